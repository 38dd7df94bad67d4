#!/bin/bash
# Tests the NEON and the portable kernels under qemu, without CMake: cross compiles the kernels, their tests and GoogleTest
# (from /usr/src/googletest) statically, and runs a reduced set.
#   scripts/test_neon.sh [build folder] [gtest filter]
# Needs (Debian, Ubuntu): g++-aarch64-linux-gnu qemu-user-static googletest
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
build=${1:-$root/build/neon}
filter=${2:-"*Lengths/neon:*Rotations/neon:*Sinks/neon:*GroupSizes*/neon:*BrainFloat/neon:*Mask*/neon:RopeTable*:Isa*:Exp*:Tanh*:SimdScalar*"}
cxx=${CXX_AARCH64:-aarch64-linux-gnu-g++}
qemu=${QEMU_AARCH64:-qemu-aarch64-static}
gtest=/usr/src/googletest/googletest

for need in "$cxx" "$qemu"; do
  command -v "$need" > /dev/null || { echo "missing: $need" >&2; exit 77; }
done
[ -d "$gtest" ] || { echo "missing: $gtest (package googletest)" >&2; exit 77; }

mkdir -p "$build"
flags=(-std=c++20 -O2 -Wall -Wextra -ffp-contract=off -DQEVICT_HAVE_NEON=1 -I"$root/src" -I"$root/include" -I"$gtest/include")
kernels=$root/src/kernels
sources=("$gtest/src/gtest-all.cc" "$gtest/src/gtest_main.cc" "$root/src/base/rope.cc" "$root/src/base/parallel.cc"
  "$kernels"/{attention,attention_scalar,attention_neon,isa,rope_table,reference,attention_test_util}.cc
  "$kernels"/{attention_test,attention_mask_test,attention_math_test,rope_table_test}.cc)
headers=$(find "$root/src/base" "$kernels" -name '*.h' -newer "$build/stamp" 2> /dev/null || echo first)

objects=()
for source in "${sources[@]}"; do
  object=$build/$(basename "$source" .cc).o
  objects+=("$object")
  case $source in "$gtest"/*) changed="" ;; *) changed=$headers ;; esac
  if [ -n "$changed" ] || [ "$source" -nt "$object" ]; then
    "$cxx" "${flags[@]}" -I"$gtest" -c "$source" -o "$object"
  fi
done
"$cxx" -static -o "$build/kernels_test" "${objects[@]}" -pthread
touch "$build/stamp"
exec "$qemu" "$build/kernels_test" --gtest_brief=1 --gtest_filter="$filter"
