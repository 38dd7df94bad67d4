# Shared by the scripts of this folder; sourced, not run.

repo_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cache_dir="${QEVICT_CACHE_DIR:-$HOME/.cache/qevict}"
jobs="${QEVICT_JOBS:-$(nproc)}"

# Progress goes to stderr, so that scripts can print a result on stdout.
step() { printf '\n==> [%4ds] %s\n' "$SECONDS" "$*" >&2; }
note() { printf '    %s\n' "$*" >&2; }
die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# Runs the rest of the script under a lock, so that two runs never write one folder of the cache.
lock_cache() {
  mkdir -p "$cache_dir"
  exec 9>"$cache_dir/$1.lock"
  flock 9
}

# Makes compilers go through ccache where it is installed. $1 is the folder below which paths count as
# relative, so that another checkout or cache folder gets the same hits.
use_ccache() {
  if command -v ccache >/dev/null; then
    export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR="$1"
  fi
}

# configure_release OPTIONS... : the command and the plug-in alone, for the llama.cpp of QEVICT_LLAMA_SOURCE
# and QEVICT_LLAMA_BUILD. No test is built, so that GoogleTest need not be there.
configure_release() {
  cmake -S "$repo_dir" --preset release -DQEVICT_BUILD_TESTS=OFF "$@"
}

# Installs what is missing, fetches and builds llama.cpp, and builds the command and the plug-in in
# build/release. Leaves the working folder at the repository.
build_release() {
  local llama_source llama_build
  "$repo_dir/scripts/bootstrap.sh" demo
  llama_source="$("$repo_dir/scripts/fetch_llama.sh")"
  llama_build="$("$repo_dir/scripts/build_llama.sh")"
  step "building qevict"
  use_ccache "$repo_dir"
  cd "$repo_dir"
  configure_release -DQEVICT_LLAMA_SOURCE="$llama_source" -DQEVICT_LLAMA_BUILD="$llama_build" >/dev/null
  cmake --build --preset release --parallel "$jobs" --target qevict ggml-qevict >&2
}

# Creates the virtual environment $1 of the cache with the exact requirements that follow; prints its python.
python_env() {
  local dir="$cache_dir/venv-$1" wanted
  shift
  wanted="$*"
  if [ "$(cat "$dir/.requirements" 2>/dev/null)" != "$wanted" ] || ! "$dir/bin/python" -c '' 2>/dev/null; then
    note "creating the Python environment $dir ($wanted)"
    rm -rf "$dir"
    python3 -m venv "$dir" >&2 || die "python3 cannot create a virtual environment; install python3-venv"
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2 ||
      die "pip could not install $wanted"
    printf '%s\n' "$wanted" >"$dir/.requirements"
  fi
  printf '%s\n' "$dir/bin/python"
}
