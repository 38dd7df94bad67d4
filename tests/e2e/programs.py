#!/usr/bin/env python3
"""llama.cpp's unmodified programs with the plug-in: they run, say nothing of errors, and write what they should.

  texts      every tiny model with f32 weights at full budget: 256 greedy tokens equal those of the CPU backend
  squeezed   every tiny model at a budget of 20%: runs, and says so
  programs   llama-bench, llama-perplexity, llama-completion with context shift, speculative decoding (tiny models)
  smollm2    the same programs on a real model, at 20% and at full budget
"""

import re

import harness
from harness import Report, THREADS

FULL = "preset=full"
SQUEEZED = "budget=20%"


class Texts:
    """Greedy texts against the CPU backend. Where the reference decides between two tokens that are closer than its own
    rounding, texts may part: that is checked, and another prompt is tried."""

    def __init__(self, report, work):
        self.report, self.work = report, work

    def compare(self, label, path, n, *args, **more):
        for attempt in range(6):
            prompt = harness.text(700, 1000 * attempt)
            reference = harness.complete(path, prompt, n, "-c", 1024, "-fa", "off", *args)
            ours = harness.complete(path, prompt, n, "-c", 1024, *args, config=FULL, **more)
            ran = self.report.check_run(reference, f"{label}, CPU backend") and self.report.check_run(ours, label)
            same = reference.out == ours.out
            common = harness.common_prefix(reference.out, ours.out)
            if not same and common == min(len(reference.out), len(ours.out)):
                continue  # a program ended before its last bytes were written; nothing that was written differs
            verdict = "equal" if same else harness.explain_difference(path, prompt, n, self.work)
            self.report.row(label, n, common, len(reference.out), f"{ours.seconds:.1f}", verdict)
            if same or not ran:
                return
            if not self.report.check("near tie" in verdict, f"{label}: the text differs: {verdict}"):
                return
        self.report.check(False, f"{label}: no prompt without a near tie or a cut end")


def texts(work):
    report = Report("greedy texts at full budget against `-dev none -fa off`, f32 weights")
    report.header("model", "tokens", "equal bytes", "of", "seconds", "", widths=(18, -6, -11, -6, -7, 50))
    compare = Texts(report, work).compare
    for name in harness.tiny_names():
        compare(name, harness.tiny(name), 256)
    base = harness.tiny("llama-hd64")
    compare("  chunks of 32", base, 256, "-b", 64, "-ub", 32)
    compare("  1 thread", base, 256, "-t", 1)
    compare("  LLAMA_ARG_DEVICE", base, 64, device="", env={"LLAMA_ARG_DEVICE": "QEVICT"})
    return report.finish()


def squeezed(_work):
    report = Report(f"tiny models at {SQUEEZED} of 4096 cells, 3500 characters and 128 tokens, validator on")
    # A ring for a sliding window is small: tables of one or two layers would take most of a fifth of it.
    sliding = {name: "budget=60%" for name in ("gemma2-hd256", "gemma3-hd64", "gpt-oss-hd64", "mimo2-k96-v64")}
    report.header("model", "plug-in", widths=(18, 100))
    for name in harness.tiny_names():
        done = harness.complete(harness.tiny(name), harness.text(3500), 128, "-c", 4096, "-lv", 4,
                                config=sliding.get(name, SQUEEZED), env={"QEVICT_CHECK": "1"})
        report.check_run(done, name)
        said = [s for s in done.sentences() if "KV cache of" in s]
        report.check(said, f"{name}: the plug-in does not say what it holds")
        report.check(len(done.out) > 3500 + 64, f"{name}: only {len(done.out)} bytes of text")
        report.row(name, said[0] if said else "-")
    return report.finish()


# A program that ends while its logger is behind loses bytes; a comparison that fails is made again with new runs.
ATTEMPTS = 4


class Programs:
    """The programs beside llama-completion, on one model and with another as its draft."""

    def __init__(self, report, model, draft, n_depth):
        self.report, self.model, self.draft, self.n_depth = report, model, draft, n_depth

    def run(self, label, name, *args, config, until=harness.TIMINGS):
        done = harness.run(name, *args, "-t", THREADS, config=config, until=until)
        ok = self.report.check_run(done, f"{label} ({config})")
        return done, ok

    def bench(self, config):
        for label, args in (("llama-bench", ("-p", 1024, "-n", 0, "-pg", "1024,16", "-r", 2)),
                            (f"llama-bench -d {self.n_depth} -r 3", ("-p", 64, "-n", 16, "-d", self.n_depth, "-r", 3))):
            done, _ = self.run(label, "llama-bench", "-m", self.model, *args, "-o", "csv", config=config, until=None)
            self.rate(label, config, done, 2)

    def rate(self, label, config, done, n_rows):
        """Tokens per second of the rows of llama-bench's table."""
        lines = done.out.decode(errors="replace").splitlines()
        names = lines[0].split(",") if lines else []
        cells = [re.findall(r'"([^"]*)"', line) for line in lines[1:]]
        rates = [dict(zip(names, c)).get("avg_ts", "") for c in cells]
        self.report.check(len(rates) == n_rows and all(float(r or 0) > 0 for r in rates), f"{label} ({config}): no rates in {lines[-2:]}")
        self.report.row(label, config, done.rc, "tokens/s " + " ".join(f"{float(r or 0):.0f}" for r in rates))

    def perplexity(self, config):
        found = {}
        for wanted in (None, config):
            done, _ = self.run("llama-perplexity", "llama-perplexity", "-m", self.model, "-f", harness.TEXT, "-c", 512,
                               "--chunks", 4, config=wanted, until="Final estimate")
            match = re.search(r"Final estimate: PPL = ([\d.]+)", done.log + done.out.decode(errors="replace"))
            self.report.check(match, f"llama-perplexity ({wanted}): no estimate")
            found[wanted] = float(match.group(1)) if match else float("nan")
        cpu, ours = found[None], found[config]
        self.report.row("llama-perplexity", config, 0, f"PPL {ours:.4f}, CPU backend {cpu:.4f}")
        limit = 0.01 if config == FULL else 0.5
        self.report.check(abs(ours / cpu - 1) < limit, f"llama-perplexity ({config}): {ours} where the CPU backend has {cpu}")

    def context_shift(self, config, exact):
        """Generation past the context size: the oldest half goes, the keys of the rest are rotated."""
        args = (self.model, harness.text(300), 800, "-c", 512, "-b", 128, "-ub", 64, "--context-shift", "--keep", 4)
        for _ in range(ATTEMPTS if exact else 1):
            done = harness.complete(*args, config=config)
            reference = harness.complete(*args, "-fa", "off") if exact else done
            if reference.out == done.out:
                break
        self.report.check_run(done, f"context shift ({config})")
        verdict = f"{len(done.out)} bytes"
        if exact:
            equal = harness.common_prefix(reference.out, done.out)
            verdict += f", {equal} equal to the CPU backend"
            self.report.check(reference.out == done.out, f"context shift ({config}): text differs after {equal} bytes")
        self.report.row("llama-completion --context-shift", config, done.rc, verdict)
        return done.out

    def speculative(self, config, exact, n=96):
        """The target takes rejected tokens of the draft back."""
        args = ("-m", self.model, "-md", self.draft, "-p", harness.text(300), "-n", n, "-c", 1024, "--temp", 0, "--ignore-eos",
                "--spec-type", "draft-simple", "--spec-draft-n-max", 6)
        for _ in range(ATTEMPTS if exact else 1):
            done = harness.run("llama-speculative-simple", *args, "-t", THREADS, config=config, until="n_accept")
            reference = harness.run("llama-speculative-simple", *args, "-fa", "off", "-t", THREADS, until="n_accept") if exact else done
            if self.answer(reference) == self.answer(done):
                break
        self.report.check_run(done, f"speculative ({config})")
        counts = dict(re.findall(r"n_(drafted|accept) *= *(\d+)", done.log + done.out.decode(errors="replace")))
        verdict = f"{counts.get('accept')} of {counts.get('drafted')} drafted tokens accepted"
        self.report.check(int(counts.get("drafted", 0)) > 0, f"speculative ({config}): nothing was drafted")
        if exact:
            same = self.answer(reference) == self.answer(done) and len(self.answer(done)) > 0
            verdict += ", text as with the CPU backend" if same else ", text DIFFERS"
            self.report.check(same, f"speculative ({config}): {self.answer(done)[-80:]!r} where the CPU backend has "
                                    f"{self.answer(reference)[-80:]!r}")
        self.report.row("llama-speculative-simple", config, done.rc, verdict)
        return self.answer(done)

    @staticmethod
    def answer(done):
        """The text without the statistics that follow it."""
        return done.out.split(b"\n\nencoded")[0].strip()


def programs(_work):
    report = Report("llama.cpp's programs, tiny models")
    report.header("program", "configuration", "rc", "result", widths=(34, 14, -3, 70))
    tiny = Programs(report, harness.tiny("llama-hd64"), harness.tiny("llama-hd80"), 2048)
    same = Programs(report, harness.tiny("llama-hd64"), harness.tiny("llama-hd64"), 2048)
    sliding = Programs(report, harness.tiny("gemma3-hd64"), harness.tiny("gemma3-hd64"), 2048)
    for config in (FULL, SQUEEZED):
        exact = config == FULL
        tiny.bench(config)
        sliding.bench(config)
        tiny.context_shift(config, exact)
        tiny.speculative(config, exact)
        same.speculative(config, exact)
    tiny.perplexity(FULL)
    sliding.perplexity(FULL)
    return report.finish()


def smollm2(_work):
    report = Report("llama.cpp's programs, SmolLM2")
    model = harness.model(harness.SMOLLM2)
    report.header("program", "configuration", "rc", "result", widths=(34, 14, -3, 70))
    real = Programs(report, model, model, 2048)
    real.bench(SQUEEZED)
    real.perplexity(FULL)
    real.perplexity(SQUEEZED)
    report.check(harness.is_readable(real.context_shift(SQUEEZED, False)), "context shift: the text is not readable")
    report.check(harness.is_readable(real.speculative(SQUEEZED, False, 48)), "speculative: the text is not readable")

    prompt = harness.text(8000)
    done = harness.complete(model, prompt, 64, "-c", 2560, config=SQUEEZED)
    report.check_run(done, "completion of a long prompt")
    answer = done.out.decode(errors="replace")[len(prompt):]
    report.check(harness.is_readable(answer), f"completion of a long prompt: {answer!r} is not readable")
    report.row("llama-completion", SQUEEZED, done.rc, answer.strip().replace("\n", " ")[:70])

    exact = harness.f32_model(harness.SMOLLM2)
    prompt = harness.text(1500)
    reference = harness.complete(exact, prompt, 256, "-c", 1024, "-fa", "off")
    done = harness.complete(exact, prompt, 256, "-c", 1024, config=FULL)
    report.check_run(done, "f32 weights")
    equal = harness.common_prefix(reference.out, done.out)
    report.check(reference.out == done.out and len(done.out) > len(prompt),
                 f"f32 weights: the text differs after {equal} bytes of {len(reference.out)}")
    report.row("llama-completion, f32 weights", FULL, done.rc, f"256 tokens, {equal} of {len(reference.out)} bytes as with the CPU backend")
    return report.finish()


if __name__ == "__main__":
    harness.main({"texts": texts, "squeezed": squeezed, "programs": programs, "smollm2": smollm2})
