// Decodes with the package that export.py made, without Python: many steps of a changing batch,
// into caches that this program allocates. What it prints, and the cache's bytes, are export.py's.
//
//   decode FOLDER libnvfp4_dsmla.so [libnvfp4_dsmla_cuda.so]
//
// On the GPU if the second library is given; the package must have been made for it.
#include <ATen/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct Sizes {
  int64_t steps, requests, blocks_a_request, block_size;
  int64_t num_layers, index_head_dim;
};

Sizes read_sizes(const std::string& path) {
  std::ifstream file(path);
  Sizes s{};
  file >> s.steps >> s.requests >> s.blocks_a_request >> s.block_size >> s.num_layers >>
      s.index_head_dim;
  if (!file) throw std::runtime_error("cannot read " + path);
  return s;
}

// The package finds the ops in these libraries. Global, for it calls their C functions by name.
void open_library(const char* path) {
  if (dlopen(path, RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
}

template <class T>
at::Tensor to_tensor(std::vector<T> values, at::IntArrayRef shape, at::Device device) {
  return at::from_blob(values.data(), shape, c10::CppTypeToScalarType<T>::value)
      .to(device, /*non_blocking=*/false, /*copy=*/true);
}

using Tokens = std::vector<std::vector<int64_t>>;  // of each request

// The requests that take part in a step, and the step's inputs. A request's blocks are its own.
std::vector<int64_t> make_inputs(const Sizes& sizes,
                                 int64_t step,
                                 const Tokens& tokens,
                                 at::Device device,
                                 std::vector<at::Tensor>& inputs) {
  std::vector<int64_t> active, last, positions, slots;
  std::vector<int32_t> table, lengths;
  int64_t longest = 0;
  for (int64_t r = 0; r < sizes.requests; ++r) {
    if (r != 0 && step / r % 3 == 2) continue;
    const int64_t position = static_cast<int64_t>(tokens[r].size()) - 1;
    active.push_back(r);
    last.push_back(tokens[r].back());
    positions.push_back(position);
    slots.push_back(r * sizes.blocks_a_request * sizes.block_size + position);
    lengths.push_back(static_cast<int32_t>(position + 1));
    longest = std::max(longest, position);
  }
  const int64_t batch = static_cast<int64_t>(active.size());
  const int64_t width = longest / sizes.block_size + 1;
  for (const int64_t r : active) {
    for (int64_t b = 0; b < width; ++b) {
      table.push_back(static_cast<int32_t>(r * sizes.blocks_a_request + b));
    }
  }
  inputs.push_back(to_tensor(last, {batch, 1}, device));
  inputs.push_back(to_tensor(positions, {batch, 1}, device));
  inputs.push_back(to_tensor(slots, {batch, 1}, device));
  inputs.push_back(to_tensor(table, {batch, width}, device));
  inputs.push_back(to_tensor(lengths, {batch}, device));
  return active;
}

bool same_bytes(const at::Tensor& tensor, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> want(std::istreambuf_iterator<char>(file), {});
  const at::Tensor got = tensor.cpu();
  return want.size() == got.nbytes() &&
         std::memcmp(got.const_data_ptr(), want.data(), want.size()) == 0;
}

int run(const std::string& folder, at::Device device) {
  const Sizes sizes = read_sizes(folder + "/sizes.txt");
  torch::inductor::AOTIModelPackageLoader model(folder + "/model.pt2");

  const int64_t blocks = sizes.requests * sizes.blocks_a_request;
  const at::Tensor latents = at::zeros({sizes.num_layers, blocks, sizes.block_size, 352},
                                       at::TensorOptions(device).dtype(at::kByte));
  const at::Tensor keys =  // a block more, where padding goes
      at::zeros({sizes.num_layers, blocks + 1, sizes.block_size, sizes.index_head_dim},
                at::TensorOptions(device).dtype(at::kBFloat16));

  Tokens tokens;
  for (int64_t r = 0; r < sizes.requests; ++r) tokens.push_back({r});
  double checksum = 0;
  for (int64_t step = 0; step < sizes.steps; ++step) {
    std::vector<at::Tensor> inputs{latents, keys};
    const std::vector<int64_t> active = make_inputs(sizes, step, tokens, device, inputs);
    const at::Tensor logits = model.run(inputs).at(0).select(1, -1);
    checksum += logits.sum().item<double>();
    const at::Tensor next = logits.argmax(-1).cpu();
    for (size_t i = 0; i < active.size(); ++i) {
      tokens[active[i]].push_back(next.const_data_ptr<int64_t>()[i]);
    }
  }
  for (int64_t r = 0; r < sizes.requests; ++r) {
    std::cout << "request " << r << ':';
    for (const int64_t token : tokens[r]) std::cout << ' ' << token;
    std::cout << '\n';
  }
  std::cout << "logits: sum " << checksum << '\n';
  const bool same = same_bytes(latents, folder + "/latents.bin");
  std::cout << "cache: " << (same ? "" : "NOT ") << "the bytes that Python wrote\n";
  return same ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) {
    std::fprintf(stderr, "usage: %s FOLDER libnvfp4_dsmla.so [libnvfp4_dsmla_cuda.so]\n", argv[0]);
    return 2;
  }
  try {
    for (int i = 2; i < argc; ++i) open_library(argv[i]);
    return run(argv[1], argc == 4 ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
