// The PTX of sm_90 that the decode kernels use, one thin function an instruction: barriers that
// count bytes, copies by the copy engine, stores of matrices, conversions, counts of registers.
#pragma once

#include <cstdint>

#include "kernels/cuda/mma.cuh"

namespace nvfp4_dsmla::cuda {

__device__ inline void barrier_init(uint64_t& barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ inline void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}
// Arrives, and has the phase wait for `bytes` of copies as well.
__device__ inline void barrier_arrive_expecting(uint64_t& barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
}
__device__ inline void barrier_wait(uint64_t& barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

// `bytes`, a multiple of 16, global -> shared by the copy engine; they count towards the barrier.
__device__ inline void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

// Four 8x8 matrices of 16-bit elements, held as mma's operands are; lane l gives the address of row
// l % 8 of matrix l / 8.
__device__ inline void store_matrices(uint32_t address, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

// The lower two e4m3 bytes -> two halves, NaN included.
__device__ inline uint32_t halves_of_e4m3(uint32_t bytes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(bytes)));
  return halves;
}

// A load that stays where it is among the instructions of this kind: the compiler would move it to
// where that saves registers.
__device__ inline uint4 load_now(const void* from) {
  uint4 to;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
               : "l"(from)
               : "memory");
  return to;
}

// How many registers a thread of this warpgroup may have from here on: a multiple of 8, and more
// only as others take fewer.
template <int kCount>
__device__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace nvfp4_dsmla::cuda
