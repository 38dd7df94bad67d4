#!/usr/bin/env bash
# From a clean clone to the first answer: installs what is missing, builds, fetches a small model, and
# answers a question about a long text with a fifth of the cache, beside the full cache.
#
# Further options go to `qevict run`: scripts/demo.sh --budget 10%
set -euo pipefail
. "$(dirname "$0")/common.sh"

build_release
model="$("$repo_dir/scripts/models.py" smollm2)"

step "running: a budget of 20%, then the full cache"
exec build/release/bin/qevict run -m "$model" -f tests/data/dorian_gray.txt -c 8192 -n 256 \
  --budget 20% --compare "$@"
