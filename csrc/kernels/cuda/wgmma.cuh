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
// two dimensions lies along the rows the instruction is told (its transpose flags). Of the 64 bits
// that describe it to the instruction the upper ones are constant: kept apart, steps from matrix to
// matrix are single additions, and the compiler starts a first product before it prepares the next.
// kStep: bytes from a matrix to the next one, of one that goes on in others past the ends of its
// rows.
template <int kRowBytes, int kStep = 16>
struct Matrix {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128);
  static constexpr uint32_t kAtomBytes = 8 * kRowBytes;
  static constexpr uint32_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  static constexpr uint32_t kHigh = kAtomBytes >> 4 | kSwizzle << 30;

  __device__ explicit Matrix(const void* start)
      : low((shared_address(start) & 0x3'ffffu) >> 4 | uint32_t{kStep >> 4} << 16) {}
  __device__ explicit Matrix(uint32_t low) : low(low) {}
  __device__ Matrix operator+(int bytes) const { return Matrix(low + (bytes >> 4)); }

  uint32_t low;
};

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

// What is multiplied is fp16. Operand numbers follow d's registers.
#define NVFP4_DSMLA_D8(d)                                                             \
  "+f"((d)[0]), "+f"((d)[1]), "+f"((d)[2]), "+f"((d)[3]), "+f"((d)[4]), "+f"((d)[5]), \
      "+f"((d)[6]), "+f"((d)[7])
#define NVFP4_DSMLA_D16(d) NVFP4_DSMLA_D8(d), NVFP4_DSMLA_D8((d) + 8)
#define NVFP4_DSMLA_D32(d) NVFP4_DSMLA_D16(d), NVFP4_DSMLA_D16((d) + 16)
#define NVFP4_DSMLA_D64(d) NVFP4_DSMLA_D32(d), NVFP4_DSMLA_D32((d) + 32)
#define NVFP4_DSMLA_LIST8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NVFP4_DSMLA_LIST16 NVFP4_DSMLA_LIST8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NVFP4_DSMLA_LIST32                                         \
  NVFP4_DSMLA_LIST16                                               \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
  "%28, %29, %30, %31"
#define NVFP4_DSMLA_LIST64                                         \
  NVFP4_DSMLA_LIST32                                               \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "   \
  "%56, %57, %58, %59, %60, %61, %62, %63"

// For few heads, which are the columns.
template <int kN>
struct Wgmma;

// a_in_registers: b's rows run along k. both_shared: a's rows run along m, b's along n, and k goes
// from row to row.
#define NVFP4_DSMLA_WGMMA(N, D, A0, A1, A2, A3, A4, A5, A6)                                       \
  template <>                                                                                     \
  struct Wgmma<N> {                                                                               \
    template <int kRowB>                                                                          \
    __device__ static void a_in_registers(float* d,                                               \
                                          const uint32_t (&a)[4],                                 \
                                          Matrix<kRowB> b,                                        \
                                          bool accumulate) {                                      \
      asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nmov.b64 b, {" A4 ", " A5                      \
                   "};\nsetp.ne.b32 p, " A6                                                       \
                   ", 0;\n"                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NVFP4_DSMLA_LIST##D \
                   "}, {" A0 ", " A1 ", " A2 ", " A3 "}, b, p, 1, 1, 0;\n}"                       \
                   : NVFP4_DSMLA_D##D(d)                                                          \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "n"(b.kHigh),        \
                     "r"(int{accumulate}));                                                       \
    }                                                                                             \
    template <int kRowA, int kRowB>                                                               \
    __device__ static void both_shared(float* d, Matrix<kRowA> a, Matrix<kRowB> b) {              \
      asm volatile("{\n.reg .b64 a, b;\nmov.b64 a, {" A0 ", " A1 "};\nmov.b64 b, {" A2 ", " A3    \
                   "};\nwgmma.mma_async.sync.aligned.m64n" #N                                     \
                   "k16.f32.f16.f16 {" NVFP4_DSMLA_LIST##D "}, a, b, 1, 1, 1, 1, 1;\n}"           \
                   : NVFP4_DSMLA_D##D(d)                                                          \
                   : "r"(a.low), "n"(a.kHigh), "r"(b.low), "n"(b.kHigh));                         \
    }                                                                                             \
  };
NVFP4_DSMLA_WGMMA(16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
NVFP4_DSMLA_WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
#undef NVFP4_DSMLA_WGMMA

// d[64 x 64], of two matrices in shared memory whose rows run along k.
template <int kRowA, int kRowB>
__device__ void wgmma_keys(float (&d)[32], Matrix<kRowA> a, Matrix<kRowB> b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nmov.b64 a, {%32, %33};\nmov.b64 b, {%34, %35};\n"
      "setp.ne.b32 p, %36, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" NVFP4_DSMLA_LIST32
      "}, a, b, p, 1, 1, 0, 0;\n}"
      : NVFP4_DSMLA_D32(d)
      : "r"(a.low), "n"(a.kHigh), "r"(b.low), "n"(b.kHigh), "r"(int{accumulate}));
}

// d[64 x 128], of two in shared memory: a's rows run along k, b's along n, 64 of its 128 in each of
// two matrices `kStep` apart.
template <int kRowA, int kRowB, int kStep>
__device__ void wgmma_values(float (&d)[64], Matrix<kRowA> a, Matrix<kRowB, kStep> b) {
  asm volatile(
      "{\n.reg .b64 a, b;\nmov.b64 a, {%64, %65};\nmov.b64 b, {%66, %67};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" NVFP4_DSMLA_LIST64
      "}, a, b, 1, 1, 1, 0, 1;\n}"
      : NVFP4_DSMLA_D64(d)
      : "r"(a.low), "n"(a.kHigh), "r"(b.low), "n"(b.kHigh));
}
#undef NVFP4_DSMLA_LIST64
#undef NVFP4_DSMLA_LIST32
#undef NVFP4_DSMLA_LIST16
#undef NVFP4_DSMLA_LIST8
#undef NVFP4_DSMLA_D64
#undef NVFP4_DSMLA_D32
#undef NVFP4_DSMLA_D16
#undef NVFP4_DSMLA_D8

}  // namespace nvfp4_dsmla::cuda
