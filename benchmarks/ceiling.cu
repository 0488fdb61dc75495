// The kernels that ours are measured against: a copy of as many bytes, which no kernel of the same
// traffic is expected to beat, and nothing at all.
//
// Built by ceiling.py with nvcc alone and called by address, so it depends on no version of torch.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

// A block copies kUnroll * blockDim.x consecutive words of 16 bytes, all loads before any store.
template <int kUnroll, bool kStreaming>
__global__ void copy_kernel(uint4* __restrict__ dst, const uint4* __restrict__ src, int64_t words) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x * kUnroll + threadIdx.x;
  uint4 word[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t at = first + i * blockDim.x;
    if (at < words) word[i] = kStreaming ? __ldcs(src + at) : src[at];
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t at = first + i * blockDim.x;
    if (at >= words) continue;
    if (kStreaming) {
      __stcs(dst + at, word[i]);
    } else {
      dst[at] = word[i];
    }
  }
}

template <int kUnroll, bool kStreaming>
void copy(uint4* dst, const uint4* src, int64_t words, int threads, cudaStream_t stream) {
  const int64_t a_block = int64_t{threads} * kUnroll;
  const auto blocks = static_cast<unsigned>((words + a_block - 1) / a_block);
  copy_kernel<kUnroll, kStreaming><<<blocks, threads, 0, stream>>>(dst, src, words);
}

__global__ void empty_kernel() {}

// Reads everything and writes nothing: the sum is never the one that it is compared with, which the
// compiler cannot know.
__global__ void read_kernel(const uint4* src, int64_t words, uint4* never) {
  uint32_t sum = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words;
       i += step) {
    const uint4 word = src[i];
    sum |= word.x | word.y | word.z | word.w;
  }
  if (sum != 0) *never = make_uint4(sum, 0, 0, 0);
}

}  // namespace

// Each enqueues one kernel and returns a cudaError_t. Pointers are multiples of 16.
extern "C" {

// Which copy is the fastest depends on the size and the chip, so there are several: the ceiling is
// the best of them.
int ceiling_num_copies() { return 5; }

int ceiling_copy(int which, void* to, const void* from, int64_t words, void* on) {
  auto* dst = static_cast<uint4*>(to);
  const auto* src = static_cast<const uint4*>(from);
  auto* stream = static_cast<cudaStream_t>(on);
  switch (which) {
    case 0:
      copy<1, false>(dst, src, words, 256, stream);
      break;
    case 1:
      copy<1, true>(dst, src, words, 1024, stream);
      break;
    case 2:
      copy<2, true>(dst, src, words, 512, stream);
      break;
    case 3:
      copy<4, false>(dst, src, words, 256, stream);
      break;
    case 4:
      copy<4, true>(dst, src, words, 256, stream);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

int ceiling_empty(void* stream) {
  empty_kernel<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>();
  return cudaGetLastError();
}

// Reads `words` words of zeros at `from`.
int ceiling_read(void* from, int64_t words, void* stream) {
  auto* src = static_cast<uint4*>(from);
  read_kernel<<<1024, 512, 0, static_cast<cudaStream_t>(stream)>>>(src, words, src);
  return cudaGetLastError();
}

}  // extern "C"
