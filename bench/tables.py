#!/usr/bin/env python3
"""Writes the results of scripts/bench.sh in one folder (JSON of `qevict bench`) as Markdown.

    bench/tables.py FOLDER > FOLDER/README.md
"""

import json
import pathlib
import sys

FACTS = ["cpu", "cpus", "isa", "threads", "ggml_version", "model", "text", "repetitions",
         "read_gbps"]
ATTENTION = ["heads", "tokens", "kernel", "ms per layer", "ns per token and KV head", "GB/s",
             "of read bandwidth", "x ggml f16", "quartiles"]
MODEL = ["test", "cache", "tokens/s", "x CPU", "interval", "TTFT, ms", "TPOT p50, ms", "upkeep",
         "KV of f16"]


def table(columns, rows):
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def number(value, form, unit=""):
    return "" if value is None else format(value, form) + unit


def attention_rows(results):
    for r in results:
        yield [r["shape"], f"{r['tokens']:,}", r["kernel"], number(r["layer_ms"], ".3f"),
               number(r["ns_per_token_kv_head"], ".1f"), number(r["gbps"], ".1f"),
               number(r["read_share_percent"], ".0f", "%"), number(r["ratio_median"], ".2f"),
               f"{r['ratio_q1']:.2f}-{r['ratio_q3']:.2f}"]


def model_rows(results):
    for r in results:
        ours = r["backend"] != "CPU"
        cache = f"`{r['policy']}`" if ours else "CPU backend, f16"
        interval = f"{r['ratio_low']:.2f}-{r['ratio_high']:.2f}" if ours else ""
        yield [r["test"], cache, number(r["tokens_per_s_median"], ".2f"),
               number(r.get("ratio_median"), ".2f"), interval, number(r.get("ttft_ms"), ".0f"),
               number(r.get("tpot_p50_ms"), ".1f"), number(r.get("upkeep_percent"), ".1f", "%"),
               number(r.get("kv_share_percent"), ".1f", "%")]


def main():
    if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1]).is_dir():
        sys.exit("tables.py: usage: tables.py FOLDER (with the JSON files of scripts/bench.sh)")
    files = sorted(pathlib.Path(sys.argv[1]).glob("*.json"))
    if not files:
        sys.exit(f"tables.py: {sys.argv[1]} holds no .json file")
    print("# Measured by `scripts/bench.sh`\n")
    for path in files:
        document = json.loads(path.read_text())
        print(f"## {path.stem}\n")
        print(", ".join(f"{k} {document[k]}" for k in FACTS if k in document) + "\n")
        attention = document["command"] == "bench attention"
        rows = attention_rows if attention else model_rows
        table(ATTENTION if attention else MODEL, rows(document["results"]))


if __name__ == "__main__":
    main()
