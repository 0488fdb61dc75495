#include "ops/argument.h"

namespace nvfp4_dsmla {

std::ostream& operator<<(std::ostream& text, DtypeName name) {
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
  for (const auto& [dtype, known] : names) {
    if (dtype == name.dtype) return text << known;
  }
  return text << "dtype number " << name.dtype;
}

std::ostream& operator<<(std::ostream& text, DeviceName name) {
  const TensorView& t = name.tensor;
  if (t.device_type == aoti_torch_device_type_cpu()) return text << "cpu";
  if (t.device_type == aoti_torch_device_type_cuda()) return text << "cuda:" << t.device_index;
  return text << "device type " << t.device_type;
}

std::ostream& operator<<(std::ostream& text, List list) {
  text << '[';
  for (int64_t i = 0; i < list.count; ++i) text << (i == 0 ? "" : ", ") << list.values[i];
  return text << ']';
}

std::ostream& operator<<(std::ostream& text, Description description) {
  const TensorView& t = description.tensor;
  return text << DtypeName{t.dtype} << ' ' << List{t.sizes, t.dim} << " with strides "
              << List{t.strides, t.dim} << " on " << DeviceName{t};
}

}  // namespace nvfp4_dsmla
