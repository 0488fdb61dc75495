// An argument of an op as a refusal speaks of it: its name, what was wanted, what it is.
#pragma once

#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>

#include "ops/torch_stable.h"

namespace nvfp4_dsmla {

// What a refusal says of a tensor, put into words only when it is said: a call that is served
// builds no string.
struct DtypeName {
  int32_t dtype;
};
struct DeviceName {
  const TensorView& tensor;
};
struct List {  // "[3, 511]"
  const int64_t* values;
  int64_t count;
};
struct Description {  // "bfloat16 [3, 511] with strides [512, 1] on cuda:0"
  const TensorView& tensor;
};
std::ostream& operator<<(std::ostream& text, DtypeName name);
std::ostream& operator<<(std::ostream& text, DeviceName name);
std::ostream& operator<<(std::ostream& text, List list);
std::ostream& operator<<(std::ostream& text, Description description);

template <class... Pieces>
[[noreturn]] void refuse(const char* op, const Pieces&... pieces) {
  std::ostringstream text;
  text << op << ": ";
  (text << ... << pieces);
  throw std::invalid_argument(text.str());
}

// One tensor argument under its name; want() refuses with what was wanted and what the tensor is.
struct Argument : TensorView {
  Argument(const char* op, const char* name, TensorRef tensor)
      : TensorView(tensor), op(op), name(name) {}

  template <class... Pieces>
  void want(bool holds, const Pieces&... wanted) const {
    if (!holds) refuse(op, name, ": wanted ", wanted..., ", got ", Description{*this});
  }
  void want_device_of(const Argument& other) const {
    want(device_type == other.device_type && device_index == other.device_index, "the device of ",
         other.name, " (", DeviceName{other}, ')');
  }

  const char* op;
  const char* name;
};

}  // namespace nvfp4_dsmla
