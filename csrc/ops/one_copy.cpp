// A second copy of the library cannot register the ops again: torch refuses, and the wrappers of
// the stable ABI do not look (2.10 .. 2.14), so the process would crash without a word. It ends
// here with one, before anything is registered. (The Python package refuses earlier, and goes on.)
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#include "ops/torch_stable.h"

namespace {

struct OneCopy {
  OneCopy() {
    TorchLibraryHandle library = nullptr;
    if (aoti_torch_library_init_def("nvfp4_dsmla", __FILE__, __LINE__, &library) ==
        AOTI_TORCH_SUCCESS) {
      aoti_torch_delete_library_object(library);
      return;
    }
    Dl_info self{};
    dladdr(this, &self);
    std::fprintf(stderr,
                 "nvfp4_dsmla: the ops are registered already, by another copy of the library; %s "
                 "cannot be loaded as well. Keep one copy.\n",
                 self.dli_fname);
    std::abort();
  }
};

// Before every other static object of the library.
__attribute__((init_priority(101))) const OneCopy one_copy;

}  // namespace
