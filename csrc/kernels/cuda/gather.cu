// Both gathers: rows of a cache, decoded. A warp takes one row or two consecutive ones.
//
//   1. lane i finds where row i's record is, or that there is none, all rows at once (locate.cuh);
//   2. the warp loads every record's bytes, all rows before any is used;
//   3. row by row it expands and stores, each store instruction a contiguous 512 bytes.
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "format/record.h"
#include "kernels/cuda/codec_fp8.cuh"
#include "kernels/cuda/codec_nvfp4.cuh"
#include "kernels/cuda/lane_memory.cuh"
#include "kernels/cuda/locate.cuh"
#include "kernels/cuda/paging.cuh"
#include "kernels/launch.h"

namespace nvfp4_dsmla::cuda {
namespace {

template <class Out, bool kWide>
__device__ void store(Out* to, const uint32_t (&words)[4]) {
  if constexpr (kWide) {
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(words[0], words[1], words[2], words[3]));
  } else {
    const Out* from = reinterpret_cast<const Out*>(words);
#pragma unroll
    for (int i = 0; i < static_cast<int>(16 / sizeof(Out)); ++i) to[i] = from[i];
  }
}

// A row's share of a lane: kPerLane elements of each of kSteps equal parts, and two of RoPE.
template <class Codec, class Out, bool kWide>
struct RowPart {
  static constexpr int kPerLane = 16 / sizeof(Out);  // a 16-byte store
  static constexpr int kSteps = kNopeDim / (kPerLane * kWarpSize);
  using Codes = typename Codec::template Codes<kPerLane>;

  __device__ static int element(int step) { return (step * kWarpSize + lane_id()) * kPerLane; }

  // A missing record reads as zeros: a scale of zero makes every element +0.
  template <bool kOnce>
  __device__ void load_from(const uint8_t* record) {
    using Rope = typename Codec::RopeWord;
    using Scale = typename Codec::ScaleWord;
    if (record == nullptr) return;
    rope = load_word<Rope, kWide, kOnce>(Codec::rope_of(record));
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int e = element(s);
      codes[s] = load_word<Codes, kWide, kOnce>(record + Codec::codes_at(e));
      scales[s] = load_word<Scale, kWide, kOnce>(record + Codec::scale_at(e));
    }
  }

  __device__ void store_to(Out* row) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      uint32_t words[4];
      Codec::template expand<Out>(codes[s], scales[s], words);
      store<Out, kWide>(row + element(s), words);
    }
    alignas(8) Out pair[kRopePerLane];
    Codec::expand_rope(rope, pair);
    Out* to = row + kNopeDim + lane_id() * kRopePerLane;
    if constexpr (kWide) {
      using Pair = std::conditional_t<sizeof(Out) == 2, unsigned int, uint2>;
      __stcs(reinterpret_cast<Pair*>(to), *reinterpret_cast<const Pair*>(pair));
    } else {
      to[0] = pair[0];
      to[1] = pair[1];
    }
  }

  Register<Codes> codes[kSteps] = {};
  Register<typename Codec::ScaleWord> scales[kSteps] = {};
  Register<typename Codec::RopeWord> rope = 0;
};

template <class Out>
struct Rows {
  Out* data;
  int64_t stride;  // bytes
};

// How the rows are shared out.
template <int rows, int warps, bool once>
struct Sharing {
  static constexpr int kRows = rows;    // a warp
  static constexpr int kWarps = warps;  // a block
  static constexpr bool kOnce = once;   // records are not worth a cache
};
// Few rows: spread them. Many: nothing stays in a cache anyway. Two rows a warp share a look-up,
// which pays where that is a search (docs/kernels.md).
constexpr uint32_t kFewRows = 4096;
using Few = Sharing<1, 4, false>;
using Many = Sharing<1, 8, true>;
using ManySearched = Sharing<2, 4, false>;

template <class Codec, class Out, bool kWide, class Sharing, class Locator>
__global__ void gather_kernel(const __grid_constant__ Locator locator, const Rows<Out> dst) {
  constexpr int kRows = Sharing::kRows;
  const uint32_t first_row = warp_id() * kRows;
  if (first_row >= locator.num_rows) return;
  const auto mine = reinterpret_cast<uint64_t>(locator.template locate<kWide, kRows>(first_row));
  RowPart<Codec, Out, kWide> part[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    part[i].template load_from<Sharing::kOnce>(
        reinterpret_cast<const uint8_t*>(__shfl_sync(kFullWarp, mine, i)));
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (first_row + i < locator.num_rows) {
      part[i].store_to(row_at<kWide>(dst.data, first_row + i, dst.stride));
    }
  }
}

template <class Codec, class Out, class Params, class Locator>
int launch_rows(const Params& p, int64_t dst_stride, const Locator& locator, CUstream_st* stream) {
  const Rows<Out> dst{static_cast<Out*>(p.dst), dst_stride * static_cast<int64_t>(sizeof(Out))};
  const auto run = [&]<bool kWide, class Sharing>(Sharing) {
    constexpr uint32_t kRowsPerBlock = Sharing::kWarps * Sharing::kRows;
    const uint32_t blocks = (locator.num_rows + kRowsPerBlock - 1) / kRowsPerBlock;
    gather_kernel<Codec, Out, kWide, Sharing>
        <<<blocks, warps(Sharing::kWarps), 0, stream>>>(locator, dst);
    return static_cast<int>(cudaGetLastError());
  };
  const bool wide = aligned(dst.data, 16) && dst.stride % 16 == 0 && fits_narrow(dst.stride) &&
                    records_aligned(p.cache, Codec::kRowLoadBytes) && locator.strides_narrow();
  if (!wide) return run.template operator()<false>(Few{});
  if (locator.num_rows <= kFewRows) return run.template operator()<true>(Few{});
  return locator.searches() ? run.template operator()<true>(ManySearched{})
                            : run.template operator()<true>(Many{});
}

template <class Codec, class Params, class Locator>
int launch_element(const Params& p,
                   int64_t dst_stride,
                   const Locator& locator,
                   CUstream_st* stream) {
  switch (p.element) {
    case Element::kBFloat16:
      return launch_rows<Codec, BFloat16>(p, dst_stride, locator, stream);
    case Element::kFloat16:
      return launch_rows<Codec, Float16>(p, dst_stride, locator, stream);
    case Element::kFloat32:
      return launch_rows<Codec, float>(p, dst_stride, locator, stream);
  }
  return cudaErrorInvalidValue;
}

template <class Params, class Locator>
int launch_gather(const Params& p,
                  int64_t dst_stride,
                  const Locator& locator,
                  CUstream_st* stream) {
  return p.format == Format::kFp8 ? launch_element<Fp8Codec>(p, dst_stride, locator, stream)
                                  : launch_element<Nvfp4Codec>(p, dst_stride, locator, stream);
}

}  // namespace

int gather(const SlotGatherParams& p, CUstream_st* stream) {
  return launch_gather(p, kHeadDim, SlotLocator(p), stream);
}

int gather(const RequestGatherParams& p, CUstream_st* stream) {
  return launch_gather(p, p.dst_stride, RequestLocator(p), stream);
}

}  // namespace nvfp4_dsmla::cuda
