// convert_kv_cache: a warp a record. A lane decodes its elements into registers and encodes them
// again; nothing else goes through memory.
#include <cuda_runtime.h>

#include "kernels/cuda/codec_bf16.cuh"
#include "kernels/cuda/codec_fp8.cuh"
#include "kernels/cuda/codec_nvfp4.cuh"
#include "kernels/cuda/paging.cuh"
#include "kernels/launch.h"

namespace nvfp4_dsmla::cuda {
namespace {

// ConvertParams, resolved.
struct Records {
  DeviceCache<const uint8_t> src;
  DeviceCache<uint8_t> dst;
};

template <class From, class To, bool kWide>
__global__ void convert_kernel(const __grid_constant__ Records records) {
  const uint32_t slot = warp_id();
  if (slot >= records.src.capacity) return;
  NopeElements<typename From::Latent> nope;
  RopeElements<typename From::Latent> rope;
  From::template load<kWide>(records.src.template record<kWide>(slot), nope, rope);
  const auto encoded = To::encode(nope, rope);
  To::template store<kWide>(records.dst.template record<kWide>(slot), encoded);
}

constexpr uint32_t kWarpsPerBlock = 4;

template <class From, class To>
int launch_convert(const ConvertParams& p, CUstream_st* stream) {
  const Records records{DeviceCache<const uint8_t>(p.src), DeviceCache<uint8_t>(p.dst)};
  const uint32_t blocks = (records.src.capacity + kWarpsPerBlock - 1) / kWarpsPerBlock;
  if (records_aligned(p.src, From::kLaneLoadBytes) && records_aligned(p.dst, To::kStoreBytes)) {
    convert_kernel<From, To, true><<<blocks, warps(kWarpsPerBlock), 0, stream>>>(records);
  } else {
    convert_kernel<From, To, false><<<blocks, warps(kWarpsPerBlock), 0, stream>>>(records);
  }
  return cudaGetLastError();
}

}  // namespace

int convert(const ConvertParams& p, CUstream_st* stream) {
  switch (p.from) {
    case Format::kNvfp4:
      return p.to == Format::kFp8 ? launch_convert<Nvfp4Codec, Fp8Codec>(p, stream)
                                  : launch_convert<Nvfp4Codec, BFloat16Codec>(p, stream);
    case Format::kFp8:
      return p.to == Format::kNvfp4 ? launch_convert<Fp8Codec, Nvfp4Codec>(p, stream)
                                    : launch_convert<Fp8Codec, BFloat16Codec>(p, stream);
    case Format::kBFloat16:
      return p.to == Format::kNvfp4 ? launch_convert<BFloat16Codec, Nvfp4Codec>(p, stream)
                                    : launch_convert<BFloat16Codec, Fp8Codec>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace nvfp4_dsmla::cuda
