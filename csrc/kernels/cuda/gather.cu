// Both gathers: rows of a cache, decoded. A warp takes kRows consecutive rows.
//
//   1. lane i < kRows finds where row i's record is (or that there is none), all rows at once;
//   2. the warp loads every record's bytes, all rows before any is used;
//   3. row by row it expands and stores, each store instruction a contiguous 512 bytes.
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "format/e4m3.h"
#include "format/record.h"
#include "kernels/cuda/expand.cuh"
#include "kernels/cuda/warp.cuh"
#include "kernels/launch.h"

namespace nvfp4_dsmla::cuda {
namespace {

// ---- 1. where a row's record is: a locator is called by whole warps
// ------------------------------

__device__ const uint8_t* find_record(const PagedCache<const uint8_t>& cache,
                                      const Divisor& block_size,
                                      int64_t slot) {
  if (!cache.holds(slot)) return nullptr;
  const uint32_t block = block_size.divide(static_cast<uint32_t>(slot));
  return cache.record(block, static_cast<uint32_t>(slot) - block * block_size.divisor);
}

struct SlotLocator : SlotGatherParams {
  explicit SlotLocator(const SlotGatherParams& p)
      : SlotGatherParams(p), block_size(static_cast<uint32_t>(p.cache.block_size)) {}

  template <int kRows>
  __device__ const uint8_t* locate(int64_t first_row) const {
    const int64_t row = first_row + lane_id();
    if (lane_id() >= kRows || row >= num_rows) return nullptr;
    return find_record(cache, block_size, slots[row]);
  }
  __device__ int64_t dst_row_stride() const { return kHeadDim; }

  Divisor block_size;
};

struct RequestLocator : RequestGatherParams {
  explicit RequestLocator(const RequestGatherParams& p)
      : RequestGatherParams(p), block_size(static_cast<uint32_t>(p.cache.block_size)) {}

  template <int kRows>
  __device__ const uint8_t* locate(int64_t first_row) const {
    const int row = static_cast<int>(first_row) + min(lane_id(), kRows - 1);
    int request, start, seq_start;
    if (num_requests <= kWarpSize) {
      find_among_few<kRows>(static_cast<int>(first_row), request, start, seq_start);
    } else {
      find_among_many(static_cast<int>(first_row), row, request, start, seq_start);
    }
    if (row >= num_rows || request < 0) return nullptr;
    const int64_t token = int64_t{seq_start} + row - start;
    if (token < 0 || token > INT32_MAX) return nullptr;
    const uint32_t column = block_size.divide(static_cast<uint32_t>(token));
    if (column >= max_blocks) return nullptr;
    const int32_t block =
        block_table[request * block_table_row_stride + column * block_table_column_stride];
    if (block < 0 || block >= cache.num_blocks) return nullptr;
    return cache.record(block, static_cast<uint32_t>(token) - column * block_size.divisor);
  }
  __device__ int64_t dst_row_stride() const { return dst_stride; }

  // At most a warp of requests: each lane holds one, and a row's is a vote away. One round trip.
  template <int kRows>
  __device__ void find_among_few(int first_row, int& request, int& start, int& seq_start) const {
    const int lane = lane_id();
    const bool present = lane < num_requests;
    const int my_start = present ? workspace_starts[lane * workspace_starts_stride] : INT32_MAX;
    const int my_seq_start =
        present && seq_starts != nullptr ? seq_starts[lane * seq_starts_stride] : 0;
    request = -1;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // The highest lane that votes, not the count: starts that do not ascend stay harmless.
      const uint32_t begun = __ballot_sync(kFullWarp, present && my_start <= first_row + i);
      if (min(lane, kRows - 1) == i) request = kWarpSize - 1 - __clz(static_cast<int>(begun));
    }
    start = __shfl_sync(kFullWarp, my_start, request & (kWarpSize - 1));
    seq_start = __shfl_sync(kFullWarp, my_seq_start, request & (kWarpSize - 1));
  }

  // A search of 32 ways a step for the warp's first row, then a walk from there for the others.
  __device__ void find_among_many(
      int first_row, int row, int& request, int& start, int& seq_start) const {
    const int count = static_cast<int>(num_requests);
    int low = 0, high = count;  // the request sought is in [low, high), or is low - 1
    while (low < high) {
      const int step = (high - low + kWarpSize - 1) / kWarpSize;
      const int probe = low + lane_id() * step;
      const bool begun =
          probe < high && workspace_starts[probe * workspace_starts_stride] <= first_row;
      const int votes = __popc(__ballot_sync(kFullWarp, begun));
      if (votes == 0) {
        high = low;
      } else {
        low += (votes - 1) * step + 1;
        high = min(high, low + step - 1);
      }
    }
    request = low - 1;
    while (request + 1 < count &&
           workspace_starts[(request + 1) * workspace_starts_stride] <= row) {
      ++request;
    }
    start = request < 0 ? 0 : workspace_starts[request * workspace_starts_stride];
    seq_start = request < 0 || seq_starts == nullptr ? 0 : seq_starts[request * seq_starts_stride];
  }

  Divisor block_size;
};

// ---- 2. and 3. a row: lane l takes kPerLane elements of each of kSteps equal parts
// -----------------

template <class Word, bool kWide>
__device__ uint32_t load(const uint8_t* from) {
  if constexpr (kWide) {
    return __ldg(reinterpret_cast<const Word*>(from));
  } else {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Word)); ++i) word |= uint32_t{from[i]} << 8 * i;
    return word;
  }
}

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

template <class Out, bool kWide>
struct RowPart {
  static constexpr int kPerLane = 16 / sizeof(Out);  // a 16-byte store
  static constexpr int kSteps = kNopeDim / (kPerLane * kWarpSize);
  static constexpr int kRopePerLane = kRopeDim / kWarpSize;
  using CodeWord = std::conditional_t<kPerLane == 8, uint32_t, uint16_t>;
  static_assert(sizeof(CodeWord) * kCodesPerByte == kPerLane && kRopePerLane == 2);

  __device__ static int element(int step) { return (step * kWarpSize + lane_id()) * kPerLane; }

  // A missing record reads as zeros: a scale of zero makes every element +0.
  __device__ void load_from(const uint8_t* record) {
    rope = record == nullptr
               ? 0
               : load<uint16_t, kWide>(record + kRopeOffset + lane_id() * kRopePerLane);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int e = element(s);
      codes[s] =
          record == nullptr ? 0 : load<CodeWord, kWide>(record + kCodesOffset + e / kCodesPerByte);
      scales[s] = record == nullptr ? 0 : __ldg(record + scale_offset(e / kBlockDim));
    }
  }

  __device__ void store_to(Out* row) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      uint32_t words[4];
      expand(codes[s], Scale<Out>(scales[s]), words);
      store<Out, kWide>(row + element(s), words);
    }
    alignas(8) Out pair[kRopePerLane] = {narrow_exact<Out>(decode_e4m3(rope & 0xff)),
                                         narrow_exact<Out>(decode_e4m3(rope >> 8))};
    Out* to = row + kNopeDim + lane_id() * kRopePerLane;
    if constexpr (kWide) {
      using Pair = std::conditional_t<sizeof(Out) == 2, unsigned int, uint2>;
      __stcs(reinterpret_cast<Pair*>(to), *reinterpret_cast<const Pair*>(pair));
    } else {
      to[0] = pair[0];
      to[1] = pair[1];
    }
  }

  uint32_t codes[kSteps];
  uint32_t scales[kSteps];
  uint32_t rope;
};

template <class Out, bool kWide, int kRows, class Locator>
__global__ void gather_kernel(const __grid_constant__ Locator rows) {
  const int64_t first_row = (static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y) * kRows;
  if (first_row >= rows.num_rows) return;
  const auto mine = reinterpret_cast<uint64_t>(rows.template locate<kRows>(first_row));
  RowPart<Out, kWide> part[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    part[i].load_from(reinterpret_cast<const uint8_t*>(__shfl_sync(kFullWarp, mine, i)));
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (first_row + i < rows.num_rows) {
      part[i].store_to(static_cast<Out*>(rows.dst) + (first_row + i) * rows.dst_row_stride());
    }
  }
}

// ---- launch ------------------------------------------------------------------------------------

// Whether every 16-byte store, and every load of a word of codes or a pair of RoPE bytes, is
// aligned.
template <class Params>
bool can_go_wide(const Params& p, int64_t dst_row_bytes) {
  constexpr int64_t kWord = sizeof(uint32_t);
  return aligned(p.dst, 16) && dst_row_bytes % 16 == 0 && aligned(p.cache.base, kWord) &&
         p.cache.block_stride % kWord == 0 && p.cache.token_stride % kWord == 0;
}

// Few rows: spread them, a row a warp and a warp a block. Many: several rows a warp share a
// look-up.
constexpr int64_t kFewRows = 2048;
constexpr int kRowsPerWarp = 4;
constexpr int kWarpsPerBlock = 8;

template <class Out, class Locator>
int launch_rows(const Locator& rows, int64_t dst_stride, CUstream_st* stream) {
  const auto run = [&]<bool kWide, int kRows>(int count) {
    const auto blocks =
        static_cast<unsigned>((rows.num_rows + count * kRows - 1) / (count * kRows));
    gather_kernel<Out, kWide, kRows><<<blocks, warps(count), 0, stream>>>(rows);
    return static_cast<int>(cudaGetLastError());
  };
  if (!can_go_wide(rows, dst_stride * sizeof(Out))) {
    return run.template operator()<false, 1>(kWarpsPerBlock);
  }
  return rows.num_rows <= kFewRows ? run.template operator()<true, 1>(1)
                                   : run.template operator()<true, kRowsPerWarp>(kWarpsPerBlock);
}

template <class Locator>
int launch_gather(const Locator& rows, int64_t dst_stride, CUstream_st* stream) {
  switch (rows.element) {
    case Element::kBFloat16:
      return launch_rows<BFloat16>(rows, dst_stride, stream);
    case Element::kFloat16:
      return launch_rows<Float16>(rows, dst_stride, stream);
    case Element::kFloat32:
      return launch_rows<float>(rows, dst_stride, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int gather(const SlotGatherParams& p, CUstream_st* stream) {
  return launch_gather(SlotLocator(p), kHeadDim, stream);
}

int gather(const RequestGatherParams& p, CUstream_st* stream) {
  return launch_gather(RequestLocator(p), p.dst_stride, stream);
}

}  // namespace nvfp4_dsmla::cuda
