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

// The split count of the least cost, in units of one tile of tokens on one thread block. Blocks
// never outnumber the slots by more than four, which also bounds the partial results: 67 MB on an
// H200.
inline int choose_splits(int64_t blocks, int64_t tiles, int64_t slots) {
  constexpr int64_t kStart = 3;    // loading q and filling the pipeline
  constexpr int64_t kCombine = 6;  // the second kernel, and the partial results it reads
  constexpr int64_t kBlocksPerSlot = 4;
  const int64_t most =
      std::min({tiles, int64_t{kMaxSplits}, kBlocksPerSlot * slots / std::max<int64_t>(blocks, 1)});
  int64_t best = 1, best_cost = INT64_MAX;
  for (int64_t splits = 1; splits <= std::max<int64_t>(most, 1); ++splits) {
    const int64_t waves = (blocks * splits + slots - 1) / slots;
    const int64_t per_block = (tiles + splits - 1) / splits;
    const int64_t cost = waves * (per_block + kStart) + (splits > 1 ? kCombine + splits / 16 : 0);
    if (cost < best_cost) {
      best = splits;
      best_cost = cost;
    }
  }
  return static_cast<int>(best);
}

inline constexpr int kMmaTokens = 32;  // tokens of a tile
inline constexpr int kWgmmaTokens = 64;
inline DecodePlan plan_decode(const DecodeDevice& device,
                              int64_t rows,
                              int64_t heads,
                              int64_t topk,
                              DecodeKernel wanted = DecodeKernel::kNone) {
  if (!device.has_mma) return {};
  // Measured on an H200: with few rows and many heads the smaller tiles of mma spread better.
  const bool few = heads > 16 && rows * ((heads + 31) / 32) <= 16;
  const bool wgmma =
      device.has_wgmma && wanted != DecodeKernel::kMma && (wanted == DecodeKernel::kWgmma || !few);
  DecodePlan plan;
  plan.kernel = wgmma ? DecodeKernel::kWgmma : DecodeKernel::kMma;
  plan.head_tile = heads <= 16 ? 16 : heads <= 32 || !wgmma ? 32 : 64;
  // Two blocks of mma's 16-head kernel share an SM, one of any other.
  const int64_t slots = int64_t{device.num_sms} * (!wgmma && plan.head_tile == 16 ? 2 : 1);
  const int64_t blocks = rows * ((heads + plan.head_tile - 1) / plan.head_tile);
  const int64_t tokens = wgmma ? kWgmmaTokens : kMmaTokens;
  plan.num_splits = choose_splits(blocks, (topk + tokens - 1) / tokens, slots);
  return plan;
}

}  // namespace nvfp4_dsmla
