// Slot -> record: the addressing of one layer of a paged cache.
#pragma once

#include <cstdint>

#include "format/portability.h"

namespace nvfp4_dsmla {

// One layer. Records may lie further apart than their size (padded pages, layers interleaved), so
// every address is base + block * block_stride + offset * token_stride, in 64 bits.
template <class Byte>
struct PagedCache {
  Byte* base;
  int64_t num_blocks;
  int64_t block_size;    // tokens a block, >= 1
  int64_t block_stride;  // bytes
  int64_t token_stride;  // bytes

  NVFP4_DSMLA_INLINE int64_t capacity() const { return num_blocks * block_size; }

  // Any slot outside [0, capacity) means "no token", -1 being the usual one.
  NVFP4_DSMLA_INLINE bool holds(int64_t slot) const { return slot >= 0 && slot < capacity(); }

  NVFP4_DSMLA_INLINE Byte* record(int64_t block, int64_t offset) const {
    return base + block * block_stride + offset * token_stride;
  }
  NVFP4_DSMLA_INLINE Byte* record(int64_t slot) const {
    return record(slot / block_size, slot % block_size);
  }
};

}  // namespace nvfp4_dsmla
