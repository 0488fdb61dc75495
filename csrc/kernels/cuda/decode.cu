// sparse_mla_decode: the plan for the device at hand, carried out.
#include <cuda_runtime.h>

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/decode_wgmma.cuh"
#include "kernels/launch.h"

namespace nvfp4_dsmla::cuda {
namespace {

// Asked once a device: the questions take microseconds.
DecodeDevice current_device() {
  constexpr int kMaxDevices = 64;
  constexpr int kKnown = 1 << 30, kHasMma = 1 << 29, kHasWgmma = 1 << 28;
  static std::atomic<int> known[kMaxDevices];  // these flags and the number of SMs
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return {};
  int facts = known[device].load(std::memory_order_relaxed);
  if (facts == 0) {
    int num_sms = 1;
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    facts =
        kKnown | num_sms | (has_decode_mma() ? kHasMma : 0) | (has_decode_wgmma() ? kHasWgmma : 0);
    known[device].store(facts, std::memory_order_relaxed);
  }
  return {(facts & kHasMma) != 0, (facts & kHasWgmma) != 0, facts & 0xffff};
}

// For benchmarks and tests: NVFP4_DSMLA_DECODE=mma takes that kernel where wgmma's would serve.
bool mma_is_asked_for() {
  const char* name = std::getenv("NVFP4_DSMLA_DECODE");
  return name != nullptr && std::string_view(name) == "mma";
}

// Whether a kernel whose launch is prepared ahead can be captured in a graph.
bool can_launch_ahead() {
  constexpr int kFirstDriver = 12'030;  // CUDA 12.3's
  static const bool can = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= kFirstDriver;
  }();
  return can;
}

int decode_wgmma(const DecodeKernelParams& p, const DecodePlan& plan, cudaStream_t stream) {
  return plan.head_tile == 64 ? hopper::decode_many_heads(p, stream)
                              : hopper::decode_few_heads(p, plan.head_tile, stream);
}

}  // namespace

DecodePlan decode_plan(const DecodeParams& p) {
  // wgmma's kernels load records in whole 16 bytes; mma's has a path for any alignment.
  const bool mma_only = !records_aligned(p.cache, 16) || mma_is_asked_for();
  return plan_decode(current_device(), p.batch * p.s_q, p.heads, p.topk, mma_only);
}

int64_t decode_workspace_bytes(const DecodeParams& p, const DecodePlan& plan) {
  return DecodeKernelParams::workspace_bytes(p, plan);
}

int decode(const DecodeParams& p, const DecodePlan& plan, void* workspace, CUstream_st* stream) {
  if (plan.kernel == DecodeKernel::kNone) return cudaErrorNoKernelImageForDevice;
  const DecodeKernelParams params(p, plan, workspace);
  const bool wgmma = plan.kernel == DecodeKernel::kWgmma;
  const int error = (wgmma ? decode_wgmma : decode_mma)(params, plan, stream);
  if (error != cudaSuccess || plan.num_splits == 1) return error;
  return combine_splits(params, wgmma && can_launch_ahead(), stream);
}

}  // namespace nvfp4_dsmla::cuda
