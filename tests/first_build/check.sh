#!/usr/bin/env bash
# The demo's build needs no GoogleTest, and a build folder that was used without the plug-in gets it back:
# check.sh WORK_FOLDER LLAMA_SOURCE LLAMA_BUILD. Nothing is compiled.
set -euo pipefail
. "$(dirname "$0")/../../scripts/common.sh"
work="$1" QEVICT_LLAMA_SOURCE="$2" QEVICT_LLAMA_BUILD="$3"
rm -rf "$work"

# configure NAME OPTIONS... : the demo's own way, in a folder of its own
configure() {
  local name="$1"
  shift
  configure_release -B "$work" "$@" >"$work.log" 2>&1 || { tail -n 20 "$work.log" >&2; die "$name: configuring fails"; }
}
# check_targets NAME: what the demo builds is there, and no file of it is a test or of GoogleTest.
check_targets() {
  local commands
  commands="$(ninja -C "$work" -t commands qevict ggml-qevict)" || die "$1: the demo's targets are missing"
  ! grep -qiE 'gtest|gmock|_test\.cc' <<<"$commands" || die "$1: the demo builds tests"
}

hidden=(-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON)
llama=(-DQEVICT_LLAMA_SOURCE="$QEVICT_LLAMA_SOURCE" -DQEVICT_LLAMA_BUILD="$QEVICT_LLAMA_BUILD")
configure "without GoogleTest" "${hidden[@]}" "${llama[@]}"
check_targets "without GoogleTest"

# scripts/test.sh core uses the folder of the README's commands, without llama.cpp.
configure "core alone" "${hidden[@]}" -DQEVICT_BUILD_PLUGIN=OFF
readme="$(grep -o 'cmake --preset release .*' "$repo_dir/README.md" | head -n 1)"
[ -n "$readme" ] || die "the README has no line that configures"
read -ra words <<<"${readme//\$HOME\/llama.cpp\/build/$QEVICT_LLAMA_BUILD}"
cmake -S "$repo_dir" -B "$work" "${words[@]:1}" "${hidden[@]}" "${llama[@]}" >"$work.log" 2>&1 ||
  { tail -n 20 "$work.log" >&2; die "the README's line fails"; }
check_targets "the README's line"
rm -rf "$work" "$work.log"
