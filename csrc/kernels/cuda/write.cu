// concat_and_cache_nvfp4_ds_mla, .._fp8_ds_mla, .._bfloat16: a warp a token.
//
//   lane l   loads 16 NoPE elements 16l ..  and 2 RoPE elements 2l ..
//            stores what its format makes of them (codec_*.cuh)
//
// All loads are issued before the slot is looked at: a skipped token costs a read, every other one
// saves a round trip.
#include <cuda_runtime.h>

#include "format/element.h"
#include "kernels/cuda/codec_bf16.cuh"
#include "kernels/cuda/codec_fp8.cuh"
#include "kernels/cuda/codec_nvfp4.cuh"
#include "kernels/cuda/paging.cuh"
#include "kernels/cuda/tokens.cuh"
#include "kernels/launch.h"

namespace nvfp4_dsmla::cuda {
namespace {

template <class Codec, class In, bool kWide>
__global__ void write_kernel(const __grid_constant__ Tokens tokens) {
  const uint32_t token = warp_id();
  if (token >= tokens.count) return;

  const int64_t slot = tokens.slots.at<kWide>(token);
  LaneElements<In> latent;
  latent.template load<kWide>(tokens, token);
  // Keeps the loads above in their place. Without it the compiler moves the token's below the test
  // of the slot (or the slot's below the arithmetic, were the test last): two round trips for one.
  __syncwarp();
  uint8_t* record = tokens.cache.template record<kWide>(static_cast<uint32_t>(slot));
  asm volatile("" : "+l"(record));  // likewise: while the token is on its way
  if (!tokens.cache.holds(slot)) return;

  Codec::template store<kWide>(record, Codec::encode(latent.nope, latent.rope));
}

template <class Codec, class In>
int launch_write(const WriteParams& p, CUstream_st* stream) {
  const Tokens tokens(p, sizeof(In));
  const uint32_t blocks = (tokens.count + kWarpsPerBlock - 1) / kWarpsPerBlock;
  if (can_go_wide<Codec>(tokens, p.cache, sizeof(In))) {
    write_kernel<Codec, In, true><<<blocks, warps(kWarpsPerBlock), 0, stream>>>(tokens);
  } else {
    write_kernel<Codec, In, false><<<blocks, warps(kWarpsPerBlock), 0, stream>>>(tokens);
  }
  return cudaGetLastError();
}

template <class Codec>
int launch_element(const WriteParams& p, CUstream_st* stream) {
  switch (p.element) {
    case Element::kBFloat16:
      return launch_write<Codec, BFloat16>(p, stream);
    case Element::kFloat16:
      return launch_write<Codec, Float16>(p, stream);
    case Element::kFloat32:
      return launch_write<Codec, float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int write(const WriteParams& p, CUstream_st* stream) {
  switch (p.format) {
    case Format::kNvfp4:
      return launch_element<Nvfp4Codec>(p, stream);
    case Format::kFp8:
      return launch_element<Fp8Codec>(p, stream);
    case Format::kBFloat16:
      return launch_element<BFloat16Codec>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace nvfp4_dsmla::cuda
