// The tokens of query rows, found through their indices: 64 at a time, which is what decode expands
// at a time.
#pragma once

#include <algorithm>

#include "format/record.h"
#include "kernels/launch.h"

namespace nvfp4_dsmla::cpu {

inline constexpr int kTile = 64;  // tokens; as floats 147 KB, which should stay in L2

// Columns are cut into parts of the same width whatever the batch and the number of threads, so a
// row's result depends on neither. Wide enough that a part's partial result (2 KB a head) is small
// beside its work, and few enough that it stays so for a very long row.
inline int64_t columns_per_part(const DecodeParams& p) {
  constexpr int64_t kMostParts = 64;
  constexpr int64_t kLeastColumns = 4 * kTile;
  const int64_t columns = (p.topk + kMostParts - 1) / kMostParts;
  return std::max(kLeastColumns, (columns + kTile - 1) / kTile * kTile);
}

// Tokens of one part.
struct Tile {
  int64_t part;
  bool first;  // of its part
  int count = 0;
  const uint8_t* record[kTile];

  // Brings in the records of tokens [begin, end) for the time when this tile's turn comes: they lie
  // where the indices say, which the processor cannot foresee.
  NVFP4_DSMLA_INLINE void prefetch(int begin, int end) const {
    constexpr int kLineBytes = 64;
    for (int t = begin; t < std::min(end, count); ++t) {
      for (int b = 0; b < kRecordBytes; b += kLineBytes) __builtin_prefetch(record[t] + b);
    }
  }
};

// The tiles of parts [begin, end), one after the other. A part without tokens has none.
class Tiles {
 public:
  NVFP4_DSMLA_INLINE Tiles(const DecodeParams& p,
                           const DecodeParts& parts,
                           int64_t begin,
                           int64_t end)
      : p_(p), parts_(parts), columns_(columns_per_part(p)), part_(begin), end_(end) {
    open_part();
  }

  // tile.count is 0 if there are no more.
  NVFP4_DSMLA_INLINE void next(Tile& tile) {
    for (tile.count = 0; part_ < end_; ++part_, open_part()) {
      while (tile.count < kTile && column_ < last_column_) {
        const int64_t slot = indices_[column_++ * p_.indices_column_stride];
        if (p_.cache.holds(slot)) tile.record[tile.count++] = p_.cache.record(slot);
      }
      if (tile.count > 0) {
        tile.part = part_;
        tile.first = first_;
        first_ = false;
        return;
      }
    }
  }

 private:
  NVFP4_DSMLA_INLINE void open_part() {
    if (part_ >= end_) return;
    const int64_t row = parts_.first_row + part_ / parts_.per_row;
    const int64_t batch = row / p_.s_q, token = row % p_.s_q;
    indices_ = p_.indices + batch * p_.indices_batch_stride + token * p_.indices_token_stride;
    int64_t length = p_.topk;
    if (p_.topk_length != nullptr) {
      length = std::min<int64_t>(length, p_.topk_length[batch * p_.topk_length_batch_stride +
                                                        token * p_.topk_length_token_stride]);
    }
    column_ = part_ % parts_.per_row * columns_;
    last_column_ = std::min(length, column_ + columns_);
    first_ = true;
  }

  const DecodeParams& p_;
  const DecodeParts& parts_;
  const int64_t columns_;
  int64_t part_;
  const int64_t end_;
  const int32_t* indices_ = nullptr;  // of the part's row
  int64_t column_ = 0;                // the next one to look at
  int64_t last_column_ = 0;           // one past the part's
  bool first_ = true;
};

}  // namespace nvfp4_dsmla::cpu
