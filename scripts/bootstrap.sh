#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages that are missing: scripts/bootstrap.sh [demo|test]
#
# Without root rights, or on another distribution, it prints what is needed and exits with 2.
set -euo pipefail
. "$(dirname "$0")/common.sh"

packages=(
  cmake ninja-build g++ ccache git ca-certificates
  python3 python3-venv python3-pip
  libcli11-dev nlohmann-json3-dev
)
if [ "${1:-demo}" = test ]; then
  packages+=(libgtest-dev libgmock-dev libbenchmark-dev valgrind clang libclang-rt-dev)
  if [ "$(uname -m)" = x86_64 ]; then
    packages+=(g++-aarch64-linux-gnu qemu-user-static)
  fi
fi

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  note "no apt here; these Debian packages, or what your distribution calls them, are needed: ${packages[*]}"
  command -v cmake >/dev/null && command -v ninja >/dev/null && command -v c++ >/dev/null || exit 2
  exit 0
fi

missing=()
for package in "${packages[@]}"; do
  status="$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)"
  [ "$status" = installed ] || missing+=("$package")
done

if [ "${#missing[@]}" -gt 0 ]; then
  install=(apt-get install -y --no-install-recommends "${missing[@]}")
  if [ "$(id -u)" = 0 ]; then
    sudo=()
  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    sudo=(sudo)
  else
    note "packages are missing; run this as root and try again:"
    note "  apt-get update && ${install[*]}"
    exit 2
  fi
  step "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  "${sudo[@]}" apt-get update -qq >&2
  "${sudo[@]}" "${install[@]}" -qq >/dev/null
fi

version="$(cmake --version | sed -n '1s/[^0-9]*//p')"
if [ "$(printf '3.25\n%s\n' "$version" | sort -V | head -n 1)" != 3.25 ]; then
  note "cmake $version is too old; 3.25 or newer is needed (for example from pip: python3 -m pip install cmake)"
  exit 2
fi
