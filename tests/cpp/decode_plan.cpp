// plan_decode, the choice of kernel and splits, over many devices and shapes: what must hold of
// each.
#include "kernels/decode_plan.h"

#include <cstdio>
#include <initializer_list>

using nvfp4_dsmla::DecodeDevice;
using nvfp4_dsmla::DecodeKernel;
using nvfp4_dsmla::DecodePlan;
using nvfp4_dsmla::plan_decode;

namespace {

int failures = 0;

void expect(bool holds, const char* what, int arch, int64_t rows, int64_t heads, int64_t topk) {
  if (holds) return;
  ++failures;
  std::printf("%s: arch %d, %lld rows, %lld heads, topk %lld\n", what, arch,
              static_cast<long long>(rows), static_cast<long long>(heads),
              static_cast<long long>(topk));
}

void check_shape(int arch, int num_sms, int64_t rows, int64_t heads, int64_t topk) {
  const auto say = [&](bool holds, const char* what) {
    expect(holds, what, arch, rows, heads, topk);
  };
  const DecodeDevice device{arch >= 80, arch == 90, num_sms};
  const DecodePlan plan = plan_decode(device, rows, heads, topk);
  if (arch < 80) {
    say(plan.kernel == DecodeKernel::kNone, "a kernel where there is none");
    return;
  }
  const bool wgmma = plan.kernel == DecodeKernel::kWgmma;
  say(wgmma || plan.kernel == DecodeKernel::kMma, "no kernel");
  say(!wgmma || arch == 90, "wgmma off Hopper");
  say(plan.head_tile == 16 || plan.head_tile == 32 || (wgmma && plan.head_tile == 64),
      "a tile that the kernel does not have");
  say(heads > 16 || plan.head_tile == 16, "16 heads pay for more");

  const int64_t tile = wgmma ? nvfp4_dsmla::kWgmmaTokens : nvfp4_dsmla::kMmaTokens;
  const int64_t tiles = (topk + tile - 1) / tile;
  say(plan.num_splits >= 1 && plan.num_splits <= nvfp4_dsmla::kMaxSplits, "splits out of bounds");
  say(plan.num_splits == 1 || plan.num_splits <= tiles, "a split without a tile");
  say(rows <= 4 * num_sms || plan.num_splits == 1, "splits although the rows fill the device");

  // Not every count is looked at; none of the others may be better.
  const auto cheapest = [&](const nvfp4_dsmla::DecodePace& pace) {
    const auto work = nvfp4_dsmla::decode_work(pace, num_sms, rows, heads, topk);
    const auto best = nvfp4_dsmla::cheapest_splits(pace, work);
    say(best.tenths == nvfp4_dsmla::split_cost(pace, work, best.num_splits), "another cost");
    for (int64_t splits = 1; splits <= nvfp4_dsmla::most_splits(work); ++splits) {
      const int64_t cost = nvfp4_dsmla::split_cost(pace, work, splits);
      say(cost > best.tenths || (cost == best.tenths && splits >= best.num_splits),
          "a cheaper count of splits");
    }
  };
  for (const auto& pace : nvfp4_dsmla::kMmaPaces) cheapest(pace);
  for (const auto& pace : nvfp4_dsmla::kWgmmaPaces) cheapest(pace);

  const DecodePlan again = plan_decode(device, rows, heads, topk);
  say(again.kernel == plan.kernel && again.num_splits == plan.num_splits, "not a pure function");
  say(plan_decode(device, rows, heads, topk, true).kernel == DecodeKernel::kMma,
      "mma was asked for");
  say(wgmma == (arch == 90), "wgmma where it is, and only there");
}

}  // namespace

int main() {
  for (const int arch : {75, 80, 86, 89, 90, 100, 103, 120}) {
    for (const int num_sms : {1, 40, 108, 132, 188}) {
      for (const int64_t rows : {1, 2, 7, 16, 64, 128, 131, 1000, 100'000}) {
        for (const int64_t heads : {1, 3, 16, 17, 32, 33, 64, 128, 200}) {
          for (const int64_t topk : {0, 1, 31, 32, 33, 64, 65, 2048, 100'000}) {
            check_shape(arch, num_sms, rows, heads, topk);
          }
        }
      }
    }
  }
  // Too few rows to fill the device are split; a row without tokens is not.
  expect(plan_decode({true, true, 132}, 1, 64, 2048).num_splits > 8, "no splits", 90, 1, 64, 2048);
  expect(plan_decode({true, true, 132}, 1, 64, 0).num_splits == 1, "splits of nothing", 90, 1, 64,
         0);
  // The shapes by which test_decode.py and benchmarks/sanitizer_cases.py try each
  // tile of an H200, and splits of it.
  struct Tried {
    int64_t rows, heads, topk;
    int head_tile;
    bool is_split;
  };
  for (const Tried& t :
       {Tried{70, 20, 300, 32, false}, Tried{70, 33, 300, 64, false},
        Tried{40, 128, 300, 64, false}, Tried{8, 64, 2048, 32, true}, Tried{40, 50, 2048, 64, true},
        Tried{50, 40, 130, 32, false}, Tried{70, 64, 130, 64, false}, Tried{70, 64, 600, 64, false},
        Tried{4, 17, 2048, 16, true}, Tried{36, 50, 2048, 64, true},
        Tried{8, 17, 2048, 32, true}}) {
    const DecodePlan plan = plan_decode({true, true, 132}, t.rows, t.heads, t.topk);
    expect(plan.head_tile == t.head_tile && (plan.num_splits > 1) == t.is_split,
           "the tests try another tile", 90, t.rows, t.heads, t.topk);
  }
  std::printf("decode_plan: %d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
