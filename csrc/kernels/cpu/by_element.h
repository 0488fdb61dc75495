// Picks the instance of a kernel for an element type.
#pragma once

#include "kernels/params.h"

namespace nvfp4_dsmla::cpu {

template <class Params>
using Kernel = void (*)(const Params&, int64_t begin, int64_t end);

template <class Params>
Kernel<Params> by_element(Element element,
                          Kernel<Params> bfloat16,
                          Kernel<Params> float16,
                          Kernel<Params> float32) {
  return element == Element::kBFloat16  ? bfloat16
         : element == Element::kFloat16 ? float16
                                        : float32;
}

}  // namespace nvfp4_dsmla::cpu
