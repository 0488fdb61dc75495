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
//   expander  loads records a tile ahead into registers, expands them, stores V, multiplies K q^T
//             as it goes; softmax; stores P.   1 warpgroup, or 2 that take turns at the tiles
//   summer    multiplies V^T P.                2 warpgroups, or 1
//
// Two or three V and P buffers pass between them: `full` when a tile's are written, `empty` when it
// is summed. As in decode_mma.cu, lane (g, q) takes blocks q, 4+q, .. 28+q of a token.
#include <cuda_runtime.h>

#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/decode_wgmma.cuh"
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
    const uint32_t a = x.words[0], b = x.words[rope ? 1 : 2];
    const uint32_t c = x.words[rope ? 2 : 1], d = x.words[3];
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

// S^T of the tile into `scores`, V into its buffer.
template <class T, int kHeads>
__device__ void multiply_keys(Shared<kHeads>& shared,
                              int buffer,
                              const Records& records,
                              float (&scores)[kHeads / 2]) {
  const int g = lane_id() / 4, q = lane_id() % 4;
  const int row = 16 * group_warp() + g;
  uint32_t folded[2][2][4];
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    fold_scales<T>(records.scales[t].x, folded[t][0]);
    fold_scales<T>(records.scales[t].y, folded[t][1]);
  }
  uint8_t* values[2][2];  // of a token's two units in the first chunk
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      values[t][word] = &shared.values[buffer][0][row + 8 * t]
                                      [swizzled_unit<kRowBytes>(row + 8 * t, 2 * q + word) * 16];
    }
  }
  uint64_t query = matrix_descriptor<kRowBytes>(&shared.query[0][0][0]);

  uint32_t a[2][4][4];  // one chunk is multiplied from one half while the next is expanded
#pragma unroll
  for (int c = 0; c < kQueryChunks; ++c) {
    auto& k = a[c % 2];
    if (c >= 2) wgmma_wait<1>();
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      if (c < kValueChunks) {
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          uint32_t pairs[4];
          expand_pairs<T>(word == 0 ? records.codes[t][c].x : records.codes[t][c].y,
                          folded[t][c / 4][c % 4], pairs);
          *reinterpret_cast<uint4*>(values[t][word] + c * kTileTokens * kRowBytes) =
              make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
          k[2 * word][t] = pairs[0];
          k[2 * word][2 + t] = pairs[1];
          k[2 * word + 1][t] = pairs[2];
          k[2 * word + 1][2 + t] = pairs[3];
        }
      } else {
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
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Wgmma<T, kHeads>::a_in_registers(scores, k[step],
                                       query + descriptor_step(c * kHeads * kRowBytes + step * 32),
                                       c > 0 || step > 0);
    }
    wgmma_commit();
  }
  wgmma_wait<0>();
}

template <class T, int kHeads>
__device__ void expand_tiles(const DecodeKernelParams& p,
                             Shared<kHeads>& shared,
                             int group,
                             const int32_t* indices,
                             int begin,
                             int end,
                             Softmax<kHeads>& softmax) {
  constexpr int kExpanders = Shared<kHeads>::kExpanders;
  const int column = 16 * group_warp() + lane_id() / 4;
  // Read a tile ahead, past the end too (the last one again): a load under a condition would be
  // waited for at once.
  const auto read_slots = [&](int first, int (&slots)[2]) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      slots[t] = __ldg(indices + min(first + column + 8 * t, end - 1) * p.indices_column_stride);
    }
  };
  const auto load_records = [&](int first, int (&slots)[2], Records& records) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      if (first + column + 8 * t >= end) slots[t] = -1;
    }
    records.load(p, slots);
  };
  if (begin >= end) return;
  const float scale = p.softmax_scale * kLog2e * kMakeGood;
  constexpr int kStep = kExpanders * kTileTokens;
  constexpr int kBuffers = Shared<kHeads>::kBuffers;
  int first = begin + group * kTileTokens;
  int slots[2];
  Records records;
  read_slots(first, slots);
  load_records(first, slots, records);
  read_slots(first + kStep, slots);

  for (int tile = group; first < end; tile += kExpanders, first += kStep) {
    const int buffer = tile % kBuffers;
    barrier_wait(shared.empty[buffer], (tile / kBuffers & 1) ^ 1);
    float scores[kHeads / 2];
    multiply_keys<T>(shared, buffer, records, scores);
#pragma unroll
    for (float& score : scores) score *= scale;
    if (!records.present[0] || !records.present[1]) {
#pragma unroll
      for (int i = 0; i < kHeads / 2; ++i) {
        if (!records.present[i / 2 % 2]) scores[i] = -INFINITY;
      }
    }
    load_records(first + kStep, slots, records);
    read_slots(first + 2 * kStep, slots);

    if (kExpanders > 1 && tile > 0) {
      // A barrier each: a waiter must not be two phases behind. No one goes before the first tile.
      barrier_wait(shared.turn[group], (tile / kExpanders - (group == 0 ? 1 : 0)) & 1);
    }
    softmax.settle_max(shared, buffer, scores);
    if (kExpanders > 1) barrier_arrive(shared.turn[(group + 1) % kExpanders]);
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
    const uint64_t values = matrix_descriptor<kRowBytes>(&shared.values[buffer][summer * kChunks]);
    const uint64_t probs = matrix_descriptor<kProbBytes>(&shared.probs[buffer]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileTokens; k += 16) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        Wgmma<T, kHeads>::both_shared(out[c],
                                      values + descriptor_step((c * kTileTokens + k) * kRowBytes),
                                      probs + descriptor_step(k * kProbBytes));
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    if (lane_id() == 0) barrier_arrive(shared.empty[buffer]);
  }
}

template <class T, int kHeads>
__device__ void write_out(const DecodeKernelParams& p,
                          const Shared<kHeads>& shared,
                          int summer,
                          const float (&out)[kValueChunks / Shared<kHeads>::kSummers][kHeads / 2],
                          uint32_t row,
                          int split,
                          int first_head) {
  constexpr int kChunks = kValueChunks / Shared<kHeads>::kSummers;
#pragma unroll
  for (int c = 0; c < kHeads / 4; ++c) {
    const int local = Softmax<kHeads>::head(c);
    const int head = first_head + local;
    if (head >= p.heads) continue;
    const float factor = shared.factor[local];
    const int64_t at = static_cast<int64_t>(row) * p.heads + head;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int position =
            (summer * kChunks + chunk) * kChunkDims + 16 * group_warp() + lane_id() / 4 + 8 * t;
        const float x = out[chunk][4 * (c / 2) + 2 * t + c % 2] * factor;
        if (p.num_splits > 1) {
          p.partial_out[(split * p.rows * p.heads + at) * kNopeDim + position] = x;
        } else {
          store_element(static_cast<T*>(p.out) + at * kNopeDim + dim_of_position(position), x);
        }
      }
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
  const auto [begin, end] = p.share_of(place, split, kTileTokens);

  const int thread = threadIdx.y * kWarpSize + threadIdx.x;
  if (thread == 0) {
    for (int b = 0; b < S::kBuffers; ++b) {
      barrier_init(shared.full[b], kGroupThreads);
      barrier_init(shared.empty[b], S::kSummers * kGroupWarps);
    }
    for (uint64_t& turn : shared.turn) barrier_init(turn, kGroupThreads);
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

  // From lane 0, so that the compiler knows it to be one value a warp, and keeps what follows from
  // it in uniform registers: descriptors above all.
  const int group = __shfl_sync(kFullWarp, group_id(), 0);
  if (group < S::kExpanders) {
    if constexpr (kHeads == 64) more_registers<S::kExpanderRegisters>();
    Softmax<kHeads> softmax;
    softmax.start();
    expand_tiles<T>(p, shared, group, p.row_indices(place), begin, end, softmax);
    expanders_sync<S::kExpanders>();  // the maxima are final
    softmax.finish(shared);
    expanders_sync<S::kExpanders>();
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
