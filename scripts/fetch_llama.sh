#!/usr/bin/env bash
# Puts the pinned llama.cpp source into the cache folder and prints its path.
#
# The source is the folder vendor/llama.cpp of the source package of llama-cpp-python, fetched by pip and
# checked against a sha256. QEVICT_LLAMA_SOURCE names a checkout of your own to be used in its place.
set -euo pipefail
. "$(dirname "$0")/common.sh"

version=0.3.36
sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
archive="llama_cpp_python-$version.tar.gz"

if [ -n "${QEVICT_LLAMA_SOURCE:-}" ]; then
  [ -f "$QEVICT_LLAMA_SOURCE/ggml/src/ggml-backend-impl.h" ] ||
    die "QEVICT_LLAMA_SOURCE=$QEVICT_LLAMA_SOURCE is no llama.cpp checkout (ggml/src/ggml-backend-impl.h is missing)"
  realpath "$QEVICT_LLAMA_SOURCE"
  exit 0
fi

target="$cache_dir/llama.cpp-$version"
link="$cache_dir/llama.cpp"
if [ -f "$target/.complete" ] && [ "$(readlink "$link")" = "llama.cpp-$version" ]; then
  echo "$target"
  exit 0
fi

lock_cache fetch-llama
work="$cache_dir/fetch.$$"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"

has_archive() { [ -f "$1" ] && echo "$sha256  $1" | sha256sum --check --status; }

# pip compares the hash first and then asks the package's build system for its metadata, which would
# set up a compiler toolchain for nothing. A stand-in build system answers at once.
download() {
  mkdir -p "$work/backend/scikit_build_core"
  touch "$work/backend/scikit_build_core/__init__.py"
  cat >"$work/backend/scikit_build_core/build.py" <<PY
import pathlib

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    name = "llama_cpp_python-$version.dist-info"
    folder = pathlib.Path(metadata_directory, name)
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: $version\n")
    return name
PY
  printf 'llama-cpp-python==%s --hash=sha256:%s\n' "$version" "$sha256" >"$work/requirements.txt"
  local pip=(python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all:
    --dest "$work" --requirement "$work/requirements.txt")
  PYTHONPATH="$work/backend" "${pip[@]}" --no-build-isolation >&2 || {
    note "the quick download failed; trying again with the package's own build system"
    "${pip[@]}" >&2
  }
}

if ! has_archive "$cache_dir/$archive"; then
  step "fetching llama.cpp (source package llama-cpp-python $version, 77 MB)"
  download || die "pip could not fetch llama-cpp-python==$version with sha256 $sha256"
  has_archive "$work/$archive" || die "the downloaded $archive has a wrong sha256"
  mv "$work/$archive" "$cache_dir/$archive"
fi

step "unpacking llama.cpp"
rm -rf "$target"
tar -xzf "$cache_dir/$archive" -C "$work" "llama_cpp_python-$version/vendor/llama.cpp"
mv "$work/llama_cpp_python-$version/vendor/llama.cpp" "$target"
touch "$target/.complete"
ln -sfn "llama.cpp-$version" "$link"
echo "$target"
