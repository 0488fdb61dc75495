// The partial results of a row's splits -> its result: each weighed by its share of the sum of
// exponentials. A block of 64 threads a head, a thread 8 dims.
#include <cuda_runtime.h>

#include "kernels/cuda/decode.cuh"

namespace nvfp4_dsmla::cuda {
namespace {

constexpr int kDimsPerThread = 8;
constexpr int kCombineThreads = kNopeDim / kDimsPerThread;

template <class T>
__global__ void combine_kernel(const __grid_constant__ DecodeKernelParams p) {
  const int64_t at = blockIdx.x;  // row * heads + head
  const int64_t pitch = static_cast<int64_t>(p.rows) * p.heads;
  __shared__ float lse[kMaxSplits];
  if (threadIdx.x < p.num_splits) lse[threadIdx.x] = p.partial_lse[threadIdx.x * pitch + at];
  __syncthreads();

  float top = -INFINITY;
  for (int s = 0; s < p.num_splits; ++s) top = fmaxf(top, lse[s]);
  const float base = top == -INFINITY ? 0.0f : top;
  float sum = 0.0f;
  for (int s = 0; s < p.num_splits; ++s) sum += exp2f(lse[s] - base);

  float out[kDimsPerThread] = {};
  const float* from = p.partial_out + at * kNopeDim + threadIdx.x * kDimsPerThread;
#pragma unroll 4
  for (int s = 0; s < p.num_splits; ++s) {
    const float weight = exp2f(lse[s] - base);
    const float4* part = reinterpret_cast<const float4*>(from + s * pitch * kNopeDim);
    const float4 x = __ldcs(part), y = __ldcs(part + 1);
    // A split without a token has no weight and, like all of them, a finite or a justly NaN output.
    const float values[] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < kDimsPerThread; ++i) out[i] += weight * values[i];
  }

  const float lse2 = sum == 0.0f ? -INFINITY : base + log2f(sum);
  const auto head = static_cast<int>(at % p.heads);
  const float factor = sum == 0.0f ? 0.0f : sink_factor(p, head, lse2) / sum;
  float ordered[kDimsPerThread];
#pragma unroll
  for (int i = 0; i < kDimsPerThread; ++i) ordered[dim_of_position(i)] = out[i] * factor;
  uint4 words;
  words.x = pack(ordered[0], ordered[1], T{});
  words.y = pack(ordered[2], ordered[3], T{});
  words.z = pack(ordered[4], ordered[5], T{});
  words.w = pack(ordered[6], ordered[7], T{});
  reinterpret_cast<uint4*>(static_cast<T*>(p.out) + at * kNopeDim)[threadIdx.x] = words;
  if (threadIdx.x == 0) p.lse[at] = lse2 * kLn2;
}

}  // namespace

int combine_splits(const DecodeKernelParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(p.rows * p.heads);
  if (p.element == Element::kBFloat16) {
    combine_kernel<BFloat16><<<blocks, kCombineThreads, 0, stream>>>(p);
  } else {
    combine_kernel<Float16><<<blocks, kCombineThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace nvfp4_dsmla::cuda
