// Attention of all heads to parts of their rows' tokens, for a machine whose registers hold kLanes
// floats. Tokens are expanded a tile at a time, and a tile serves every head twice: as keys and as
// values.
//
//     scores [tile, heads] = tile [tile, 576] * q^T      lanes are heads, so that the softmax needs
//     weights = exp(scores - max)                        no sum across lanes
//     out [heads, 512] += weights^T * tile[:, :512]      lanes are dimensions
//
// Both products keep a block of sums in registers while they run over what is summed. A sum is
// taken in the order of dimensions, respectively of tokens, so it does not depend on which heads or
// rows are computed beside it.
//
// One core of an EPYC (Zen 4, g++ 12, 2026-11-29) does at most 114 GFLOP/s of fp32 multiply-adds.
// Of these it does 91 here with 128 heads and 95 with 16, topk 2048 of 16,384 tokens; with 256-bit
// registers 90 and 78. So multiply-adds bind it down to 16 heads. With 8 heads it does 75, and with
// one 12 (178 ns a token): there it is the expansion (40 ns) and the lanes that no head fills.
#pragma once

#include <algorithm>

#include "kernels/cpu/expand.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/tiles.h"
#include "kernels/launch.h"

namespace nvfp4_dsmla::cpu {

inline constexpr int kMostLanes = 16;  // heads are padded to so many

inline int64_t padded_heads(int64_t heads) {
  return (heads + kMostLanes - 1) / kMostLanes * kMostLanes;
}

// The memory of one thread, cut from an array of floats.
struct AttendScratch {
  AttendScratch(float* memory, int64_t heads)
      : tile(memory),
        q(tile + kTile * kHeadDim),
        weights(q + padded_heads(heads) * kHeadDim),
        correction(weights + padded_heads(heads) * kTile),
        max(correction + padded_heads(heads)),
        sum(max + padded_heads(heads)) {}
  static int64_t num_floats(int64_t heads) {
    return kTile * kHeadDim + padded_heads(heads) * (kHeadDim + kTile + 3);
  }

  float* tile;        // [kTile, 576]
  float* q;           // [padded_heads / kLanes, 576, kLanes]
  float* weights;     // [kTile, padded_heads]: first the scores
  float* correction;  // [padded_heads]: what earlier sums are worth under the new maximum
  float* max;         // [padded_heads]: of the scores so far
  float* sum;         // [padded_heads]: of the weights so far
};

template <int kLanes, class Element>
NVFP4_DSMLA_INLINE void pack_q(const DecodeParams& p, int64_t row, float* __restrict packed) {
  const Element* q = static_cast<const Element*>(p.q) + row / p.s_q * p.q_batch_stride +
                     row % p.s_q * p.q_token_stride;
  for (int64_t h = 0; h < padded_heads(p.heads); ++h) {
    float* to = packed + h / kLanes * kLanes * kHeadDim + h % kLanes;
    for (int d = 0; d < kHeadDim; ++d) {
      to[d * kLanes] = h < p.heads ? widen(q[h * p.q_head_stride + d]) : 0.0f;
    }
  }
}

// Scores of kTokens tokens and kVectors * kLanes heads.
template <int kLanes, int kTokens, int kVectors>
NVFP4_DSMLA_INLINE void score_block(const float* __restrict q,
                                    const float* __restrict tile,
                                    float* __restrict scores,
                                    int64_t scores_stride) {
  using Floats = typename Lanes<kLanes>::Floats;
  Floats sums[kTokens][kVectors] = {};
  for (int d = 0; d < kHeadDim; ++d) {
    Floats of_q[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      of_q[v] = load<Floats>(q + (v * kHeadDim + d) * kLanes);
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const float key = tile[t * kHeadDim + d];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[t][v] += of_q[v] * key;
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      store(scores + t * scores_stride + v * kLanes, sums[t][v]);
    }
  }
}

// Scores -> weights of a tile's tokens; brings max, sum and correction up to date.
template <int kLanes>
NVFP4_DSMLA_INLINE void weigh(const AttendScratch& s, int64_t heads, int tokens, float scale) {
  using Floats = typename Lanes<kLanes>::Floats;
  const int64_t stride = padded_heads(heads);
  for (int64_t h = 0; h < heads; h += kLanes) {
    float* weights = s.weights + h;
    const Floats old_max = load<Floats>(s.max + h);
    Floats max = old_max;
    for (int t = 0; t < tokens; ++t) {
      const Floats score = load<Floats>(weights + t * stride) * scale;
      max = score > max ? score : max;  // not a NaN, which shall come out in the sum
      store(weights + t * stride, score);
    }
    // With a maximum of -inf every weight is exp(-inf), but -inf - -inf is NaN: so take 0 off.
    const Floats finite_max = max == kMinusInfinity ? Floats{} : max;
    const Floats correction = exp_not_positive<kLanes>(old_max - finite_max);
    Floats sum = load<Floats>(s.sum + h) * correction;
    for (int t = 0; t < tokens; ++t) {
      const Floats weight =
          exp_not_positive<kLanes>(load<Floats>(weights + t * stride) - finite_max);
      sum += weight;
      store(weights + t * stride, weight);
    }
    store(s.max + h, max);
    store(s.sum + h, sum);
    store(s.correction + h, correction);
  }
}

// out [kHeads, kVectors * kLanes] = out * correction + weights^T * tile.
template <int kLanes, int kHeads, int kVectors>
NVFP4_DSMLA_INLINE void value_block(const float* __restrict weights,
                                    int64_t weights_stride,
                                    const float* __restrict tile,
                                    int tokens,
                                    const float* __restrict correction,
                                    bool first,
                                    float* __restrict out) {
  using Floats = typename Lanes<kLanes>::Floats;
  Floats sums[kHeads][kVectors] = {};
  if (!first) {
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        sums[h][v] = load<Floats>(out + h * kNopeDim + v * kLanes) * correction[h];
      }
    }
  }
  for (int t = 0; t < tokens; ++t) {
    Floats value[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) value[v] = load<Floats>(tile + t * kHeadDim + v * kLanes);
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      const float weight = weights[t * weights_stride + h];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[h][v] += value[v] * weight;
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store(out + h * kNopeDim + v * kLanes, sums[h][v]);
  }
}

// Heads from `h` on in blocks of kHeads, what is left over in blocks of half as many, and so on.
template <int kLanes, int kHeads, int kSums>
NVFP4_DSMLA_INLINE void add_values(
    const AttendScratch& s, int64_t heads, int tokens, bool first, int64_t h, float* out) {
  constexpr int kVectors = kSums / kHeads;
  const int64_t end = h + (heads - h) / kHeads * kHeads;
  for (int d = 0; d < kNopeDim; d += kVectors * kLanes) {
    for (int64_t i = h; i < end; i += kHeads) {
      value_block<kLanes, kHeads, kVectors>(s.weights + i, padded_heads(heads), s.tile + d, tokens,
                                            s.correction + i, first, out + i * kNopeDim + d);
    }
  }
  if constexpr (kHeads > 1) {
    if (end < heads) add_values<kLanes, kHeads / 2, kSums>(s, heads, tokens, first, end, out);
  }
}

// Scores of a tile; meanwhile the records of the next one are brought in.
template <int kLanes, int kTokens>
NVFP4_DSMLA_INLINE void score(const AttendScratch& s, int64_t heads, int tokens, const Tile& next) {
  const int64_t stride = padded_heads(heads);
  for (int t = 0; t < tokens; t += kTokens) {
    next.prefetch(t, t + kTokens);
    const float* tile = s.tile + t * kHeadDim;
    float* scores = s.weights + t * stride;
    int64_t h = 0;
    for (; h + kLanes < heads; h += 2 * kLanes) {
      score_block<kLanes, kTokens, 2>(s.q + h * kHeadDim, tile, scores + h, stride);
    }
    if (h < heads) score_block<kLanes, kTokens, 1>(s.q + h * kHeadDim, tile, scores + h, stride);
  }
}

// kSums: the vectors of sums that stay in registers.
template <int kLanes, int kSums, class Element>
NVFP4_DSMLA_INLINE void attend(
    const DecodeParams& p, const DecodeParts& parts, float* scratch, int64_t begin, int64_t end) {
  constexpr int kTokens = kSums / 2;  // by two vectors of heads
  const AttendScratch s(scratch, p.heads);
  std::fill(parts.max + begin * p.heads, parts.max + end * p.heads, kMinusInfinity);
  std::fill(parts.sum + begin * p.heads, parts.sum + end * p.heads, 0.0f);

  Tiles tiles(p, parts, begin, end);
  Tile two[2];  // this one and the next one
  tiles.next(two[0]);
  two[0].prefetch(0, kTile);
  int64_t packed_row = -1;
  for (int i = 0; two[i].count > 0; i = 1 - i) {
    const Tile& tile = two[i];
    Tile& next = two[1 - i];
    tiles.next(next);
    if (const int64_t row = parts.first_row + tile.part / parts.per_row; row != packed_row) {
      pack_q<kLanes, Element>(p, row, s.q);
      packed_row = row;
    }
    if (tile.first) {
      std::fill_n(s.max, padded_heads(p.heads), kMinusInfinity);
      std::fill_n(s.sum, padded_heads(p.heads), 0.0f);
    }
    for (int t = 0; t < tile.count; ++t) expand<kLanes>(tile.record[t], s.tile + t * kHeadDim);
    // The last block of tokens may be short: zeros fill it up, whose scores are not used.
    const int filled = (tile.count + kTokens - 1) / kTokens * kTokens;
    std::fill(s.tile + tile.count * kHeadDim, s.tile + filled * kHeadDim, 0.0f);
    score<kLanes, kTokens>(s, p.heads, tile.count, next);
    weigh<kLanes>(s, p.heads, tile.count, p.softmax_scale);
    add_values<kLanes, kSums / 2, kSums>(s, p.heads, tile.count, tile.first, 0,
                                         parts.out + tile.part * p.heads * kNopeDim);
    std::copy_n(s.max, p.heads, parts.max + tile.part * p.heads);
    std::copy_n(s.sum, p.heads, parts.sum + tile.part * p.heads);
  }
}

}  // namespace nvfp4_dsmla::cpu
