#!/usr/bin/env python3
"""Decisions of real runs on every instruction set and with one and two threads.

Scores are sums of floats in another order there, so plans may differ in windows that are within 1e-4 of a cut, and in
nothing else. After the first such window codes differ, and so do logits and all later scores: the comparison of a run ends
with that event. Weights are f32: with quantized ones llama.cpp rounds activations to 8 bits, which makes of the smallest
difference one of percents in some scores of deep layers, whatever the kernels do.

  smollm2  SmolLM2 with f32 weights, 20%, a prompt of 1,000 tokens and 32 steps
  tiny     a tiny model, the same with 600 tokens
"""

import collections
import re

import harness
from harness import Report

NEAR = 1e-4
CONFIG = "preset=qevict,budget=20%"


def isas():
    """The instruction sets of this machine that QEVICT_SIMD can force."""
    done = harness.execute([str(harness.needed(harness.COMMAND, "the command")), "info", "-o", "json"], harness.environment(), 60)
    found = re.search(r'"isas?":\s*\[([^]]*)\]', done.out.decode())
    return re.findall(r'"([a-z0-9]+)"', found.group(1)) if found else ["scalar"]


def decisions(isa, threads, **common):
    """{event: {layer: {birth: (score, tier)}}}"""
    _, done = harness.probe("plans", config=CONFIG, threads=threads, env={"QEVICT_SIMD": isa}, timeout=500, **common)
    events = collections.defaultdict(lambda: collections.defaultdict(dict))
    for event, layer, birth, score, tier in re.findall(rb"window (\d+) (\d+) (\d+) (\S+) (\d)", done.out):
        events[int(event)][int(layer)][int(birth)] = (float(score), int(tier))
    return events, done


def cuts(windows):
    """Scores beside the borders between tiers: those of the best window below and the worst above. Windows that are kept
    for their place (sinks, recents) are left out."""
    births = sorted(windows)[1:-6]
    tiers = [[windows[b][0] for b in births if windows[b][1] == tier] for tier in (0, 1, 2)]
    return [score for better, worse in ((0, 1), (1, 2), (0, 2)) if tiers[better] and tiers[worse]
            for score in (min(tiers[better]), max(tiers[worse]))]


def compare(report, label, reference, other):
    n_windows = n_events = n_near = 0
    worst = 0.0
    for event, layers in reference.items():
        n_events += 1
        for layer, windows in layers.items():
            theirs = other[event][layer]
            n_windows += len(windows)
            report.check(windows.keys() == theirs.keys(), f"{label}, event {event}, layer {layer}: other windows")
            for birth, (score, tier) in windows.items():
                if birth not in theirs:
                    continue
                worst = max(worst, abs(score - theirs[birth][0]) / max(score, 1e-9))
                if tier == theirs[birth][1]:
                    continue
                n_near += 1
                distance = min((abs(score - cut) / cut for cut in cuts(windows)), default=1.0)
                report.check(distance <= NEAR, f"{label}, event {event}, layer {layer}: window {birth} is {distance:.1e} from a cut")
        if n_near:
            break
    report.row(label, n_events, n_windows, n_near, f"{worst:.1e}")
    report.check(n_windows > 0, f"{label}: nothing was decided")


def run(work, title, **common):
    report = Report(f"decisions of {title}, {CONFIG}")
    text = work / "text.txt"
    text.write_text(harness.text(10**6), encoding="utf-8")
    names = isas()
    report.header("against " + names[-1] + ", 2 threads", "events", "windows", "differ", "scores within", widths=(28, -7, -8, -7, -13))
    reference, done = decisions(names[-1], 2, text=text, **common)
    report.check_run(done, names[-1])
    for isa, threads in [(names[-1], 2), (names[-1], 1)] + [(isa, t) for isa in names[:-1] for t in (2, 1)]:
        other, done = decisions(isa, threads, text=text, **common)
        if report.check_run(done, isa):
            compare(report, f"{isa}, {threads} thread{'s' if threads > 1 else ''}", reference, other)
    return report.finish()


def tiny(work):
    return run(work, "llama-hd64", model=harness.tiny("llama-hd64"), prompt=600, generate=64, ctx=1024)


def smollm2(work):
    return run(work, "SmolLM2 with f32 weights", model=harness.f32_model(harness.SMOLLM2), prompt=1000, generate=32, ctx=2048)


if __name__ == "__main__":
    harness.main({"tiny": tiny, "smollm2": smollm2})
