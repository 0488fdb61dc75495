// sparse_mla_decode for 16 or 32 heads a block, with mma.sync: every device from sm_80 on.
//
// A block of 8 warps takes one row (a query token), 16 or 32 of its heads, and a share of its
// tokens, in tiles of 32 tokens. A record passes through the block once:
//
//   global ──cp.async──► records, 3 stages ──► registers of warp (tokens 8i.., half of the dims)
//                                               │            │
//                          scores += q · K  ◄───┘ as they are └──► shared: V tile, 16-bit, swizzled
//                                                                   │
//   softmax over the tile (a warp two heads a 16) ──► P ──► out += P · V (a warp 64 dims)
//
// K needs no shared memory: which token and dims a lane of an mma holds of K is ours to choose,
// since a dot product does not mind the order of the dims as long as q's is the same. Lane (g, q)
// takes token g and blocks q, 4+q, .. 28+q, whose scales lie in eight contiguous bytes of the
// record.
//
// What is multiplied is fp16, in which K and V are exact as in bf16, and P has three bits more.
#include <cuda_runtime.h>

#include <type_traits>

#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/expand.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/lane_block.cuh"
#include "kernels/cuda/mma.cuh"

namespace nvfp4_dsmla::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kTokens = kMmaTokens;
constexpr int kStages = 3;
constexpr int kTokenGroups = kTokens / 8;          // warps side by side over tokens
constexpr int kDimGroups = kWarps / kTokenGroups;  // .. and over the dims of q · K
constexpr int kBlocksPerLane = kNumScales / 4 / kDimGroups;
constexpr int kRopeOfLane = kRopeDim / 4 / kDimGroups;
constexpr int kSteps = kBlocksPerLane * kBlockDim / 4 + kRopeOfLane / 4;  // of k = 16
constexpr int kOutChunks = kNopeDim / 8 / kWarps;  // groups of 8 dims of the output, a warp
static_assert(kDimGroups == 2 && kBlocksPerLane == 4 && kRopeOfLane == 8 && kSteps == 18);

constexpr int kScorePitch = kTokens + 8;  // floats; rows 8 banks apart
constexpr int kProbPitch = kTokens + 8;   // 16-bit; rows 20 banks apart

template <int kTiles>
struct alignas(16) Shared {
  static constexpr int kHeads = 16 * kTiles;
  uint8_t records[kStages][kTokens][kRecordBytes];
  uint4 values[kTokens][kNopeDim / 8];  // chunk c of token t at c ^ (t % 8)
  float scores[kDimGroups][kHeads][kScorePitch];
  uint16_t probs[kHeads][kProbPitch];
  float rescale[kHeads];  // of the output so far, then of all of it
  uint8_t present[kStages][kTokens];
  uint64_t arrived[kStages];  // sm_90: the stage's records are here
};

// Brings records into the stages, a tile at a time, reading a tile's indices one tile ahead.
template <bool kWide>
class Loader {
 public:
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // The copy engine takes a record in one instruction, but instructions of a warp's lanes one after
  // another: so each warp brings its share of the tile.
  static constexpr bool kBulk = kWide;
#else
  static constexpr bool kBulk = false;
#endif
  static constexpr int kThreadsPerToken = kThreads / kTokens;

  template <class SharedMemory>
  __device__ Loader(
      const DecodeKernelParams& p, SharedMemory& shared, const int32_t* indices, int begin, int end)
      : p_(p), indices_(indices), column_(begin + token()), end_(end) {
    if (kBulk && thread() == 0) {
      for (uint64_t& barrier : shared.arrived) barrier_init(barrier, kWarps);
      barrier_init_fence();
    }
    __syncthreads();
    next_ = read();
  }

  template <class SharedMemory>
  __device__ void issue(SharedMemory& shared, int stage) {
    const bool present = p_.device_cache.holds(next_);
    const uint8_t* record =
        p_.device_cache.template record<kWide>(present ? static_cast<uint32_t>(next_) : 0);
    uint8_t* to = shared.records[stage][token()];
    if (part() == 0) shared.present[stage][token()] = present;
    if constexpr (kBulk) {
      const int count = __popc(__ballot_sync(kFullWarp, present && part() == 0));
      if (lane_id() == 0) barrier_arrive_expecting(shared.arrived[stage], count * kRecordBytes);
      __syncwarp();
      if (present && part() == 0) copy_bulk(to, record, kRecordBytes, shared.arrived[stage]);
    } else {
      constexpr int kPiece = 16;
      for (int i = part() * kPiece; i < kRecordBytes; i += kThreadsPerToken * kPiece) {
        if constexpr (kWide) {
          copy_async(shared_address(to + i), record + i, present);
        } else {
          for (int j = i; j < i + kPiece; ++j) to[j] = present ? record[j] : 0;
        }
      }
      copy_async_commit();
    }
    column_ += kTokens;
    next_ = read();
  }

  // Until the oldest stage under way has arrived; a block-wide barrier has to follow.
  template <class SharedMemory>
  __device__ void wait(SharedMemory& shared, int stage, uint32_t parity) const {
    if constexpr (kBulk) {
      barrier_wait(shared.arrived[stage], parity);
    } else {
      copy_async_wait<kStages - 2>();
    }
  }

 private:
  __device__ static int thread() { return threadIdx.y * kWarpSize + lane_id(); }
  __device__ static int token() { return thread() / kThreadsPerToken; }
  __device__ static int part() { return lane_id() % kThreadsPerToken; }
  __device__ int read() const {
    return column_ < end_ ? indices_[column_ * p_.indices_column_stride] : -1;
  }

  const DecodeKernelParams& p_;
  const int32_t* indices_;
  int column_, end_;
  int next_;
};

// Half of the dims of q, of heads g and g+8, in the order in which expand_pairs gives K.
template <class T, bool kWide>
struct QueryTile {
  __device__ void load(const DecodeKernelParams& p, const T* row, int first_head, int dim_group) {
    const int g = lane_id() / 4, q = lane_id() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = first_head + g + 8 * half;
      const T* x = head < p.heads ? row + head * p.q_head_stride : nullptr;
#pragma unroll
      for (int c = 0; c < kBlocksPerLane; ++c) {
        const int block = 4 * (dim_group * kBlocksPerLane + c) + q;
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          const uint4 w = eight(x, block * kBlockDim + 8 * word);  // 01 23 45 67
          const int step = 4 * c + 2 * word;
          set(step, half, __byte_perm(w.x, w.z, 0x5410), __byte_perm(w.x, w.z, 0x7632));
          set(step + 1, half, __byte_perm(w.y, w.w, 0x5410), __byte_perm(w.y, w.w, 0x7632));
        }
      }
      const uint4 w = eight(x, kNopeDim + 16 * q + kRopeOfLane * dim_group);
      const int step = 4 * kBlocksPerLane;
      set(step, half, __byte_perm(w.x, w.y, 0x5410), __byte_perm(w.x, w.y, 0x7632));
      set(step + 1, half, __byte_perm(w.z, w.w, 0x5410), __byte_perm(w.z, w.w, 0x7632));
      inverse[half] = 1.0f;
      if constexpr (std::is_same_v<T, BFloat16>) to_fp16(half);
    }
  }
  __device__ static uint4 eight(const T* x, int dim) {
    if (x == nullptr) return {};
    Elements<T, 8> elements;
    elements.template load<kWide>(x + dim);
    return {elements.words[0], elements.words[1], elements.words[2], elements.words[3]};
  }
  __device__ void set(int step, int half, uint32_t low, uint32_t high) {
    a[step][half] = low;
    a[step][2 + half] = high;
  }
  // The halves of the dims each by a power of two of their own.
  __device__ void to_fp16(int half) {
    uint32_t greatest = 0;
#pragma unroll
    for (const auto& step : a) {
      greatest = __vmaxu2(greatest, step[half] & 0x7fff'7fffu);
      greatest = __vmaxu2(greatest, step[2 + half] & 0x7fff'7fffu);
    }
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) {
      greatest = __vmaxu2(greatest, __shfl_xor_sync(kFullWarp, greatest, lane));
    }
    const QueryScale scale(max(greatest & 0xffffu, greatest >> 16));
#pragma unroll
    for (auto& step : a) {
      step[half] = scale.to_fp16(step[half]);
      step[2 + half] = scale.to_fp16(step[2 + half]);
    }
    inverse[half] = scale.inverse;
  }

  uint32_t a[kSteps][4];
  float inverse[2];  // what the scores of heads g and g+8 are to be multiplied by
};

// Scores of 8 tokens against the tiles of q, over this warp's half of the dims; the NoPE elements,
// as they come, also into the V tile.
template <class Query, int kTiles>
__device__ void score_tokens(Shared<kTiles>& shared, int stage, const Query (&q)[kTiles]) {
  const int lane_g = lane_id() / 4, lane_q = lane_id() % 4;
  const int group = threadIdx.y % kTokenGroups, half = threadIdx.y / kTokenGroups;
  const int token = 8 * group + lane_g;
  const uint8_t* record = shared.records[stage][token];
  float score[kTiles][4] = {};

  // A token that is not there has stale bytes for a record: with scales of zero they are zeros.
  uint32_t scales[kBlocksPerLane];
  fold_scales(shared.present[stage][token]
                  ? *reinterpret_cast<const uint32_t*>(record + scale_offset(lane_q) +
                                                       kBlocksPerLane * half)
                  : 0,
              scales);
  const int first_block = 4 * half * kBlocksPerLane;
  const uint8_t* codes_of_lane =
      record + kCodesOffset + (first_block + lane_q) * kCodeBytesPerBlock;
  uint4* values[2];  // where this lane's two chunks of a block go; the next block's are 8 further
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    values[word] = &shared.values[token][2 * first_block + ((2 * lane_q + word) ^ (token % 8))];
  }
#pragma unroll
  for (int c = 0; c < kBlocksPerLane; ++c) {
    const uint2 codes = *reinterpret_cast<const uint2*>(codes_of_lane + 4 * c * kCodeBytesPerBlock);
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t k[4];
      expand_pairs<Float16>(word == 0 ? codes.x : codes.y, scales[c], k);
      values[word][8 * c] = make_uint4(k[0], k[1], k[2], k[3]);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        mma(score[tile], q[tile].a[4 * c + 2 * word], k[0], k[1]);
        mma(score[tile], q[tile].a[4 * c + 2 * word + 1], k[2], k[3]);
      }
    }
  }
  const uint2 rope = *reinterpret_cast<const uint2*>(record + kRopeOffset +
                                                     lane_q * (kRopeDim / 4) + kRopeOfLane * half);
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    uint32_t k[2];
    expand_rope_pairs(word == 0 ? rope.x : rope.y, k);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      mma(score[tile], q[tile].a[4 * kBlocksPerLane + word], k[0], k[1]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* to = &shared.scores[half][16 * tile + lane_g + 8 * i][8 * group + 2 * lane_q];
      const float inverse = q[tile].inverse[i];
      *reinterpret_cast<float2*>(to) =
          make_float2(score[tile][2 * i] * inverse, score[tile][2 * i + 1] * inverse);
    }
  }
}

// The running softmax of this warp's heads: half a warp a head, a lane two tokens of each tile.
template <int kTiles>
struct Softmax {
  // P is relative to so much below the maximum: at most 2^15 in fp16, it keeps weights down to
  // 2^-39 of the greatest.
  static constexpr float kHeadroom = 15.0f;

  static constexpr int kLanes = kTokens / 2;  // a head's
  static constexpr int kHeadsAtOnce = kWarpSize / kLanes;
  static constexpr int kRounds = 16 * kTiles / (kWarps * kHeadsAtOnce);

  __device__ static int head(int round) {
    return (threadIdx.y * kRounds + round) * kHeadsAtOnce + lane_id() / kLanes;
  }
  __device__ static float max_over_head(float x) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, step));
    }
    return x;
  }
  __device__ static float sum_over_head(float x) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
    return x;
  }

  __device__ void update(Shared<kTiles>& shared, int stage, float scale) {
    const int token = 2 * (lane_id() % kLanes);
    const uchar2 present = *reinterpret_cast<const uchar2*>(&shared.present[stage][token]);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int h = head(i);
      const float2 a = *reinterpret_cast<const float2*>(&shared.scores[0][h][token]);
      const float2 b = *reinterpret_cast<const float2*>(&shared.scores[1][h][token]);
      const float x = present.x ? (a.x + b.x) * scale : -INFINITY;
      const float y = present.y ? (a.y + b.y) * scale : -INFINITY;
      const float before = base[i];
      base[i] = raised_max(before, max_over_head(fmaxf(x, y)), kHeadroom);
      const float from = base[i] == -INFINITY ? 0.0f : base[i];  // no token yet: no Inf - Inf
      const float p = exp2_approx(x - from), r = exp2_approx(y - from);
      const float rescale = exp2_approx(before - from);
      sum[i] = sum[i] * rescale + p + r;
      *reinterpret_cast<uint32_t*>(&shared.probs[h][token]) = pack(p, r, Float16{});
      if (token == 0) shared.rescale[h] = rescale;
    }
  }

  float base[kRounds];
  float sum[kRounds];  // of this lane's tokens
};

// out[heads, this warp's 64 dims] = rescale * out + P · V
template <int kTiles>
__device__ void add_values(Shared<kTiles>& shared, float (&out)[kTiles][kOutChunks][4]) {
  const int lane = lane_id(), g = lane / 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const float low = shared.rescale[16 * tile + g], high = shared.rescale[16 * tile + g + 8];
    if (__any_sync(kFullWarp, low != 1.0f || high != 1.0f)) {
#pragma unroll
      for (auto& c : out[tile]) {
        c[0] *= low;
        c[1] *= low;
        c[2] *= high;
        c[3] *= high;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kTokens; k += 16) {
    uint32_t p[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      load_matrices(shared_address(&shared.probs[16 * tile + lane % 16][k + lane / 16 * 8]),
                    p[tile]);
    }
    const int token = k + lane % 16;
#pragma unroll
    for (int c = 0; c < kOutChunks; c += 2) {
      const int chunk = threadIdx.y * kOutChunks + c + lane / 16;
      uint32_t v[4];
      load_matrices_transposed(shared_address(&shared.values[token][chunk ^ (token % 8)]), v);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        mma(out[tile][c], p[tile], v[0], v[1]);
        mma(out[tile][c + 1], p[tile], v[2], v[3]);
      }
    }
  }
}

// Hands over this warp's heads' factor of the output (through shared.rescale) and writes their lse.
template <int kTiles>
__device__ void finish_softmax(const DecodeKernelParams& p,
                               Shared<kTiles>& shared,
                               const Softmax<kTiles>& softmax,
                               uint32_t row,
                               int split,
                               int first_head) {
  using Running = Softmax<kTiles>;
#pragma unroll
  for (int i = 0; i < Running::kRounds; ++i) {
    const float sum = Running::sum_over_head(softmax.sum[i]);
    const int head = first_head + Running::head(i);
    if (lane_id() % Running::kLanes != 0) continue;
    shared.rescale[Running::head(i)] = finish_head(p, row, split, head, sum, softmax.base[i]);
  }
}

// to: of the block's first head.
template <class T, int kTiles>
__device__ void write_out(T* to,
                          const Shared<kTiles>& shared,
                          const float (&out)[kTiles][kOutChunks][4],
                          int num_heads) {
  const int g = lane_id() / 4, q = lane_id() % 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = 16 * tile + g + 8 * half;
      if (local >= num_heads) continue;
      const float factor = shared.rescale[local];
#pragma unroll
      for (int c = 0; c < kOutChunks; ++c) {
        // In the expanded order of eight dims, 0 4 1 5 2 6 3 7, a lane has two in a row.
        T* dims = to + local * kNopeDim + (threadIdx.y * kOutChunks + c) * 8 + q;
        store_element(dims, out[tile][c][2 * half] * factor);
        store_element(dims + 4, out[tile][c][2 * half + 1] * factor);
      }
    }
  }
}

template <class T, int kTiles, bool kWide>
__global__ void __launch_bounds__(kThreads, kTiles == 1 ? 2 : 1)
    decode_mma_kernel(const __grid_constant__ DecodeKernelParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ uint4 shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<kTiles>*>(shared_bytes);
  const uint32_t row = blockIdx.x / p.num_splits;
  const int split = static_cast<int>(blockIdx.x % p.num_splits);
  const int first_head = static_cast<int>(blockIdx.y) * 16 * kTiles;
  const auto place = p.row(row);

  const auto [begin, end] = p.share_of(place, split, kTokens);

  Loader<kWide> loader(p, shared, p.row_indices(place), begin, end);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) loader.issue(shared, stage);

  QueryTile<T, kWide> q[kTiles];
  const T* q_row =
      static_cast<const T*>(p.q) + place.b * p.q_batch_stride + place.t * p.q_token_stride;
  Softmax<kTiles> softmax;
  float out[kTiles][kOutChunks][4] = {};
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    q[tile].load(p, q_row, first_head + 16 * tile, threadIdx.y / kTokenGroups);
  }
#pragma unroll
  for (int i = 0; i < Softmax<kTiles>::kRounds; ++i) {
    softmax.base[i] = -INFINITY;
    softmax.sum[i] = 0.0f;
  }

  const float scale = p.softmax_scale * kLog2e * kMakeGood;
  int stage = 0;
  uint32_t parity = 0;
  for (int first = begin; first < end; first += kTokens) {
    loader.wait(shared, stage, parity);
    __syncthreads();  // the tile's records are here, and the tile before has been used up
    loader.issue(shared, stage == 0 ? kStages - 1 : stage - 1);
    score_tokens(shared, stage, q);
    __syncthreads();
    softmax.update(shared, stage, scale);
    __syncthreads();
    add_values(shared, out);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __syncthreads();  // shared.rescale is free
  finish_softmax(p, shared, softmax, row, split, first_head);
  __syncthreads();
  write_results<T>(p, split, row, first_head, [&](auto* to) {
    write_out(to, shared, out, static_cast<int>(p.heads) - first_head);
  });
#endif
}

template <class T, int kTiles, bool kWide>
int launch(const DecodeKernelParams& p, cudaStream_t stream) {
  return launch_blocks<Shared<kTiles>>(decode_mma_kernel<T, kTiles, kWide>, p,
                                       Shared<kTiles>::kHeads, kWarps, stream);
}

template <class T>
int launch(const DecodeKernelParams& p, const DecodePlan& plan, cudaStream_t stream) {
  const bool wide = records_aligned(p.cache, 16) && p.query_aligned(sizeof(T));
  if (!wide) {
    return plan.head_tile == 16 ? launch<T, 1, false>(p, stream) : launch<T, 2, false>(p, stream);
  }
  return plan.head_tile == 16 ? launch<T, 1, true>(p, stream) : launch<T, 2, true>(p, stream);
}

}  // namespace

bool has_decode_mma() { return has_code(decode_mma_kernel<BFloat16, 1, true>); }

int decode_mma(const DecodeKernelParams& p, const DecodePlan& plan, cudaStream_t stream) {
  return p.element == Element::kBFloat16 ? launch<BFloat16>(p, plan, stream)
                                         : launch<Float16>(p, plan, stream);
}

}  // namespace nvfp4_dsmla::cuda
