#!/usr/bin/env bash
# Runs every test on a clean clone: scripts/test.sh [stage...]
#
# Stages, in this order; without arguments all but `model`. `all` stands for every one.
#   core        release build without llama.cpp: unit tests, layers, installed package
#   sanitizers  unit tests under asan and ubsan, parallel tests under tsan
#   aarch64     unit tests cross compiled and run under qemu (on x86-64)
#   fuzz        each fuzz target for QEVICT_FUZZ_SECONDS (60)
#   plugin      llama.cpp, the plug-in and the command: their own tests
#   e2e         llama.cpp's unmodified programs with the plug-in and tiny models (about 3 minutes)
#   model       the same with the real models (about 20 minutes)
# Everything fetched or built outside this folder is kept in QEVICT_CACHE_DIR (~/.cache/qevict).
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$repo_dir"

# configure_and_build PRESET OPTIONS...
configure_and_build() {
  local preset="$1"
  shift
  step "$preset: building"
  cmake --preset "$preset" "$@" >"$log_dir/$preset-configure.log" 2>&1 ||
    { cat "$log_dir/$preset-configure.log" >&2; die "configuring the preset $preset failed"; }
  grep -E 'llama.cpp|is off' "$log_dir/$preset-configure.log" >&2 || true
  cmake --build --preset "$preset" --parallel "$jobs" >"$log_dir/$preset-build.log" 2>&1 ||
    { grep -vE '^\[[0-9]+/[0-9]+\] (Building|Linking)' "$log_dir/$preset-build.log" >&2; die "building the preset $preset failed"; }
}

# run_tests DIRECTORY NAME ctest-options... : runs the tests that the options choose, if there are any.
run_tests() {
  local dir="$1" name="$2" count
  shift 2
  count="$(ctest --test-dir "$dir" -N "$@" | sed -n 's/^Total Tests: //p')"
  if [ "${count:-0}" = 0 ]; then
    note "$name: there are no such tests"
    return 0
  fi
  step "$name: testing"
  ctest --test-dir "$dir" --output-on-failure --no-tests=error "$@"
}

stage_core() {
  configure_and_build ci -DQEVICT_BUILD_PLUGIN=OFF
  cmake --build --preset ci --target all_verify_interface_header_sets >"$log_dir/headers.log" 2>&1 ||
    { cat "$log_dir/headers.log" >&2; die "an installed header does not compile alone"; }
  run_tests build/release core --parallel "$jobs" -L '^(unit|install)$'
}

stage_sanitizers() {
  configure_and_build asan-ubsan
  ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 \
    run_tests build/asan-ubsan asan-ubsan --parallel "$jobs" -L '^unit$'
  if [ -n "$(grep -rlw --include=CMakeLists.txt parallel src tests)" ]; then
    configure_and_build tsan
    TSAN_OPTIONS=halt_on_error=1 run_tests build/tsan tsan -L '^parallel$'
  fi
}

stage_aarch64() {
  if [ "$(uname -m)" != x86_64 ]; then
    note "aarch64: this machine is no x86-64, the core stage ran natively"
    return 0
  fi
  configure_and_build aarch64
  run_tests build/aarch64 aarch64 --parallel "$jobs" -L '^unit$' -LE '^slow$'
}

stage_fuzz() {
  local seconds="${QEVICT_FUZZ_SECONDS:-60}" target name corpus failed=0
  local -A running=()
  if [ -z "$(grep -rlE --include=CMakeLists.txt '^ *qevict_fuzz\(' src fuzz)" ]; then
    note "fuzz: there are no fuzz targets"
    return 0
  fi
  configure_and_build fuzz
  for target in build/fuzz/bin/*_fuzz; do
    name="$(basename "$target")"
    step "fuzz: $name for $seconds s"
    corpus="build/fuzz/corpus/$name"
    mkdir -p "$corpus" "fuzz/corpus/$name"
    "$target" -max_total_time="$seconds" -print_final_stats=1 -artifact_prefix="build/fuzz/$name-" \
      "$corpus" "fuzz/corpus/$name" >"$log_dir/$name.log" 2>&1 &
    running[$name]=$!
  done
  for name in "${!running[@]}"; do
    wait "${running[$name]}" && note "$name: $(grep -E 'number_of_executed_units' "$log_dir/$name.log" || true)" && continue
    tail -n 40 "$log_dir/$name.log" >&2
    failed=1
  done
  [ "$failed" = 0 ] || die "a failing input was found; it is in build/fuzz/"
}

build_with_llama() {
  [ -n "${llama_build:-}" ] && return 0
  llama_source="$("$repo_dir/scripts/fetch_llama.sh")"
  llama_build="$("$repo_dir/scripts/build_llama.sh")"
  configure_and_build ci -DQEVICT_BUILD_PLUGIN=ON \
    -DQEVICT_LLAMA_SOURCE="$llama_source" -DQEVICT_LLAMA_BUILD="$llama_build"
}

# Tests of these two stages use every core themselves, so they run one after another.
stage_plugin() {
  build_with_llama
  run_tests build/release plugin -L '^plugin$' -LE '^model$' -E '^e2e_'
}

stage_e2e() {
  build_with_llama
  run_tests build/release e2e -L '^plugin$' -LE '^model$' -R '^e2e_'
}

stage_model() {
  build_with_llama
  run_tests build/release model -L '^model$'
}

all=(core sanitizers aarch64 fuzz plugin e2e model)
stages=("$@")
[ "$#" -gt 0 ] || stages=(core sanitizers aarch64 fuzz plugin e2e)
[ "$*" != all ] || stages=("${all[@]}")
for stage in "${stages[@]}"; do
  [[ " ${all[*]} " = *" $stage "* ]] || die "no stage $stage; there are ${all[*]}"
done

"$repo_dir/scripts/bootstrap.sh" test
use_ccache "$repo_dir"
log_dir=build/logs
mkdir -p "$log_dir"
for stage in "${stages[@]}"; do
  "stage_$stage"
done
step "all tests passed: ${stages[*]}"
