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
#include <utility>
#include <vector>

namespace nvfp4_dsmla {

using torch::stable::Tensor;

// A tensor argument: the caller's handle, which it keeps for the length of the call. A Tensor would
// be a handle of its own, 30 ns more (2.13).
class TensorRef {
 public:
  TensorRef(AtenTensorHandle handle) : handle_(handle) {}     // NOLINT: both are what it stands for
  TensorRef(const Tensor& tensor) : handle_(tensor.get()) {}  // NOLINT
  AtenTensorHandle get() const { return handle_; }
  int32_t get_device_index() const {
    int32_t index = -1;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle_, &index));
    return index;
  }

 private:
  AtenTensorHandle handle_;
};

// A handle that is ours to free, without the count for copies that a Tensor shares: 30 ns less
// (2.13).
class OwnedTensor {
 public:
  explicit OwnedTensor(AtenTensorHandle handle) : handle_(handle) {}
  OwnedTensor(OwnedTensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  ~OwnedTensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  operator TensorRef() const { return handle_; }  // NOLINT: it is one

 private:
  AtenTensorHandle handle_;
};

// What a check reads of a tensor, read once. Sizes and strides belong to the tensor.
struct TensorView {
  explicit TensorView(TensorRef tensor) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device_index));
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
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), dtype, device_type, device_index,
                                                  &handle));
  return Tensor(handle);
}

// A ScalarType argument as the int32 that tensors report: torch::headeronly::ScalarType numbers
// need not be libtorch's own.
inline std::optional<int32_t> dtype_of(
    const std::optional<torch::headeronly::ScalarType>& scalar_type) {
  if (!scalar_type) return std::nullopt;
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(*scalar_type));
}

// Of a tensor that is not contiguous.
inline std::optional<Tensor> contiguous_copy(TensorRef tensor) {
  bool is_contiguous = false;
  TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(tensor.get(), &is_contiguous));
  if (is_contiguous) return std::nullopt;
  AtenTensorHandle same = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &same));
  return torch::stable::contiguous(Tensor(same));
}

inline std::optional<torch::headeronly::ScalarType> scalar_type_of(const int32_t* dtype) {
  if (dtype == nullptr) return std::nullopt;
  return torch::stable::detail::to<torch::headeronly::ScalarType>(
      torch::stable::detail::from(*dtype));
}

}  // namespace nvfp4_dsmla

// TORCH_BOX gets handles that it has to free. It keeps one of these for each until the function
// returns, as it keeps a string for a string_view; in an optional only a Tensor will do, since
// TORCH_BOX copies it (2.10 .. 2.14).
template <>
struct torch::stable::detail::UnboxType<nvfp4_dsmla::TensorRef> {
  using type = nvfp4_dsmla::OwnedTensor;
};
template <>
struct torch::stable::detail::UnboxType<std::optional<nvfp4_dsmla::TensorRef>> {
  using type = std::optional<torch::stable::Tensor>;
};
template <>
struct torch::stable::detail::ToImpl<nvfp4_dsmla::OwnedTensor> {
  template <class... About>
  static nvfp4_dsmla::OwnedTensor call(StableIValue value, About...) {
    return nvfp4_dsmla::OwnedTensor(to<AtenTensorHandle>(value));
  }
};
