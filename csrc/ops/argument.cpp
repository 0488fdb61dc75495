#include "ops/argument.h"

namespace nvfp4_dsmla {

std::string dtype_name(int32_t dtype) {
  const std::pair<int32_t, const char*> names[] = {
      {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_float16(), "float16"},
      {aoti_torch_dtype_float32(), "float32"},
      {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
  };
  for (const auto& [number, name] : names) {
    if (number == dtype) return name;
  }
  return "dtype number " + std::to_string(dtype);
}

std::string list(const int64_t* values, int64_t count) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < count; ++i) text << (i == 0 ? "" : ", ") << values[i];
  text << ']';
  return text.str();
}

std::string device_name(const TensorView& t) {
  if (t.device_type == aoti_torch_device_type_cpu()) return "cpu";
  if (t.device_type == aoti_torch_device_type_cuda()) {
    return "cuda:" + std::to_string(t.device_index);
  }
  return "device type " + std::to_string(t.device_type);
}

std::string describe(const TensorView& t) {
  return dtype_name(t.dtype) + ' ' + list(t.sizes, t.dim) + " with strides " +
         list(t.strides, t.dim) + " on " + device_name(t);
}

}  // namespace nvfp4_dsmla
