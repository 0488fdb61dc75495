// What the decode kernels share: a row's tokens, where results go, and the scales in base 2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "format/element.h"
#include "format/record.h"
#include "kernels/cuda/paging.cuh"
#include "kernels/decode_plan.h"
#include "kernels/params.h"

namespace nvfp4_dsmla::cuda {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// expand.cuh leaves elements 2^-7 of their value; this is what makes scores and outputs good.
inline constexpr float kMakeGood = 0x1p7f;

// Partial results are in fp16. None exceeds V's greatest, 6 * 448, which leaves room for a factor
// of 2^4: four more bits for small ones.
inline constexpr float kPartialScale = 0x1p4f;

struct DecodeKernelParams : DecodeParams {
  DecodeKernelParams(const DecodeParams& p, const DecodePlan& plan, void* workspace)
      : DecodeParams(p),
        device_cache(p.cache),
        num_splits(plan.num_splits),
        rows(static_cast<uint32_t>(p.batch * p.s_q)),
        partial_lse(static_cast<float*>(workspace)),
        partial_out(reinterpret_cast<Float16*>(partial_lse + partial_lse_floats(p, plan))) {}

  static int64_t partial_lse_floats(const DecodeParams& p, const DecodePlan& plan) {
    return (plan.num_splits * p.batch * p.s_q * p.heads + 3) / 4 * 4;  // 16 bytes, for what follows
  }
  static int64_t workspace_bytes(const DecodeParams& p, const DecodePlan& plan) {
    if (plan.num_splits <= 1) return 0;
    const int64_t outs = plan.num_splits * p.batch * p.s_q * p.heads * kNopeDim;
    return partial_lse_floats(p, plan) * int64_t{sizeof(float)} + outs * int64_t{sizeof(Float16)};
  }

  // Whether every head of q starts at a multiple of 16 bytes.
  bool query_aligned(int64_t element_bytes) const {
    return aligned(q, 16) && q_batch_stride * element_bytes % 16 == 0 &&
           q_token_stride * element_bytes % 16 == 0 && q_head_stride * element_bytes % 16 == 0;
  }

  // The place of a head's result among those of all heads, rows and, if it is partial, splits.
  __device__ int64_t result_at(int split, uint32_t row, int head) const {
    return (static_cast<int64_t>(split) * rows + row) * heads + head;
  }

  // A row's batch and token; how many of its indices are to be read.
  struct Row {
    int64_t b, t;
  };
  __device__ Row row(uint32_t r) const {
    const auto width = static_cast<uint32_t>(s_q);
    return {r / width, r % width};
  }
  __device__ int length(Row r) const {
    if (topk_length == nullptr) return static_cast<int>(topk);
    const int n = topk_length[r.b * topk_length_batch_stride + r.t * topk_length_token_stride];
    return min(max(n, 0), static_cast<int>(topk));
  }
  __device__ const int32_t* row_indices(Row r) const {
    return indices + r.b * indices_batch_stride + r.t * indices_token_stride;
  }

  // The slot at a column of such indices, -1 past their end.
  __device__ int32_t slot_at(const int32_t* row, int column, int end) const {
    return column < end ? __ldg(row + column * indices_column_stride) : -1;
  }

  // A split's share of a row's indices: whole tiles, as even as can be.
  struct Share {
    int begin, end;
  };
  __device__ Share share_of(Row r, int split, int tile_tokens) const {
    const int total = length(r);
    const int64_t tiles = (total + tile_tokens - 1) / tile_tokens;
    return {static_cast<int>(tiles * split / num_splits) * tile_tokens,
            min(static_cast<int>(tiles * (split + 1) / num_splits) * tile_tokens, total)};
  }

  DeviceCache<const uint8_t> device_cache;
  int num_splits;
  uint32_t rows;
  // [num_splits, rows, heads] in base 2, then [num_splits, rows, heads, 512] times kPartialScale,
  // 16-byte aligned; only if num_splits > 1.
  float* partial_lse;
  Float16* partial_out;
};

// 2^x in one instruction; results below 2^-126 are zero.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What P and its sums are relative to, in base 2, is a running maximum that no score exceeds by
// more than the slack: P is at most 2^15, in fp16.
inline constexpr float kSlack = 15.0f;
__device__ inline bool exceeds(float score, float max) { return score - max > kSlack; }
// Raised to `headroom` below the greatest score.
__device__ inline float raised_max(float max, float top, float headroom) {
  const float below = top - headroom;  // beyond 2^27 floats are farther apart
  return fmaxf(max, exceeds(top, below) ? top : below);
}

// exp(lse) / (exp(lse) + exp(sink)), lse in base 2. 1 without sinks.
__device__ inline float sink_factor(const DecodeParams& p, int head, float lse2) {
  if (p.attn_sink == nullptr) return 1.0f;
  const float sink = p.attn_sink[head * p.attn_sink_stride];
  return 1.0f / (1.0f + exp2f(sink * kLog2e - lse2));
}

// Stores what is known of a head once its sum is, relative to 2^max; returns what its outputs are
// to be multiplied by.
__device__ inline float finish_head(
    const DecodeKernelParams& p, uint32_t row, int split, int head, float sum, float max) {
  const float lse2 = sum == 0.0f ? -INFINITY : max + log2f(sum);
  float factor = sum == 0.0f ? 0.0f : kMakeGood / sum;
  if (head >= p.heads) return factor;
  if (p.num_splits > 1) {
    factor *= kPartialScale;
    p.partial_lse[p.result_at(split, row, head)] = lse2;
  } else {
    if (sum != 0.0f) factor *= sink_factor(p, head, lse2);
    p.lse[p.result_at(0, row, head)] = lse2 * kLn2;
  }
  return factor;
}

__device__ inline void store_element(BFloat16* to, float x) {
  *reinterpret_cast<__nv_bfloat16*>(to) = __float2bfloat16_rn(x);
}
__device__ inline void store_element(Float16* to, float x) {
  *reinterpret_cast<__half*>(to) = __float2half_rn(x);
}
__device__ inline uint32_t pack(float low, float high, BFloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return bit_cast<uint32_t>(pair);
}
__device__ inline uint32_t pack(float low, float high, Float16) {
  const __half2 pair = __floats2half2_rn(low, high);
  return bit_cast<uint32_t>(pair);
}

// write(the place of the results from `head` on), by the type that they are to have there.
template <class T, class Write>
__device__ void write_results(
    const DecodeKernelParams& p, int split, uint32_t row, int head, Write write) {
  if (p.num_splits == 1) {
    write(static_cast<T*>(p.out) + p.result_at(0, row, head) * kNopeDim);
  } else {
    write(p.partial_out + p.result_at(split, row, head) * kNopeDim);
  }
}

// What brings a head's elements of q, or some of them, into fp16's range: the power of two that
// takes the greatest magnitude, given in the bits of bf16, to 2^14 .. 2^15. Elements below 2^-31 of
// it lose bits by it, below 2^-39 all. With an infinity or a NaN among them nothing is scaled, and
// what is past fp16's range is infinite too.
struct QueryScale {
  __device__ explicit QueryScale(uint32_t greatest) {
    const int exponent = static_cast<int>(greatest >> 7);  // biased by 127
    // At most 126, so that the inverse is a normal number: which matters to q below 2^-112.
    const int power = greatest == 0 || exponent == 255 ? 0 : min(14 + 127 - exponent, 126);
    scale = bit_cast<float>(static_cast<uint32_t>(127 + power) << 23);
    inverse = bit_cast<float>(static_cast<uint32_t>(127 - power) << 23);
  }

  // Two elements of bf16 -> two of fp16.
  __device__ uint32_t to_fp16(uint32_t pair) const {
    return pack(bit_cast<float>(pair << 16) * scale, bit_cast<float>(pair & 0xffff'0000u) * scale,
                Float16{});
  }

  float scale, inverse;
};

// A block of `num_warps` warps for each row, split and `heads` heads, with a Shared of its own.
template <class Shared, class Kernel>
int launch_blocks(
    Kernel kernel, const DecodeKernelParams& p, int heads, int num_warps, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared);
  static_assert(kBytes <= 227 * 1024);
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess) {
    return error;
  }
  const dim3 grid(p.rows * p.num_splits, (p.heads + heads - 1) / heads);
  kernel<<<grid, warps(num_warps), kBytes, stream>>>(p);
  return cudaGetLastError();
}

// Whether there is code of this kernel for the device at hand. Compiled for an architecture without
// its instructions (and such code may reach a newer device as PTX) its body is left empty, which
// shows in the registers it takes.
template <class Kernel>
bool has_code(Kernel* kernel) {
  constexpr int kRegistersOfAnEmptyKernel = 32;  // and more
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    cudaGetLastError();  // not an error of the caller's
    return false;
  }
  return attributes.numRegs > kRegistersOfAnEmptyKernel;
}

bool has_decode_mma();
bool has_decode_wgmma();
int decode_mma(const DecodeKernelParams& p, const DecodePlan& plan, cudaStream_t stream);
// ahead: prepared while the kernel before it still runs, which sm_90 can.
int combine_splits(const DecodeKernelParams& p, bool ahead, cudaStream_t stream);

}  // namespace nvfp4_dsmla::cuda
