#!/usr/bin/env bash
# Builds llama.cpp once, with shared libraries, and prints the build folder. A second call is instant.
#
# The folder's name holds version, flags, compiler and processor, since llama.cpp is compiled for the
# processor it is built on. QEVICT_LLAMA_SOURCE names a checkout of your own; QEVICT_LLAMA_BUILD, a
# finished build of it, which is then used as it is.
set -euo pipefail
. "$(dirname "$0")/common.sh"

targets=(llama-server llama-bench llama-perplexity llama-completion llama-quantize llama-speculative-simple)
flags=(
  -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=ON -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON
  -DLLAMA_BUILD_UI=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
)

# ggml's AMX kernels need leave from the kernel, which virtual machines may not give: programs then end
# with an illegal instruction or a segmentation fault. Nothing here is measured with AMX.
if [ "$(uname -m)" = x86_64 ]; then
  no_amx="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
  flags+=("-DCMAKE_C_FLAGS=$no_amx" "-DCMAKE_CXX_FLAGS=$no_amx")
fi

if [ -n "${QEVICT_LLAMA_BUILD:-}" ]; then
  [ -f "$QEVICT_LLAMA_BUILD/bin/libllama.so" ] ||
    die "QEVICT_LLAMA_BUILD=$QEVICT_LLAMA_BUILD holds no bin/libllama.so; build it with -DBUILD_SHARED_LIBS=ON"
  realpath "$QEVICT_LLAMA_BUILD"
  exit 0
fi

source_dir="$("$repo_dir/scripts/fetch_llama.sh")"
if [ -n "${QEVICT_LLAMA_SOURCE:-}" ]; then
  name=own
  version="$source_dir $(git -C "$source_dir" rev-parse HEAD 2>/dev/null || true)"
else
  name="${source_dir##*-}"
  version="$name"
fi
cpu="$(grep -m1 -E '^(flags|Features)' /proc/cpuinfo || uname -m)"
compiler="$("${CXX:-c++}" --version | head -n 1)"
key="$(printf '%s\n' "$version" "${flags[*]}" "${targets[*]}" "$cpu" "$compiler" | sha256sum | cut -c1-10)"
build_dir="$cache_dir/llama-build-$name-$key"
stamp="$build_dir/.built"

finish() {
  if [ "$name" != own ]; then
    ln -sfn "$(basename "$build_dir")" "$cache_dir/llama-build"
  fi
  echo "$build_dir"
  exit 0
}

[ -f "$stamp" ] && finish
lock_cache build-llama
[ -f "$stamp" ] && finish

step "building llama.cpp ($name, $jobs jobs): about five minutes on two cores, once"
use_ccache "$cache_dir"
cmake -S "$source_dir" -B "$build_dir" -G Ninja "${flags[@]}" >"$build_dir.log" 2>&1 ||
  die "configuring llama.cpp failed; see $build_dir.log"
if [ -t 2 ]; then
  cmake --build "$build_dir" --parallel "$jobs" --target "${targets[@]}" >&2
else
  cmake --build "$build_dir" --parallel "$jobs" --target "${targets[@]}" >>"$build_dir.log" 2>&1 ||
    { tail -n 30 "$build_dir.log" >&2; die "building llama.cpp failed; see $build_dir.log"; }
fi
touch "$stamp"
finish
