// What an error of a launch means.
#include <cuda_runtime.h>

#include "kernels/launch.h"

namespace nvfp4_dsmla::cuda {

const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

bool is_missing_code(int error) { return error == cudaErrorNoKernelImageForDevice; }

ComputeCapability compute_capability(int device) {
  ComputeCapability capability{};
  cudaDeviceGetAttribute(&capability.major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&capability.minor, cudaDevAttrComputeCapabilityMinor, device);
  return capability;
}

}  // namespace nvfp4_dsmla::cuda
