#!/usr/bin/env python3
"""Bytes against the budget, at every step, by count and by the operating system.

  bounded  SmolLM2: a prompt of 6,000 tokens in chunks of 512 and 1,000 generated tokens, compressed after each chunk
  full     the same, compressed once after the prompt
  checked  tiny models, many configurations, the validator after every commit
  forks    a sequence copied in one cache and between streams, two models in one process, an aborted step
"""

import harness
from harness import Report

MIB = 1024 * 1024
# What the C library's allocator keeps of tables that have grown, beside their counted bytes.
ALLOCATOR = 2 * MIB


def mib(n):
    return f"{n / MIB:.2f}"


def long_text(work):
    path = work / "text.txt"
    path.write_text(harness.text(10**6), encoding="utf-8")
    return path


class Steps:
    """A prompt of 6,000 tokens in chunks of 512, then 1,000 generated, on SmolLM2."""

    COLUMNS = ("configuration", "budget", "f16", "prompt", "end", "peak", "resident", "over", "steps", "process", "workspace")
    WIDTHS = (26, -7, -7, -7, -7, -7, -8, -5, -6, -8, -9)

    def __init__(self, work, title):
        self.report = Report(f"SmolLM2, 6,000 tokens of prompt in chunks of 512, then 1,000 generated, {title} (MiB)")
        self.common = {"model": harness.model(harness.SMOLLM2), "text": long_text(work), "ctx": 7168, "chunk": 512, "prompt": 6000}
        self.f16 = 7168 * 30 * 2 * 192 * 2

    def beside(self):
        """What the process needs beside its cache: the CPU backend, whose cache is touched as a whole."""
        cpu, done = harness.probe("budget", generate=1, timeout=550, **self.common)
        self.report.check_run(done, "CPU backend")
        beside = cpu["peak_rss_anon"] - self.f16
        print(f"   CPU backend: {mib(cpu['peak_rss_anon'])} of anonymous memory, {mib(self.f16)} of it cache, {mib(beside)} beside")
        return beside, cpu["compute_CPU"]

    def run(self, config):
        found, done = harness.probe("budget", config=config, timeout=550, **self.common, generate=1000)
        return found if self.report.check_run(done, config) else None

    def show(self, config, found, growth, workspace):
        budget = found["end_budget"]
        self.report.header(*self.COLUMNS, widths=self.WIDTHS)
        self.report.row(config, mib(budget), mib(self.f16), *(mib(found[k]) for k in ("prompt_counted", "end_counted", "peak_counted")),
                        f"{100 * found['resident_error']:.1f}%", int(found["steps_over"]), int(found["steps_in_force"]), growth, workspace)
        check = self.report.check
        check(budget > 0 and found["end_events"] > 0, f"{config}: no limit came into force")
        check(found["steps_over"] == 0, f"{config}: {int(found['steps_over'])} steps above the budget, by {mib(found['peak_over'])} MiB")
        check(found["resident_error"] <= 0.02, f"{config}: resident and counted bytes differ by {100 * found['resident_error']:.1f}%")


def bounded(work):
    steps = Steps(work, "prefill=bounded")
    beside, compute = steps.beside()
    config = "budget=20%,prefill=bounded"
    if found := steps.run(config):
        budget = found["end_budget"]
        # Scratch of the kernels and masks, the device's compute buffer, and what its attention adds to the CPU's.
        workspace = found["peak_workspace"] + found["compute_QEVICT"] + found["compute_CPU"] - compute + ALLOCATOR
        growth = found["peak_rss_anon"] - beside
        steps.show(config, found, mib(growth), mib(workspace))
        steps.report.check(found["steps_in_force"] >= 1012, f"{config}: the limit was in force for {int(found['steps_in_force'])} steps only")
        steps.report.check(found["arena_peak"] <= budget, f"{config}: the arena held {mib(found['arena_peak'])} MiB")
        steps.report.check(growth <= 1.02 * budget + workspace,
                           f"{config}: the process grew by {mib(growth)} MiB, allowed {mib(1.02 * budget)} + {mib(workspace)}")
    return steps.report.finish()


def full(work):
    steps = Steps(work, "prefill=full")
    config = "budget=20%,prefill=full"
    if found := steps.run(config):
        steps.show(config, found, "-", mib(found["peak_workspace"]))
        # The last chunk's step is over when the first event comes, before the first generated token is stored.
        steps.report.check(found["steps_in_force"] >= 1000, f"{config}: the limit was in force for {int(found['steps_in_force'])} steps only")
        steps.report.check(found["prompt_packed"] == 0, f"{config}: the prompt was routed before its end")
    return steps.report.finish()


CHECKED = [
    "budget=20%", "budget=20%,prefill=bounded", "budget=600KiB", "budget=20%,promotion=pinned", "budget=20%,promotion=none",
    "budget=30%,bits=4", "budget=20%,window=16", "budget=30%,window=32", "budget=30%,window=1", "budget=20%,window=4,interval=3",
    "budget=20%,local_mode=windows", "budget=20%,charge_dormant=off", "budget=20%,fill_slack=on", "budget=20%,per_head=on",
    "budget=20%,scores=events", "budget=20%,init_rows=0", "budget=20%,first_event=5", "budget=20%,score=ema", "budget=20%,score=p_norm",
    "budget=20%,score=key_norm", "budget=20%,q=0", "budget=20%,q=1", "budget=20%,recents=10%", "budget=20%,sinks=0,recents=0",
    "preset=streaming,budget=20%", "preset=streaming,budget=10%,prefill=bounded", "budget=100%", "preset=full",
]


def checked(work):
    report = Report("tiny models, 1,500 tokens of prompt in chunks of 256, 300 generated, validator on (KiB)")
    text = long_text(work)
    report.header("model", "configuration", "budget", "peak", "end", "over", "events", "promoted", "evicted",
                  widths=(13, 42, -7, -7, -7, -5, -6, -8, -7))
    runs = [("qwen2-hd64" if i % 2 else "llama-hd64", config) for i, config in enumerate(CHECKED)]
    runs += [(name, "budget=25%,prefill=bounded") for name in ("gemma3-hd64", "gpt2-hd64", "bloom-hd64", "smollm3-hd64", "mimo2-k96-v64")]
    for name, config in runs:
        found, done = harness.probe("budget", model=harness.tiny(name), text=text, ctx=4096, chunk=256, prompt=1500, generate=300,
                                    config=config, env={"QEVICT_CHECK": "1"})
        if not report.check_run(done, f"{name} {config}"):
            continue
        report.row(name, config, *(f"{found[k] / 1024:.0f}" for k in ("end_budget", "peak_counted", "end_counted")),
                   *(int(found[k]) for k in ("steps_over", "end_events", "end_promotions", "end_evictions")))
        allowed = found["peak_dormant"] if "charge_dormant=off" in config else 0
        report.check(found["peak_over"] <= allowed, f"{name} {config}: {int(found['steps_over'])} steps above the budget by {found['peak_over']}")
        report.check(found["end_violations"] == 0, f"{name} {config}: {int(found['end_violations'])} violations")
        report.check(found["resident_error"] <= 0.02 or found["end_counted"] < MIB,
                     f"{name} {config}: resident and counted bytes differ by {100 * found['resident_error']:.1f}%")
    return report.finish()


def check_state(report, what, found, exact, sliding):
    """exact: the continuation is that of a cache that was never saved. Dormant codes are not saved, so that windows that had
    them may be routed otherwise later. What a sliding-window cache has left behind stays where it was until its cells are
    used again, and takes its part of the budget."""
    tiers = ["full_tokens", "packed_tokens", "evicted_tokens"] + ([] if sliding else ["full", "packed"])
    saved, restored = ([found[f"{when}_{t}"] for t in tiers] for when in ("saved", "restored"))
    if sliding:
        saved, restored = [sum(saved)], [sum(restored)]
    same = "same tokens" if sliding else "same bytes"
    report.row(what, f"{int(found['saved_full_tokens'])} + {int(found['saved_packed_tokens'])} + {int(found['saved_evicted_tokens'])} tokens, "
                     f"{same if saved == restored else f'{saved} -> {restored}'}, {int(found['equal'])} of 32 tokens equal, "
                     f"logits within {found['max_logit']:.1e}")
    report.check(saved == restored, f"{what}: {tiers} {saved} -> {restored}")
    if exact:
        report.check(found["equal"] == 32 and found["max_logit"] < 1e-3, f"{what}: {int(found['equal'])} of 32 tokens equal")


def forks(work):
    report = Report("forks, states, several models, an aborted step")
    text = long_text(work)
    report.header("what", "result", widths=(46, 90))
    for name in ("llama-hd64", "gemma3-hd64", "smollm3-hd64", "bloom-hd64"):
        for unified in (0, 1):
            found, done = harness.probe("fork", model=harness.tiny(name), text=text, prompt=700, ctx=2048 if unified else 4096,
                                        config="preset=full", unified=unified)
            if report.check_run(done, f"fork {name} unified {unified}"):
                report.row(f"fork, {'one cache' if unified else 'two streams'}, {name}",
                           f"KL to the CPU backend {found['both_kl']:.1e}, after the first has gone {found['rest_kl']:.1e}")
                report.check(max(found["both_kl"], found["rest_kl"]) < 1e-5, f"fork {name} unified {unified}: KL {found['both_kl']:.1e}")
            found, done = harness.probe("fork", model=harness.tiny(name), text=text, prompt=700, ctx=2048 if unified else 4096,
                                        config="budget=25%", unified=unified, env={"QEVICT_CHECK": "1"})
            report.check_run(done, f"fork {name} unified {unified} at 25%")
    for name in ("llama-hd64", "qwen2-hd64", "gemma3-hd64", "gpt2-hd64", "bloom-hd64", "smollm3-hd64", "qwen2vl-hd128"):
        sliding = name.startswith("gemma")
        for config in ("preset=full", "budget=60%" if sliding else "budget=20%", f"budget={2 if sliding else 1}MiB,promotion=none"):
            found, done = harness.probe("state", model=harness.tiny(name), text=text, prompt=3000, generate=40, ctx=4096, chunk=256,
                                        config=config, env={"QEVICT_CHECK": "1"})
            what = f"save and restore, {name}, {config}"
            if report.check_run(done, what):
                check_state(report, what, found, exact=config == "preset=full" or not sliding and "promotion=none" in config, sliding=sliding)
    for config in (("preset=full", "budget=20%"), ("budget=20%", "budget=60%,prefill=bounded")):
        found, done = harness.probe("contexts", model=harness.tiny("llama-hd64"), second=harness.tiny("gemma3-hd64"), text=text, prompt=900,
                                    generate=64, ctx=2048, config=config[0], second_config=config[1])
        if report.check_run(done, f"two models {config}"):
            same = found["same_a"] == found["same_b"] == found["sessions_differ"] == 1
            report.row(f"two models, {config[0]} and {config[1]}", "each writes what it writes alone" if same else str(found))
            report.check(same, f"two models {config}: {found}")
    found, done = harness.probe("abort", model=harness.tiny("llama-hd64"), text=text, prompt=600, ctx=1024, config="budget=20%")
    report.check(done.rc == 0 and found.get("aborted") == 2, f"abort: {done.rc} {found} {done.log[-300:]}")
    report.row("an aborted step, then a prompt", f"llama_decode returns {int(found.get('aborted', -1))}, then 0")
    return report.finish()


if __name__ == "__main__":
    harness.main({"bounded": bounded, "full": full, "checked": checked, "forks": forks})
