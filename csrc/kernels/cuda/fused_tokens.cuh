// The tokens of a fused write, and the rotation of their keys.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "format/e4m3.h"
#include "format/element.h"
#include "format/record.h"
#include "kernels/cuda/lane_block.cuh"
#include "kernels/cuda/lane_memory.cuh"
#include "kernels/cuda/paging.cuh"
#include "kernels/cuda/tokens.cuh"
#include "kernels/norm_rope.h"
#include "kernels/params.h"

namespace nvfp4_dsmla::cuda {

inline int64_t bytes_of(Element element) { return element == Element::kFloat32 ? 4 : 2; }

// FusedWriteParams, resolved: strides in bytes.
struct FusedTokens : Tokens {
  explicit FusedTokens(const FusedWriteParams& p)
      : Tokens(p.write, bytes_of(p.write.element)),
        norm_weight(p.norm_weight),
        positions(p.positions),
        cos_sin(p.cos_sin),
        cos_sin_stride(p.cos_sin_stride * bytes_of(p.cos_sin_element)),
        max_positions(p.max_positions),
        eps(p.eps),
        is_float_weight(p.norm_weight_element == Element::kFloat32),
        is_float_table(p.cos_sin_element == Element::kFloat32),
        is_neox(p.is_neox) {}

  __device__ bool holds(int64_t slot, int64_t position) const {
    return cache.holds(slot) &&
           static_cast<uint64_t>(position) < static_cast<uint64_t>(max_positions);
  }

  const void* norm_weight;  // of the tokens' type or of float
  IndexColumn positions;
  const void* cos_sin;  // likewise
  int64_t cos_sin_stride;
  int64_t max_positions;
  float eps;
  bool is_float_weight;
  bool is_float_table;
  bool is_neox;
};

// Some neighbouring pairs of a token's RoPE elements: loaded, rotated, stored.
template <class In, int kPairs, bool kWide>
class KeyPairs {
 public:
  static constexpr int kLanes = kRopePairs / kPairs;  // that a token takes

  // Those of lane `lane` of kLanes.
  __device__ void load(const FusedTokens& t, uint32_t token, int lane) {
    first_ = lane * kPairs;
    const In* from = static_cast<const In*>(row_at<kWide>(t.k_pe, token, t.k_pe_stride));
    if (t.is_neox) {
      Elements<In, kPairs> halves[2];
      halves[0].template load<kWide>(from + first_);
      halves[1].template load<kWide>(from + kRopePairs + first_);
      memcpy(key_.words, halves, sizeof(halves));
    } else {
      key_.template load<kWide>(from + 2 * first_);
    }
  }

  // Cosines and sines, by their bits: no branch waits for them.
  __device__ void load_angles(const FusedTokens& t, int64_t position) {
    const void* row = static_cast<const char*>(t.cos_sin) + position * t.cos_sin_stride;
    if (t.is_float_table) {
      load_angles<float>(row);
    } else {
      load_angles<In>(row);
    }
  }

  // Stored: what the rotated key is rounded to before it is encoded.
  template <class Stored>
  __device__ void store(const FusedTokens& t, uint8_t* record) const {
    float a[kPairs], b[kPairs];
    if (t.is_float_table) {
      rotate_by<float>(t.is_neox, a, b);
    } else {
      rotate_by<In>(t.is_neox, a, b);
    }
    const uint32_t first = encode<Stored>(a), second = encode<Stored>(b);
    uint8_t* rope = record + kRopeOffset;
    if (t.is_neox) {
      store_word<kWide>(rope + first_, static_cast<Half>(first));
      store_word<kWide>(rope + kRopePairs + first_, static_cast<Half>(second));
    } else {
      const uint64_t whole =
          __byte_perm(first, second, 0x5140) | uint64_t{__byte_perm(first, second, 0x7362)} << 32;
      store_word<kWide>(rope + 2 * first_, static_cast<Whole>(whole));
    }
  }

 private:
  static_assert(kPairs == 2 || kPairs == 4);
  using Half = std::conditional_t<kPairs == 4, uint32_t, uint16_t>;
  using Whole = std::conditional_t<kPairs == 4, uint64_t, uint32_t>;

  template <class T>
  __device__ void load_angles(const void* row) {
    Elements<T, kPairs> cos, sin;
    cos.template load<kWide>(static_cast<const T*>(row) + first_);
    sin.template load<kWide>(static_cast<const T*>(row) + kRopePairs + first_);
    memcpy(cos_, cos.words, sizeof(cos.words));
    memcpy(sin_, sin.words, sizeof(sin.words));
  }

  template <class T>
  __device__ void rotate_by(bool is_neox, float (&a)[kPairs], float (&b)[kPairs]) const {
    Elements<T, kPairs> cos, sin;
    memcpy(cos.words, cos_, sizeof(cos.words));
    memcpy(sin.words, sin_, sizeof(sin.words));
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float halves[2] = {key_[i], key_[kPairs + i]},
                  turns[2] = {key_[2 * i], key_[2 * i + 1]};
      const RopePair pair{is_neox ? halves[0] : turns[0], is_neox ? halves[1] : turns[1]};
      const RopePair turned = rotate(pair, cos[i], sin[i]);
      a[i] = turned.first;
      b[i] = turned.second;
    }
  }

  // A byte each.
  template <class Stored>
  __device__ static uint32_t encode(const float (&x)[kPairs]) {
    const auto rounded = Elements<Stored, kPairs>::rounded(x);
    uint32_t bytes = 0;
#pragma unroll
    for (int i = 0; i < kPairs; i += 2) {
      bytes |= encode_e4m3_pair(rounded[i], rounded[i + 1]) << 8 * i;
    }
    return bytes;
  }

  int first_;
  Elements<In, 2 * kPairs> key_;  // the pairs' first elements, then their second, or by turns
  uint32_t cos_[kPairs], sin_[kPairs];
};

}  // namespace nvfp4_dsmla::cuda
