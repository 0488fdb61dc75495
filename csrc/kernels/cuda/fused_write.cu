// fused_rmsnorm_rope_concat_and_cache_nvfp4_ds_mla: write.cu with a norm and a rotation before it.
//
// Up to 2,048 tokens, a block each: what counts is how long one takes. Two warps have 8 NoPE
// elements a lane and exchange their sums of squares, a third rotates the key meanwhile.
//
// More, two or four a warp: what counts is how few instructions one takes.
//
//   lane l   rotates   two or four pairs of one of the keys
//            then, token by token, the next one's elements on their way:
//            loads     16 NoPE elements from 16l
//            sums      its squares, then by a butterfly those of all lanes
//            stores    8 code bytes, 1 scale byte
//
// As in write.cu all loads that wait for no other are issued before the slot is looked at. The
// table's row needs the position first.
#include <cuda_runtime.h>

#include "format/block.h"
#include "format/element.h"
#include "kernels/cuda/codec_nvfp4.cuh"
#include "kernels/cuda/fused_tokens.cuh"
#include "kernels/cuda/lane_block.cuh"
#include "kernels/cuda/lane_memory.cuh"
#include "kernels/cuda/paging.cuh"
#include "kernels/launch.h"
#include "kernels/norm_rope.h"

namespace nvfp4_dsmla::cuda {
namespace {

// The sum of a lane's squares, then of neighbouring lanes': in the order of norm_rope.h.
template <int kCount>
__device__ float sum_of_squares(const float (&x)[kCount], int lanes) {
  float squares[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) squares[i] = product(x[i], x[i]);
  float sum = sum_of_pairs(squares);
#pragma unroll
  for (int apart = 1; apart < lanes; apart *= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, apart);
  }
  return sum;
}

template <class In, int kCount>
__device__ void widen_all(const Elements<In, kCount>& from, float (&to)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    to[i] = from[i];
    asm("" : "+f"(to[i]));  // else it is widened twice, to save a register
  }
}

// ---- few tokens --------------------------------------------------------------------------------

constexpr int kFewNopeWarps = 2;

// A lane's eight NoPE elements, half a block: one store of codes.
template <class In, bool kWide>
class FewElements {
 public:
  __device__ void load(const FusedTokens& t, uint32_t token) {
    const In* kv_c = static_cast<const In*>(row_at<kWide>(t.kv_c, token, t.kv_c_stride));
    x_.template load<kWide>(kv_c + first());
    if (t.is_float_weight) {
      float_weight_.template load<kWide>(static_cast<const float*>(t.norm_weight) + first());
    } else {
      weight_.template load<kWide>(static_cast<const In*>(t.norm_weight) + first());
    }
  }

  // A sum of every four lanes: two exchanges, where a warp's takes five.
  static constexpr int kLanes = 4, kSums = kFewNopeWarps * kWarpSize / kLanes;
  __device__ void share_sum(const FusedTokens& t, float (&sums)[kSums]) {
    widen_all(x_, y_);
    const float sum = sum_of_squares(y_, kLanes);
    if (thread() % kLanes == 0) sums[thread() / kLanes] = sum;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      w_[i] = t.is_float_weight ? float_weight_[i] : weight_[i];
      asm volatile("" : "+f"(w_[i]));  // while others' sums are waited for
    }
  }

  template <class Stored>
  __device__ void store(const FusedTokens& t, const float (&shared_sums)[kSums], uint8_t* record) {
    float sums[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = shared_sums[i];
    const float inverse = inverse_rms(sum_of_pairs(sums), t.eps);
#pragma unroll
    for (int i = 0; i < kCount; ++i) y_[i] = normalise(y_[i], inverse, w_[i]);
    const auto nope = Elements<Stored, kCount>::rounded(y_);
    const float amax = nope.max_magnitude();
    const BlockScale scale = choose_scale(fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, 1)));
    store_word<kWide>(record + kCodesOffset + first() / kCodesPerByte,
                      Nvfp4Codec::encode_eight(nope, 0, scale.inverse));
    const int block = static_cast<int>(thread() / 2);
    if (thread() % 2 == 0) record[scale_offset(block)] = static_cast<uint8_t>(scale.code);
  }

 private:
  static constexpr int kCount = kNopeDim / (kFewNopeWarps * kWarpSize);
  static_assert(kCount == 8 && kCount * 2 == kBlockDim);

  __device__ static uint32_t thread() { return threadIdx.y * kWarpSize + threadIdx.x; }
  __device__ static uint32_t first() { return thread() * kCount; }

  Elements<In, kCount> x_, weight_;
  Elements<float, kCount> float_weight_;
  float y_[kCount], w_[kCount];
};

template <class In, class Stored, bool kWide>
__global__ void fused_write_few(const __grid_constant__ FusedTokens t) {
  using Latent = FewElements<In, kWide>;
  using Pairs = KeyPairs<In, 2, kWide>;
  __shared__ float sums[Latent::kSums];
  const uint32_t token = blockIdx.x;
  const bool of_key = threadIdx.y == kFewNopeWarps;
  Latent latent;
  Pairs pairs;
  if (of_key) {
    pairs.load(t, token, lane_id() % Pairs::kLanes);
  } else {
    latent.load(t, token);
  }
  // After the elements: their conversion to 64 bits would hold those up.
  const int64_t slot = t.slots.at<kWide>(token), position = t.positions.at<kWide>(token);
  __syncwarp();  // keeps the loads above in their place, as in write.cu
  const bool there = t.holds(slot, position);
  uint8_t* record = t.cache.template record<kWide>(static_cast<uint32_t>(slot));
  asm volatile("" : "+l"(record));  // now: the compiler would make it after the barrier
  if (!of_key) {
    latent.share_sum(t, sums);
  } else if (there) {
    pairs.load_angles(t, position);
  }
  __syncthreads();
  // A vote, so that the compiler sees that the warp stays whole.
  if (!__any_sync(kFullWarp, there)) return;
  if (!of_key) {
    latent.template store<Stored>(t, sums, record);
  } else if (lane_id() < Pairs::kLanes) {
    pairs.template store<Stored>(t, record);
  }
}

// ---- many tokens -------------------------------------------------------------------------------

// The norm's weights, as floats in shared memory: lane l's sixteen in four pieces, so that what a
// warp reads is in banks apart.
struct SharedWeights {
  template <class In, bool kWide>
  __device__ void load(const FusedTokens& t) {
    static_assert(kWarpsPerBlock * kWarpSize * 4 == kNopeDim);
    const int thread = threadIdx.y * kWarpSize + lane_id();
    Elements<float, 4> four;
    if (t.is_float_weight) {
      four.template load<kWide>(static_cast<const float*>(t.norm_weight) + 4 * thread);
    } else {
      Elements<In, 4> narrow;
      narrow.template load<kWide>(static_cast<const In*>(t.norm_weight) + 4 * thread);
#pragma unroll
      for (int i = 0; i < 4; ++i) four.words[i] = bit_cast<uint32_t>(narrow[i]);
    }
    pieces[thread % 4][thread / 4] = bit_cast<float4>(four);
  }

  float4 pieces[4][kWarpSize];
};

__device__ void normalise_all(float (&y)[kNopePerLane],
                              float inverse,
                              const SharedWeights& weights) {
#pragma unroll
  for (int i = 0; i < kNopePerLane; i += 4) {
    const float4 weight = weights.pieces[i / 4][lane_id()];
    y[i] = normalise(y[i], inverse, weight.x);
    y[i + 1] = normalise(y[i + 1], inverse, weight.y);
    y[i + 2] = normalise(y[i + 2], inverse, weight.z);
    y[i + 3] = normalise(y[i + 3], inverse, weight.w);
  }
}

// So many blocks at least are to fit an SM: more warps, each with fewer registers, hide the memory
// better. (Chips before sm_80 hold no more than 8.)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <class In>
constexpr int kBlocksPerSm = 8;
#else
template <class In>
constexpr int kBlocksPerSm = sizeof(In) == 2 ? 12 : 8;
#endif

// A warp's tokens are as far apart as there are warps, so that what an SM reads at a time lies
// together.
template <class In, class Stored, int kTokens, bool kWide>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize, kBlocksPerSm<In>)
    fused_write_many(const __grid_constant__ FusedTokens t) {
  __shared__ SharedWeights weights;
  weights.load<In, kWide>(t);
  // A lane has to do with one token's key, and with all tokens' latents.
  using Pairs = KeyPairs<In, kTokens, kWide>;
  const uint32_t apart = gridDim.x * kWarpsPerBlock, last = t.count - 1;
  const uint32_t first = warp_id(), mine = first + lane_id() / Pairs::kLanes * apart;
  const uint32_t token = min(mine, last);
  const int64_t slot = t.slots.at<kWide>(token), position = t.positions.at<kWide>(token);
  const auto* from =
      static_cast<const char*>(row_at<kWide>(t.kv_c, min(first, last), t.kv_c_stride)) +
      lane_id() * kNopePerLane * sizeof(In);
  NopeElements<In> x;
  x.template load<kWide>(reinterpret_cast<const In*>(from));
  Pairs pairs;
  pairs.load(t, token, lane_id() % Pairs::kLanes);
  __syncthreads();

  const bool there = mine <= last && t.holds(slot, position);
  const int64_t record = t.cache.template record<kWide>(static_cast<uint32_t>(slot)) - t.cache.base;
  if (there) {
    pairs.load_angles(t, position);
    pairs.template store<Stored>(t, t.cache.base + record);
  }
  // From the token at hand on, a bit a lane.
  uint32_t present = __ballot_sync(kFullWarp, there);
#pragma unroll 1
  for (int i = 0; present != 0; ++i, present >>= Pairs::kLanes) {
    float y[kNopePerLane];
    widen_all(x, y);
    if (present >> Pairs::kLanes != 0) {
      from = row_at<kWide>(from, apart, t.kv_c_stride);
      x.template load<kWide>(reinterpret_cast<const In*>(from));
    }
    if ((present & 1) == 0) continue;
    normalise_all(y, inverse_rms(sum_of_squares(y, kWarpSize), t.eps), weights);
    const auto nope = NopeElements<Stored>::rounded(y);
    const BlockScale scale = choose_scale(nope.max_magnitude());
    const uint64_t codes = Nvfp4Codec::encode_codes(nope, scale.inverse);
    uint8_t* to = t.cache.base + __shfl_sync(kFullWarp, record, i * Pairs::kLanes);
    Nvfp4Codec::store_nope<kWide>(to, codes, scale.code);
  }
}

// ---- which, and how many blocks -----------------------------------------------------------------

// Up to which number of tokens a block a token, and then two tokens a warp, are the fastest
// (docs/kernels.md).
constexpr uint32_t kMostByBlocks = 2'048;
constexpr uint32_t kMostByTwo = 8'192;

template <class In, class Stored, bool kWide>
void launch_few(const FusedTokens& t, cudaStream_t stream) {
  fused_write_few<In, Stored, kWide><<<t.count, warps(kFewNopeWarps + 1), 0, stream>>>(t);
}

template <class In, class Stored, int kTokens, bool kWide>
void launch_many(const FusedTokens& t, cudaStream_t stream) {
  constexpr uint32_t kPerBlock = kWarpsPerBlock * kTokens;
  const uint32_t blocks = (t.count + kPerBlock - 1) / kPerBlock;
  fused_write_many<In, Stored, kTokens, kWide><<<blocks, warps(kWarpsPerBlock), 0, stream>>>(t);
}

// Whether a lane's parts of a record, of the inputs and of the table may be loaded and stored
// whole.
bool can_go_wide(const FusedTokens& t, const WriteParams& p) {
  return can_go_wide<Nvfp4Codec>(t, p.cache, bytes_of(p.element)) && aligned(t.k_pe, 16) &&
         t.k_pe_stride % 16 == 0 && aligned(t.norm_weight, 16) && fits_narrow(t.positions.stride) &&
         aligned(t.cos_sin, 16) && t.cos_sin_stride % 16 == 0;
}

template <class In, class Stored>
int launch(const FusedWriteParams& p, cudaStream_t stream) {
  if (p.max_positions == 0) return cudaSuccess;  // no position is in the table
  const FusedTokens t(p);
  const bool wide = can_go_wide(t, p.write);
  if (t.count <= kMostByBlocks) {
    wide ? launch_few<In, Stored, true>(t, stream) : launch_few<In, Stored, false>(t, stream);
  } else if (!wide) {
    launch_many<In, Stored, 2, false>(t, stream);
  } else if (t.count <= kMostByTwo) {
    launch_many<In, Stored, 2, true>(t, stream);
  } else {
    launch_many<In, Stored, 4, true>(t, stream);
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
