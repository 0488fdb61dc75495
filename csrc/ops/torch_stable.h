// The part of libtorch's stable ABI this library stands on, and every work-around of it, each
// marked with the torch version whose support makes it deletable once it is the oldest we target.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

namespace nvfp4_dsmla {

using torch::stable::Tensor;

// What a check reads of a tensor, read once. Sizes and strides belong to the tensor.
struct TensorView {
  explicit TensorView(const Tensor& tensor) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &dim));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device_index));
  }

  void* data;
  int64_t dim;
  int64_t* sizes;
  int64_t* strides;
  int32_t dtype;  // compare with aoti_torch_dtype_*()
  int32_t device_type;
  int32_t device_index;

  // Counted from the last dimension: size(1) is the last one's.
  int64_t size(int64_t from_end) const { return sizes[dim - from_end]; }
  int64_t stride(int64_t from_end) const { return strides[dim - from_end]; }
};

// Through the C entry point: torch::stable::new_empty costs 1.5 us more a call, since it goes
// through the dispatcher (2.10 .. 2.14).
inline Tensor empty_contiguous(const std::vector<int64_t>& sizes,
                               int32_t dtype,
                               int32_t device_type,
                               int32_t device_index) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()),
                                                         sizes.data(), strides.data(), dtype,
                                                         device_type, device_index, &handle));
  return Tensor(handle);
}

// A ScalarType argument as the int32 that tensors report: torch::headeronly::ScalarType numbers
// need not be libtorch's own.
inline std::optional<int32_t> dtype_of(
    const std::optional<torch::headeronly::ScalarType>& scalar_type) {
  if (!scalar_type) return std::nullopt;
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(*scalar_type));
}

}  // namespace nvfp4_dsmla
