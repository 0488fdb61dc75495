// The partial results of a row's splits -> its result: each weighed by its share of the sum of
// exponentials. A block a head, a thread 4 dims, 16 parts at a time, which it asks for before it
// knows what they weigh: such a kernel's time is round trips to memory.
#include <cuda_runtime.h>

#include "kernels/cuda/decode.cuh"

namespace nvfp4_dsmla::cuda {
namespace {

constexpr int kThreads = kNopeDim / 4;
constexpr int kLanesSplits = kMaxSplits / kWarpSize;

template <class Combine>
__device__ float of_warp(float x, Combine combine) {
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    x = combine(x, __shfl_xor_sync(kFullWarp, x, step));
  }
  return x;
}

// What the splits weigh, split i with lane i % 32, and the logarithm of the whole sum; every warp
// finds it out for itself.
struct Weights {
  __device__ explicit Weights(const float (&lse)[kLanesSplits]) {
    const float top = of_warp(fmaxf(lse[0], lse[1]), [](float a, float b) { return fmaxf(a, b); });
    const float base = top == -INFINITY ? 0.0f : top;
    for (int i = 0; i < kLanesSplits; ++i) of_lane[i] = exp2f(lse[i] - base);
    sum = of_warp(of_lane[0] + of_lane[1], [](float a, float b) { return a + b; });
    lse2 = sum == 0.0f ? -INFINITY : base + log2f(sum);
  }
  __device__ float operator[](int split) const {
    return __shfl_sync(kFullWarp, split < kWarpSize ? of_lane[0] : of_lane[1], split % kWarpSize);
  }

  float of_lane[kLanesSplits];
  float sum, lse2;
};
static_assert(kLanesSplits == 2);

template <class T, int kAtOnce>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ DecodeKernelParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // If launched ahead, what it reads is there from here on. (Only the wgmma kernels have it so:
  // then this one's code is sm_90a's too, and waits.)
  cudaGridDependencySynchronize();
#endif
  const int64_t at = blockIdx.x;  // row * heads + head
  const int64_t pitch = p.result_at(1, 0, 0);
  const int lane = threadIdx.x % kWarpSize;
  float lse[kLanesSplits];
#pragma unroll
  for (int i = 0; i < kLanesSplits; ++i) {
    const int split = i * kWarpSize + lane;
    lse[i] = split < p.num_splits ? p.partial_lse[split * pitch + at] : -INFINITY;
  }
  const auto* from = reinterpret_cast<const uint2*>(p.partial_out + at * kNopeDim) + threadIdx.x;
  const int64_t step = pitch * (kNopeDim / 4);
  uint2 parts[kAtOnce];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < p.num_splits) parts[i] = __ldcs(from + (first + i) * step);
    }
  };
  load(0);
  const Weights weights(lse);

  float4 sum = {};
  for (int first = 0; first < p.num_splits; first += kAtOnce) {
    if (first > 0) load(first);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= p.num_splits) break;
      // A split without a token has no weight and, like all of them, a finite or a justly NaN
      // output.
      const float weight = weights[first + i];
      const float2 low = __half22float2(bit_cast<__half2>(parts[i].x));
      const float2 high = __half22float2(bit_cast<__half2>(parts[i].y));
      sum.x += weight * low.x;
      sum.y += weight * low.y;
      sum.z += weight * high.x;
      sum.w += weight * high.y;
    }
  }

  const auto head = static_cast<int>(at % p.heads);
  const float factor = weights.sum == 0.0f
                           ? 0.0f
                           : sink_factor(p, head, weights.lse2) / (weights.sum * kPartialScale);
  auto* to = reinterpret_cast<uint2*>(static_cast<T*>(p.out) + at * kNopeDim);
  to[threadIdx.x] = make_uint2(pack(sum.x * factor, sum.y * factor, T{}),
                               pack(sum.z * factor, sum.w * factor, T{}));
  if (threadIdx.x == 0) p.lse[at] = weights.lse2 * kLn2;
}

// Registers for many parts at once keep blocks from running side by side.
template <class T>
int launch(const DecodeKernelParams& p, bool ahead, cudaStream_t stream) {
  constexpr int kFew = 4, kMany = 16;
  const auto kernel = p.num_splits <= kFew ? combine_kernel<T, kFew> : combine_kernel<T, kMany>;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(p.rows * p.heads);
  config.blockDim = kThreads;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = ahead ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, p);
  return cudaGetLastError();
}

}  // namespace

int combine_splits(const DecodeKernelParams& p, bool ahead, cudaStream_t stream) {
  return p.element == Element::kBFloat16 ? launch<BFloat16>(p, ahead, stream)
                                         : launch<Float16>(p, ahead, stream);
}

}  // namespace nvfp4_dsmla::cuda
