// Ops of the same signatures as ours that check nothing and do nothing, the way PyTorch's
// documentation shows: TORCH_LIBRARY over libtorch's C++ interface. What they cost is what a custom
// op costs at the least. For benchmarks/host.py alone.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace plain {

void write(const at::Tensor& /*kv_c*/,
           const at::Tensor& /*k_pe*/,
           const at::Tensor& /*kv_cache*/,
           const at::Tensor& /*slot_mapping*/,
           int64_t /*layer*/) {}

void cp_gather(const at::Tensor& /*src_cache*/,
               const at::Tensor& /*dst*/,
               const at::Tensor& /*block_table*/,
               const at::Tensor& /*workspace_starts*/,
               int64_t /*batch_size*/,
               const std::optional<at::Tensor>& /*seq_starts*/,
               int64_t /*layer*/) {}

at::Tensor gather(const at::Tensor& kv_cache,
                  const at::Tensor& slots,
                  std::optional<at::ScalarType> dtype,
                  int64_t /*layer*/) {
  auto shape = slots.sizes().vec();
  shape.push_back(576);
  return at::empty(shape, kv_cache.options().dtype(dtype.value_or(at::kBFloat16)));
}

}  // namespace plain

TORCH_LIBRARY(nvfp4_dsmla_plain, library) {
  library.def(
      "write(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, SymInt layer=0) "
      "-> ()");
  library.def(
      "cp_gather(Tensor src_cache, Tensor(a!) dst, Tensor block_table, Tensor workspace_starts, "
      "SymInt batch_size, Tensor? seq_starts=None, SymInt layer=0) -> ()");
  library.def(
      "gather(Tensor kv_cache, Tensor slots, ScalarType? dtype=None, SymInt layer=0) -> Tensor");
}

TORCH_LIBRARY_IMPL(nvfp4_dsmla_plain, CPU, library) {
  library.impl("write", &plain::write);
  library.impl("cp_gather", &plain::cp_gather);
  library.impl("gather", &plain::gather);
}

TORCH_LIBRARY_IMPL(nvfp4_dsmla_plain, CUDA, library) {
  library.impl("write", &plain::write);
  library.impl("cp_gather", &plain::cp_gather);
  library.impl("gather", &plain::gather);
}
