// concat_and_cache_nvfp4_ds_mla, .._fp8_ds_mla, .._bfloat16: a warp a token.
//
//   lane l   loads 16 NoPE elements 16l ..  and 2 RoPE elements 2l ..
//            stores what its format makes of them (codec_*.cuh)
//
// All loads are issued before the slot is looked at: a skipped token costs a read, every other one
// saves a round trip.
#include <cuda_runtime.h>

#include "format/element.h"
#include "kernels/cuda/codec_bf16.cuh"
#include "kernels/cuda/codec_fp8.cuh"
#include "kernels/cuda/codec_nvfp4.cuh"
#include "kernels/cuda/lane_block.cuh"
#include "kernels/cuda/paging.cuh"
#include "kernels/launch.h"

namespace nvfp4_dsmla::cuda {
namespace {

// WriteParams, resolved: strides in bytes.
struct Tokens {
  Tokens(const WriteParams& p, int64_t element_bytes)
      : kv_c(p.kv_c),
        k_pe(p.k_pe),
        kv_c_stride(p.kv_c_stride * element_bytes),
        k_pe_stride(p.k_pe_stride * element_bytes),
        slot_mapping(p.slot_mapping),
        cache(p.cache),
        count(static_cast<uint32_t>(p.num_tokens)) {}

  const void* kv_c;
  const void* k_pe;
  int64_t kv_c_stride;
  int64_t k_pe_stride;
  IndexVector slot_mapping;
  DeviceCache<uint8_t> cache;
  uint32_t count;
};

template <class Codec, class In, bool kWide>
__global__ void write_kernel(const __grid_constant__ Tokens tokens) {
  const uint32_t token = warp_id();
  if (token >= tokens.count) return;
  const int lane = lane_id();

  const int64_t slot = tokens.slot_mapping[token];
  const In* kv_c = static_cast<const In*>(row_at<kWide>(tokens.kv_c, token, tokens.kv_c_stride));
  const In* k_pe = static_cast<const In*>(row_at<kWide>(tokens.k_pe, token, tokens.k_pe_stride));
  NopeElements<In> nope;
  RopeElements<In> rope;
  nope.template load<kWide>(kv_c + lane * kNopePerLane);
  rope.template load<kWide>(k_pe + lane * kRopePerLane);
  // Keeps the loads above in their place. Without it the compiler moves the token's below the test
  // of the slot (or the slot's below the arithmetic, were the test last): two round trips for one.
  __syncwarp();
  if (!tokens.cache.holds(slot)) return;

  const auto encoded = Codec::encode(nope, rope);
  Codec::template store<kWide>(tokens.cache.template record<kWide>(static_cast<uint32_t>(slot)),
                               encoded);
}

// Whether kv_c may be loaded 16 bytes at a time, a lane's RoPE elements and its parts of a record
// whole.
template <class Codec>
bool can_go_wide(const Tokens& t, const PagedCache<uint8_t>& cache, int64_t element_bytes) {
  const int64_t rope_bytes = kRopePerLane * element_bytes;
  return aligned(t.kv_c, 16) && t.kv_c_stride % 16 == 0 && fits_narrow(t.kv_c_stride) &&
         aligned(t.k_pe, rope_bytes) && t.k_pe_stride % rope_bytes == 0 &&
         fits_narrow(t.k_pe_stride) && records_aligned(cache, Codec::kStoreBytes);
}

// At every size from 1 to 262,144 tokens as good as 1, 2, 8 or 16, or better (docs/kernels.md).
constexpr uint32_t kWarpsPerBlock = 4;

template <class Codec, class In>
int launch_write(const WriteParams& p, CUstream_st* stream) {
  const Tokens tokens(p, sizeof(In));
  const uint32_t blocks = (tokens.count + kWarpsPerBlock - 1) / kWarpsPerBlock;
  if (can_go_wide<Codec>(tokens, p.cache, sizeof(In))) {
    write_kernel<Codec, In, true><<<blocks, warps(kWarpsPerBlock), 0, stream>>>(tokens);
  } else {
    write_kernel<Codec, In, false><<<blocks, warps(kWarpsPerBlock), 0, stream>>>(tokens);
  }
  return cudaGetLastError();
}

template <class Codec>
int launch_element(const WriteParams& p, CUstream_st* stream) {
  switch (p.element) {
    case Element::kBFloat16:
      return launch_write<Codec, BFloat16>(p, stream);
    case Element::kFloat16:
      return launch_write<Codec, Float16>(p, stream);
    case Element::kFloat32:
      return launch_write<Codec, float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int write(const WriteParams& p, CUstream_st* stream) {
  switch (p.format) {
    case Format::kNvfp4:
      return launch_element<Nvfp4Codec>(p, stream);
    case Format::kFp8:
      return launch_element<Fp8Codec>(p, stream);
    case Format::kBFloat16:
      return launch_element<BFloat16Codec>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace nvfp4_dsmla::cuda
