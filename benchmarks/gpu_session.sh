#!/usr/bin/env bash
# All that needs a GPU, in one go and in less than nine minutes: what is missing is built, decode is
# tested by mma.sync, then all tests and compute-sanitizer run side by side, then the benchmarks
# alone.
#
#   benchmarks/gpu_session.sh [tests] [sanitize] [bench]        all three by default
#
# Nothing is installed: the package is put together in build/gpu_session. A stage that fails does
# not stop the others; a summary comes last, and the status is 1 if anything failed.
#
#   PYTHON                   python3 by default; with torch, numpy, pybind11, pytest, hypothesis,
#                            rich, typer, matplotlib
#   OUT                      folder of the logs, benchmarks.json and benchmarks.png
#   NVFP4_DSMLA_PREBUILT     folder with libnvfp4_dsmla.so and libnvfp4_dsmla_cuda.so to test
#                            instead of building them
#   NVFP4_DSMLA_CUDA_ARCHS   what to build for; by default the GPU at hand
#   NVFP4_DSMLA_PYTEST_ARGS  instead of: -m 'not slow'
#   NVFP4_DSMLA_BENCH_ARGS   such as --quick
#   NVFP4_DSMLA_SECONDS      for everything together, 520 by default
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
self=$root/benchmarks/$(basename "$0")
cd "$root" || exit 1
python=$(command -v "${PYTHON:-python3}") || { echo "no ${PYTHON:-python3}"; exit 1; }
out=${OUT:-benchmarks/out}
work=build/gpu_session
package=$work/package
mkdir -p "$out" "$work"
out=$(cd "$out" && pwd)
export PYTHONPATH="$root/$package:$root/tests:$root" PYTHONUNBUFFERED=1

# The log of a stage. At most eight files go to $out.
log_of() { [[ $1 == build ]] && echo "$work/build.log" || echo "$out/$1.log"; }

# run NAME SECONDS COMMAND..: into its log, and how it went into NAME.status.
run() {
  local name=$1 limit=$2 start=$SECONDS left=$((deadline - SECONDS)) status
  shift 2
  ((limit > left)) && limit=$left
  ((limit < 1)) && limit=1
  # By SIGINT, which a job in the background is born to ignore: pytest then says what has failed.
  env --default-signal=INT timeout --signal=INT --kill-after=15 "$limit" "$@" \
    >"$(log_of "$name")" 2>&1
  status=$?
  local outcome="FAILED ($status)"
  ((status == 0)) && outcome=passed
  ((status == 124 || status == 137)) && outcome="STOPPED after $limit s"
  printf '%-10s %-22s %4d s\n' "$name" "$outcome" $((SECONDS - start)) >"$work/$name.status"
  return "$status"
}

summary() {
  local name
  for name in build tests mma memcheck racecheck initcheck bench; do
    [[ -f $work/$name.status ]] || continue
    printf '\n== %s\n' "$name"
    [[ $name == bench ]] && grep -E 'of the (copy|floor)$' "$out/bench.log"
    tail -n 8 "$(log_of "$name")" | cut -c 1-160
  done
  printf '\n== summary\n'
  cat "$work"/*.status
  if grep -qv ' passed ' "$work"/*.status; then exit 1; fi
  exit 0
}

gpu_archs() {
  # From 9.0 on, the instructions of one chip alone are behind the suffix.
  "$python" -c 'import torch
major, minor = torch.cuda.get_device_capability()
print(major, minor, "a" if major >= 9 else "", "-real", sep="")'
}

build() {
  set -e
  local archs=${NVFP4_DSMLA_CUDA_ARCHS:-$(gpu_archs)} generator=() target=all libraries=$work/build
  command -v ninja >/dev/null && generator=(-G Ninja)
  if [[ -n ${NVFP4_DSMLA_PREBUILT:-} ]]; then
    target=_C # it belongs to one version of Python, so it is always built
    libraries=$NVFP4_DSMLA_PREBUILT
  fi
  cmake -S . -B "$work/build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DBUILD_TESTING=OFF \
    -DPython_EXECUTABLE="$python" -DNVFP4_DSMLA_CUDA=ON -DNVFP4_DSMLA_CUDA_ARCHS="$archs"
  cmake --build "$work/build" --parallel --target "$target"
  rm -rf "$package"
  mkdir -p "$package"
  cp -r python/nvfp4_dsmla "$package/"
  cp -r tests/golden "$package/nvfp4_dsmla/"
  cp "$work"/build/_C*.so "$libraries"/libnvfp4_dsmla.so "$libraries"/libnvfp4_dsmla_cuda.so \
    "$package/nvfp4_dsmla/"
  "$python" -c 'import nvfp4_dsmla, torch
print(*nvfp4_dsmla.loaded_libraries(), torch.__version__, torch.cuda.get_device_name())'
}

run_pytest() {
  local parallel=()
  "$python" -c 'import xdist' 2>/dev/null && parallel=(-n $(($(nproc) > 4 ? $(nproc) - 2 : 2)))
  # Two threads a worker: PyTorch would start one a core in each, for the references.
  NVFP4_DSMLA_REQUIRE_CUDA=1 TORCHINDUCTOR_COMPILE_THREADS=2 OMP_NUM_THREADS=2 "$python" -m pytest \
    -v --tb=short -p no:cacheprovider -p no:benchmark -o minversion=8.0 --durations=10 \
    "${parallel[@]}" "$@"
}

tests() {
  local args=(-m "not slow")
  [[ -n ${NVFP4_DSMLA_PYTEST_ARGS:-} ]] && eval "args=($NVFP4_DSMLA_PYTEST_ARGS)"
  run_pytest "${args[@]}" tests
}

# Decode by mma.sync, which on Hopper serves no call by itself.
mma() {
  NVFP4_DSMLA_DECODE=mma run_pytest -m "cuda and not slow" tests/test_decode.py
}

sanitize() {
  local sanitizer
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  # Without caching every tensor is an allocation of its own, whose end memcheck knows.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$1" --error-exitcode 1 --print-limit 20 \
    --target-processes application-only "$python" -m benchmarks.sanitizer_cases
}

bench() {
  local args=()
  read -ra args <<<"${NVFP4_DSMLA_BENCH_ARGS:-}"
  "$python" -m benchmarks all --out "$out" "${args[@]}"
}

# `timeout` runs programs, not functions: so this script calls itself for one.
if [[ ${NVFP4_DSMLA_STAGE:-} ]]; then
  "$@"
  exit
fi
export NVFP4_DSMLA_STAGE=1

deadline=$((SECONDS + ${NVFP4_DSMLA_SECONDS:-520}))
stages=" ${*:-tests sanitize bench} "
wanted() { [[ $stages == *" $1 "* ]]; }
rm -f "$work"/*.status

run build 240 "$self" build || summary
if wanted tests; then
  run mma 90 "$self" mma # 13 s on an H200
  run tests 300 "$self" tests &
fi
if wanted sanitize; then
  for tool in memcheck racecheck initcheck; do
    run "$tool" 240 "$self" sanitize "$tool" &
  done
fi
wait
if wanted bench; then run bench 400 "$self" bench; fi
summary
