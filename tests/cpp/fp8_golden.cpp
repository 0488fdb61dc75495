// Makes golden fp8_ds_mla records: tokens of 576 bf16 come in on stdin, records go out on stdout.
//
// The conversions are NVIDIA's own, of cuda_fp8.h on the host; nothing of this library is used.
//   c++ -O1 -I /usr/local/cuda/include fp8_golden.cpp
#include <cuda_fp8.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

int main() {
  constexpr int kNope = 512, kRope = 64, kBlock = 128;
  uint16_t latent[kNope + kRope];
  while (std::fread(latent, sizeof(latent), 1, stdin) == 1) {
    uint8_t codes[kNope];
    float scales[kNope / kBlock];
    for (int s = 0; s < kNope / kBlock; ++s) {
      float x[kBlock], amax = 0;
      for (int i = 0; i < kBlock; ++i) {
        const uint32_t bits = static_cast<uint32_t>(latent[s * kBlock + i]) << 16;
        std::memcpy(&x[i], &bits, sizeof(bits));
        amax = std::fmax(amax, std::fabs(x[i]));  // fmax leaves NaN out
      }
      scales[s] = std::max(amax / 448.0f, FLT_MIN);
      for (int i = 0; i < kBlock; ++i) {
        codes[s * kBlock + i] = __nv_cvt_float_to_fp8(x[i] / scales[s], __NV_SATFINITE, __NV_E4M3);
      }
    }
    std::fwrite(codes, sizeof(codes), 1, stdout);
    std::fwrite(scales, sizeof(scales), 1, stdout);
    std::fwrite(latent + kNope, sizeof(uint16_t), kRope, stdout);
  }
}
