#include "ops/check.h"

#include <array>
#include <cmath>

#include "format/bf16_record.h"
#include "format/fp8_record.h"
#include "format/record.h"
#include "ops/argument.h"

namespace nvfp4_dsmla {

namespace {

std::optional<Element> element_of(int32_t dtype) {
  if (dtype == aoti_torch_dtype_bfloat16()) return Element::kBFloat16;
  if (dtype == aoti_torch_dtype_float16()) return Element::kFloat16;
  if (dtype == aoti_torch_dtype_float32()) return Element::kFloat32;
  return std::nullopt;
}

// A matrix of latent elements: [rows, width], a row contiguous, rows anywhere.
Element check_rows(const Argument& t, int64_t width) {
  const auto element = element_of(t.dtype);
  t.want(element && t.dim == 2 && t.size(1) == width && t.stride(1) == 1,
         "bfloat16, float16 or float32 of shape [tokens, ", width,
         "] with a contiguous last dimension");
  return *element;
}

bool is_index(const Argument& t) {
  return t.dtype == aoti_torch_dtype_int32() || t.dtype == aoti_torch_dtype_int64();
}

Index index_of(const Argument& t) {
  return t.dtype == aoti_torch_dtype_int64() ? Index::kInt64 : Index::kInt32;
}

void check_int32(const Argument& t, int64_t dim, const char* shape) {
  t.want(t.dtype == aoti_torch_dtype_int32() && t.dim == dim, "int32 of shape ", shape);
}

// What a cache of a format is as a tensor: its dtype, and the elements of a record.
struct RecordShape {
  int32_t dtype;
  int64_t width;
  int64_t element_bytes;
};

RecordShape record_shape(Format format) {
  switch (format) {
    case Format::kNvfp4:
      return {aoti_torch_dtype_uint8(), kRecordBytes, 1};
    case Format::kFp8:
      return {aoti_torch_dtype_uint8(), fp8::kRecordBytes, 1};
    case Format::kBFloat16:
      return {aoti_torch_dtype_bfloat16(), kHeadDim, bf16::kElementBytes};
  }
  return {};
}

// Whether no two records share an element. Dimensions are taken from the closest to the widest
// stride; each must step over all that the closer ones span.
bool records_apart(const Argument& cache, const RecordShape& record) {
  std::array<std::pair<int64_t, int64_t>, 3> steps{};  // stride, size; {0, 0} where there is none
  for (int64_t d = 0; d + 1 < cache.dim; ++d) {
    if (cache.sizes[d] == 0) return true;
    if (cache.sizes[d] > 1) steps[d] = {cache.strides[d], cache.sizes[d]};
  }
  std::sort(steps.begin(), steps.end());
  int64_t span = record.width;
  for (const auto& [stride, size] : steps) {
    if (size == 0) continue;
    if (stride < span) return false;
    span += stride * (size - 1);
  }
  return true;
}

// Whether it is a cache or pool of such records; their bytes are not yet looked at.
bool holds_records(const Argument& cache, const RecordShape& record) {
  return cache.dtype == record.dtype && (cache.dim == 3 || cache.dim == 4) &&
         cache.size(1) == record.width && cache.size(2) >= 1 && cache.stride(1) == 1;
}

int64_t num_layers_of(const Argument& cache) { return cache.dim == 4 ? cache.sizes[0] : 1; }

PagedCache<uint8_t> layer_of(const Argument& cache, const RecordShape& record, int64_t layer) {
  const int64_t bytes = record.element_bytes;
  auto* base = static_cast<uint8_t*>(cache.data);
  if (cache.dim == 4) base += layer * cache.strides[0] * bytes;
  return {base, cache.size(3), cache.size(2), cache.stride(3) * bytes, cache.stride(2) * bytes};
}

PagedCache<uint8_t> check_cache(Format format, const Argument& cache, int64_t layer) {
  const RecordShape record = record_shape(format);
  cache.want(holds_records(cache, record), DtypeName{record.dtype},
             " of shape [num_blocks, block_size, ", record.width,
             "] or [num_layers, num_blocks, block_size, ", record.width,
             "] with block_size >= 1 and contiguous records");
  const int64_t num_layers = num_layers_of(cache);
  if (layer < 0 || layer >= num_layers) {
    refuse(cache.op, "layer: wanted 0 <= layer < ", num_layers, ", the layers of ", cache.name,
           ", got ", layer);
  }
  return layer_of(cache, record, layer);
}

PagedCache<const uint8_t> read_only(const PagedCache<uint8_t>& c) {
  return {c.base, c.num_blocks, c.block_size, c.block_stride, c.token_stride};
}

WriteParams check_write(const char* op,
                        Format format,
                        TensorRef kv_c_tensor,
                        TensorRef k_pe_tensor,
                        TensorRef kv_cache_tensor,
                        TensorRef slot_mapping_tensor,
                        int64_t layer) {
  const Argument kv_cache(op, "kv_cache", kv_cache_tensor);
  const Argument kv_c(op, "kv_c", kv_c_tensor);
  const Argument k_pe(op, "k_pe", k_pe_tensor);
  const Argument slot_mapping(op, "slot_mapping", slot_mapping_tensor);

  const PagedCache<uint8_t> cache = check_cache(format, kv_cache, layer);
  kv_cache.want(records_apart(kv_cache, record_shape(format)), "strides that keep records apart");
  const Element element = check_rows(kv_c, kNopeDim);
  check_rows(k_pe, kRopeDim);
  k_pe.want(k_pe.dtype == kv_c.dtype, "the dtype of kv_c (", DtypeName{kv_c.dtype}, ')');
  slot_mapping.want(is_index(slot_mapping) && slot_mapping.dim == 1,
                    "int64 or int32 of shape [tokens]");
  const int64_t num_tokens = slot_mapping.size(1);
  kv_c.want(kv_c.size(2) >= num_tokens, "a row for each of slot_mapping's ", num_tokens, " tokens");
  k_pe.want(k_pe.size(2) >= num_tokens, "a row for each of slot_mapping's ", num_tokens, " tokens");
  for (const Argument* t : {&kv_c, &k_pe, &slot_mapping}) t->want_device_of(kv_cache);

  return {.format = format,
          .kv_c = kv_c.data,
          .k_pe = k_pe.data,
          .kv_c_stride = kv_c.stride(2),
          .k_pe_stride = k_pe.stride(2),
          .element = element,
          .cache = cache,
          .slot_mapping = {slot_mapping.data, index_of(slot_mapping), slot_mapping.stride(1)},
          .num_tokens = num_tokens};
}

}  // namespace

WriteParams check_write(Format format,
                        TensorRef kv_c,
                        TensorRef k_pe,
                        TensorRef kv_cache,
                        TensorRef slot_mapping,
                        int64_t layer) {
  return check_write(op_names(format).write, format, kv_c, k_pe, kv_cache, slot_mapping, layer);
}

FusedWriteParams check_fused_write(TensorRef kv_c_tensor,
                                   TensorRef k_pe_tensor,
                                   TensorRef norm_weight_tensor,
                                   double eps,
                                   TensorRef positions_tensor,
                                   TensorRef cos_sin_cache_tensor,
                                   bool is_neox,
                                   TensorRef kv_cache_tensor,
                                   TensorRef slot_mapping_tensor,
                                   int64_t layer,
                                   bool round_to_input) {
  const WriteParams write = check_write(kFusedWrite, Format::kNvfp4, kv_c_tensor, k_pe_tensor,
                                        kv_cache_tensor, slot_mapping_tensor, layer);
  const Argument kv_c(kFusedWrite, "kv_c", kv_c_tensor);
  const Argument norm_weight(kFusedWrite, "norm_weight", norm_weight_tensor);
  const Argument positions(kFusedWrite, "positions", positions_tensor);
  const Argument cos_sin_cache(kFusedWrite, "cos_sin_cache", cos_sin_cache_tensor);

  const auto as_kv_c_or_float = [&](const Argument& t) {
    return t.dtype == kv_c.dtype || t.dtype == aoti_torch_dtype_float32();
  };
  norm_weight.want(as_kv_c_or_float(norm_weight) && norm_weight.dim == 1 &&
                       norm_weight.size(1) == kNopeDim && norm_weight.stride(1) == 1,
                   "the dtype of kv_c (", DtypeName{kv_c.dtype}, ") or float32, of shape [",
                   kNopeDim, "], contiguous");
  if (!std::isfinite(eps) || eps < 0) {
    refuse(kFusedWrite, "eps: wanted a finite number, 0 or more, got ", eps);
  }
  positions.want(is_index(positions) && positions.dim == 1, "int64 or int32 of shape [tokens]");
  positions.want(positions.size(1) >= write.num_tokens, "an entry for each of slot_mapping's ",
                 write.num_tokens, " tokens");
  cos_sin_cache.want(as_kv_c_or_float(cos_sin_cache) && cos_sin_cache.dim == 2 &&
                         cos_sin_cache.size(1) == kRopeDim && cos_sin_cache.stride(1) == 1,
                     "the dtype of kv_c (", DtypeName{kv_c.dtype},
                     ") or float32, of shape [max_positions, ", kRopeDim,
                     "] with a contiguous last dimension");
  const Argument kv_cache(kFusedWrite, "kv_cache", kv_cache_tensor);
  for (const Argument* t : {&norm_weight, &positions, &cos_sin_cache}) {
    t->want_device_of(kv_cache);
  }

  return {.write = write,
          .norm_weight = norm_weight.data,
          .norm_weight_element = *element_of(norm_weight.dtype),
          .eps = static_cast<float>(eps),
          .positions = {positions.data, index_of(positions), positions.stride(1)},
          .cos_sin = cos_sin_cache.data,
          .cos_sin_stride = cos_sin_cache.stride(2),
          .cos_sin_element = *element_of(cos_sin_cache.dtype),
          .max_positions = cos_sin_cache.size(2),
          .is_neox = is_neox,
          .round_to_input = round_to_input};
}

RequestGatherParams check_request_gather(Format format,
                                         TensorRef src_cache_tensor,
                                         TensorRef dst_tensor,
                                         TensorRef block_table_tensor,
                                         TensorRef workspace_starts_tensor,
                                         int64_t batch_size,
                                         std::optional<TensorRef> seq_starts_tensor,
                                         int64_t layer) {
  const char* op = op_names(format).request_gather;
  const Argument src_cache(op, "src_cache", src_cache_tensor);
  const Argument dst(op, "dst", dst_tensor);
  const Argument block_table(op, "block_table", block_table_tensor);
  const Argument workspace_starts(op, "workspace_starts", workspace_starts_tensor);
  std::optional<Argument> seq_starts;
  if (seq_starts_tensor) seq_starts.emplace(op, "seq_starts", *seq_starts_tensor);

  const PagedCache<uint8_t> cache = check_cache(format, src_cache, layer);
  const Element element = check_rows(dst, kHeadDim);
  dst.want(dst.size(2) <= 1 || dst.stride(2) >= kHeadDim, "rows that do not overlap");
  if (batch_size < 0) refuse(op, "batch_size: wanted 0 or more, got ", batch_size);
  check_int32(block_table, 2, "[batch_size or more, max_blocks]");
  check_int32(workspace_starts, 1, "[batch_size or more]");
  block_table.want(block_table.size(2) >= batch_size, "a row for each of the ", batch_size,
                   " requests");
  workspace_starts.want(workspace_starts.size(1) >= batch_size, "an entry for each of the ",
                        batch_size, " requests");
  if (seq_starts) {
    check_int32(*seq_starts, 1, "[batch_size or more]");
    seq_starts->want(seq_starts->size(1) >= batch_size, "an entry for each of the ", batch_size,
                     " requests");
    seq_starts->want_device_of(src_cache);
  }
  for (const Argument* t : {&dst, &block_table, &workspace_starts}) t->want_device_of(src_cache);

  return {.format = format,
          .cache = read_only(cache),
          .dst = dst.data,
          .dst_stride = dst.stride(2),
          .element = element,
          .num_rows = dst.size(2),
          .block_table = static_cast<const int32_t*>(block_table.data),
          .block_table_row_stride = block_table.stride(2),
          .block_table_column_stride = block_table.stride(1),
          .max_blocks = block_table.size(1),
          .workspace_starts = static_cast<const int32_t*>(workspace_starts.data),
          .workspace_starts_stride = workspace_starts.stride(1),
          .seq_starts = seq_starts ? static_cast<const int32_t*>(seq_starts->data) : nullptr,
          .seq_starts_stride = seq_starts ? seq_starts->stride(1) : 0,
          .num_requests = batch_size};
}

SlotGather check_slot_gather(Format format,
                             TensorRef kv_cache_tensor,
                             TensorRef slots_tensor,
                             std::optional<torch::headeronly::ScalarType> dtype,
                             int64_t layer) {
  const char* op = op_names(format).slot_gather;
  const Argument kv_cache(op, "kv_cache", kv_cache_tensor);
  const PagedCache<uint8_t> cache = check_cache(format, kv_cache, layer);
  const Argument given(op, "slots", slots_tensor);
  given.want(is_index(given), "int32 or int64");
  given.want_device_of(kv_cache);
  const int32_t out_dtype = dtype_of(dtype).value_or(aoti_torch_dtype_bfloat16());
  const auto element = element_of(out_dtype);
  if (!element) {
    refuse(op, "dtype: wanted bfloat16, float16 or float32, got ", DtypeName{out_dtype});
  }

  const auto copy = given.dim > 1 ? contiguous_copy(slots_tensor) : std::nullopt;
  const Argument slots(op, "slots", copy ? TensorRef(*copy) : slots_tensor);
  std::vector<int64_t> shape(slots.sizes, slots.sizes + slots.dim);
  int64_t num_rows = 1;
  for (const int64_t size : shape) num_rows *= size;
  shape.push_back(kHeadDim);
  Tensor out = empty_contiguous(shape, out_dtype, kv_cache.device_type, kv_cache.device_index);

  const int64_t slot_stride = slots.dim == 1 ? slots.stride(1) : 1;
  return {.params = {.format = format,
                     .cache = read_only(cache),
                     .dst = out.data_ptr(),
                     .element = *element,
                     .slots = {slots.data, index_of(slots), slot_stride},
                     .num_rows = num_rows},
          .slots_copy = copy,
          .out = out};
}

std::vector<ConvertParams> check_convert(TensorRef src_tensor, TensorRef dst_tensor) {
  constexpr const char* kOp = "convert_kv_cache";
  const auto format_of = [](const Argument& cache) {
    for (const Format format : {Format::kNvfp4, Format::kFp8, Format::kBFloat16}) {
      if (holds_records(cache, record_shape(format))) return format;
    }
    cache.want(false, "uint8 [..., num_blocks, block_size, ", kRecordBytes, "], uint8 [..., ",
               fp8::kRecordBytes, "] or bfloat16 [..., ", kHeadDim,
               "] with 3 or 4 dimensions, block_size >= 1 and contiguous records");
    return Format::kNvfp4;
  };
  const Argument src(kOp, "src", src_tensor);
  const Argument dst(kOp, "dst", dst_tensor);
  const Format from = format_of(src), to = format_of(dst);
  dst.want(from != to, "another format than that of src");
  dst.want(std::equal(src.sizes, src.sizes + src.dim - 1, dst.sizes, dst.sizes + dst.dim - 1),
           "the layers, blocks and block_size of src, ", List{src.sizes, src.dim - 1});
  dst.want(records_apart(dst, record_shape(to)), "strides that keep records apart");
  dst.want_device_of(src);

  std::vector<ConvertParams> layers;
  for (int64_t layer = 0; layer < num_layers_of(src); ++layer) {
    layers.push_back({.from = from,
                      .to = to,
                      .src = read_only(layer_of(src, record_shape(from), layer)),
                      .dst = layer_of(dst, record_shape(to), layer)});
  }
  return layers;
}

Decode check_decode(TensorRef q_tensor,
                    TensorRef kv_cache_tensor,
                    TensorRef indices_tensor,
                    double softmax_scale,
                    std::optional<TensorRef> topk_length_tensor,
                    std::optional<TensorRef> attn_sink_tensor,
                    int64_t layer) {
  constexpr const char* kOp = "sparse_mla_decode";
  const Argument kv_cache(kOp, "kv_cache", kv_cache_tensor);
  const Argument q(kOp, "q", q_tensor);
  const Argument indices(kOp, "indices", indices_tensor);

  const PagedCache<uint8_t> cache = check_cache(Format::kNvfp4, kv_cache, layer);
  const auto element = element_of(q.dtype);
  q.want(element && element != Element::kFloat32 && q.dim == 4 && q.size(1) == kHeadDim &&
             q.stride(1) == 1,
         "bfloat16 or float16 of shape [batch, s_q, heads, ", kHeadDim,
         "] with a contiguous last dimension");
  const int64_t batch = q.size(4), s_q = q.size(3), heads = q.size(2);
  check_int32(indices, 3, "[batch, s_q, topk]");
  indices.want(indices.size(3) == batch && indices.size(2) == s_q, "q's batch of ", batch,
               " and s_q of ", s_q);
  for (const Argument* t : {&q, &indices}) t->want_device_of(kv_cache);

  const int32_t* lengths = nullptr;
  int64_t length_batch_stride = 0, length_token_stride = 0;
  if (topk_length_tensor) {
    const Argument topk_length(kOp, "topk_length", *topk_length_tensor);
    topk_length.want(
        topk_length.dtype == aoti_torch_dtype_int32() &&
            (topk_length.dim == 1 || topk_length.dim == 2) && topk_length.sizes[0] == batch &&
            (topk_length.dim == 1 || topk_length.sizes[1] == s_q),
        "int32 of shape [batch] or [batch, s_q], here [", batch, "] or [", batch, ", ", s_q, ']');
    topk_length.want_device_of(kv_cache);
    lengths = static_cast<const int32_t*>(topk_length.data);
    length_batch_stride = topk_length.strides[0];
    length_token_stride = topk_length.dim == 2 ? topk_length.strides[1] : 0;
  }
  const float* sink = nullptr;
  int64_t sink_stride = 0;
  if (attn_sink_tensor) {
    const Argument attn_sink(kOp, "attn_sink", *attn_sink_tensor);
    attn_sink.want(attn_sink.dtype == aoti_torch_dtype_float32() && attn_sink.dim == 1 &&
                       attn_sink.size(1) == heads,
                   "float32 of shape [heads], here [", heads, ']');
    attn_sink.want_device_of(kv_cache);
    sink = static_cast<const float*>(attn_sink.data);
    sink_stride = attn_sink.stride(1);
  }

  Tensor out =
      empty_contiguous({batch, s_q, heads, kNopeDim}, q.dtype, q.device_type, q.device_index);
  Tensor lse = empty_contiguous({batch, s_q, heads}, aoti_torch_dtype_float32(), q.device_type,
                                q.device_index);
  return {.params = {.q = q.data,
                     .q_batch_stride = q.stride(4),
                     .q_token_stride = q.stride(3),
                     .q_head_stride = q.stride(2),
                     .element = *element,
                     .cache = read_only(cache),
                     .indices = static_cast<const int32_t*>(indices.data),
                     .indices_batch_stride = indices.stride(3),
                     .indices_token_stride = indices.stride(2),
                     .indices_column_stride = indices.stride(1),
                     .batch = batch,
                     .s_q = s_q,
                     .heads = heads,
                     .topk = indices.size(1),
                     .topk_length = lengths,
                     .topk_length_batch_stride = length_batch_stride,
                     .topk_length_token_stride = length_token_stride,
                     .attn_sink = sink,
                     .attn_sink_stride = sink_stride,
                     .softmax_scale = static_cast<float>(softmax_scale),
                     .out = out.data_ptr(),
                     .lse = static_cast<float*>(lse.data_ptr())},
          .out = out,
          .lse = lse};
}

Merge check_merge(TensorRef out_a_tensor,
                  TensorRef lse_a_tensor,
                  TensorRef out_b_tensor,
                  TensorRef lse_b_tensor) {
  constexpr const char* kOp = "merge_attention_states";
  const Argument out_a(kOp, "out_a", out_a_tensor);
  const Argument lse_a(kOp, "lse_a", lse_a_tensor);
  const Argument out_b(kOp, "out_b", out_b_tensor);
  const Argument lse_b(kOp, "lse_b", lse_b_tensor);

  const auto element = element_of(out_a.dtype);
  out_a.want(element && out_a.dim >= 1 && out_a.size(1) == kNopeDim,
             "bfloat16, float16 or float32 of shape [..., ", kNopeDim, ']');
  const std::vector<int64_t> shape(out_a.sizes, out_a.sizes + out_a.dim);
  const std::vector<int64_t> rows(shape.begin(), shape.end() - 1);
  const auto has_shape = [](const Argument& t, const std::vector<int64_t>& sizes) {
    return std::equal(t.sizes, t.sizes + t.dim, sizes.begin(), sizes.end());
  };
  out_b.want(out_b.dtype == out_a.dtype && has_shape(out_b, shape),
             "the dtype and shape of out_a (", DtypeName{out_a.dtype}, ' ',
             List{shape.data(), out_a.dim}, ')');
  for (const Argument* t : {&lse_a, &lse_b}) {
    t->want(t->dtype == aoti_torch_dtype_float32() && has_shape(*t, rows),
            "float32 of out_a's shape without its last dimension, ",
            List{rows.data(), out_a.dim - 1});
  }
  for (const Argument* t : {&lse_a, &out_b, &lse_b}) t->want_device_of(out_a);

  std::vector<Tensor> copies;
  const auto data = [&](TensorRef tensor, const Argument& as) {
    const auto copy = contiguous_copy(tensor);
    if (!copy) return as.data;
    copies.push_back(*copy);
    return copy->data_ptr();
  };
  int64_t num_rows = 1;
  for (const int64_t size : rows) num_rows *= size;
  Tensor out = empty_contiguous(shape, out_a.dtype, out_a.device_type, out_a.device_index);
  Tensor lse = empty_contiguous(rows, lse_a.dtype, out_a.device_type, out_a.device_index);
  return {.params = {.out_a = data(out_a_tensor, out_a),
                     .lse_a = static_cast<const float*>(data(lse_a_tensor, lse_a)),
                     .out_b = data(out_b_tensor, out_b),
                     .lse_b = static_cast<const float*>(data(lse_b_tensor, lse_b)),
                     .element = *element,
                     .num_rows = num_rows,
                     .out = out.data_ptr(),
                     .lse = static_cast<float*>(lse.data_ptr())},
          .copies = copies,
          .out = out,
          .lse = lse};
}

void check_limit(const char* op, const char* what, int64_t count, int64_t limit) {
  if (count > limit) refuse(op, what, ": wanted at most ", limit, " on this device, got ", count);
}

}  // namespace nvfp4_dsmla
