// sparse_mla_decode for Hopper, with wgmma: 16 or 32 heads a block.
//
// A block of three warpgroups takes one row (a query token), up to kHeads of its heads and a share
// of its tokens, in tiles of 64 tokens. Tokens are the rows of both products and heads their
// columns, so that 16 heads do not cost what 64 do:
//
//   S^T[64 tokens, heads] = K q^T     K from the registers of the lanes that expand it,
//                                     q from shared memory, its dims in expanded order
//   O^T[512, heads]      += V^T P     V and P from shared memory, O in registers
//
//   expanders  take turns at the tiles: take records, expand them, store V, multiply K q^T as they
//              go; softmax; store P
//   summer     multiplies V^T P
//
// Two V and P buffers pass between them: `full` when a tile's are written, and back, by halves of
// the dims, when they are summed. Four registers that are an operand of K q^T go to V as they are,
// with one stmatrix; the order of dims that this makes is LanesRecord's.
#include <cuda_runtime.h>

#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/decode_wgmma.cuh"
#include "kernels/cuda/decode_wgmma_few.cuh"
#include "kernels/cuda/decode_wgmma_few_records.cuh"
#include "kernels/cuda/decode_wgmma_lane.cuh"
#include "kernels/cuda/decode_wgmma_query.cuh"
#include "kernels/cuda/expand.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace nvfp4_dsmla::cuda {
namespace hopper {
namespace few {

// ---- expander ----------------------------------------------------------------------------------

// Four pairs of token t -> their places in two operands of K q^T.
__device__ inline void place(const uint32_t (&pairs)[4], int t, uint32_t (*k)[4]) {
  k[0][t] = pairs[0];
  k[0][2 + t] = pairs[1];
  k[1][t] = pairs[2];
  k[1][2 + t] = pairs[3];
}

// Chunk c of a lane's two tokens -> four operands of K q^T.
__device__ inline void expand_chunk(const Records& records,
                                    int c,
                                    const uint32_t (&folded)[2][2][4],
                                    uint32_t (&k)[4][4]) {
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t pairs[4];
      expand_pairs<Float16>(records[t].word(c, word), folded[t][c / 4][c % 4], pairs);
      place(pairs, t, &k[2 * word]);
    }
  }
}

__device__ inline void expand_rope(const Records& records, uint32_t (&k)[4][4]) {
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const uint4& rope = records[t].rope;
    uint32_t pairs[4];
    expand_rope_in_order(rope.x, rope.y, pairs);
    place(pairs, t, &k[0]);
    expand_rope_in_order(rope.z, rope.w, pairs);
    place(pairs, t, &k[2]);
  }
}

// S^T of the source's next tile into `scores`, which are there after wgmma_wait; V into its buffer,
// each half of the dims once `wait_for_half` returns.
template <int kHeads, class Wait>
__device__ void multiply_keys(Shared<kHeads>& shared,
                              int buffer,
                              StagedRecords& source,
                              Records& records,
                              float (&scores)[kHeads / 2],
                              Wait wait_for_half) {
  source.take(records);
  uint32_t folded[2][2][4];
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    records[t].fold(0, folded[t][0]);
    records[t].fold(1, folded[t][1]);
  }
  // Of matrix lane / 8 of store_matrices: tokens 0 .. 7 or 8 .. 15, the even unit or the odd one.
  const int lane = lane_id(), row = kWarpTokens * group_warp() + lane % 16;
  const uint32_t values =
      shared_address(&shared.values[buffer][0][row][swizzled_unit<kRowBytes>(row, lane / 16) * 16]);
  const Matrix<kRowBytes> query(&shared.query[0][0][0]);

  uint32_t a[2][4][4];  // one chunk is multiplied from one half while the next is expanded
#pragma unroll
  for (int c = 0; c < kQueryChunks; ++c) {
    auto& k = a[c % 2];
    if (c >= 2) wgmma_wait<1>();
    if (c < kValueChunks) {
      expand_chunk(records, c, folded, k);
      if (c % kHalfChunks == 0) wait_for_half(c / kHalfChunks);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        store_matrices((values ^ 2 * step * 16) + c * kChunkBytes, k[step]);
      }
    } else {
      expand_rope(records, k);
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Wgmma<kHeads>::a_in_registers(scores, k[step], query + (c * kHeads * kRowBytes + step * 32),
                                    c > 0 || step > 0);
    }
    wgmma_commit();
  }
}

template <int kHeads>
__device__ void expand_tiles(const DecodeKernelParams& p,
                             Shared<kHeads>& shared,
                             const BlockWork& work,
                             int group,
                             StagedRecords& source,
                             Softmax<kHeads>& softmax) {
  constexpr int kStep = kExpanders * kTileTokens;
  int first = work.begin + group * kTileTokens;
  Records records;
  for (int tile = group; first < work.end; tile += kExpanders, first += kStep) {
    const int buffer = tile % kBuffers;
    float scores[kHeads / 2];
    multiply_keys(shared, buffer, source, records, scores, [&](int half) {
      if (tile >= kBuffers) barrier_sync(empty_barrier(buffer, half), kInTurn);
    });
    if (tile > 0) barrier_sync(kTurnBarrier + group, kInTurn);
    const uint32_t raises = shared.raises;
    wgmma_wait<0>();
    softmax.scale_scores(scores, {records[0].present, records[1].present});
    softmax.settle_max(shared, buffer, raises, scores);
    if (first + kTileTokens < work.end) {
      barrier_pass(kTurnBarrier + (group + 1) % kExpanders, kInTurn);
    }
    softmax.store_probs(shared, buffer, scores);
    fence_for_async();
    barrier_arrive(shared.full[buffer]);
  }
}

// ---- summer ------------------------------------------------------------------------------------

template <int kHeads>
__device__ void sum_tiles(Shared<kHeads>& shared,
                          int tiles,
                          float (&out)[kValueChunks][kHeads / 2]) {
  constexpr int kProbBytes = Shared<kHeads>::kProbBytes;
  for (int tile = 0; tile < tiles; ++tile) {
    const int buffer = tile % kBuffers;
    barrier_wait(shared.full[buffer], tile / kBuffers & 1);
    if (shared.rescaled[buffer] != 0) {
#pragma unroll
      for (int c = 0; c < kHeads / 4; ++c) {
        const float rescale = shared.rescale[buffer][Softmax<kHeads>::head(c)];
#pragma unroll
        for (auto& chunk : out) {
          chunk[4 * (c / 2) + c % 2] *= rescale;
          chunk[4 * (c / 2) + 2 + c % 2] *= rescale;
        }
      }
    }
    const Matrix<kRowBytes> values(&shared.values[buffer]);
    const Matrix<kProbBytes> probs(&shared.probs[buffer]);
    wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int k = 0; k < kTileTokens; k += 16) {
#pragma unroll
        for (int c = half * kHalfChunks; c < (half + 1) * kHalfChunks; ++c) {
          Wgmma<kHeads>::both_shared(out[c], values + (c * kTileTokens + k) * kRowBytes,
                                     probs + k * kProbBytes);
        }
      }
      wgmma_commit();
    }
    const bool is_awaited = tile + kBuffers < tiles;
    wgmma_wait<1>();
    if (is_awaited) barrier_pass(empty_barrier(buffer, 0), kInTurn);
    wgmma_wait<0>();
    if (is_awaited) barrier_pass(empty_barrier(buffer, 1), kInTurn);
  }
}

// O leaves by way of shared memory, in V's place: a lane has single dims of it. A head has a row, a
// little longer than it is, so that what lanes store is in banks apart.
inline constexpr int kRowFloats = kNopeDim + 4;

template <int kHeads>
__device__ void stage_out(Shared<kHeads>& shared, const float (&out)[kValueChunks][kHeads / 2]) {
  auto* staged = reinterpret_cast<float*>(&shared.values);
  static_assert(sizeof(float) * kHeads * kRowFloats <= sizeof(shared.values));
  barrier_sync(kSummerBarrier, kGroupThreads);
  // A lane's positions g and g+8 of a warp's 16 are dims d and d+1.
  const int g = lane_id() / 4, w = group_warp();
  const int first_dim = g / 2 * 32 + w / 2 * 8 + g % 2 * 4 + w % 2 * 2;
#pragma unroll
  for (int c = 0; c < kHeads / 4; ++c) {
    const int head = Softmax<kHeads>::head(c);
    const float factor = shared.factor[head];
#pragma unroll
    for (int chunk = 0; chunk < kValueChunks; ++chunk) {
      const float* x = &out[chunk][4 * (c / 2) + c % 2];
      const int dim = chunk / 2 * 128 + chunk % 2 * 16 + first_dim;
      *reinterpret_cast<float2*>(&staged[head * kRowFloats + dim]) =
          make_float2(x[0] * factor, x[2] * factor);
    }
  }
}

// By all warps of the block. to: of its first head.
template <class T, int kHeads>
__device__ void write_out(T* to, const Shared<kHeads>& shared, int num_heads) {
  const auto* staged = reinterpret_cast<const float*>(&shared.values);
  constexpr int kEights = kNopeDim / 8, kThreads = kGroups * kGroupThreads;
  auto* units = reinterpret_cast<uint4*>(to);
  const int end = num_heads * kEights;
#pragma unroll 2
  for (int i = threadIdx.y * kWarpSize + lane_id(); i < end; i += kThreads) {
    const auto* from =
        reinterpret_cast<const float4*>(&staged[i / kEights * kRowFloats + i % kEights * 8]);
    const float4 x = from[0], y = from[1];
    units[i] = make_uint4(pack(x.x, x.y, T{}), pack(x.z, x.w, T{}), pack(y.x, y.y, T{}),
                          pack(y.z, y.w, T{}));
  }
}

// ---- the whole ---------------------------------------------------------------------------------

template <int kHeads>
__device__ void finish_heads(const DecodeKernelParams& p,
                             Shared<kHeads>& shared,
                             const BlockWork& work) {
  const int local = threadIdx.y * kWarpSize + threadIdx.x;
  if (local >= kHeads) return;
  float sum = 0.0f;
  for (const auto& group : shared.warp_values) {
    for (const auto& warp : group) sum += warp[local];
  }
  shared.factor[local] =
      finish_head(p, work.row, work.split, work.first_head + local, sum, shared.running_max[local]);
}

namespace {

template <class T, int kHeads, bool kWide>
__global__ void __launch_bounds__(kGroups* kGroupThreads, 1)
    decode_kernel(const __grid_constant__ DecodeKernelParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared<kHeads>*>(shared_bytes);
  const BlockWork work(p, kHeads);
  const int thread = threadIdx.y * kWarpSize + threadIdx.x;
  if (thread == 0) {
    for (uint64_t& full : shared.full) barrier_init(full, kGroupThreads);
    barrier_init(shared.finished, kExpanders * kGroupThreads);
    shared.raises = 0;
  }
  if (thread < kHeads) shared.running_max[thread] = kNoMaximum;
  const int group = __shfl_sync(kFullWarp, group_id(), 0);
  constexpr int kWarps = kGroups * kGroupWarps;
  using Query = QueryLoader<T, kWide, kWarps, Shared<kHeads>>;
  if (group < kExpanders) {
    const int first = work.begin + group * kTileTokens;
    StagedRecords source(p, p.row_indices(work.place), first, work.end, kExpanders * kTileTokens,
                         shared.stages[group * kGroupWarps + group_warp()]);
    Query query(p, work, threadIdx.y);
    source.start_copies();
    query.store(shared);
    fence_for_async();
    __syncthreads();
    Softmax<kHeads> softmax(shared);
    if (work.begin < work.end) expand_tiles(p, shared, work, group, source, softmax);
    barrier_sync(kExpandersBarrier, kExpanders * kGroupThreads);  // the maxima are final
    softmax.finish(shared);
    barrier_sync(kExpandersBarrier, kExpanders * kGroupThreads);
    finish_heads(p, shared, work);
    barrier_arrive(shared.finished);
  } else {
    Query(p, work, threadIdx.y).store(shared);
    fence_for_async();
    __syncthreads();
    float out[kValueChunks][kHeads / 2] = {};
    sum_tiles(shared, work.tiles(), out);
    barrier_wait(shared.finished, 0);
    stage_out(shared, out);
  }
  __syncthreads();
  write_results<T>(p, work.split, work.row, work.first_head,
                   [&](auto* to) { write_out(to, shared, work.num_heads(p, kHeads)); });
#endif
}

template <class T, int kHeads>
int launch(const DecodeKernelParams& p, cudaStream_t stream) {
  const auto kernel =
      p.query_aligned(sizeof(T)) ? decode_kernel<T, kHeads, true> : decode_kernel<T, kHeads, false>;
  return launch_blocks<Shared<kHeads>>(kernel, p, kHeads, kGroups * kGroupWarps, stream);
}

template <class T>
int launch(const DecodeKernelParams& p, int head_tile, cudaStream_t stream) {
  return head_tile == 16 ? launch<T, 16>(p, stream) : launch<T, 32>(p, stream);
}

}  // namespace
}  // namespace few

int decode_few_heads(const DecodeKernelParams& p, int head_tile, cudaStream_t stream) {
  return p.element == Element::kBFloat16 ? few::launch<BFloat16>(p, head_tile, stream)
                                         : few::launch<Float16>(p, head_tile, stream);
}

}  // namespace hopper

bool has_decode_wgmma() { return has_code(hopper::few::decode_kernel<BFloat16, 16, true>); }

}  // namespace nvfp4_dsmla::cuda
