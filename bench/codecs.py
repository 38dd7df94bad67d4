#!/usr/bin/env python3
"""Writes the results of scripts/codecs.sh as tables into a document, and two pictures beside it.

    bench/codecs.py RESULTS DOCUMENT

RESULTS has the JSON lines of `qevict eval kld` (cells-*, field-*, depth-*) and kernels.json of
`qevict bench codecs`. In DOCUMENT everything between `<!-- codecs: begin -->` and `<!-- codecs: end -->` is
replaced; the pictures are codecs-kl.svg and codecs-depth.svg.
"""

import json
import pathlib
import re
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

MODELS = {"qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B", "smollm2": "SmolLM2-135M", "gemma3-270m": "Gemma-3-270m"}
OURS = ("wf", "token")
LIMITS = (20.5, 17.5, 14.5, 11.0)  # percent of f16
BEGIN, END = "<!-- codecs: begin -->", "<!-- codecs: end -->"


def name_of(policy):
    """`codec=wf,bits=2` as `wf,bits=2`."""
    return re.sub(r",statistics=[^,]*", ",statistics", policy.removeprefix("codec="))


def codec_of(name):
    return name.split(",")[0]


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def read_results(folder, model):
    """Results by name; of two for one name that with more positions."""
    results = {}
    for path in sorted(folder.glob(f"*-{model}.jsonl")):
        for line in read_lines(path) if not path.name.startswith("depth") else []:
            name = name_of(line["policy"])
            if name not in results or line["positions"] > results[name]["positions"]:
                results[name] = line
    return results


def table(columns, rows):
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def kl_text(result):
    return f"{result['kl_mean']:.4f} +- {result['kl_stderr']:.4f}" if result else ""


def share_text(result):
    return f"{result['packed_share_percent']:.2f}%" if result else ""


def all_formats(results, kernels):
    """One row per format: bytes and KL on each model, and what the kernels take."""
    first = {}
    for model in MODELS:
        first |= {n: r for n, r in results[model].items() if n not in first}
    names = [n for n in first if n != "floor"]
    names.sort(key=lambda n: (codec_of(n) in OURS, codec_of(n), "statistics" in n, first[n]["packed_share_percent"]))
    rows = []
    for name in names:
        row = [f"`{name}`"]
        for model in MODELS:
            r = results[model].get(name)
            row += [share_text(r), kl_text(r)]
        k = kernels.get(name)
        row += [f"{k['token_head_bytes']:.1f}", f"{k['ns_per_token_kv_head']:.1f}"] if k else ["", ""]
        rows.append(row)
    floor = ["floor"]
    for model in MODELS:
        floor += ["", kl_text(results[model].get("floor"))]
    rows.append(floor + ["", ""])
    columns = ["`codec=`"]
    for label in MODELS.values():
        columns += [f"{label}: packed of f16", "mean KL"]
    return table(columns + ["bytes a token and head, D = 64", "ns"], rows)


def best(results, limit, ours):
    fits = [r for n, r in results.items() if n != "floor" and (codec_of(n) in OURS) == ours
            and 0 < r["packed_share_percent"] <= limit]
    return min(fits, key=lambda r: r["kl_mean"], default=None)


def cells(results):
    """The best format of each side at each size."""
    rows = []
    for model, label in MODELS.items():
        for limit in LIMITS:
            ours, field = best(results[model], limit, True), best(results[model], limit, False)
            if ours is None:
                continue
            ratio = f"{field['kl_mean'] / ours['kl_mean']:.1f}" if field else ""
            rows.append([label, f"{limit}%", f"`{name_of(ours['policy'])}`", share_text(ours),
                         f"{ours['kv_share_percent']:.1f}%", kl_text(ours), f"{ours['positions']:,}",
                         f"{ours['same_top_percent']:.1f}%", f"{ours['ppl_ratio']:.4f} +- {ours['ppl_ratio_error']:.4f}",
                         f"`{name_of(field['policy'])}`" if field else "none", kl_text(field), ratio])
    return table(["model", "at most", "qevict's best", "packed", "whole cache", "mean KL", "positions", "same top",
                  "perplexity ratio", "best of the field", "mean KL", "times"], rows)


def depth(folder):
    rows, series = [], {}
    for model, label in MODELS.items():
        for line in read_lines(folder / f"depth-{model}.jsonl"):
            name = name_of(line["policy"])
            parts = line["by_depth"]
            series[f"{label}, {name}"] = ([(p["first"] + p["end"]) / 2 for p in parts],
                                          [p["kl_mean"] for p in parts])
            quarter = len(parts) // 4
            quarters = [sum(p["kl_mean"] for p in parts[i * quarter:(i + 1) * quarter]) / quarter for i in range(4)]
            share = f"{line['packed_share_percent']:.2f}%" if "packed_share_percent" in line else ""
            rows.append([label, f"`{name}`", share] + [f"{q:.4f}" for q in quarters] + [kl_text(line)])
    columns = ["model", "`codec=`", "packed of f16", "tokens 0-999", "1,000-1,999", "2,000-2,999", "3,000-3,999", "all"]
    return table(columns, rows) if rows else "", series


def draw_depth(series, path):
    if not series:
        return
    figure, axes = plt.subplots(figsize=(10, 4))
    for label, (x, y) in series.items():
        axes.plot(x, y, marker=".", label=label, linestyle=":" if "floor" in label else "-")
    axes.set_yscale("log")
    axes.set_xlabel("generated tokens")
    axes.set_ylabel("mean KL, nats")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def draw_kl(results, path):
    figure, all_axes = plt.subplots(1, len(MODELS), figsize=(13, 4.5), sharey=True)
    for axes, (model, label) in zip(all_axes, MODELS.items()):
        by_codec = {}
        for name, r in results[model].items():
            if name != "floor":
                key = codec_of(name) + (", window 8" if "window=8" in name else "")
                key += ", calibrated" if "statistics" in name else ""
                by_codec.setdefault(key, []).append((r["packed_share_percent"] * 0.16, r["kl_mean"]))
        for i, (codec, points) in enumerate(sorted(by_codec.items())):
            points.sort()
            axes.plot(*zip(*points), label=codec, marker="o" if codec in OURS else "vsD^x*"[i % 6], markersize=4,
                      linewidth=2.5 if codec.startswith("wf") else 0.8,
                      color={"wf": "gray", "wf, calibrated": "black"}.get(codec))
        if "floor" in results[model]:
            axes.axhline(results[model]["floor"]["kl_mean"], linestyle=":", color="gray", label="floor")
        axes.set_title(label)
        axes.set_xlabel("bits per number, all bytes")
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("mean KL, nats")
    all_axes[0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    if len(sys.argv) != 3:
        sys.exit("codecs.py: usage: codecs.py RESULTS DOCUMENT")
    folder, document = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    plt.rcParams["svg.hashsalt"] = "qevict"  # the same file for the same numbers
    results = {model: read_results(folder, model) for model in MODELS}
    if not any(results.values()):
        sys.exit(f"codecs.py: {folder} holds no results of scripts/codecs.sh")
    kernels = {}
    if (folder / "kernels.json").exists():
        kernels = {name_of(r["format"]): r for r in json.loads((folder / "kernels.json").read_text())["results"]}
    depth_table, series = depth(folder)
    text = document.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    parts = [before, BEGIN, "\n\n### At equal bytes\n\n", cells(results), "\n### All formats\n\n",
             all_formats(results, kernels), "\n![KL against bits](codecs-kl.svg)\n"]
    if depth_table:
        parts += ["\n### Along a long answer\n\n", depth_table, "\n![KL by depth](codecs-depth.svg)\n"]
    document.write_text("".join(parts + ["\n", END, after]))
    draw_kl(results, document.parent / "codecs-kl.svg")
    draw_depth(series, document.parent / "codecs-depth.svg")


if __name__ == "__main__":
    main()
