// sparse_mla_decode for Hopper, with wgmma: 16, 32 or 64 heads a block.
//
// A block of three warpgroups takes one row (a query token), up to kHeads of its heads and
// a share of its tokens, in tiles of 64 tokens. Tokens are the rows of both products and heads
// their columns, so that 16 heads do not cost what 64 do:
//
//   S^T[64 tokens, heads] = K q^T     K from the registers of the lanes that expand it,
//                                     q from shared memory, its dims in expanded order
//   O^T[512, heads]      += V^T P     V and P from shared memory, O in registers
//
//   expander  takes records into registers a tile ahead, expands them, stores V, multiplies K q^T
//             as it goes; softmax; stores P.   1 warpgroup, or 2 that take turns at the tiles
//   summer    multiplies V^T P.                2 warpgroups, or 1
//
// Two V and P buffers pass between them: `full` when a tile's are written, `empty` when it is
// summed. As in decode_mma.cu, lane (g, q) takes blocks q, 4+q, .. 28+q of a token.
//
// Four registers that are an operand of K q^T go to V as they are, with one stmatrix. That puts
// pair j (elements j and j+4) of word w of the lanes' blocks into 16-byte unit 4w + j of a chunk's
// row, lane q's at word q: dim 64c + 16q + 8w + j + 4e is at position 64c + 8(4w + j) + 2q + e.
#include <cuda_runtime.h>

#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/decode_wgmma.cuh"
#include "kernels/cuda/decode_wgmma_records.cuh"
#include "kernels/cuda/expand.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/lane_block.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace nvfp4_dsmla::cuda {
namespace hopper {
namespace {

// q into shared memory, its dims in the order in which the lanes hold K: as the 8 positions of a
// lane q of 4 in a k = 16 step are 2q, 2q+1, 2q+8, 2q+9, a 16-byte unit of a head's row holds one
// pair of each lane's. kWide: q may be read 16 bytes at a time.
template <class T, int kHeads, bool kWide>
__device__ void load_query(const DecodeKernelParams& p,
                           Shared<kHeads>& shared,
                           const T* row,
                           int first_head) {
  constexpr int kEights = kHeadDim / 8;
  const int thread = threadIdx.y * kWarpSize + threadIdx.x;
#pragma unroll 4
  for (int i = thread; i < kHeads * kEights; i += Shared<kHeads>::kThreads) {
    const int local = i / kEights, eight = i % kEights;  // dims 8 * eight ..
    Elements<T, 8> x{};
    if (first_head + local < p.heads) {
      x.template load<kWide>(row + (first_head + local) * p.q_head_stride + 8 * eight);
    }
    const int chunk = eight / 8, q = eight % 8 / 2, half = eight % 2;
    uint8_t* to = shared.query[chunk][local];
    // As expand_pairs leaves them: (0, 4), (1, 5), (2, 6), (3, 7); and expand_rope_pairs: (0, 2),
    // (1, 3), (4, 6), (5, 7).
    const bool rope = chunk == kValueChunks;
    const uint32_t a = x.words[0], b = rope ? x.words[1] : x.words[2];
    const uint32_t c = rope ? x.words[2] : x.words[1], d = x.words[3];
    const uint32_t pairs[4] = {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632),
                               __byte_perm(c, d, 0x5410), __byte_perm(c, d, 0x7632)};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int unit = swizzled_unit<kRowBytes>(local, 4 * half + k);
      *reinterpret_cast<uint32_t*>(to + unit * 16 + 4 * q) = pairs[k];
    }
  }
}

// ---- expander
// -------------------------------------------------------------------------------------

// Chunk c of a lane's two tokens -> four operands of K q^T.
template <class T>
__device__ void expand_chunk(const Records& records,
                             int c,
                             const uint32_t (&folded)[2][2][4],
                             uint32_t (&k)[4][4]) {
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t pairs[4];
      expand_pairs<T>(word == 0 ? records.codes[t][c].x : records.codes[t][c].y,
                      folded[t][c / 4][c % 4], pairs);
      k[2 * word][t] = pairs[0];
      k[2 * word][2 + t] = pairs[1];
      k[2 * word + 1][t] = pairs[2];
      k[2 * word + 1][2 + t] = pairs[3];
    }
  }
}

template <class T>
__device__ void expand_rope(const Records& records, uint32_t (&k)[4][4]) {
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const uint32_t words[4] = {records.rope[t].x, records.rope[t].y, records.rope[t].z,
                               records.rope[t].w};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t pairs[2];
      expand_rope_pairs<T>(words[step], pairs);
      k[step][t] = pairs[0];
      k[step][2 + t] = pairs[1];
    }
  }
}

// S^T of the tile into `scores`, which are there after wgmma_wait; V into its buffer, once
// `wait_for_buffer` returns.
template <class T, int kHeads, class Wait>
__device__ void multiply_keys(Shared<kHeads>& shared,
                              int buffer,
                              const Records& records,
                              float (&scores)[kHeads / 2],
                              Wait wait_for_buffer) {
  uint32_t folded[2][2][4];
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    fold_scales<T>(records.scales[t].x, folded[t][0]);
    fold_scales<T>(records.scales[t].y, folded[t][1]);
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
      expand_chunk<T>(records, c, folded, k);
      if (c == 0) wait_for_buffer();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        store_matrices((values ^ 2 * step * 16) + c * kTileTokens * kRowBytes, k[step]);
      }
    } else {
      expand_rope<T>(records, k);
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Wgmma<T, kHeads>::a_in_registers(
          scores, k[step], query + (c * kHeads * kRowBytes + step * 32), c > 0 || step > 0);
    }
    wgmma_commit();
  }
}

template <class T, int kHeads>
__device__ void expand_tiles(const DecodeKernelParams& p,
                             Shared<kHeads>& shared,
                             int group,
                             const int32_t* indices,
                             int begin,
                             int end,
                             Softmax<kHeads>& softmax) {
  using S = Shared<kHeads>;
  constexpr int kStep = S::kExpanders * kTileTokens;
  constexpr int kInTurn = 2 * kGroupThreads;  // of a barrier between an expander and the next
  if (begin >= end) return;
  const float scale = p.softmax_scale * kLog2e * kMakeGood;
  int first = begin + group * kTileTokens;
  auto source = [&] {
    if constexpr (S::kStaged) {
      return StagedRecords(p, indices, first, end, kStep,
                           shared.stages[group * kGroupWarps + group_warp()]);
    } else {
      return DirectRecords(p, indices, first, end, kStep);
    }
  }();
  Records records;
  if constexpr (!S::kStaged) source.take(records);

  for (int tile = group; first < end; tile += S::kExpanders, first += kStep) {
    const int buffer = tile % S::kBuffers;
    if constexpr (S::kStaged) source.take(records);
    float scores[kHeads / 2];
    multiply_keys<T>(shared, buffer, records, scores,
                     [&] { barrier_wait(shared.empty[buffer], (tile / S::kBuffers & 1) ^ 1); });
    // A hardware barrier: with one that is polled, the compiler takes the warps for diverged, and
    // descriptions of matrices take six instructions in place of one.
    if (S::kExpanders > 1 && tile > 0) barrier_sync(kTurnBarrier + group, kInTurn);
    const uint32_t raises = shared.raises;
    wgmma_wait<0>();
#pragma unroll
    for (float& score : scores) score *= scale;
    if (!records.present[0] || !records.present[1]) {
#pragma unroll
      for (int i = 0; i < kHeads / 2; ++i) {
        if (!records.present[i / 2 % 2]) scores[i] = -INFINITY;
      }
    }
    if constexpr (!S::kStaged) source.take(records);  // to arrive during the softmax
    softmax.settle_max(shared, buffer, raises, scores);
    if (S::kExpanders > 1 && first + kTileTokens < end) {
      barrier_pass(kTurnBarrier + (group + 1) % S::kExpanders, kInTurn);
    }
    softmax.template store_probs<T>(shared, buffer, scores);
    fence_for_async();
    barrier_arrive(shared.full[buffer]);
  }
}

// ---- summer
// ---------------------------------------------------------------------------------------

template <class T, int kHeads>
__device__ void sum_tiles(Shared<kHeads>& shared,
                          int summer,
                          int tiles,
                          float (&out)[kValueChunks / Shared<kHeads>::kSummers][kHeads / 2]) {
  constexpr int kChunks = kValueChunks / Shared<kHeads>::kSummers;
  constexpr int kProbBytes = Shared<kHeads>::kProbBytes;
  for (int tile = 0; tile < tiles; ++tile) {
    const int buffer = tile % Shared<kHeads>::kBuffers;
    barrier_wait(shared.full[buffer], tile / Shared<kHeads>::kBuffers & 1);
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
    const Matrix<kRowBytes> values(&shared.values[buffer][summer * kChunks]);
    const Matrix<kProbBytes> probs(&shared.probs[buffer]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileTokens; k += 16) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        Wgmma<T, kHeads>::both_shared(out[c], values + (c * kTileTokens + k) * kRowBytes,
                                      probs + k * kProbBytes);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    if (lane_id() == 0) barrier_arrive(shared.empty[buffer]);
  }
}

// O leaves by way of shared memory, in V's place: a lane has single dims of it, and a store to
// memory should be of 16 bytes at least.
template <class T, int kHeads>
__device__ void write_out(const DecodeKernelParams& p,
                          Shared<kHeads>& shared,
                          int summer,
                          const float (&out)[kValueChunks / Shared<kHeads>::kSummers][kHeads / 2],
                          uint32_t row,
                          int split,
                          int first_head) {
  constexpr int kThreads = Shared<kHeads>::kSummers * kGroupThreads;
  constexpr int kChunks = kValueChunks / Shared<kHeads>::kSummers;
  constexpr int kPairs = kNopeDim / 2;
  auto* staged = reinterpret_cast<float2*>(&shared.values);  // [kHeads][kPairs], permuted
  static_assert(sizeof(float2) * kHeads * kPairs <= sizeof(shared.values));
  const auto place = [](int head, int pair) {  // lanes q apart, in banks apart
    return head * kPairs + (pair ^ (head / 2 % 2 * 4 + head / 4 % 2));
  };
  barrier_sync(kSummersBarrier, kThreads);
  // A lane's positions g and g+8 of a warp's 16 are dims d and d+1.
  const int g = lane_id() / 4, w = group_warp();
  const int first_pair = (g / 2 * 16 + w / 2 * 8 + g % 2 * 4 + w % 2 * 2) / 2;
#pragma unroll
  for (int c = 0; c < kHeads / 4; ++c) {
    const int head = Softmax<kHeads>::head(c);
    const float factor = shared.factor[head];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int pair = (summer * kChunks + chunk) * (kChunkDims / 2) + first_pair;
      const float* x = &out[chunk][4 * (c / 2) + c % 2];
      staged[place(head, pair)] = make_float2(x[0] * factor, x[2] * factor);
    }
  }
  barrier_sync(kSummersBarrier, kThreads);
#pragma unroll 2
  for (int i = (summer * kGroupWarps + w) * kWarpSize + lane_id(); i < kHeads * (kNopeDim / 8);
       i += kThreads) {
    const int local = i / (kNopeDim / 8), eight = i % (kNopeDim / 8), head = first_head + local;
    if (head >= p.heads) break;
    float2 x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] = staged[place(local, 4 * eight + k)];
    const int64_t at = static_cast<int64_t>(row) * p.heads + head;
    if (p.num_splits > 1) {
      float* part = p.partial_out + (split * p.rows * p.heads + at) * kNopeDim;
      auto* to = reinterpret_cast<float4*>(part + 8 * eight);  // in expanded order
      to[0] = make_float4(x[0].x, x[2].x, x[0].y, x[2].y);
      to[1] = make_float4(x[1].x, x[3].x, x[1].y, x[3].y);
    } else {
      auto* to = reinterpret_cast<uint4*>(static_cast<T*>(p.out) + at * kNopeDim);
      to[eight] = make_uint4(pack(x[0].x, x[0].y, T{}), pack(x[1].x, x[1].y, T{}),
                             pack(x[2].x, x[2].y, T{}), pack(x[3].x, x[3].y, T{}));
    }
  }
}

// ---- the whole
// ------------------------------------------------------------------------------------

template <class T, int kHeads>
__device__ void finish_heads(
    const DecodeKernelParams& p, Shared<kHeads>& shared, uint32_t row, int split, int first_head) {
  const int local = threadIdx.y * kWarpSize + threadIdx.x;
  if (local >= kHeads) return;
  float sum = 0.0f;
  for (const auto& group : shared.warp_values) {
    for (const auto& warp : group) sum += warp[local];
  }
  const float lse2 = sum == 0.0f ? -INFINITY : shared.running_max[local] + log2f(sum);
  float factor = sum == 0.0f ? 0.0f : kMakeGood / sum;
  const int head = first_head + local;
  if (head < p.heads) {
    const int64_t at = static_cast<int64_t>(row) * p.heads + head;
    if (p.num_splits > 1) {
      p.partial_lse[split * p.rows * p.heads + at] = lse2;
    } else {
      if (sum != 0.0f) factor *= sink_factor(p, head, lse2);
      p.lse[at] = lse2 * kLn2;
    }
  }
  shared.factor[local] = factor;
}

template <class T, int kHeads, bool kWide>
__global__ void __launch_bounds__(Shared<kHeads>::kThreads, 1)
    decode_wgmma_kernel(const __grid_constant__ DecodeKernelParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shared<kHeads>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  S& shared = *reinterpret_cast<S*>(shared_bytes);
  const uint32_t row = blockIdx.x / p.num_splits;
  const int split = static_cast<int>(blockIdx.x % p.num_splits);
  const int first_head = static_cast<int>(blockIdx.y) * kHeads;
  const auto place = p.row(row);
  // From lane 0, so that the compiler knows it to be one value a warp, and keeps what follows from
  // it in uniform registers: descriptions of matrices above all. So the group below.
  const auto share = p.share_of(place, split, kTileTokens);
  const int begin = __shfl_sync(kFullWarp, share.begin, 0);
  const int end = __shfl_sync(kFullWarp, share.end, 0);

  const int thread = threadIdx.y * kWarpSize + threadIdx.x;
  if (thread == 0) {
    for (int b = 0; b < S::kBuffers; ++b) {
      barrier_init(shared.full[b], kGroupThreads);
      barrier_init(shared.empty[b], S::kSummers * kGroupWarps);
    }
    barrier_init(shared.finished, S::kExpanders * kGroupThreads);
    barrier_init_fence();
  }
  if (thread == 0) shared.raises = 0;
  if (thread < kHeads) shared.running_max[thread] = kNoMaximum;
  load_query<T, kHeads, kWide>(
      p, shared,
      static_cast<const T*>(p.q) + place.b * p.q_batch_stride + place.t * p.q_token_stride,
      first_head);
  fence_for_async();
  __syncthreads();

  const int group = __shfl_sync(kFullWarp, group_id(), 0);
  if (group < S::kExpanders) {
    if constexpr (kHeads == 64) more_registers<S::kExpanderRegisters>();
    Softmax<kHeads> softmax;
    softmax.start();
    expand_tiles<T>(p, shared, group, p.row_indices(place), begin, end, softmax);
    barrier_sync(kExpandersBarrier, S::kExpanders * kGroupThreads);  // the maxima are final
    softmax.finish(shared);
    barrier_sync(kExpandersBarrier, S::kExpanders * kGroupThreads);
    finish_heads<T>(p, shared, row, split, first_head);
    barrier_arrive(shared.finished);
  } else {
    if constexpr (kHeads == 64) fewer_registers<S::kSummerRegisters>();
    const int summer = group - S::kExpanders;
    float out[kValueChunks / S::kSummers][kHeads / 2] = {};
    sum_tiles<T>(shared, summer, (end - begin + kTileTokens - 1) / kTileTokens, out);
    barrier_wait(shared.finished, 0);
    write_out<T>(p, shared, summer, out, row, split, first_head);
  }
#endif
}

template <class T, int kHeads, bool kWide>
int launch(const DecodeKernelParams& p, cudaStream_t stream) {
  const auto kernel = decode_wgmma_kernel<T, kHeads, kWide>;
  constexpr int kBytes = sizeof(Shared<kHeads>);
  static_assert(kBytes <= 227 * 1024);
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess) {
    return error;
  }
  const dim3 grid(p.rows * p.num_splits, (p.heads + kHeads - 1) / kHeads);
  kernel<<<grid, warps(Shared<kHeads>::kGroups * kGroupWarps), kBytes, stream>>>(p);
  return cudaGetLastError();
}

template <class T, int kHeads>
int launch_for(const DecodeKernelParams& p, cudaStream_t stream) {
  return p.query_aligned(sizeof(T)) ? launch<T, kHeads, true>(p, stream)
                                    : launch<T, kHeads, false>(p, stream);
}

template <class T>
int launch(const DecodeKernelParams& p, const DecodePlan& plan, cudaStream_t stream) {
  switch (plan.head_tile) {
    case 16:
      return launch_for<T, 16>(p, stream);
    case 32:
      return launch_for<T, 32>(p, stream);
    default:
      return launch_for<T, 64>(p, stream);
  }
}

}  // namespace
}  // namespace hopper

bool has_decode_wgmma() { return has_code(hopper::decode_wgmma_kernel<BFloat16, 64, true>); }

int decode_wgmma(const DecodeKernelParams& p, const DecodePlan& plan, cudaStream_t stream) {
  return p.element == Element::kBFloat16 ? hopper::launch<BFloat16>(p, plan, stream)
                                         : hopper::launch<Float16>(p, plan, stream);
}

}  // namespace nvfp4_dsmla::cuda
