// Which kernel serves a sparse_mla_decode call, and how its tokens are split: a pure function of
// the device and the shapes, so that a captured graph is the same whatever the data, and so that it
// is tested on the host.
#pragma once

#include <algorithm>
#include <cstdint>

namespace nvfp4_dsmla {

enum class DecodeKernel : uint8_t {
  kNone,   // the device has none
  kMma,    // mma.sync, tiles of 16 or 32 heads; from compute capability 8.0 on
  kWgmma,  // wgmma, tiles of 16, 32 or 64 heads; 9.0 alone
};

// What matters of a device: which kernels this build has code of for it, and its size.
struct DecodeDevice {
  bool has_mma;
  bool has_wgmma;
  int num_sms;
};

struct DecodePlan {
  DecodeKernel kernel = DecodeKernel::kNone;
  int head_tile = 0;   // heads of one thread block
  int num_splits = 0;  // thread blocks that share a row's tokens; their results are combined if > 1
};

inline constexpr int kMaxSplits = 64;
inline constexpr int kMmaTokens = 32;  // tokens of a tile
inline constexpr int kWgmmaTokens = 64;

// What a thread block takes on an H200, in tenths of a microsecond: wgmma's are fits to its times
// over 1 to 128 rows, start and combine together; mma's to those of before it multiplied fp16, with
// wgmma's cost of combining. Elsewhere the ratios matter, and those are alike.
struct DecodePace {
  int head_tile;
  int tokens;        // of a tile
  int tiles;         // at a time: wgmma's 16 and 32 heads have two warpgroups that expand
  int blocks;        // that share an SM
  int64_t per_time;  // for so many tiles
  int64_t start;     // loading q, filling the pipeline, writing the result
  int64_t combine;   // partial results, which are in fp16, and the second kernel
};
inline constexpr DecodePace kMmaPaces[] = {{16, kMmaTokens, 1, 2, 23, 50, 30},
                                           {32, kMmaTokens, 1, 1, 18, 50, 45}};
inline constexpr DecodePace kWgmmaPaces[] = {{16, kWgmmaTokens, 2, 1, 26, 51, 30},
                                             {32, kWgmmaTokens, 2, 1, 31, 54, 45},
                                             {64, kWgmmaTokens, 1, 1, 21, 100, 20}};

// A call at such a pace.
struct DecodeWork {
  int64_t blocks;  // if no tokens are shared
  int64_t tiles;   // of a row
  int64_t slots;   // blocks that run at a time
};
inline DecodeWork decode_work(
    const DecodePace& pace, int num_sms, int64_t rows, int64_t heads, int64_t topk) {
  return {rows * ((heads + pace.head_tile - 1) / pace.head_tile),
          (topk + pace.tokens - 1) / pace.tokens, int64_t{num_sms} * pace.blocks};
}

// How often one of so many blocks of a row takes a tile, or two at a time.
inline int64_t times_of_split(const DecodePace& pace, const DecodeWork& work, int64_t splits) {
  return ((work.tiles + splits - 1) / splits + pace.tiles - 1) / pace.tiles;
}

// In tenths of a microsecond.
inline int64_t split_cost(const DecodePace& pace, const DecodeWork& work, int64_t splits) {
  const int64_t waves = (work.blocks * splits + work.slots - 1) / work.slots;
  return waves * (times_of_split(pace, work, splits) * pace.per_time + pace.start) +
         (splits > 1 ? pace.combine : 0);
}

// Splitting makes at most four blocks a place for one, which also bounds the partial results: 35 MB
// on an H200.
inline int64_t most_splits(const DecodeWork& work) {
  constexpr int64_t kBlocksPerSlot = 4;
  const int64_t room = kBlocksPerSlot * work.slots / std::max<int64_t>(work.blocks, 1);
  return std::max<int64_t>(std::min({work.tiles, int64_t{kMaxSplits}, room}), 1);
}

struct DecodeCost {
  int num_splits = 1;
  int64_t tenths = INT64_MAX;  // of a microsecond
};

// The split count of the least cost, the least of equal ones.
inline DecodeCost cheapest_splits(const DecodePace& pace, const DecodeWork& work) {
  DecodeCost best;
  for (int64_t splits = 1; splits <= most_splits(work);) {
    const int64_t cost = split_cost(pace, work, splits);
    if (cost < best.tenths) best = {static_cast<int>(splits), cost};
    const int64_t times = times_of_split(pace, work, splits);
    if (times <= 1) break;
    // On to the fewest splits that save a time: those between cost no less.
    const int64_t fewer = (times - 1) * pace.tiles;
    splits = (work.tiles + fewer - 1) / fewer;
  }
  return best;
}

inline DecodePlan plan_decode(
    const DecodeDevice& device, int64_t rows, int64_t heads, int64_t topk, bool mma_only = false) {
  if (!device.has_mma) return {};
  const bool wgmma = device.has_wgmma && !mma_only;
  DecodePlan plan;
  plan.kernel = wgmma ? DecodeKernel::kWgmma : DecodeKernel::kMma;
  int64_t least = INT64_MAX;
  const auto consider = [&](const DecodePace& pace) {
    // No tile is padded by half or more where a smaller one does.
    if (pace.head_tile > 16 && heads <= pace.head_tile / 2) return;
    const DecodeCost cost =
        cheapest_splits(pace, decode_work(pace, device.num_sms, rows, heads, topk));
    if (cost.tenths >= least) return;
    least = cost.tenths;
    plan.head_tile = pace.head_tile;
    plan.num_splits = cost.num_splits;
  };
  if (wgmma) {
    for (const DecodePace& pace : kWgmmaPaces) consider(pace);
  } else {
    for (const DecodePace& pace : kMmaPaces) consider(pace);
  }
  return plan;
}

}  // namespace nvfp4_dsmla
