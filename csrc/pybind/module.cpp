// nvfp4_dsmla._C: the record's constants, facts of the build, and the C++ codec over plain buffers,
// so that Python's tests can drive every input of it. No torch here: this module is the only file
// of the library tied to one Python version.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <sstream>
#include <string>
#include <vector>

#include "format/bf16_record.h"
#include "format/block.h"
#include "format/element.h"
#include "format/fp8_record.h"
#include "format/record.h"
#include "format/token.h"

namespace py = pybind11;

namespace nvfp4_dsmla {
namespace {

// A buffer as a flat span of T, checked.
template <class T>
struct Span {
  Span(const char* name, const py::buffer& buffer, bool writable = false)
      : info(buffer.request(writable)), data(static_cast<T*>(info.ptr)), size(info.size) {
    if (info.itemsize != sizeof(T)) refuse(name, "elements of", sizeof(T), info.itemsize, "bytes");
    py::ssize_t stride = info.itemsize;
    for (py::ssize_t d = info.ndim; d-- > 0; stride *= info.shape[d]) {
      if (info.shape[d] > 1 && info.strides[d] != stride) {
        throw py::value_error(std::string(name) +
                              ": wanted a contiguous buffer, got one with gaps");
      }
    }
  }
  void want_size(const char* name, py::ssize_t wanted) const {
    if (size != wanted) refuse(name, "a buffer of", wanted, size, "elements");
  }
  static void refuse(
      const char* name, const char* what, py::ssize_t wanted, py::ssize_t got, const char* unit) {
    std::ostringstream text;
    text << name << ": wanted " << what << ' ' << wanted << ' ' << unit << ", got " << got;
    throw py::value_error(text.str());
  }

  py::buffer_info info;
  T* data;
  py::ssize_t size;
};

// out[i] = convert(in[i]) over whole buffers.
template <class In, class Out, class Convert>
void map(const py::buffer& in, const py::buffer& out, Convert convert) {
  const Span<In> from("in", in);
  const Span<Out> to("out", out, /*writable=*/true);
  to.want_size("out", from.size);
  const py::gil_scoped_release release;
  for (py::ssize_t i = 0; i < from.size; ++i) to.data[i] = convert(from.data[i]);
}

void encode_scales(const py::buffer& amax, const py::buffer& scale, const py::buffer& inverse) {
  const Span<float> from("amax", amax);
  const Span<uint8_t> codes("scale", scale, true);
  const Span<float> inverses("inverse", inverse, true);
  codes.want_size("scale", from.size);
  inverses.want_size("inverse", from.size);
  for (py::ssize_t i = 0; i < from.size; ++i) {
    const BlockScale chosen = choose_scale(from.data[i]);
    codes.data[i] = static_cast<uint8_t>(chosen.code);
    inverses.data[i] = chosen.inverse;
  }
}

// Calls visit(Element{}) with the element type that `dtype` names.
template <class Visit>
void with_element(const std::string& dtype, Visit visit) {
  if (dtype == "bfloat16") return visit(BFloat16{});
  if (dtype == "float16") return visit(Float16{});
  if (dtype == "float32") return visit(float{});
  throw py::value_error("dtype: wanted bfloat16, float16 or float32, got " + dtype);
}

void widen_elements(const py::buffer& bits, const std::string& dtype, const py::buffer& out) {
  with_element(dtype, [&]<class T>(T) { map<T, float>(bits, out, [](T x) { return widen(x); }); });
}

void encode_tokens(const py::buffer& latent, const std::string& dtype, const py::buffer& records) {
  with_element(dtype, [&]<class T>(T) {
    const Span<T> from("latent", latent);
    const Span<uint8_t> to("records", records, true);
    const py::ssize_t tokens = to.size / kRecordBytes;
    to.want_size("records", tokens * kRecordBytes);
    from.want_size("latent", tokens * kHeadDim);
    for (py::ssize_t t = 0; t < tokens; ++t) {
      const T* x = from.data + t * kHeadDim;
      encode_token(x, x + kNopeDim, to.data + t * kRecordBytes);
    }
  });
}

void decode_tokens(const py::buffer& records, const std::string& dtype, const py::buffer& latent) {
  with_element(dtype, [&]<class T>(T) {
    const Span<uint8_t> from("records", records);
    const Span<T> to("latent", latent, true);
    const py::ssize_t tokens = from.size / kRecordBytes;
    from.want_size("records", tokens * kRecordBytes);
    to.want_size("latent", tokens * kHeadDim);
    for (py::ssize_t t = 0; t < tokens; ++t) {
      decode_token(from.data + t * kRecordBytes, to.data + t * kHeadDim);
    }
  });
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

}  // namespace
}  // namespace nvfp4_dsmla

PYBIND11_MODULE(_C, m) {
  using namespace nvfp4_dsmla;
  m.doc() = "The nvfp4_ds_mla record's constants, facts of this build, and the C++ codec.";

  m.attr("NOPE_DIM") = kNopeDim;
  m.attr("ROPE_DIM") = kRopeDim;
  m.attr("HEAD_DIM") = kHeadDim;
  m.attr("BLOCK_DIM") = kBlockDim;
  m.attr("NUM_SCALES") = kNumScales;
  m.attr("RECORD_BYTES") = kRecordBytes;
  m.attr("CODES_OFFSET") = kCodesOffset;
  m.attr("ROPE_OFFSET") = kRopeOffset;
  m.attr("SCALES_OFFSET") = kScalesOffset;
  m.def("scale_offset", &scale_offset, py::arg("block"));

  m.attr("FP8_BLOCK_DIM") = fp8::kBlockDim;
  m.attr("FP8_NUM_SCALES") = fp8::kNumScales;
  m.attr("FP8_RECORD_BYTES") = fp8::kRecordBytes;
  m.attr("FP8_CODES_OFFSET") = fp8::kCodesOffset;
  m.attr("FP8_SCALES_OFFSET") = fp8::kScalesOffset;
  m.attr("FP8_ROPE_OFFSET") = fp8::kRopeOffset;
  m.attr("BF16_RECORD_BYTES") = bf16::kRecordBytes;

  m.attr("VERSION") = NVFP4_DSMLA_VERSION;
  m.attr("COMPILER") = NVFP4_DSMLA_COMPILER;
  m.attr("CUDA_ARCHS") = py::tuple(py::cast(split(NVFP4_DSMLA_CUDA_ARCHS, ',')));
  m.attr("TORCH_TARGET") = NVFP4_DSMLA_TORCH_TARGET;

  m.def("encode_e2m1", [](const py::buffer& x, const py::buffer& out) {
    map<float, uint8_t>(x, out, [](float v) { return static_cast<uint8_t>(encode_e2m1(v)); });
  });
  m.def("decode_e2m1", [](const py::buffer& codes, const py::buffer& out) {
    map<uint8_t, float>(codes, out, [](uint8_t code) { return decode_e2m1(code); });
  });
  m.def("encode_e4m3", [](const py::buffer& x, const py::buffer& out) {
    map<float, uint8_t>(x, out, [](float v) { return static_cast<uint8_t>(encode_e4m3(v)); });
  });
  m.def("decode_e4m3", [](const py::buffer& codes, const py::buffer& out) {
    map<uint8_t, float>(codes, out, [](uint8_t code) { return decode_e4m3(code); });
  });
  m.def("encode_scales", &encode_scales);
  m.def("widen", &widen_elements);
  m.def("encode_tokens", &encode_tokens);
  m.def("decode_tokens", &decode_tokens);
}
