# Where torch is, and how a library of ours is bound to it. The libraries use the stable ABI alone: a
# few headers and C symbols, so neither find_package(Torch) nor an import of torch (two seconds) is
# needed.
#
# Gives the target nvfp4_dsmla_torch (headers and libtorch_cpu.so), and nvfp4_dsmla_torch_cuda, which
# adds what a CUDA library needs.

set(NVFP4_DSMLA_TORCH_DIR "" CACHE PATH
    "The folder of the torch package (with include/ and lib/ in it). Empty: the one of the Python found")
# The oldest torch the libraries run on; a newer torch's headers then offer nothing newer than that.
set(NVFP4_DSMLA_TORCH_TARGET 2.10)
set(_torch_target_version 0x020a000000000000)

# Under pip's build isolation torch is not importable, but the environment that is being installed
# into is still the interpreter's own, so its site-packages are looked into as well.
set(_find_torch [=[
import importlib.util, pathlib, sys, sysconfig
spec = importlib.util.find_spec("torch")
places = list(spec.submodule_search_locations or []) if spec else []
places += [pathlib.Path(sysconfig.get_path(p)) / "torch" for p in ("platlib", "purelib")]
for place in places:
    if (pathlib.Path(place) / "version.py").is_file():
        print(place, end="")
        break
else:
    places = [*sys.path, *map(sysconfig.get_path, ("platlib", "purelib"))]
    sys.exit(", ".join(dict.fromkeys(p for p in places if p.endswith("-packages"))))
]=])

function(_nvfp4_dsmla_find_torch result)
  set(how "Install it with `pip install torch==2.13.0` and build with `pip install \
--no-build-isolation .`, or name its folder with -DNVFP4_DSMLA_TORCH_DIR=... (or the environment \
variable of that name)")
  set(dir "${NVFP4_DSMLA_TORCH_DIR}")
  if(NOT dir)
    set(dir "$ENV{NVFP4_DSMLA_TORCH_DIR}")
  endif()
  if(NOT dir)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c "${_find_torch}"
      OUTPUT_VARIABLE dir ERROR_VARIABLE places RESULT_VARIABLE status
      ERROR_STRIP_TRAILING_WHITESPACE)
    if(NOT status EQUAL 0)
      message(FATAL_ERROR "The package torch was looked for with ${Python_EXECUTABLE}, and is in none \
of: ${places}. ${how}.")
    endif()
  endif()
  foreach(file version.py include/torch/csrc/stable/library.h lib/libtorch_cpu.so)
    if(NOT EXISTS "${dir}/${file}")
      message(FATAL_ERROR "${dir} was taken for the folder of torch >= ${NVFP4_DSMLA_TORCH_TARGET}, \
but ${file} is not in it. ${how}.")
    endif()
  endforeach()
  file(STRINGS "${dir}/version.py" version REGEX "^__version__")
  string(REGEX MATCH "[0-9]+\\.[0-9]+" version "${version}")
  if(version VERSION_LESS NVFP4_DSMLA_TORCH_TARGET)
    message(FATAL_ERROR "torch >= ${NVFP4_DSMLA_TORCH_TARGET} is needed, ${dir} is ${version}. ${how}.")
  endif()
  message(STATUS "torch ${version}: ${dir}")
  set(${result} "${dir}" PARENT_SCOPE)
endfunction()

_nvfp4_dsmla_find_torch(_torch)

add_library(nvfp4_dsmla_torch_cpu SHARED IMPORTED)
set_target_properties(nvfp4_dsmla_torch_cpu PROPERTIES IMPORTED_LOCATION "${_torch}/lib/libtorch_cpu.so")

# torch is imported with local symbols, so each library names the one it takes them from (DT_NEEDED),
# although the linker, seeing no use of it, might leave it out.
add_library(nvfp4_dsmla_torch INTERFACE)
target_include_directories(nvfp4_dsmla_torch SYSTEM INTERFACE "${_torch}/include")
target_compile_options(nvfp4_dsmla_torch INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${_torch}/include/=>")
target_compile_definitions(nvfp4_dsmla_torch INTERFACE TORCH_TARGET_VERSION=${_torch_target_version})
target_link_options(nvfp4_dsmla_torch INTERFACE -Wl,--no-as-needed)
target_link_libraries(nvfp4_dsmla_torch INTERFACE nvfp4_dsmla_torch_cpu)

# nvfp4_dsmla_add_torch_cuda(): defines nvfp4_dsmla_torch_cuda. The library at hand may be a CPU
# torch's, and a linker wants a file for each DT_NEEDED entry; the entry is the file's soname and
# nothing else, so an empty library of that name, never installed, stands in for the real one.
function(nvfp4_dsmla_add_torch_cuda)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/stub/libtorch_cuda.cpp CONTENT "")
  add_library(nvfp4_dsmla_torch_cuda_stub SHARED ${PROJECT_BINARY_DIR}/stub/libtorch_cuda.cpp)
  set_target_properties(nvfp4_dsmla_torch_cuda_stub PROPERTIES
    OUTPUT_NAME torch_cuda LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/stub)
  add_library(nvfp4_dsmla_torch_cuda INTERFACE)
  target_compile_definitions(nvfp4_dsmla_torch_cuda INTERFACE USE_CUDA)
  target_link_libraries(nvfp4_dsmla_torch_cuda INTERFACE nvfp4_dsmla_torch nvfp4_dsmla_torch_cuda_stub)
endfunction()
