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
#include "kernels/cuda/warp.cuh"
#include "kernels/launch.h"

namespace nvfp4_dsmla::cuda {
namespace {

constexpr int kRopePerLane = kRopeDim / kWarpSize;
static_assert(kNumScales == kWarpSize && kRopePerLane == 2);

struct WriteKernelParams : WriteParams {
  explicit WriteKernelParams(const WriteParams& p)
      : WriteParams(p), block_size(static_cast<uint32_t>(p.cache.block_size)) {}
  Divisor block_size;
};

// `count` elements at `from`, by 16-byte (or, if there are fewer bytes, whole) loads where kWide.
template <bool kWide, int kCount, class In>
__device__ void load(const In* from, In (&to)[kCount]) {
  constexpr int kBytes = kCount * sizeof(In);
  if constexpr (kWide && kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      reinterpret_cast<uint4*>(to)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
    }
  } else if constexpr (kWide && kBytes == 8) {
    *reinterpret_cast<uint2*>(to) = __ldg(reinterpret_cast<const uint2*>(from));
  } else if constexpr (kWide && kBytes == 4) {
    *reinterpret_cast<uint32_t*>(to) = __ldg(reinterpret_cast<const uint32_t*>(from));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = from[i];
  }
}

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
__global__ void write_kernel(const __grid_constant__ WriteKernelParams p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= p.num_tokens) return;
  const int lane = lane_id();

  alignas(16) In nope[kBlockDim];
  alignas(16) In rope[kRopePerLane];
  load<kWide>(static_cast<const In*>(p.kv_c) + token * p.kv_c_stride + lane * kBlockDim, nope);
  load<kWide>(static_cast<const In*>(p.k_pe) + token * p.k_pe_stride + lane * kRopePerLane, rope);
  const int64_t slot = p.slot_mapping[token];
  if (!p.cache.holds(slot)) return;

  float x[kBlockDim];
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlockDim; ++i) {
    x[i] = widen(nope[i]);
    amax = max_magnitude(amax, x[i]);
  }
  const BlockScale scale = choose_scale(amax);
  uint64_t codes = 0;
#pragma unroll
  for (int i = 0; i < kBlockDim; i += kCodesPerByte) {
    const uint32_t pair =
        encode_e2m1_pair(scale_down(x[i], scale.inverse), scale_down(x[i + 1], scale.inverse));
    codes |= static_cast<uint64_t>(pair) << 4 * i;
  }
  const uint32_t rope_bytes = encode_e4m3(widen(rope[0])) | encode_e4m3(widen(rope[1])) << 8;

  const uint32_t block = p.block_size.divide(static_cast<uint32_t>(slot));
  const uint32_t offset = static_cast<uint32_t>(slot) - block * p.block_size.divisor;
  uint8_t* record = p.cache.record(block, offset);
  store<kWide>(record + kCodesOffset + lane * kCodeBytesPerBlock, codes);
  store<kWide>(record + kRopeOffset + lane * kRopePerLane, static_cast<uint16_t>(rope_bytes));
  record[scale_offset(lane)] = static_cast<uint8_t>(scale.code);
}

// Whether every address that the wide kernel loads 16 bytes (kv_c), a lane's RoPE elements, or 8
// code bytes at is a multiple of that.
bool can_go_wide(const WriteParams& p, int64_t element_bytes) {
  const int64_t rope_bytes = kRopePerLane * element_bytes;
  return aligned(p.kv_c, 16) && p.kv_c_stride * element_bytes % 16 == 0 &&
         aligned(p.k_pe, rope_bytes) && p.k_pe_stride * element_bytes % rope_bytes == 0 &&
         aligned(p.cache.base, kCodeBytesPerBlock) &&
         p.cache.block_stride % kCodeBytesPerBlock == 0 &&
         p.cache.token_stride % kCodeBytesPerBlock == 0;
}

// One warp a block while there are fewer tokens than would give every SM a block of several.
constexpr int64_t kSmallTokens = 1024;
constexpr int kWarpsPerBlock = 8;

template <class In>
int launch_write(const WriteParams& p, CUstream_st* stream) {
  const int count = p.num_tokens <= kSmallTokens ? 1 : kWarpsPerBlock;
  const auto blocks = static_cast<unsigned>((p.num_tokens + count - 1) / count);
  if (can_go_wide(p, sizeof(In))) {
    write_kernel<In, true><<<blocks, warps(count), 0, stream>>>(WriteKernelParams(p));
  } else {
    write_kernel<In, false><<<blocks, warps(count), 0, stream>>>(WriteKernelParams(p));
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
