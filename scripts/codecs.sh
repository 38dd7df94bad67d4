#!/usr/bin/env bash
# Measures packed formats: KL against the full cache on three models (everything but sinks and recents
# packed, nothing evicted), time and bytes in the kernels, and KL along a long answer. Then writes the
# tables and the pictures of docs/codec-measurements.md from the results.
#
#   scripts/codecs.sh --text FILE --calibration FILE [--out DIR] [--models NAMES] [--groups NAMES]
#                     [--quick] [part ...]
#
# --models: of qwen2.5-coder-0.5b smollm2 gemma3-270m, by default all, separated by commas.
# --groups: of kivi papers token wf, what `field` measures, by default all.
# --quick: two chunks (2,048 positions) everywhere, to see that all works.
# Parts, by default all: calibrate (bits of layers, on another text; half an hour on two cores), cells
# (wf with these, at four sizes, 40,960 positions, Gemma 8,192; an hour and a half), field (all formats,
# 8,192 positions; two hours), field-floor (an exact cache, and QEvict's own format), depth (4,000
# generated tokens), kernels, table. A part's results are files per model, so that two cores are used
# best by two processes on one core each (taskset), with other models or parts.
# The texts are WikiText-2's test file (raw) and, for calibrate, another one, such as its validation
# file; neither is part of the repository.
set -euo pipefail
. "$(dirname "$0")/common.sh"

out="$repo_dir/bench/results/codecs"
text='' calibration=''
models=(qwen2.5-coder-0.5b smollm2 gemma3-270m)
cell_chunks=40 field_chunks=8
groups=(kivi papers token wf)
parts=()
while [ $# -gt 0 ]; do
  case "$1" in
    --text) text=${2:?scripts/codecs.sh: --text needs a file}; shift 2 ;;
    --calibration) calibration=${2:?scripts/codecs.sh: --calibration needs a file}; shift 2 ;;
    --models) IFS=, read -ra models <<<"${2:?scripts/codecs.sh: --models needs names}"; shift 2 ;;
    --quick) cell_chunks=2 field_chunks=2; shift ;;
    --out) out=${2:?scripts/codecs.sh: --out needs a folder}; shift 2 ;;
    -h | --help) sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 0 ;;
    --groups) IFS=, read -ra groups <<<"${2:?scripts/codecs.sh: --groups needs names}"; shift 2 ;;
    calibrate | cells | field | field-floor | depth | kernels | table) parts+=("$1"); shift ;;
    *) echo "scripts/codecs.sh: unknown part $1 (calibrate, cells, field, field-floor, depth, kernels, table)" >&2; exit 2 ;;
  esac
done
for group in "${groups[@]}"; do
  case "$group" in
    kivi | papers | token | wf) ;;
    *) echo "scripts/codecs.sh: unknown group $group (kivi, papers, token, wf)" >&2; exit 2 ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=(calibrate cells field field-floor depth kernels table)
for part in "${parts[@]}"; do
  case "$part" in
    kernels | table) continue ;;
    calibrate) file="$calibration" option=--calibration ;;
    *) file="$text" option=--text ;;
  esac
  [ -r "$file" ] || { echo "scripts/codecs.sh: $part needs $option FILE, not '$file'" >&2; exit 2; }
done
if [ -z "${QEVICT_COMMAND:-}" ]; then
  build_release
  QEVICT_COMMAND="$repo_dir/build/release/bin/qevict"
fi
mkdir -p "$out" "$cache_dir/statistics"

# Formats of the papers, and qevict's own beside the four sizes of `cells`.
kivi=(kivi,bits={1,2,3,4} kivi_clip,bits={2,3} kivi_post,bits={2,4} byte_grid,bits={2,3})
papers=(kvquant,bits={2,3,4} zipcache,bits={2,4} ott,bits=2 'kvtuner,layer_bits=*:4/2;0-1:8/8'
  nqkv,bits=4 hqe,bits={1,2,4})
token=(hadamard,bits={1,2,3,4} token,bits={2,3,4,8})
wf=(wf,bits={1,1.5,2,2.5,3,4})
floor=(kivi,bits=2,window=8)  # QEvict's own, apart from the others: its steps are of 8 tokens
cell_rates=(1.5 2 2.5 3)

# caches CODEC,SETTINGS...: the options that name them
caches() {
  local c
  for c in "$@"; do printf -- '--cache\ncodec=%s\n' "$c"; done
}

# kld NAME MODEL CHUNKS CACHE...: summaries of one run, 1,024 prompt and 1,024 scored tokens a chunk
kld() {
  local name="$1" model="$2" chunks="$3" options
  shift 3
  mapfile -t options < <(caches "$@")
  # The floor costs as much as a format, and is the same wherever it is measured.
  case "$name" in field-floor-*) options+=(--floor) ;; esac
  step "$name: $# formats, $chunks chunks"
  save "$name" "$model" --chunks "$chunks" --prompt 1024 --score 1024 "${options[@]}"
}

# field MODEL GROUP...: a file per group, of one run, so that the full cache runs once.
field() {
  local model="$1" all=() group row=1 name
  shift
  for group in "$@"; do
    local -n formats="$group"
    all+=("${formats[@]}")
  done
  name="$(IFS=+; echo "field-$*")"
  kld "$name-$model" "$model" "$field_chunks" "${all[@]}"
  [ "$(wc -l <"$out/$name-$model.jsonl")" = "${#all[@]}" ] ||
    { echo "scripts/codecs.sh: $out/$name-$model.jsonl lacks formats" >&2; exit 1; }
  [ $# -gt 1 ] || return 0
  for group in "$@"; do
    local -n formats="$group"
    sed -n "$row,$((row + ${#formats[@]} - 1))p" "$out/$name-$model.jsonl" >"$out/field-$group-$model.jsonl.part"
    mv "$out/field-$group-$model.jsonl.part" "$out/field-$group-$model.jsonl"
    row=$((row + ${#formats[@]}))
  done
  rm "$out/$name-$model.jsonl"
}

# save NAME MODEL OPTION...: summaries alone, without the folders of this machine. What was there stays
# until there is better.
save() {
  local file="$out/$1.jsonl" model="$2"
  shift 2
  "$QEVICT_COMMAND" eval kld -m "$("$repo_dir/scripts/models.py" "$model")" -f "$text" --pack-all \
    --window 32 -o json "$@" | grep '"type":"summary"' |
    sed -E 's#("(model|file)":")[^"]*/#\1#g; s#statistics=[^,"]*/#statistics=#g' >"$file.part"
  mv "$file.part" "$file"
}

# The side file of a model.
statistics() { echo "$cache_dir/statistics/$1"; }

for part in "${parts[@]}"; do
  case "$part" in
    calibrate)
      for model in "${models[@]}"; do
        step "calibrate $model"
        "$QEVICT_COMMAND" calibrate codec -m "$("$repo_dir/scripts/models.py" "$model")" \
          -f "$calibration" --write "$(statistics "$model")" -o json >"$out/calibrate-$model.json.part"
        sed -E 's#("output": ")[^"]*/#\1#' "$out/calibrate-$model.json.part" >"$out/calibrate-$model.json"
        rm "$out/calibrate-$model.json.part"
      done ;;
    cells)
      for model in "${models[@]}"; do
        chunks=$cell_chunks rates=("${cell_rates[@]}")
        # Sliding windows cannot share prompts, and tables weigh more where layers hold less.
        if [ "$model" = gemma3-270m ]; then chunks=$field_chunks rates+=(1.75); fi
        kld "cells-$model" "$model" "$chunks" "${rates[@]/#/wf,statistics=$(statistics "$model"),bits=}"
      done ;;
    field)
      for model in "${models[@]}"; do field "$model" "${groups[@]}"; done ;;
    field-floor)
      for model in "${models[@]}"; do kld "$part-$model" "$model" "$field_chunks" "${floor[@]}"; done ;;
    depth)
      for model in "${models[@]}"; do
        step "depth-$model"
        # Nothing is cut off: with that, models as small as these soon repeat themselves. kivi learns
        # nothing, and so shows what the text alone does along the way.
        save "depth-$model" "$model" --chunks 2 --prompt 2000 --score 4000 --by-depth 16 --generate \
          --temp 1 --top-k 0 --top-p 1 --min-p 0 --seed 1 --cache codec=wf,bits=2.5 \
          --cache "codec=wf,bits=2.5,statistics=$(statistics "$model")" --cache codec=kivi,bits=2
      done ;;
    kernels)
      step "kernels"
      all=()
      for format in "${kivi[@]}" "${papers[@]}" "${token[@]}" "${wf[@]}" "${floor[@]}"; do
        case "$format" in *layer_bits*) ;; *) all+=("$format") ;; esac  # there are no layers here
      done
      mapfile -t options < <(caches "${all[@]}")
      "$QEVICT_COMMAND" bench codecs -r 11 -o json "${options[@]}" >"$out/kernels.json.part"
      mv "$out/kernels.json.part" "$out/kernels.json" ;;
    table)
      step "table and picture"
      "$(python_env plots matplotlib==3.10.7)" "$repo_dir/bench/codecs.py" "$out" "$repo_dir/docs/codec-measurements.md" ;;
  esac
done
