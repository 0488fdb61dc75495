// The partial results of a row's splits -> its result: each weighed by its share of the sum of
// exponentials. A block a head, a thread 4 dims, up to 16 parts at a time, which it asks for before
// it knows what they weigh: such a kernel's time is round trips to memory, and between lanes.
#include <cuda_runtime.h>

#include "kernels/cuda/decode.cuh"

namespace nvfp4_dsmla::cuda {
namespace {

constexpr int kThreads = kNopeDim / 4;
constexpr int kSplitsPerLane = kMaxSplits / kWarpSize;

// -inf past the last split.
__device__ float partial_lse(const DecodeKernelParams& p, int split, int64_t at) {
  return split < p.num_splits ? p.partial_lse[p.result_at(split, 0, 0) + at] : -INFINITY;
}

template <class Combine>
__device__ float of_warp(float x, Combine combine) {
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    x = combine(x, __shfl_xor_sync(kFullWarp, x, step));
  }
  return x;
}

// What the parts of a head weigh, and the logarithm of the whole sum. A few parts: every thread
// finds it out for itself.
constexpr int kFew = 4;
class FewWeights {
 public:
  __device__ FewWeights(const DecodeKernelParams& p, int64_t at) {
#pragma unroll
    for (int i = 0; i < kFew; ++i) of_[i] = partial_lse(p, i, at);
  }
  __device__ void settle() {
    float top = of_[0];
#pragma unroll
    for (int i = 1; i < kFew; ++i) top = fmaxf(top, of_[i]);
    const float base = top == -INFINITY ? 0.0f : top;
#pragma unroll
    for (int i = 0; i < kFew; ++i) {
      of_[i] = exp2f(of_[i] - base);
      sum += of_[i];
    }
    lse2 = sum == 0.0f ? -INFINITY : base + log2f(sum);
  }
  __device__ float operator[](int split) const { return of_[split]; }

  static constexpr int kAtOnce = kFew;
  static constexpr bool kInOneRound = true;
  float sum = 0.0f, lse2;

 private:
  float of_[kFew];
};

// Any number: split i's with lane i % 32; every warp for itself.
class ManyWeights {
 public:
  __device__ ManyWeights(const DecodeKernelParams& p, int64_t at) {
#pragma unroll
    for (int i = 0; i < kSplitsPerLane; ++i) {
      of_lane_[i] = partial_lse(p, i * kWarpSize + static_cast<int>(threadIdx.x) % kWarpSize, at);
    }
  }
  __device__ void settle() {
    const float top =
        of_warp(fmaxf(of_lane_[0], of_lane_[1]), [](float a, float b) { return fmaxf(a, b); });
    const float base = top == -INFINITY ? 0.0f : top;
    for (float& lse : of_lane_) lse = exp2f(lse - base);
    sum = of_warp(of_lane_[0] + of_lane_[1], [](float a, float b) { return a + b; });
    lse2 = sum == 0.0f ? -INFINITY : base + log2f(sum);
  }
  __device__ float operator[](int split) const {
    return __shfl_sync(kFullWarp, split < kWarpSize ? of_lane_[0] : of_lane_[1], split % kWarpSize);
  }

  static constexpr int kAtOnce = 16;
  static constexpr bool kInOneRound = false;
  float sum, lse2;

 private:
  float of_lane_[kSplitsPerLane];
};
static_assert(kSplitsPerLane == 2);

template <class T, class Weights>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ DecodeKernelParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // If launched ahead, what it reads is there from here on. (Only the wgmma kernels have it so:
  // then this one's code is sm_90a's too, and waits.)
  cudaGridDependencySynchronize();
#endif
  const int64_t at = blockIdx.x;  // row * heads + head
  Weights weights(p, at);
  const auto* from = reinterpret_cast<const uint2*>(p.partial_out + at * kNopeDim) + threadIdx.x;
  const int64_t step = p.result_at(1, 0, 0) * (kNopeDim / 4);
  constexpr int kParts = Weights::kAtOnce;
  uint2 parts[kParts];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (first + i < p.num_splits) parts[i] = __ldcs(from + (first + i) * step);
    }
  };
  load(0);
  weights.settle();

  float4 sum = {};
  const int end = Weights::kInOneRound ? kParts : p.num_splits;
  for (int first = 0; first < end; first += kParts) {
    if (first > 0) load(first);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
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

// The one for few parts has fewer registers, so that more blocks run side by side.
template <class T>
int launch(const DecodeKernelParams& p, bool ahead, cudaStream_t stream) {
  const auto kernel =
      p.num_splits <= kFew ? combine_kernel<T, FewWeights> : combine_kernel<T, ManyWeights>;
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
