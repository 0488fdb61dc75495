// concat_and_cache_nvfp4_ds_mla: a warp a token, a lane a block.
//
//   lane l   loads 16 NoPE elements 16l ..       and 2 RoPE elements 2l ..
//            stores their 8 code bytes,  1 scale byte,  2 RoPE bytes
//
// Across a warp each of the three stores covers whole sectors of the record. All loads are issued
// before the slot is looked at: a skipped token costs a read, every other one saves a round trip.
#include <cuda_runtime.h>

#include "format/block.h"
#include "format/element.h"
#include "format/record.h"
#include "kernels/cuda/lane_block.cuh"
#include "kernels/cuda/paging.cuh"
#include "kernels/launch.h"

namespace nvfp4_dsmla::cuda {
namespace {

constexpr int kRopePerLane = kRopeDim / kWarpSize;
static_assert(kNumScales == kWarpSize && kRopePerLane == 2);

// WriteParams, resolved: strides in bytes.
struct Tokens {
  Tokens(const WriteParams& p, int64_t element_bytes)
      : kv_c(p.kv_c),
        k_pe(p.k_pe),
        kv_c_stride(p.kv_c_stride * element_bytes),
        k_pe_stride(p.k_pe_stride * element_bytes),
        slot_mapping(p.slot_mapping),
        cache(p.cache),
        count(static_cast<uint32_t>(p.num_tokens)) {}

  const void* kv_c;
  const void* k_pe;
  int64_t kv_c_stride;
  int64_t k_pe_stride;
  Slots slot_mapping;
  DeviceCache<uint8_t> cache;
  uint32_t count;
};

template <bool kWide, class Word>
__device__ void store(uint8_t* to, Word word) {
  if constexpr (kWide) {
    *reinterpret_cast<Word*>(to) = word;
  } else {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Word)); ++i) to[i] = word >> 8 * i & 0xff;
  }
}

template <class In, bool kWide>
__global__ void write_kernel(const __grid_constant__ Tokens tokens) {
  const uint32_t token = warp_id();
  if (token >= tokens.count) return;
  const int lane = lane_id();

  const int64_t slot = tokens.slot_mapping[token];
  const In* kv_c = static_cast<const In*>(row_at<kWide>(tokens.kv_c, token, tokens.kv_c_stride));
  const In* k_pe = static_cast<const In*>(row_at<kWide>(tokens.k_pe, token, tokens.k_pe_stride));
  Elements<In, kBlockDim> nope;
  Elements<In, kRopePerLane> rope;
  nope.template load<kWide>(kv_c + lane * kBlockDim);
  rope.template load<kWide>(k_pe + lane * kRopePerLane);
  // Keeps the loads above in their place. Without it the compiler moves the token's below the test
  // of the slot (or the slot's below the arithmetic, were the test last): two round trips for one.
  __syncwarp();
  if (!tokens.cache.holds(slot)) return;

  const BlockScale scale = choose_scale(nope.max_magnitude());
  float y[2][8];
#pragma unroll
  for (int i = 0; i < kBlockDim; ++i) y[i / 8][i % 8] = scale_down(nope[i], scale.inverse);
  const uint64_t codes = encode_e2m1x8(y[0]) | uint64_t{encode_e2m1x8(y[1])} << 32;
  const auto rope_bytes = static_cast<uint16_t>(encode_e4m3_pair(rope[0], rope[1]));

  uint8_t* record = tokens.cache.template record<kWide>(static_cast<uint32_t>(slot));
  store<kWide>(record + kCodesOffset + lane * kCodeBytesPerBlock, codes);
  store<kWide>(record + kRopeOffset + lane * kRopePerLane, rope_bytes);
  record[scale_offset(lane)] = static_cast<uint8_t>(scale.code);
}

// Whether kv_c may be loaded 16 bytes at a time, a lane's RoPE elements and its 8 code bytes whole.
bool can_go_wide(const Tokens& t, const PagedCache<uint8_t>& cache, int64_t element_bytes) {
  const int64_t rope_bytes = kRopePerLane * element_bytes;
  return aligned(t.kv_c, 16) && t.kv_c_stride % 16 == 0 && fits_narrow(t.kv_c_stride) &&
         aligned(t.k_pe, rope_bytes) && t.k_pe_stride % rope_bytes == 0 &&
         fits_narrow(t.k_pe_stride) && records_aligned(cache, kCodeBytesPerBlock);
}

// At every size from 1 to 262,144 tokens as good as 1, 2, 8 or 16, or better (docs/kernels.md).
constexpr uint32_t kWarpsPerBlock = 4;

template <class In>
int launch_write(const WriteParams& p, CUstream_st* stream) {
  const Tokens tokens(p, sizeof(In));
  const uint32_t blocks = (tokens.count + kWarpsPerBlock - 1) / kWarpsPerBlock;
  if (can_go_wide(tokens, p.cache, sizeof(In))) {
    write_kernel<In, true><<<blocks, warps(kWarpsPerBlock), 0, stream>>>(tokens);
  } else {
    write_kernel<In, false><<<blocks, warps(kWarpsPerBlock), 0, stream>>>(tokens);
  }
  return cudaGetLastError();
}

}  // namespace

int write(const WriteParams& p, CUstream_st* stream) {
  switch (p.element) {
    case Element::kBFloat16:
      return launch_write<BFloat16>(p, stream);
    case Element::kFloat16:
      return launch_write<Float16>(p, stream);
    case Element::kFloat32:
      return launch_write<float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace nvfp4_dsmla::cuda
