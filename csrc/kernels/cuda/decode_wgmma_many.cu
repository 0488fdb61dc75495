// sparse_mla_decode for Hopper, with wgmma: 64 heads a block, which fill a matrix instruction's
// rows.
//
//   S[64 heads, 64 tokens] = q K^T      both from shared memory
//   O[64 heads, 512]      += P V        likewise; O in registers
//
// A block takes one row (a query token), up to 64 of its heads and a share of its tokens, in tiles
// of 64 tokens. Its four warpgroups are a pipeline:
//
//   expander  records from memory, a tile ahead in registers -> K in shared memory, whose first
//             eight chunks are V
//   scorer    q K^T; softmax; P in the place of the chunk of K that is not V's; and, for it has the
//             time, where the records of the tile four ahead are
//   summers   q to shared memory, first; then P V, each half of the dims
//
// Two buffers pass from one to the next and back. A word of codes, expanded, goes to K with one
// stmatrix, in LanesRecord's order of dims.
#include <cuda_runtime.h>

#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/decode_wgmma.cuh"
#include "kernels/cuda/decode_wgmma_many.cuh"
#include "kernels/cuda/decode_wgmma_many_expander.cuh"
#include "kernels/cuda/decode_wgmma_query.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace nvfp4_dsmla::cuda {
namespace hopper {
namespace many {

__device__ inline void score_tiles(Shared& shared, int tiles, Locator& locator, Softmax& softmax) {
  const Matrix<kRowBytes> query(&shared.query);
  int32_t slot = locator.read();  // of the tile that is located next
  for (int tile = 0; tile < tiles; ++tile) {
    const int buffer = tile % kBuffers;
    barrier_sync(kFullBarrier + buffer, kExpanderAndScorer);
    const Matrix<kRowBytes> keys(&shared.tiles[buffer]);
    float scores[Softmax::kScores];
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kQueryChunks; ++c) {
#pragma unroll
      for (int at = 0; at < kRowBytes; at += 32) {
        wgmma_keys(scores, query + (c * Shared::kHeads * kRowBytes + at),
                   keys + (c * kChunkBytes + at), c > 0 || at > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    softmax.take(shared, tile, scores);
    locator.note(tile % kLocated, slot);
    slot = locator.read();
    fence_for_async();
    barrier_pass(kScoredBarrier + buffer, kScorerAndSummers);
    // For what it has located, which the expander reads.
    if (tile + kBuffers < tiles) barrier_pass(kEmptyBarrier + buffer, kAll);
  }
}

inline constexpr int kSummerDims = kNopeDim / kSummers;

// A summer's dims of O, by 128: in out[i][4j + 2r + e] head g + 8r of the warp's 16, position
// 128i + 8j + 2q + e. (The compiler takes no product of 256 dims for a kernel of 128 registers.)
using Out = float[2][64];

__device__ inline void sum_tiles(Shared& shared, int summer, int tiles, Out& out) {
  for (int tile = 0; tile < tiles; ++tile) {
    const int buffer = tile % kBuffers;
    barrier_sync(kScoredBarrier + buffer, kScorerAndSummers);
    if (shared.any_rescaled[buffer] != 0) {
      const float rescale[2] = {shared.rescale[buffer][Softmax::head(0)],
                                shared.rescale[buffer][Softmax::head(1)]};
#pragma unroll
      for (auto& part : out) {
#pragma unroll
        for (int i = 0; i < 64; ++i) part[i] *= rescale[i / 2 % 2];
      }
    }
    const Matrix<kRowBytes> probs(&shared.tiles[buffer][kValueChunks]);
    const Matrix<kRowBytes, kChunkBytes> values(
        &shared.tiles[buffer][summer * (kValueChunks / kSummers)]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileTokens; k += 16) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        wgmma_values(out[i], probs + k * 2, values + (2 * i * kChunkBytes + k * kRowBytes));
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    if (tile + kBuffers < tiles) {  // the expander waits for it
      barrier_pass(kEmptyBarrier + buffer, kAll);
    }
  }
}

// A lane's 8 dims from `dim` on of its row r, scaled: x[j][e] is dim + j + 4e.
struct EightDims {
  __device__ EightDims(const Out& out, int eight, int r, int summer, float factor)
      : dim(kSummerDims * summer + 128 * (eight / 4) + 32 * (lane_id() % 4) + 8 * (eight % 4)) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i / 2][i % 2] = out[eight / 4][16 * (eight % 4) + 4 * (i / 2) + 2 * r + i % 2] * factor;
    }
  }

  int dim;
  float x[4][2];
};
inline constexpr int kEights = kSummerDims / 32;  // of a lane's dims of a row

// By way of shared memory, in q's place, for a store to memory should be of whole lines. A warp has
// rows and dims of its own, so it waits for nobody. to: of the block's first head.
template <class T>
__device__ void write_out(T* to, Shared& shared, int num_heads, int summer, const Out& out) {
  constexpr int kUnits = kSummerDims / 8;  // of 16 bytes, in a row
  static_assert(kUnits == kWarpSize);
  static_assert(sizeof(uint4) * kUnits * kSummers * Shared::kHeads <= sizeof(shared.query));
  auto* staged = reinterpret_cast<uint4*>(&shared.query) +
                 (summer * Shared::kHeads + 16 * group_warp()) * kUnits;
  const auto place = [](int row, int unit) {  // what eight lanes store, in banks apart
    return row * kUnits + (unit ^ (unit >> 3 & 1) ^ (row & 1) << 1);
  };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float factor = shared.factor[Softmax::head(r)];
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      const EightDims dims(out, eight, r, summer, factor);
      const auto& x = dims.x;
      staged[place(lane_id() / 4 + 8 * r, dims.dim % kSummerDims / 8)] =
          make_uint4(pack(x[0][0], x[1][0], T{}), pack(x[2][0], x[3][0], T{}),
                     pack(x[0][1], x[1][1], T{}), pack(x[2][1], x[3][1], T{}));
    }
  }
  __syncwarp();
#pragma unroll 4
  for (int row = 0; row < 16; ++row) {
    const int head = 16 * group_warp() + row;
    if (head >= num_heads) break;
    auto* dims = reinterpret_cast<uint4*>(to + head * kNopeDim + kSummerDims * summer);
    dims[lane_id()] = staged[place(row, lane_id())];
  }
}

namespace {

template <class T, bool kWide>
__global__ void __launch_bounds__(kGroups* kGroupThreads, 1)
    decode_kernel(const __grid_constant__ DecodeKernelParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const BlockWork work(p, Shared::kHeads);
  const int group = __shfl_sync(kFullWarp, group_id(), 0);
  if (group == kExpander) {
    fewer_registers<kExpanderRegisters>();
    Locator(p, shared, work, 0).first_tiles();
    __syncwarp();
    Expander(p, shared, work.tiles()).run();
  } else if (group == kScorer) {
    fewer_registers<kScorerRegisters>();
    if (group_warp() == 0 && lane_id() == 0) barrier_init(shared.finished, kGroupThreads);
    Locator locator(p, shared, work, kLocated);
    barrier_sync(kQueryBarrier, kScorerAndSummers);
    Softmax softmax(shared);
    score_tiles(shared, work.tiles(), locator, softmax);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int local = Softmax::head(r);
      const float sum = softmax.sum(r);
      if (lane_id() % 4 == 0) {
        shared.factor[local] =
            finish_head(p, work.row, work.split, work.first_head + local, sum, softmax.max(r));
      }
    }
    barrier_arrive(shared.finished);
  } else {
    more_registers<kSummerRegisters>();
    constexpr int kWarps = kSummers * kGroupWarps;  // with registers for all of q at once
    QueryLoader<T, kWide, kWarps, Shared>(p, work, threadIdx.y - kFirstSummer * kGroupWarps)
        .store(shared);
    fence_for_async();
    barrier_sync(kQueryBarrier, kScorerAndSummers);  // shared.finished is there, too
    const int summer = group - kFirstSummer;
    Out out = {};
    sum_tiles(shared, summer, work.tiles(), out);
    barrier_wait(shared.finished, 0);
    write_results<T>(p, work.split, work.row, work.first_head, [&](auto* to) {
      write_out(to, shared, work.num_heads(p, Shared::kHeads), summer, out);
    });
  }
#endif
}

template <class T>
int launch(const DecodeKernelParams& p, cudaStream_t stream) {
  const auto kernel = p.query_aligned(sizeof(T)) ? decode_kernel<T, true> : decode_kernel<T, false>;
  return launch_blocks<Shared>(kernel, p, Shared::kHeads, kGroups * kGroupWarps, stream);
}

}  // namespace
}  // namespace many

int decode_many_heads(const DecodeKernelParams& p, cudaStream_t stream) {
  return p.element == Element::kBFloat16 ? many::launch<BFloat16>(p, stream)
                                         : many::launch<Float16>(p, stream);
}

}  // namespace hopper
}  // namespace nvfp4_dsmla::cuda
