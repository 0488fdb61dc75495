// Records on their way into the registers of decode_wgmma_few.cu's expanders.
#pragma once

#include <cstdint>

#include "format/record.h"
#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/decode_wgmma.cuh"
#include "kernels/cuda/decode_wgmma_lane.cuh"
#include "kernels/cuda/mma.cuh"

namespace nvfp4_dsmla::cuda::hopper::few {

// Of two tokens of its warp's 16.
using Records = LanesRecord[2];

inline constexpr int kStageBytes = kWarpTokens * kRecordBytes;

// A warp's 16 tokens of one tile of a row after another, `step` tokens apart: by way of shared
// memory, where the next tile's records arrive while one is worked on.
class StagedRecords {
 public:
  __device__ StagedRecords(const DecodeKernelParams& p,
                           const int32_t* indices,
                           int first,
                           int end,
                           int step,
                           void* stage)
      : p_(p),
        indices_(indices),
        column_(first + kWarpTokens * group_warp() + lane_id()),
        end_(end),
        step_(step),
        stage_(static_cast<uint8_t*>(stage)) {
    read_slot();  // what is asked for until start_copies comes along with it
  }

  // The next tile's; past the last one no token is present.
  __device__ void take(Records& records) {
    copy_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      // Eight lanes have tokens two apart, whose pieces are in banks apart.
      const int g = lane_id() / 4, token = 8 * t + (g & 4) + (g & 1) * 2 + (g >> 1 & 1);
      records[t].present = present_ >> token & 1;
      const auto load = [](const uint8_t* from) { return *reinterpret_cast<const uint4*>(from); };
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        records[t].load(stage_ + token * kRecordBytes, part, load);
      }
    }
    __syncwarp();
    start_copies();
  }

  // The first tile's, whose records `take` waits for. Four tokens at a time, 8 lanes each, so that
  // an instruction asks for whole lines.
  __device__ void start_copies() {
    constexpr int kLanes = 8, kPiece = 16, kStride = kLanes * kPiece;
    const bool there = p_.device_cache.holds(slot_);
    const auto mine = reinterpret_cast<uint64_t>(
        p_.device_cache.record<true>(there ? static_cast<uint32_t>(slot_) : 0));
    present_ = __ballot_sync(kFullWarp, there);
    const int piece = lane_id() % kLanes * kPiece;
#pragma unroll
    for (int first = 0; first < kWarpTokens; first += kWarpSize / kLanes) {
      const int token = first + lane_id() / kLanes;
      const uint8_t* from =
          reinterpret_cast<const uint8_t*>(__shfl_sync(kFullWarp, mine, token)) + piece;
      const uint32_t to = shared_address(stage_ + token * kRecordBytes + piece);
#pragma unroll
      for (int at = 0; at < kRecordBytes; at += kStride) {
        if (at + kStride <= kRecordBytes || at + piece < kRecordBytes) {
          copy_async(to + at, from + at, present_ >> token & 1);
        }
      }
    }
    copy_async_commit();
    read_slot();
  }

 private:
  __device__ void read_slot() {  // of token `lane`, lanes 0 .. 15
    slot_ = lane_id() < kWarpTokens ? p_.slot_at(indices_, column_, end_) : -1;
    column_ += step_;
  }

  const DecodeKernelParams& p_;
  const int32_t* indices_;
  int column_, end_, step_;
  uint8_t* stage_;
  int slot_;          // of the tile after the one that is copied
  uint32_t present_;  // of the one that is copied, a bit a token
};

}  // namespace nvfp4_dsmla::cuda::hopper::few
