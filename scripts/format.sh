#!/usr/bin/env bash
# Formats every C++ file of the repository with clang-format 14; with --check, lists those that differ.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cd "$repo_dir"

tool="$(command -v clang-format-14 || command -v clang-format)" || die "install clang-format-14"
case "$("$tool" --version)" in
  *"version 14."*) ;;
  *) die "$("$tool" --version) would format otherwise than clang-format 14" ;;
esac
mode=(-i)
[ "${1:-}" = --check ] && mode=(--dry-run --Werror)
git ls-files -z --cached --others --exclude-standard '*.h' '*.cc' | xargs -0 -r "$tool" "${mode[@]}"
