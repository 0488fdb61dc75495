// Where a row's record is: the first step of a gather, by slot and by request.
//
// locate<kNarrow, kRows>(first_row) is called by whole warps. Lane i < kRows gets the record of row
// first_row + i, or null where there is none (the other lanes repeat the last row's). kNarrow:
// strides fit 32 bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/paging.cuh"
#include "kernels/params.h"

namespace nvfp4_dsmla::cuda {

struct SlotLocator {
  explicit SlotLocator(const SlotGatherParams& p)
      : cache(p.cache), slots(p.slots), num_rows(static_cast<uint32_t>(p.num_rows)) {}

  template <bool kNarrow, int kRows>
  __device__ const uint8_t* locate(uint32_t first_row) const {
    const uint32_t row = first_row + min(lane_id(), kRows - 1);
    if (row >= num_rows) return nullptr;
    const int64_t slot = slots[row];
    return cache.holds(slot) ? cache.record<kNarrow>(static_cast<uint32_t>(slot)) : nullptr;
  }

  bool strides_narrow() const { return true; }
  bool searches() const { return false; }

  DeviceCache<const uint8_t> cache;
  IndexVector slots;
  uint32_t num_rows;
};

// A vector of int32 anywhere in memory.
struct Int32s {
  Int32s(const int32_t* data, int64_t stride)
      : data(data), stride(stride * static_cast<int64_t>(sizeof(int32_t))) {}
  template <bool kNarrow>
  __device__ int32_t at(uint32_t i) const {
    return *row_at<kNarrow>(data, i, stride);
  }

  const int32_t* data;
  int64_t stride;  // bytes
};

struct RequestLocator {
  explicit RequestLocator(const RequestGatherParams& p)
      : cache(p.cache),
        num_rows(static_cast<uint32_t>(p.num_rows)),
        num_requests(static_cast<int>(p.num_requests)),
        max_blocks(static_cast<uint32_t>(std::min<int64_t>(p.max_blocks, UINT32_MAX))),
        starts(p.workspace_starts, p.workspace_starts_stride),
        first_tokens(p.seq_starts, p.seq_starts_stride),
        block_table(p.block_table, p.block_table_row_stride),
        block_table_column_stride(p.block_table_column_stride *
                                  static_cast<int64_t>(sizeof(int32_t))) {}

  template <bool kNarrow, int kRows>
  __device__ const uint8_t* locate(uint32_t first_row) const {
    const uint32_t row = first_row + min(lane_id(), kRows - 1);
    const Request request = searches()
                                ? find_among_many<kNarrow>(static_cast<int>(first_row), row)
                                : find_among_few<kNarrow, kRows>(static_cast<int>(first_row));
    if (row >= num_rows || request.index < 0) return nullptr;
    const int64_t token = int64_t{request.first_token} + row - request.first_row;
    if (token < 0 || token > INT32_MAX) return nullptr;
    const uint32_t column = cache.block_size.divide(static_cast<uint32_t>(token));
    if (column >= max_blocks) return nullptr;
    const auto block = static_cast<uint32_t>(
        *row_at<kNarrow>(row_at<kNarrow>(block_table.data, request.index, block_table.stride),
                         column, block_table_column_stride));
    if (block >= cache.num_blocks) return nullptr;  // a negative one is a large one here
    return cache.record<kNarrow>(block,
                                 static_cast<uint32_t>(token) - column * cache.block_size.divisor);
  }

  bool strides_narrow() const {
    return fits_narrow(starts.stride) && fits_narrow(first_tokens.stride) &&
           fits_narrow(block_table.stride) && fits_narrow(block_table_column_stride);
  }

  // A look-up takes more than one vote.
  __host__ __device__ bool searches() const { return num_requests > kWarpSize; }

  struct Request {
    int index;  // -1: the row belongs to none
    int first_row;
    int first_token;
  };

  // At most a warp of requests: each lane holds one, and a row's is a vote away. One round trip.
  template <bool kNarrow, int kRows>
  __device__ Request find_among_few(int first_row) const {
    const int lane = lane_id();
    const bool present = lane < num_requests;
    const int my_start = present ? starts.at<kNarrow>(lane) : INT32_MAX;
    const int my_seq_start = present ? first_token<kNarrow>(lane) : 0;
    int index = -1;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // The highest lane that votes, not the count: starts that do not ascend stay harmless.
      const uint32_t begun = __ballot_sync(kFullWarp, present && my_start <= first_row + i);
      if (min(lane, kRows - 1) == i) index = kWarpSize - 1 - __clz(static_cast<int>(begun));
    }
    return {index, __shfl_sync(kFullWarp, my_start, index & (kWarpSize - 1)),
            __shfl_sync(kFullWarp, my_seq_start, index & (kWarpSize - 1))};
  }

  // A search of 32 ways a step for the warp's first row, then a walk from there for the others.
  template <bool kNarrow>
  __device__ Request find_among_many(int first_row, uint32_t row) const {
    int low = 0, high = num_requests;  // the request sought is in [low, high), or is low - 1
    while (low < high) {
      const int step = (high - low + kWarpSize - 1) / kWarpSize;
      const int probe = low + lane_id() * step;
      const bool begun = probe < high && starts.at<kNarrow>(probe) <= first_row;
      const int votes = __popc(__ballot_sync(kFullWarp, begun));
      if (votes == 0) {
        high = low;
      } else {
        low += (votes - 1) * step + 1;
        high = min(high, low + step - 1);
      }
    }
    int index = low - 1;
    while (index + 1 < num_requests && starts.at<kNarrow>(index + 1) <= static_cast<int>(row))
      ++index;
    if (index < 0) return {-1, 0, 0};
    return {index, starts.at<kNarrow>(index), first_token<kNarrow>(index)};
  }

  template <bool kNarrow>
  __device__ int first_token(int request) const {
    return first_tokens.data == nullptr ? 0 : first_tokens.at<kNarrow>(request);
  }

  DeviceCache<const uint8_t> cache;
  uint32_t num_rows;
  int num_requests;
  uint32_t max_blocks;
  Int32s starts;                      // workspace_starts
  Int32s first_tokens;                // seq_starts; null data: all zero
  Int32s block_table;                 // rows
  int64_t block_table_column_stride;  // bytes
};

}  // namespace nvfp4_dsmla::cuda
