// Two attentions over disjoint tokens merged: a warp a row, lane l the elements
// [kPerLane * l, kPerLane * (l + 1)) of each of kSteps equal parts.
#include <cuda_runtime.h>

#include <cstdint>

#include "format/element.h"
#include "format/record.h"
#include "kernels/cuda/paging.cuh"
#include "kernels/launch.h"
#include "kernels/merge_weights.h"

namespace nvfp4_dsmla::cuda {
namespace {

template <class T, int kPerLane>
struct alignas(sizeof(T) * kPerLane) Elements {
  T at[kPerLane];
};

template <class T, int kPerLane>
__global__ void merge_kernel(const __grid_constant__ MergeParams p) {
  using Part = Elements<T, kPerLane>;
  constexpr int kSteps = kNopeDim / (kPerLane * kWarpSize);
  const int64_t row = warp_id();
  if (row >= p.num_rows) return;
  const MergeWeights w = merge_weights(p.lse_a[row], p.lse_b[row]);
  if (lane_id() == 0) p.lse[row] = w.lse;
  const int64_t first = row * kNopeDim / kPerLane + lane_id();
  Part a[kSteps], b[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    a[s] = static_cast<const Part*>(p.out_a)[first + s * kWarpSize];
    b[s] = static_cast<const Part*>(p.out_b)[first + s * kWarpSize];
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    Part out;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      out.at[i] = round_to<T>(merge(w, widen(a[s].at[i]), widen(b[s].at[i])));
    }
    static_cast<Part*>(p.out)[first + s * kWarpSize] = out;
  }
}

template <class T>
int launch_merge(const MergeParams& p, CUstream_st* stream) {
  constexpr int kWarpsPerBlock = 4;
  constexpr int kBytesPerLane = 16;
  const auto blocks = static_cast<uint32_t>((p.num_rows + kWarpsPerBlock - 1) / kWarpsPerBlock);
  const bool wide = aligned(p.out_a, kBytesPerLane) && aligned(p.out_b, kBytesPerLane) &&
                    aligned(p.out, kBytesPerLane);
  if (wide) {
    merge_kernel<T, kBytesPerLane / sizeof(T)><<<blocks, warps(kWarpsPerBlock), 0, stream>>>(p);
  } else {
    merge_kernel<T, 1><<<blocks, warps(kWarpsPerBlock), 0, stream>>>(p);
  }
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

int merge(const MergeParams& p, CUstream_st* stream) {
  switch (p.element) {
    case Element::kBFloat16:
      return launch_merge<BFloat16>(p, stream);
    case Element::kFloat16:
      return launch_merge<Float16>(p, stream);
    case Element::kFloat32:
      return launch_merge<float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace nvfp4_dsmla::cuda
