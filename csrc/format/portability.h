// What differs between the compilers that read this folder: g++/clang++ alone, and nvcc's two
// passes.
#pragma once

#include <cstring>

// Forced inlining is not for speed alone: a host caller compiled for a wider instruction set
// (kernels/cpu) only vectorises these functions if they are part of its own body.
#if defined(__CUDACC__)
#define NVFP4_DSMLA_INLINE __host__ __device__ __forceinline__
#else
#define NVFP4_DSMLA_INLINE inline __attribute__((always_inline))
#endif

namespace nvfp4_dsmla {

// std::bit_cast is no __device__ function, and refuses CUDA's own 16-bit types.
template <class To, class From>
NVFP4_DSMLA_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(static_cast<void*>(&to), &from, sizeof(To));
  return to;
}

// a * b to nearest, never made one with an addition: nvcc would fuse them, and the host, which is
// compiled with -ffp-contract=off, would not.
NVFP4_DSMLA_INLINE float product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

}  // namespace nvfp4_dsmla
