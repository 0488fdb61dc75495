# How every target is compiled: the language, the arithmetic, the warnings, the CUDA architectures.
# Says nothing about which files there are (CMakeLists.txt) or where torch is (TorchStable.cmake).

option(NVFP4_DSMLA_WERROR "Treat compiler warnings as errors" OFF)
set(NVFP4_DSMLA_CUDA AUTO CACHE STRING "Build the CUDA library: AUTO (where nvcc works), ON or OFF")
set_property(CACHE NVFP4_DSMLA_CUDA PROPERTY STRINGS AUTO ON OFF)
set(NVFP4_DSMLA_CUDA_ARCHS "" CACHE STRING
    "CUDA architectures, as in CMAKE_CUDA_ARCHITECTURES: 90a-real;100f-real;100-virtual. Empty: by the age of nvcc. few: a short list for every GPU")

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
# torch's libraries are in the process before ours, so no path to them belongs in the binaries.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH "")
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

# The record is a contract to the bit, so the arithmetic is what the source says: no contraction to
# fused multiply-adds, no fast-math. (Device code lives on fused multiply-adds; it says __fmul_rn where
# there must be none.) Without errno and floating-point traps, which nobody here reads, the compiler
# may vectorise.
set(_arithmetic -ffp-contract=off -fno-math-errno -fno-trapping-math)

add_library(nvfp4_dsmla_options INTERFACE)
target_compile_options(nvfp4_dsmla_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${_arithmetic};-Wall;-Wextra>"
  # Messages of failed checks carry __FILE__: the path in the repository, not one of this machine.
  "$<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-lineinfo>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>")
if(NVFP4_DSMLA_WERROR)
  target_compile_options(nvfp4_dsmla_options INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-Werror>" "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>")
endif()
target_include_directories(nvfp4_dsmla_options INTERFACE ${PROJECT_SOURCE_DIR}/csrc)

# nvfp4_dsmla_find_cuda(<result>): ON or OFF, by the option and by what is there; says why it is OFF.
function(nvfp4_dsmla_find_cuda result)
  set(${result} OFF PARENT_SCOPE)
  if(NOT NVFP4_DSMLA_CUDA MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "NVFP4_DSMLA_CUDA must be AUTO, ON or OFF, got '${NVFP4_DSMLA_CUDA}'.")
  endif()
  if(NVFP4_DSMLA_CUDA STREQUAL "OFF")
    message(STATUS "CUDA library: not built, NVFP4_DSMLA_CUDA is OFF")
    return()
  endif()

  # CMake itself looks in $CUDACXX and in PATH only, and remembers a failure.
  if(DEFINED CMAKE_CUDA_COMPILER AND NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)
  endif()
  find_program(NVFP4_DSMLA_NVCC nvcc
    HINTS ENV CUDA_HOME ENV CUDA_PATH
    PATHS /usr/local/cuda
    PATH_SUFFIXES bin)
  mark_as_advanced(NVFP4_DSMLA_NVCC)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND NVFP4_DSMLA_NVCC)
    set(ENV{CUDACXX} ${NVFP4_DSMLA_NVCC})
  endif()
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  include(CheckLanguage)
  check_language(CUDA)

  if(CMAKE_CUDA_COMPILER)
    # Asked before enable_language(CUDA), which could not be taken back.
    execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE version)
    string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" _ "${version}")
    set(version "${CMAKE_MATCH_1}")
    if(version VERSION_GREATER_EQUAL 12.0)
      set(${result} ON PARENT_SCOPE)
      return()
    endif()
    set(why "${CMAKE_CUDA_COMPILER} is of CUDA '${version}'; C++20 in device code needs 12.0")
  elseif(NVFP4_DSMLA_NVCC OR DEFINED ENV{CUDACXX})
    set(why "$ENV{CUDACXX} was found, but it does not compile an empty file; its output is in \
${CMAKE_BINARY_DIR}/CMakeFiles (often the host compiler is newer than this nvcc accepts: set \
CUDAHOSTCXX)")
  else()
    set(why "no nvcc in $CUDACXX, $CUDA_HOME/bin, $CUDA_PATH/bin, PATH or /usr/local/cuda/bin")
  endif()
  if(NVFP4_DSMLA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "NVFP4_DSMLA_CUDA is ON, but the CUDA library cannot be built: ${why}.")
  endif()
  message(STATUS "CUDA library: not built, ${why}")
endfunction()

# nvfp4_dsmla_cuda_archs(<flags> <names>): the nvcc flags of NVFP4_DSMLA_CUDA_ARCHS, and what they
# build, in NVIDIA's names (sm_90a,compute_100). CMake's own CMAKE_CUDA_ARCHITECTURES knows the
# family targets (100f) from version 4.1 on only.
function(nvfp4_dsmla_cuda_archs flags names)
  string(REPLACE "," ";" archs "${NVFP4_DSMLA_CUDA_ARCHS}")
  if(archs STREQUAL "few")
    # One plain chip, one with 90a's instructions, one that converts e2m1 itself where nvcc knows it.
    # The PTX is for every other GPU: of 8.0, the oldest that sparse decode takes.
    set(archs 75-real 80 90a-real)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.9)
      list(APPEND archs 120f-real)
    endif()
  elseif(NOT archs)
    set(archs 75-real 80-real 86-real 89-real 90a-real)
    # e2m1 conversion instructions exist on suffixed targets alone: 100f runs on every 10.x, 120f on
    # every 12.x; CUDA 12.8 knows the chips but not the families. The PTX is for chips to come.
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.9)
      list(APPEND archs 100f-real 120f-real 100-virtual)
    elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
      list(APPEND archs 100a-real 120a-real 100-virtual)
    else()
      list(APPEND archs 90-virtual)
    endif()
  endif()
  set(gencode "")
  set(built "")
  foreach(arch IN LISTS archs)
    if(NOT arch MATCHES "^([0-9]+[af]?)(-real|-virtual)?$")
      message(FATAL_ERROR "NVFP4_DSMLA_CUDA_ARCHS must be few, or a list such as 90a-real;100f-real;\
100-virtual, got '${arch}' in it.")
    endif()
    set(number ${CMAKE_MATCH_1})
    if(NOT CMAKE_MATCH_2 STREQUAL "-virtual")
      list(APPEND gencode "-gencode=arch=compute_${number},code=sm_${number}")
      list(APPEND built sm_${number})
    endif()
    if(NOT CMAKE_MATCH_2 STREQUAL "-real")
      list(APPEND gencode "-gencode=arch=compute_${number},code=compute_${number}")
      list(APPEND built compute_${number})
    endif()
  endforeach()
  list(JOIN built "," built)
  set(${flags} "${gencode}" PARENT_SCOPE)
  set(${names} "${built}" PARENT_SCOPE)
endfunction()
