#!/usr/bin/env python3
"""Input that cannot work ends in one sentence and exit code 1: no signal, no text, never silently without compression.
A budget that is too small is raised, with one sentence.

  refused  configurations, budgets, cache types, options and models, by llama.cpp's programs
  states   damaged states, by the server, by llama-completion and through libllama
"""

import os
import re
import resource
import subprocess

import harness
from harness import Report
from llama_server import Server

NOTHING = r"budget=0% is not legal"
RAISED = r"qevict: the budget of [^\n]* is raised to"
# Name, QEVICT_CONFIG, what the sentence must say.
CONFIGURATIONS = [
    ("budget of nothing", "budget=0%", r"budget=0% is not legal"),
    ("budget above all", "budget=120%", r"budget=120% is not legal"),
    ("negative budget", "budget=-5%", r"budget=-5% is not legal"),
    ("budget of words", "budget=banana", r"budget=banana is not legal"),
    ("budget without unit", "budget=512", r"budget=512 is not legal"),
    ("budget beyond the machine", "budget=1e30GiB", r"budget=1e30GiB is not legal"),
    ("budget not a number", "budget=nan", r"budget=nan is not legal"),
    ("window not a power of two", "window=3", r"window=3 is not legal"),
    ("window of nothing", "window=0", r"window=0 is not legal"),
    ("absurd window", "window=1000000", r"window=1000000 is not legal"),
    ("window beyond integers", "window=99999999999999999999", r"window=9+ is not legal"),
    ("q above 1", "q=1.5", r"q=1.5 is not legal"),
    ("q below 0", "q=-0.1", r"q=-0.1 is not legal"),
    ("q not a number", "q=nan", r"q=nan is not legal"),
    ("2.5 bits", "bits=2.5", r"bits=2.5 is not legal"),
    ("unknown promotion", "promotion=maybe", r"promotion=maybe is not legal"),
    ("unknown prefill", "prefill=never", r"prefill=never is not legal"),
    ("unknown preset", "preset=best", r"preset=best is not legal"),
    ("negative recents", "recents=-1", r"recents=-1 is not legal"),
    ("recents above all", "recents=101%", r"recents=101% is not legal"),
    ("absurd sinks", "sinks=99999999", r"sinks=99999999 is not legal"),
    ("absurd interval", "interval=1000000", r"interval=1000000 is not legal"),
    ("decay of 1", "score=ema,ema_lambda=1", r"ema_lambda=1 is not legal"),
    ("exponent below 1", "score=p_norm,p_norm=0", r"p_norm=0 is not legal"),
    ("unknown key", "colour=blue", r"unknown key colour"),
    ("key without value", "q=0.5,bits", r"`bits` has no value"),
    ("key twice", "q=0.5,q=0.6", r"key q is given twice"),
    ("bytes that are no text", "\udcff\udcfe=\x01", r"unknown key \?\?"),
    ("missing file", "/no/such/qevict.conf", r"neither key=value text nor a readable file"),
    ("a folder as file", "/tmp", r"neither key=value text nor a readable file"),
]
# Name, model, options, QEVICT_CONFIG, exit code, what must be said.
RUNS = [
    ("flash attention off", "llama-hd64", ("-fa", "off"), "budget=20%", 1, r"flash attention is off"),
    ("q8_0 cache", "llama-hd64", ("-ctk", "q8_0", "-ctv", "q8_0"), "budget=20%", 1, r"cache type q8_0 .* not supported"),
    ("q4_0 keys", "llama-hd64", ("-ctk", "q4_0"), "budget=20%", 1, r"cache type q4_0 .* not supported"),
    ("f32 cache", "llama-hd64", ("-ctk", "f32", "-ctv", "f32"), "budget=20%", 1, r"cache type f32 .* not supported"),
    ("f32 values", "llama-hd64", ("-ctv", "f32"), "budget=20%", 1, r"cache type f32 .* not supported"),
    ("recurrent model", "mamba", (), "budget=20%", 1, r"recurrent state .* not supported"),
    ("partly recurrent model", "lfm2-hd64", (), "budget=20%", 1, r"recurrent state .* not supported"),
    ("latent attention", "deepseek2-mla", (), "budget=20%", 1, r"MLA"),
    ("context below the minimum", "llama-hd64", ("-c", 256), "budget=20%", 0, RAISED),
    ("budget of 1 KiB", "llama-hd64", (), "budget=1KiB", 0, RAISED),
    ("budget of 1% of 1,024", "llama-hd64", (), "budget=1%", 0, RAISED),
    ("budget below the recents", "llama-hd64", (), "budget=20%,recents=600", 0, RAISED),
    ("cache left to the host", "llama-hd64", ("-nkvo",), "budget=20%", 0, r"not on QEVICT and stays? uncompressed"),
    ("no layer on the device", "llama-hd64", ("-ngl", 0), "budget=20%", 0, r"not on QEVICT and stays? uncompressed"),
    ("one layer on the device", "llama-hd64", ("-ngl", 2), "budget=20%", 0, r"not on QEVICT and stays? uncompressed"),
    ("a model without RoPE", "gpt2-hd64", (), "budget=20%", 0, r"KV cache of 2 layers,.* budget"),
    ("a model with ALiBi", "bloom-hd64", (), "budget=20%", 0, r"KV cache of 2 layers,.* budget"),
]


def said(pattern, *command, **options):
    """Runs a program until its log has the pattern: llama.cpp's logger drops what is queued when the program ends."""
    for _ in range(40):
        done = harness.run(*command, **options)
        if re.search(pattern, done.log):
            break
    return done


class Cases:
    def __init__(self, report):
        self.report, self.n = report, 0
        report.header("case", "rc", "what is said", widths=(28, -3, 110))

    def verdict(self, name, done, code, pattern, output=b""):
        """Checks the end of a run; output: text that must not appear."""
        self.n += 1
        line = re.search(r"[^\n]*(" + pattern + r")[^\n]*", done.log)
        sentence = re.sub(r"^[\d.]+ [IWE] ", "", line.group(0)).strip() if line else "-"
        self.report.row(name, done.rc, sentence[:110])
        codes = code if isinstance(code, tuple) else (code,)
        self.report.check(done.rc in codes, f"{name}: ends with {done.rc} instead of {code}: {done.log[-600:]}")
        self.report.check(line, f"{name}: nothing says /{pattern}/: {done.log[-600:]}")
        if done.rc != 0:
            self.report.check(not output.strip(), f"{name}: wrote {output[:80]!r}")

    def complete(self, name, model, args, config, code, pattern, **more):
        model_path = harness.tiny(model) if isinstance(model, str) else model
        if "-c" not in args:
            args = (*args, "-c", 1024)
        done = said(pattern, "llama-completion", "-m", model_path, "-p", "Once upon a time", "-n", 8, "-no-cnv", "--temp", 0, "-lv", 4,
                    *args, config=config, timeout=60, **more)
        self.verdict(name, done, code, pattern, done.out.replace(b"Once upon a time", b""))
        return done


def refused(work):
    cases = Cases(Report("input that is refused"))
    for name, config, pattern in CONFIGURATIONS:
        cases.complete(name, "llama-hd64", (), config, 1, pattern)
    file = work / "qevict.conf"
    file.write_text("# two mistakes are one too many\nbudget = 20%\nwindow = 7\n", encoding="utf-8")
    cases.complete("a mistake in a file", "llama-hd64", (), str(file), 1, r"window=7 is not legal")
    file.write_text("# a comment\n" * 200000, encoding="utf-8")
    cases.complete("an unknown instruction set", "llama-hd64", (), "", 1, r"QEVICT_SIMD=avx1024 names no", env={"QEVICT_SIMD": "avx1024"})
    cases.complete("a huge file", "llama-hd64", (), str(file), 1, r"larger than 1 MiB")
    file.write_text("budget = 30%  # fine\nrecents = 64\n", encoding="utf-8")
    cases.complete("a file without mistakes", "llama-hd64", (), str(file), 0, r"KV cache of 2 layers,.* budget")
    for run in RUNS:
        cases.complete(*run)

    environment = {"LLAMA_ARG_DEVICE": "QEVICT"}
    cases.complete("device from the environment", "llama-hd64", (), "q=2", 1, r"q=2 is not legal", device="", env=environment)
    no_plugin = {"GGML_BACKEND_PATH": "/no/such/libggml-qevict.so"}
    cases.complete("wrong path of the plug-in", "llama-hd64", (), "", 1, r"[Ff]ailed to load|invalid device", env=no_plugin)
    text = work / "libggml-qevict.so"
    text.write_text("not a library", encoding="utf-8")
    cases.complete("a plug-in that is none", "llama-hd64", (), "", 1, r"[Ff]ailed to load|invalid device", env={"GGML_BACKEND_PATH": str(text)})
    elsewhere(cases)
    cases.report.check(cases.n >= 50, f"only {cases.n} cases")
    return cases.report.finish()


def elsewhere(cases):
    """Other programs, and a machine without memory."""
    model = harness.tiny("llama-hd64")
    bits = r"bits=5 is not legal"
    done = said(bits, "llama-bench", "-m", model, "-p", 8, "-n", 0, "-v", config="bits=5", timeout=60)
    cases.verdict("llama-bench", done, 1, bits)
    done = said(bits, "llama-perplexity", "-m", model, "-f", harness.TEXT, "-c", 512, "--chunks", 1, config="bits=5", timeout=60)
    cases.verdict("llama-perplexity", done, 1, bits, done.out)
    done = said(NOTHING, "llama-server", "-m", model, "--port", 1, config="budget=0%", timeout=60)
    cases.verdict("llama-server", done, 1, NOTHING, done.out)
    limit = 1 << 30
    command = [str(harness.program("llama-completion")), "-m", str(model), "-p", "Once", "-n", "8", "-no-cnv", "-c", "2000000", "-dev", "QEVICT"]
    ended = subprocess.run(command, env=harness.environment("budget=20%"), stdin=subprocess.DEVNULL, capture_output=True, check=False,
                           timeout=60, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    done = harness.Run(" ".join(command), ended.returncode, ended.stdout, ended.stderr.decode(errors="replace"), 0)
    cases.verdict("no address space", done, 1, r"refuses an address range|failed to allocate")


def states(work):
    report = Report("damaged states")
    cases = Cases(report)
    text = work / "text.txt"
    text.write_text(harness.text(20000), encoding="utf-8")
    for name in ("llama-hd64", "gemma3-hd64", "gpt2-hd64"):
        for damage in ("truncate", "head", "zero", "rows", "flip"):
            for config in ("preset=full", "budget=20%"):
                found, done = harness.probe("state", model=harness.tiny(name), text=text, prompt=1200, generate=16, ctx=4096, config=config,
                                            damage=damage, env={"QEVICT_CHECK": "1"})
                cases.n += 1
                report.row(f"{damage}, {name}", done.rc, f"{config}: {found.get('restored', 0):.0f} of {found.get('state', 0):.0f} bytes read, "
                           f"{found.get('equal', 0):.0f} tokens as before; then {found.get('usable_full_tokens', 0):.0f} new tokens held")
                report.check(done.rc == 0, f"{damage}, {name}, {config}: {done.rc}: {done.log[-600:]}")
                report.check(found.get("usable_full_tokens", 0) > 0, f"{damage}, {name}, {config}: the context is not usable")

    model = harness.tiny("llama-hd64")
    with Server(model, "-np", 1, "-c", 4096, "--slot-save-path", work, config="budget=20%", work=work) as server:
        prompt = harness.text(3000)
        server.complete(prompt, 24, cache_prompt=True)
        server.slot("save", "good")
        good = (work / "good").read_bytes()
        # llama.cpp itself aborts on a file that ends early, whatever the device; the probe above cuts states in memory.
        damaged = {"zeros": bytes(len(good)), "nothing": b"", "its head": good[:64],
                   "zeros from the middle on": good[:len(good) // 2] + bytes(len(good) - len(good) // 2),
                   "another file": os.urandom(5000)}
        for what, data in damaged.items():
            (work / "bad").write_bytes(data)
            status, answer = server.post("/slots/0?action=restore", {"filename": "bad"})
            again = server.complete(prompt, 8, cache_prompt=True)
            report.row(f"slot from {what}", status, f"{str(answer)[:70]}; then {len(again['tokens'])} tokens")
            report.check(len(again["tokens"]) == 8, f"slot from {what}: no answer afterwards")
            report.check(status in (200, 400, 500), f"slot from {what}: {status}")
    report.check(server.rc == 0, f"the server ends with {server.rc}")

    # llama-completion's own file of a prompt's state.
    cache = work / "prompt.cache"
    args = ("--prompt-cache", cache)
    done = harness.complete(model, harness.text(2000), 8, "-c", 4096, *args, config="budget=20%")
    report.check_run(done, "writing a prompt cache")
    good = cache.read_bytes()
    for what, data in (("whole", good), ("zeroed", good[:4096] + bytes(len(good) - 4096))):
        cache.write_bytes(data)
        done = harness.complete(model, harness.text(2000), 8, "-c", 4096, *args, config="budget=20%")
        report.row(f"prompt cache, {what}", done.rc, (done.errors or done.sentences() or ["-"])[0][:110])
        report.check(done.rc in (0, 1), f"prompt cache, {what}: ends with {done.rc}")
    return report.finish()


if __name__ == "__main__":
    harness.main({"refused": refused, "states": states})
