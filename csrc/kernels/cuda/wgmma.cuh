// The PTX of sm_90a for asynchronous matrix products of a warpgroup (4 warps), one thin function an
// instruction, and the descriptors by which it reads shared memory.
//
// d[64 x kN] += a[64 x 16] * b[16 x kN]. With g = lane / 4 and q = lane % 4 a lane of warp w holds,
// of d, rows 16w + g and 16w + g + 8 at columns 8j + 2q, 8j + 2q + 1 in d[4j .. 4j + 3]; of an `a`
// in registers the same rows at columns 2q, 2q+1 (a[0], a[1]) and 2q+8, 2q+9 (a[2], a[3]).
#pragma once

#include <cstdint>

#include "format/element.h"
#include "kernels/cuda/mma.cuh"

namespace nvfp4_dsmla::cuda {

// A matrix in shared memory whose rows of `kRowBytes` (32, 64 or 128) are stored whole, one after
// another, their 16-byte units permuted as swizzled_unit says; 8 rows make an atom. Which of its
// two dimensions lies along the rows the instruction is told (its transpose flags).
template <int kRowBytes>
__device__ uint64_t matrix_descriptor(const void* start) {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128);
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  constexpr uint64_t kAtomBytes = 8 * kRowBytes;
  return (shared_address(start) & 0x3'ffffu) >> 4 | uint64_t{1} << 16 | (kAtomBytes >> 4) << 32 |
         kSwizzle << 62;
}
// How a descriptor's start moves on by `bytes`.
__device__ constexpr uint64_t descriptor_step(int bytes) { return bytes >> 4; }

// Where 16-byte unit `unit` of row `row` stands in its row.
template <int kRowBytes>
__device__ int swizzled_unit(int row, int unit) {
  return unit ^ (kRowBytes == 128 ? row & 7 : kRowBytes == 64 ? row >> 1 & 3 : row >> 2 & 1);
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Ordinary stores to shared memory before it are seen by matrix products after it.
__device__ inline void fence_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <class T, int kN>
struct Wgmma;

#define NVFP4_DSMLA_D8(d)                                                             \
  "+f"((d)[0]), "+f"((d)[1]), "+f"((d)[2]), "+f"((d)[3]), "+f"((d)[4]), "+f"((d)[5]), \
      "+f"((d)[6]), "+f"((d)[7])
#define NVFP4_DSMLA_D16(d) NVFP4_DSMLA_D8(d), NVFP4_DSMLA_D8((d) + 8)
#define NVFP4_DSMLA_D32(d) NVFP4_DSMLA_D16(d), NVFP4_DSMLA_D16((d) + 16)
#define NVFP4_DSMLA_LIST8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NVFP4_DSMLA_LIST16 NVFP4_DSMLA_LIST8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NVFP4_DSMLA_LIST32                                         \
  NVFP4_DSMLA_LIST16                                               \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
  "%28, %29, %30, %31"

// a_in_registers: b's rows run along k. both_shared: a's rows run along m, b's along n, and k goes
// from row to row. Operand numbers follow d's kD registers.
#define NVFP4_DSMLA_WGMMA(T, ptx, N, D, A0, A1, A2, A3, A4, A5)                                 \
  template <>                                                                                   \
  struct Wgmma<T, N> {                                                                          \
    __device__ static void a_in_registers(float* d,                                             \
                                          const uint32_t (&a)[4],                               \
                                          uint64_t b,                                           \
                                          bool accumulate) {                                    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " A5                                       \
                   ", 0;\n"                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." ptx "." ptx                \
                   " {" NVFP4_DSMLA_LIST##D "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " A4          \
                                            ", p, 1, 1, 0;\n}"                                  \
                   : NVFP4_DSMLA_D##D(d)                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate})); \
    }                                                                                           \
    __device__ static void both_shared(float* d, uint64_t a, uint64_t b) {                      \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." ptx "." ptx                \
                   " {" NVFP4_DSMLA_LIST##D "}, " A0 ", " A1 ", 1, 1, 1, 1, 1;"                 \
                   : NVFP4_DSMLA_D##D(d)                                                        \
                   : "l"(a), "l"(b));                                                           \
    }                                                                                           \
  };
NVFP4_DSMLA_WGMMA(BFloat16, "bf16", 16, 8, "%8", "%9", "%10", "%11", "%12", "%13")
NVFP4_DSMLA_WGMMA(BFloat16, "bf16", 32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
NVFP4_DSMLA_WGMMA(BFloat16, "bf16", 64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
NVFP4_DSMLA_WGMMA(Float16, "f16", 16, 8, "%8", "%9", "%10", "%11", "%12", "%13")
NVFP4_DSMLA_WGMMA(Float16, "f16", 32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
NVFP4_DSMLA_WGMMA(Float16, "f16", 64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
#undef NVFP4_DSMLA_WGMMA
#undef NVFP4_DSMLA_LIST32
#undef NVFP4_DSMLA_LIST16
#undef NVFP4_DSMLA_LIST8
#undef NVFP4_DSMLA_D32
#undef NVFP4_DSMLA_D16
#undef NVFP4_DSMLA_D8

}  // namespace nvfp4_dsmla::cuda
