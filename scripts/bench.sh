#!/usr/bin/env bash
# Measures kernels and whole models against llama.cpp in the same run and leaves the results, with
# the machine's facts, under bench/results/<machine>/. Wants a machine that does nothing else.
#
#   scripts/bench.sh [--out DIR] [part ...]
#
# Parts, by default all: attention (3 minutes on two cores), model (25), long (30), prompt (12),
# avx2 (8).
set -euo pipefail
. "$(dirname "$0")/common.sh"

machine=$(lscpu | sed -n 's/^Model name: *//p' | head -1 | tr -cs 'A-Za-z0-9' '-' | sed 's/-$//' | tr 'A-Z' 'a-z')
out="$repo_dir/bench/results/$machine"
parts=()
while [ $# -gt 0 ]; do
  case "$1" in
    --out) out=${2:?scripts/bench.sh: --out needs a folder}; shift 2 ;;
    -h | --help) sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 0 ;;
    attention | model | long | prompt | avx2) parts+=("$1"); shift ;;
    *) echo "scripts/bench.sh: unknown part $1 (attention, model, long, prompt, avx2)" >&2; exit 2 ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=(attention model long prompt avx2)

build_release
model="$("$repo_dir/scripts/models.py" qwen2.5-coder-0.5b)"
mkdir -p "$out"

# Scores are kept, but the budget never binds: everything stays full precision.
scored=preset=qevict,budget=16GiB
# Whatever is older than the recents at 2 bits, nothing evicted.
packed=preset=pack,budget=100%,bits=2

# measure NAME ARGUMENTS...: one run of `qevict bench`, its JSON to a file.
measure() {
  local name="$1"
  shift
  step "$name: qevict bench $*"
  build/release/bin/qevict bench "$@" -o json | sed "s#$(dirname "$model")/##g" >"$out/$name.json"
}

for part in "${parts[@]}"; do
  case "$part" in
    attention)
      measure attention attention --tokens 16384 --tiers full,packed2,token -r 21
      measure attention-32k attention --shapes 32/8x128 --tokens 32768 --tiers full -r 11 ;;
    model)
      measure model-16k model -m "$model" -p 512 -n 32 -d 16384 -r 5 \
        --cache "$scored" --cache "$scored,init_rows=0" --cache "$packed,codec=wf" \
        --cache "$packed,codec=token" --cache preset=qevict,budget=5%
      measure model-0 model -m "$model" -p 0 -n 64 -d 0 -r 11 --cache preset=full \
        --cache "$scored" ;;
    long)
      measure model-32k model -m "$model" -p 0 -n 32 -d 4000,32000 -r 5 \
        --cache "$packed,codec=wf" --cache "$packed,codec=token" \
        --cache preset=qevict,budget=20MiB ;;
    prompt)
      measure prompt-8k model -m "$model" -p 8192 -n 0 -d 0 -r 5 --cache "$scored,init_rows=0" ;;
    avx2)
      QEVICT_SIMD=avx2 measure avx2-16k model -m "$model" -p 0 -n 32 -d 16384 -r 5 \
        --cache "$packed,codec=wf" ;;
  esac
done
python3 bench/tables.py "$out" >"$out/README.md"
step "results are in $out"
