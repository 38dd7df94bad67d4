#!/usr/bin/env bash
# From a clean clone to the first answer: installs what is missing, builds, fetches a small model, and
# answers a question about a long text with a fifth of the cache, beside the full cache.
#
# Further options go to `qevict run`: scripts/demo.sh --budget 10%
set -euo pipefail
. "$(dirname "$0")/common.sh"

"$repo_dir/scripts/bootstrap.sh" demo
llama_source="$("$repo_dir/scripts/fetch_llama.sh")"
llama_build="$("$repo_dir/scripts/build_llama.sh")"
model="$("$repo_dir/scripts/models.py" smollm2)"

step "building qevict"
use_ccache "$repo_dir"
cd "$repo_dir"
cmake --preset release -DQEVICT_BUILD_PLUGIN=ON \
  -DQEVICT_LLAMA_SOURCE="$llama_source" -DQEVICT_LLAMA_BUILD="$llama_build" >/dev/null
cmake --build --preset release --parallel "$jobs" --target qevict ggml-qevict >&2

step "running: a budget of 20%, then the full cache"
exec build/release/bin/qevict run -m "$model" -f tests/data/dorian_gray.txt -c 8192 -n 256 \
  --budget 20% --compare "$@"
