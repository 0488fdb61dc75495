// fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla: write.cu with a norm and a rotation before it.
//
//   lane l   loads     16 NoPE elements from 16l,  their weights,  pair l of the RoPE elements,
//                      cosine and sine of pair l
//            sums      its squares, then by a butterfly those of all lanes
//            stores    8 code bytes, 1 scale byte, 2 RoPE bytes
//
// As in write.cu all loads that wait for no other are issued before the slot is looked at. The
// table's row needs the position first; it arrives while the squares are summed.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "format/element.h"
#include "kernels/cuda/codec_nvfp4.cuh"
#include "kernels/cuda/lane_block.cuh"
#include "kernels/cuda/paging.cuh"
#include "kernels/cuda/tokens.cuh"
#include "kernels/launch.h"
#include "kernels/norm_rope.h"

namespace nvfp4_dsmla::cuda {
namespace {

static_assert(kRopePairs == kWarpSize);

int64_t bytes_of(Element element) { return element == Element::kFloat32 ? 4 : 2; }

// FusedWriteParams, resolved: strides in bytes.
struct FusedTokens : Tokens {
  FusedTokens(const FusedWriteParams& p, int64_t element_bytes)
      : Tokens(p.write, element_bytes),
        norm_weight(p.norm_weight),
        positions(p.positions),
        cos_sin(p.cos_sin),
        cos_sin_stride(p.cos_sin_stride * bytes_of(p.cos_sin_element)),
        max_positions(p.max_positions),
        eps(p.eps),
        is_float_weight(p.norm_weight_element == Element::kFloat32),
        is_float_table(p.cos_sin_element == Element::kFloat32),
        is_neox(p.is_neox) {}

  // The two RoPE elements of a lane's pair.
  __device__ uint32_t first_of_pair() const { return is_neox ? lane_id() : 2 * lane_id(); }
  __device__ uint32_t second_of_pair() const {
    return first_of_pair() + (is_neox ? kRopePairs : 1);
  }

  __device__ bool holds_position(int64_t position) const {
    return static_cast<uint64_t>(position) < static_cast<uint64_t>(max_positions);
  }

  const void* norm_weight;
  IndexColumn positions;
  const void* cos_sin;
  int64_t cos_sin_stride;
  int64_t max_positions;  // not 0
  float eps;
  bool is_float_weight;
  bool is_float_table;
  bool is_neox;
};

// A lane's weights, of In or of float as the caller's tensor is. Nothing waits for the load before
// the first token's norm widens them.
template <class In>
struct Weights {
  template <bool kWide>
  __device__ void load(const FusedTokens& t) {
    are_float = t.is_float_weight;
    if (are_float) {
      load_as<kWide, float>(t.norm_weight);
    } else {
      load_as<kWide, In>(t.norm_weight);
    }
  }
  template <bool kWide, class T>
  __device__ void load_as(const void* from) {
    NopeElements<T> elements;
    elements.template load<kWide>(static_cast<const T*>(from) + lane_id() * kNopePerLane);
    memcpy(words, elements.words, sizeof(elements.words));
  }

  __device__ void widen() {
    if (are_float) return;
    NopeElements<In> narrow;
    memcpy(narrow.words, words, sizeof(narrow.words));
#pragma unroll
    for (int i = 0; i < kNopePerLane; ++i) words[i] = bit_cast<uint32_t>(narrow[i]);
    are_float = true;
  }

  // Once they are wide.
  __device__ float operator[](int i) const { return bit_cast<float>(words[i]); }

  uint32_t words[kNopePerLane];
  bool are_float;
};

// Cosine and sine of a lane's pair, in the bits of In or of float.
struct Angle {
  template <bool kNarrow>
  __device__ void load(const FusedTokens& t, int64_t position) {
    const void* row;
    if constexpr (kNarrow) {
      row = row_at<true>(t.cos_sin, static_cast<uint32_t>(position), t.cos_sin_stride);
    } else {
      row = static_cast<const char*>(t.cos_sin) + position * t.cos_sin_stride;
    }
    if (t.is_float_table) {
      cos = static_cast<const uint32_t*>(row)[lane_id()];
      sin = static_cast<const uint32_t*>(row)[lane_id() + kRopePairs];
    } else {
      cos = static_cast<const uint16_t*>(row)[lane_id()];
      sin = static_cast<const uint16_t*>(row)[lane_id() + kRopePairs];
    }
  }

  template <class In>
  __device__ static float widen(uint32_t bits, bool is_float) {
    if constexpr (std::is_same_v<In, float>) {
      return bit_cast<float>(bits);
    } else {
      const float narrow = nvfp4_dsmla::widen(In{static_cast<uint16_t>(bits)});
      return is_float ? bit_cast<float>(bits) : narrow;
    }
  }

  uint32_t cos;
  uint32_t sin;
};

// The sum over a warp's 512 elements, in the order of norm_rope.h.
__device__ float sum_of_squares(const float (&x)[kNopePerLane]) {
  float squares[kNopePerLane];
#pragma unroll
  for (int i = 0; i < kNopePerLane; ++i) squares[i] = product(x[i], x[i]);
  float sum = sum_of_pairs(squares);
#pragma unroll
  for (int apart = 1; apart < kWarpSize; apart *= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, apart);
  }
  return sum;
}

// All warps of a block take as many steps, so that the compiler knows each to be whole; past the
// end they repeat the last token.
template <class In, class Stored, bool kWide>
__global__ void fused_write_kernel(const __grid_constant__ FusedTokens t) {
  Weights<In> weights;
  weights.template load<kWide>(t);
  for (uint32_t block = blockIdx.x * blockDim.y; block < t.count; block += gridDim.x * blockDim.y) {
    const uint32_t token = min(block + threadIdx.y, t.count - 1);
    const int64_t slot = t.slots.at<kWide>(token);
    const int64_t position = t.positions.at<kWide>(token);
    const In* kv_c = static_cast<const In*>(row_at<kWide>(t.kv_c, token, t.kv_c_stride));
    const In* k_pe = static_cast<const In*>(row_at<kWide>(t.k_pe, token, t.k_pe_stride));
    NopeElements<In> x;
    x.template load<kWide>(kv_c + lane_id() * kNopePerLane);
    const In first = k_pe[t.first_of_pair()], second = k_pe[t.second_of_pair()];
    __syncwarp();  // keeps the loads above in their place, as in write.cu
    // A vote, so that the compiler sees that the warp stays whole.
    if (!__any_sync(kFullWarp, t.cache.holds(slot) && t.holds_position(position))) continue;
    Angle angle;
    angle.load<kWide>(t, position);
    __syncwarp();  // likewise

    weights.widen();
    float y[kNopePerLane];
#pragma unroll
    for (int i = 0; i < kNopePerLane; ++i) {
      y[i] = x[i];
      asm("" : "+f"(y[i]));  // else it is widened twice, to save a register
    }
    const float inverse = inverse_rms(sum_of_squares(y), t.eps);
#pragma unroll
    for (int i = 0; i < kNopePerLane; ++i) y[i] = normalise(y[i], inverse, weights[i]);
    const RopePair turned =
        rotate({widen(first), widen(second)}, Angle::widen<In>(angle.cos, t.is_float_table),
               Angle::widen<In>(angle.sin, t.is_float_table));

    const auto encoded =
        Nvfp4Codec::encode(NopeElements<Stored>::rounded(y),
                           RopeElements<Stored>::rounded({turned.first, turned.second}));
    uint8_t* record = t.cache.template record<kWide>(static_cast<uint32_t>(slot));
    Nvfp4Codec::store_nope<kWide>(record, encoded);
    record[kRopeOffset + t.first_of_pair()] = encoded.rope & 0xff;
    record[kRopeOffset + t.second_of_pair()] = encoded.rope >> 8;
  }
}

// A warp's tokens share its weights, which pays where there are more warps than run at a time.
constexpr uint32_t kManyTokens = 32'768;
constexpr uint32_t kTokensPerWarp = 4;

template <class In, class Stored>
int launch(const FusedWriteParams& p, CUstream_st* stream) {
  if (p.max_positions == 0) return cudaSuccess;  // no position is in the table
  const FusedTokens tokens(p, sizeof(In));
  const uint32_t per_block = kWarpsPerBlock * (tokens.count < kManyTokens ? 1 : kTokensPerWarp);
  const uint32_t blocks = (tokens.count + per_block - 1) / per_block;
  const bool wide = can_go_wide<Nvfp4Codec>(tokens, p.write.cache, sizeof(In)) &&
                    aligned(p.norm_weight, 16) && fits_narrow(tokens.positions.stride) &&
                    fits_narrow(tokens.cos_sin_stride) && p.max_positions <= UINT32_MAX;
  if (wide) {
    fused_write_kernel<In, Stored, true><<<blocks, warps(kWarpsPerBlock), 0, stream>>>(tokens);
  } else {
    fused_write_kernel<In, Stored, false><<<blocks, warps(kWarpsPerBlock), 0, stream>>>(tokens);
  }
  return cudaGetLastError();
}

template <class In>
int launch_stored(const FusedWriteParams& p, CUstream_st* stream) {
  return p.round_to_input ? launch<In, In>(p, stream) : launch<In, float>(p, stream);
}

}  // namespace

int fused_write(const FusedWriteParams& p, CUstream_st* stream) {
  switch (p.write.element) {
    case Element::kBFloat16:
      return launch_stored<BFloat16>(p, stream);
    case Element::kFloat16:
      return launch_stored<Float16>(p, stream);
    case Element::kFloat32:
      return launch<float, float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace nvfp4_dsmla::cuda
