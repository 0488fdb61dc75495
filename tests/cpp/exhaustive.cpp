// The codec over fp32 inputs, every one of them or one in so many:
//
//   exhaustive step..   for each step checks the inputs whose bits are 0, step, 2 step ..
//
// Step 1 is every input there is; 4096 has every value that a code or a tie between two can be.
//
// Two oracles. The format's own words: a table of the type's values and the midpoints between them,
// passed one after another while the input's magnitude grows. And, where the CUDA toolkit's headers
// are, NVIDIA's converters on the host.
#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(NVFP4_DSMLA_TEST_CUDA_HEADERS)
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#endif

#include "format/block.h"
#include "format/e2m1.h"
#include "format/e4m3.h"

namespace nvfp4_dsmla {
namespace {

constexpr uint64_t kMagnitudes = uint64_t{1} << 31;  // of fp32, by its bits without the sign
constexpr uint64_t kNan = 0x7f80'0001;               // the least of them that is none

// ---- the definition ----------------------------------------------------------------------------

// The value of a small float's magnitude bits, by its fields.
double value_of(uint32_t bits, int mantissa_bits, int bias) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>(bits >> mantissa_bits);
  return exponent == 0
             ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
             : std::ldexp(mantissa + (1u << mantissa_bits), exponent - bias - mantissa_bits);
}

// Nearest, ties to the even code, saturating, for magnitudes that only ever grow.
class NearestCode {
 public:
  NearestCode(uint32_t max_code, int mantissa_bits, int bias) : max_code_(max_code) {
    for (uint32_t code = 0; code < max_code; ++code) {
      midpoints_.push_back(
          (value_of(code, mantissa_bits, bias) + value_of(code + 1, mantissa_bits, bias)) /
          2);  // exact in a double
    }
  }
  uint32_t operator()(float magnitude) {
    while (code_ < max_code_ &&
           (magnitude > midpoints_[code_] || (magnitude == midpoints_[code_] && code_ % 2 == 1))) {
      ++code_;
    }
    return code_;
  }

 private:
  std::vector<double> midpoints_;
  uint32_t max_code_;
  uint32_t code_ = 0;
};

NearestCode nearest_e2m1() { return {0x7, 1, 1}; }
NearestCode nearest_e4m3() { return {0x7e, 3, 7}; }

// ---- what is counted and shown -----------------------------------------------------------------

std::atomic<uint64_t> failures = 0;

void expect(const char* what, uint32_t input, uint32_t got, uint32_t want) {
  if (got == want) return;
  constexpr uint64_t kShown = 20;
  if (failures++ < kShown) {
    std::printf("%s of fp32 0x%08" PRIx32 " (%.9g): got 0x%" PRIx32 ", want 0x%" PRIx32 "\n", what,
                input, static_cast<double>(bit_cast<float>(input)), got, want);
  }
}

// ---- the checks, each over magnitudes [begin, end) ---------------------------------------------

// Both signs of a magnitude: what the definition says, with the type's sign bit.
template <class Encode>
void check_both_signs(const char* what,
                      uint32_t magnitude,
                      uint32_t want,
                      uint32_t want_negative,
                      const Encode& encode) {
  expect(what, magnitude, encode(bit_cast<float>(magnitude)), want);
  const uint32_t negative = magnitude | kSignBit;
  expect(what, negative, encode(bit_cast<float>(negative)), want_negative);
}

void check_elements(uint64_t begin, uint64_t end, uint64_t step) {
  NearestCode e2m1 = nearest_e2m1();
  NearestCode e4m3 = nearest_e4m3();
  const auto encode2 = [](float x) { return encode_e2m1(x); };
  const auto encode4 = [](float x) { return encode_e4m3(x); };
  for (uint64_t m = begin; m < std::min(end, kNan); m += step) {
    const auto magnitude = static_cast<uint32_t>(m);
    const uint32_t code2 = e2m1(bit_cast<float>(magnitude));
    check_both_signs("e2m1", magnitude, code2, code2 | 0x8, encode2);
    const uint32_t code4 = e4m3(bit_cast<float>(magnitude));
    check_both_signs("e4m3", magnitude, code4, code4 | 0x80, encode4);
  }
  const uint64_t first_nan =
      begin >= kNan ? begin : begin + (kNan - begin + step - 1) / step * step;
  for (uint64_t m = first_nan; m < end; m += step) {
    check_both_signs("e2m1", static_cast<uint32_t>(m), 0x7, 0x7, encode2);
    check_both_signs("e4m3", static_cast<uint32_t>(m), 0x7f, 0x7f, encode4);
  }
}

// Steps 2 to 4 of the format to the letter, for every amax there can be: NaN never is one.
void check_scales(uint64_t begin, uint64_t end, uint64_t step) {
  NearestCode nearest = nearest_e4m3();
  for (uint64_t m = begin; m < std::min(end, kNan); m += step) {
    const float amax = bit_cast<float>(static_cast<uint32_t>(m));
    const float t = std::max(amax / 6.0f, 0x1p-9f);
    uint32_t code = nearest(t);
    if (value_of(code, 3, 7) < t && code < 0x7e) ++code;
    const float inverse = 1.0f / static_cast<float>(value_of(code, 3, 7));
    const BlockScale got = choose_scale(amax);
    expect("scale", static_cast<uint32_t>(m), got.code, code);
    expect("inverse", static_cast<uint32_t>(m), bit_cast<uint32_t>(got.inverse),
           bit_cast<uint32_t>(inverse));
  }
}

#if defined(NVFP4_DSMLA_TEST_CUDA_HEADERS)
void check_against_nvidia(uint64_t begin, uint64_t end, uint64_t step) {
  for (uint64_t m = begin; m < std::min(end, kNan); m += step) {
    for (const uint32_t bits : {static_cast<uint32_t>(m), static_cast<uint32_t>(m) | kSignBit}) {
      const float x = bit_cast<float>(bits);
      expect("e2m1 by cuda_fp4.h", bits, encode_e2m1(x),
             __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest));
      expect("e4m3 by cuda_fp8.h", bits, encode_e4m3(x),
             __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
    }
  }
}
#endif

// Every code down.
void check_codes() {
  for (uint32_t code = 0; code < 0x10; ++code) {
    const double value = (code & 0x8 ? -1.0 : 1.0) * value_of(code & 0x7, 1, 1);
    expect("decode_e2m1", code, bit_cast<uint32_t>(decode_e2m1(code)),
           bit_cast<uint32_t>(static_cast<float>(value)));
  }
  for (uint32_t code = 0; code < 0x100; ++code) {
    const double value = (code & 0x80 ? -1.0 : 1.0) * value_of(code & 0x7f, 3, 7);
    const float got = decode_e4m3(code);
    if ((code & 0x7f) == 0x7f) {
      expect("decode_e4m3 is NaN", code, is_nan(got), true);
    } else {
      expect("decode_e4m3", code, bit_cast<uint32_t>(got),
             bit_cast<uint32_t>(static_cast<float>(value)));
    }
  }
}

// ---- all of them, over the machine's threads ---------------------------------------------------

void for_all(const char* what, void (*check)(uint64_t, uint64_t, uint64_t), uint64_t step) {
  const uint64_t before = failures;
  // More parts than threads: they are not equally long. Each begins on the grid of inputs.
  constexpr uint64_t kParts = 64;
  const uint64_t inputs = (kMagnitudes + step - 1) / step;
  const auto edge = [&](uint64_t part) { return inputs * part / kParts * step; };
  std::atomic<uint64_t> next = 0;
  const auto work = [&] {
    for (uint64_t part = next++; part < kParts; part = next++) {
      check(edge(part), std::min(edge(part + 1), kMagnitudes), step);
    }
  };
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::max(1u, std::thread::hardware_concurrency()); ++t) {
    threads.emplace_back(work);
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%s: %" PRIu64 " magnitudes, %" PRIu64 " failures\n", what, inputs,
              failures - before);
}

}  // namespace
}  // namespace nvfp4_dsmla

int main(int count, char** arguments) {
  using namespace nvfp4_dsmla;
  std::vector<uint64_t> steps;
  for (int i = 1; i < count; ++i) steps.push_back(std::strtoull(arguments[i], nullptr, 10));
  if (steps.empty() || std::count(steps.begin(), steps.end(), 0) > 0) {
    std::fprintf(stderr, "usage: %s step..; a step is a number from 1\n", arguments[0]);
    return 2;
  }
  check_codes();
  for (const uint64_t step : steps) {
    for_all("e2m1 and e4m3 by their definition", &check_elements, step);
    for_all("scales and inverses by their definition", &check_scales, step);
#if defined(NVFP4_DSMLA_TEST_CUDA_HEADERS)
    for_all("e2m1 and e4m3 by NVIDIA's converters", &check_against_nvidia, step);
#else
    std::printf("e2m1 and e4m3 by NVIDIA's converters: not built, no cuda_fp4.h was found\n");
#endif
  }
  std::printf("%" PRIu64 " failures\n", failures.load());
  return failures == 0 ? 0 : 1;
}
