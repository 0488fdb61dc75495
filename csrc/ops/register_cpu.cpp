// The CPU's implementations: check, look for what only the data can show, run in parallel.
#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include "format/record.h"
#include "kernels/launch.h"
#include "ops/check.h"
#include "ops/implementations.h"
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

void check_slots(const char* op, const WriteParams& p) {
  if (const int64_t t = cpu::find_slot_past_capacity(p); t >= 0) {
    throw std::out_of_range(sentence(op, ": slot_mapping[", t,
                                     "]: wanted a slot below the cache's capacity of ",
                                     p.cache.capacity(), ", got ", p.slot_mapping[t]));
  }
}

template <Format kFormat>
void concat_and_cache(
    TensorRef kv_c, TensorRef k_pe, TensorRef kv_cache, TensorRef slot_mapping, int64_t layer) {
  const WriteParams p = check_write(kFormat, kv_c, k_pe, kv_cache, slot_mapping, layer);
  check_slots(op_names(kFormat).write, p);
  for_rows(p.num_tokens, p, &cpu::write);
}

void fused_concat_and_cache(TensorRef kv_c,
                            TensorRef k_pe,
                            TensorRef norm_weight,
                            double eps,
                            TensorRef positions,
                            TensorRef cos_sin_cache,
                            bool is_neox,
                            TensorRef kv_cache,
                            TensorRef slot_mapping,
                            int64_t layer,
                            bool round_to_input) {
  const FusedWriteParams p =
      check_fused_write(kv_c, k_pe, norm_weight, eps, positions, cos_sin_cache, is_neox, kv_cache,
                        slot_mapping, layer, round_to_input);
  check_slots(kFusedWrite, p.write);
  if (const int64_t t = cpu::find_position_outside(p); t >= 0) {
    throw std::out_of_range(sentence(kFusedWrite, ": positions[", t,
                                     "]: wanted a row of cos_sin_cache, in [0, ", p.max_positions,
                                     "), got ", p.positions[t]));
  }
  for_rows(p.write.num_tokens, p, &cpu::fused_write);
}

void throw_fault(const RequestGatherParams& p, const cpu::GatherFaultAt& at) {
  using cpu::GatherFault;
  const std::string op = sentence(op_names(p.format).request_gather, ": ");
  switch (at.fault) {
    case GatherFault::kNone:
      return;
    case GatherFault::kStartsNotFromZero:
      throw std::invalid_argument(sentence(op, "workspace_starts[0]: wanted 0, got ", at.value));
    case GatherFault::kStartsDecrease:
      throw std::invalid_argument(sentence(op, "workspace_starts[", at.request,
                                           "]: wanted no less than the entry before it, got ",
                                           at.value));
    case GatherFault::kTokenOutsideTable:
      throw std::out_of_range(sentence(op, "dst: wanted rows within request ", at.request, "'s ",
                                       p.max_blocks, " blocks of ", p.cache.block_size,
                                       " tokens, got its token ", at.value));
    case GatherFault::kBlockOutsideCache:
      throw std::out_of_range(sentence(op, "block_table[", at.request, ", ", at.column,
                                       "]: wanted a block id in [0, ", p.cache.num_blocks,
                                       "), got ", at.value));
  }
}

template <Format kFormat>
void cp_gather(TensorRef src_cache,
               TensorRef dst,
               TensorRef block_table,
               TensorRef workspace_starts,
               int64_t batch_size,
               std::optional<TensorRef> seq_starts,
               int64_t layer) {
  const RequestGatherParams p = check_request_gather(
      kFormat, src_cache, dst, block_table, workspace_starts, batch_size, seq_starts, layer);
  throw_fault(p, cpu::find_gather_fault(p));
  for_rows<RequestGatherParams>(p.num_rows, p, &cpu::gather);
}

template <Format kFormat>
Tensor gather(TensorRef kv_cache,
              TensorRef slots,
              std::optional<torch::headeronly::ScalarType> dtype,
              int64_t layer) {
  const SlotGather call = check_slot_gather(kFormat, kv_cache, slots, dtype, layer);
  for_rows<SlotGatherParams>(call.params.num_rows, call.params, &cpu::gather);
  return call.out;
}

void convert(TensorRef src, TensorRef dst) {
  for (const ConvertParams& p : check_convert(src, dst)) {
    for_rows<ConvertParams>(p.src.capacity(), p, &cpu::convert);
  }
}

Tensor floats(int64_t count) {
  return empty_contiguous({count}, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0);
}

// Rows are taken so many at a time that their parts' results fit this: 64 MB.
constexpr int64_t kMostPartFloats = int64_t{1} << 24;

std::tuple<Tensor, Tensor> decode(TensorRef q,
                                  TensorRef kv_cache,
                                  TensorRef indices,
                                  double softmax_scale,
                                  std::optional<TensorRef> topk_length,
                                  std::optional<TensorRef> attn_sink,
                                  int64_t layer) {
  const Decode call =
      check_decode(q, kv_cache, indices, softmax_scale, topk_length, attn_sink, layer);
  const DecodeParams& p = call.params;
  const int64_t rows = p.batch * p.s_q;
  if (rows * p.heads == 0) return {call.out, call.lse};
  const int64_t parts_per_row = cpu::decode_parts_per_row(p);
  const int64_t results_per_row = parts_per_row * p.heads;
  const int64_t rows_at_a_time = std::clamp<int64_t>(
      kMostPartFloats / std::max<int64_t>(results_per_row * kNopeDim, 1), 1, rows);
  const Tensor out = floats(rows_at_a_time * results_per_row * kNopeDim);
  const Tensor max = floats(rows_at_a_time * results_per_row);
  const Tensor sum = floats(rows_at_a_time * results_per_row);
  cpu::DecodeParts parts{.first_row = 0,
                         .per_row = parts_per_row,
                         .out = static_cast<float*>(out.data_ptr()),
                         .max = static_cast<float*>(max.data_ptr()),
                         .sum = static_cast<float*>(sum.data_ptr())};
  for (; parts.first_row < rows; parts.first_row += rows_at_a_time) {
    const int64_t count = std::min(rows_at_a_time, rows - parts.first_row);
    torch::stable::parallel_for(0, count * parts_per_row, 1, [&](int64_t begin, int64_t end) {
      const Tensor scratch = floats(cpu::decode_scratch_floats(p));
      cpu::decode(p, parts, static_cast<float*>(scratch.data_ptr()), begin, end);
    });
    torch::stable::parallel_for(0, count * p.heads, kGrain, [&](int64_t begin, int64_t end) {
      cpu::combine_decode(p, parts, begin, end);
    });
  }
  return {call.out, call.lse};
}

std::tuple<Tensor, Tensor> merge(TensorRef out_a,
                                 TensorRef lse_a,
                                 TensorRef out_b,
                                 TensorRef lse_b) {
  const Merge call = check_merge(out_a, lse_a, out_b, lse_b);
  for_rows(call.params.num_rows, call.params, &cpu::merge);
  return {call.out, call.lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nvfp4_dsmla, CPU, library) { NVFP4_DSMLA_IMPLEMENT(library) }

}  // namespace nvfp4_dsmla

#define NVFP4_DSMLA_DEVICE cpu
#include "ops/entry_points.h"
