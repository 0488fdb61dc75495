// The CPU's implementations: check, look for what only the data can show, run in parallel.
#include <sstream>
#include <stdexcept>

#include "kernels/launch.h"
#include "ops/check.h"
#include "ops/torch_stable.h"

namespace nvfp4_dsmla {
namespace {

// Tokens a thread takes at the least: about 10 us of work, well above the cost of waking it.
constexpr int64_t kGrain = 32;

template <class Params>
void for_rows(int64_t rows,
              const Params& params,
              void (*kernel)(const Params&, int64_t begin, int64_t end)) {
  torch::stable::parallel_for(0, rows, kGrain, [&](int64_t begin, int64_t end) {
    if (begin < end) kernel(params, begin, end);
  });
}

template <class... Pieces>
std::string sentence(const Pieces&... pieces) {
  std::ostringstream text;
  (text << ... << pieces);
  return text.str();
}

void concat_and_cache(const Tensor& kv_c,
                      const Tensor& k_pe,
                      const Tensor& kv_cache,
                      const Tensor& slot_mapping,
                      int64_t layer) {
  const WriteParams p = check_write(kv_c, k_pe, kv_cache, slot_mapping, layer);
  if (const int64_t t = cpu::find_slot_past_capacity(p); t >= 0) {
    throw std::out_of_range(sentence("concat_and_cache_nvfp4_ds_mla: slot_mapping[", t,
                                     "]: wanted a slot below the cache's capacity of ",
                                     p.cache.capacity(), ", got ", p.slot_mapping[t]));
  }
  for_rows(p.num_tokens, p, &cpu::write);
}

void throw_fault(const RequestGatherParams& p, const cpu::GatherFaultAt& at) {
  using cpu::GatherFault;
  constexpr const char* kOp = "cp_gather_and_upconvert_nvfp4_kv_cache: ";
  switch (at.fault) {
    case GatherFault::kNone:
      return;
    case GatherFault::kStartsNotFromZero:
      throw std::invalid_argument(sentence(kOp, "workspace_starts[0]: wanted 0, got ", at.value));
    case GatherFault::kStartsDecrease:
      throw std::invalid_argument(sentence(kOp, "workspace_starts[", at.request,
                                           "]: wanted no less than the entry before it, got ",
                                           at.value));
    case GatherFault::kTokenOutsideTable:
      throw std::out_of_range(sentence(kOp, "dst: wanted rows within request ", at.request, "'s ",
                                       p.max_blocks, " blocks of ", p.cache.block_size,
                                       " tokens, got its token ", at.value));
    case GatherFault::kBlockOutsideCache:
      throw std::out_of_range(sentence(kOp, "block_table[", at.request, ", ", at.column,
                                       "]: wanted a block id in [0, ", p.cache.num_blocks,
                                       "), got ", at.value));
  }
}

void cp_gather(const Tensor& src_cache,
               const Tensor& dst,
               const Tensor& block_table,
               const Tensor& workspace_starts,
               int64_t batch_size,
               const std::optional<Tensor>& seq_starts,
               int64_t layer) {
  const RequestGatherParams p = check_request_gather(src_cache, dst, block_table, workspace_starts,
                                                     batch_size, seq_starts, layer);
  throw_fault(p, cpu::find_gather_fault(p));
  for_rows<RequestGatherParams>(p.num_rows, p, &cpu::gather);
}

Tensor gather(const Tensor& kv_cache,
              const Tensor& slots,
              std::optional<torch::headeronly::ScalarType> dtype,
              int64_t layer) {
  const SlotGather call = check_slot_gather(kv_cache, slots, dtype, layer);
  for_rows<SlotGatherParams>(call.params.num_rows, call.params, &cpu::gather);
  return call.out;
}

}  // namespace
}  // namespace nvfp4_dsmla

STABLE_TORCH_LIBRARY_IMPL(nvfp4_dsmla, CPU, library) {
  library.impl("concat_and_cache_nvfp4_ds_mla", TORCH_BOX(&nvfp4_dsmla::concat_and_cache));
  library.impl("cp_gather_and_upconvert_nvfp4_kv_cache", TORCH_BOX(&nvfp4_dsmla::cp_gather));
  library.impl("gather_and_upconvert_nvfp4_ds_mla", TORCH_BOX(&nvfp4_dsmla::gather));
}
