#!/usr/bin/env python3
"""Every example of `qevict --help`, of each command's help and of the README runs as it stands, but for the names of files
and with fewer repetitions.

  help         all of them on a tiny model; `serve` with --dry-run
  first_words  the first example of the help on every real model
"""

import re
import shlex
import subprocess

import harness
from harness import Report

COMMANDS = ["", "run", "serve", "plan", "info", "eval", "eval kld", "eval ppl", "calibrate", "calibrate codec", "bench",
            "bench model", "bench attention", "bench codecs"]
MODEL = "model.gguf"
FEW = [("eval", "--chunks", "1"), ("bench", "-r", "2")]
SHORT, LONG = ("prompt.txt", "paper.txt"), ("book.txt", "wiki.test.raw")


def examples_of(text):
    """Commands in a help text or a code block, continued lines joined, comments cut."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = re.findall(r"^ *(?:build/release/bin/)?(qevict (?!COMMAND).*)$", joined, re.MULTILINE)
    return [line.split("  #")[0].strip() for line in found]


def examples():
    found = []
    for command in COMMANDS:
        done = subprocess.run([harness.COMMAND, *command.split(), "--help"], capture_output=True, text=True, check=True)
        found += examples_of(done.stdout.partition("Examples:")[2])
    for block in re.findall(r"```sh\n(.*?)```", (harness.ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL):
        found += examples_of(block)
    return list(dict.fromkeys(found))


class Runner:
    def __init__(self, report, work):
        self.report, self.work = report, work

    def run(self, line, model, timeout=900):
        # A tiny model's tokens are single characters: what is a book to `eval` would not fit the context of `run`.
        long = harness.text(5000) if line.startswith("qevict run") else "\n".join([harness.text(30000)] * 6)
        for name in SHORT + LONG:
            (self.work / name).write_text(harness.text(3000) if name in SHORT else long, encoding="utf-8")
        link = self.work / MODEL
        link.unlink(missing_ok=True)
        link.symlink_to(model)
        words = shlex.split(line)
        words[0] = str(harness.COMMAND)
        if words[1] == "serve" and "--dry-run" not in words:
            words.insert(2, "--dry-run")
        if ">" in words:
            words = words[:words.index(">")]
        for command, option, few in FEW:  # the same with fewer repetitions
            if words[1] == command and option not in words:
                words += [option, few]
        done = subprocess.run(words, cwd=self.work, env=harness.environment(), stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, errors="replace", timeout=timeout, check=False)
        said = done.stderr.strip().splitlines()
        self.report.row(line[:90], done.returncode, model.stem[:18], (said[-1] if done.returncode and said else "")[:100])
        self.report.check(done.returncode == 0, f"{line}: ends with {done.returncode}: {done.stderr[-600:]}")
        self.report.check(done.stdout.strip(), f"{line}: writes nothing")
        return done


def tiny_help(work):
    report = Report("examples of the help and of the README, a tiny model")
    report.header("example", "rc", "model", "", widths=(90, -3, 18, 100))
    runner = Runner(report, work)
    lines = examples()
    report.check(len(lines) > 20, f"only {len(lines)} examples")
    # What one example writes another reads: calibration comes before the statistics are used.
    for line in sorted(lines, key=lambda l: "calibrate" not in l):
        runner.run(line, harness.tiny("llama-hd64"))
    return report.finish()


def first_words(work):
    report = Report("the first example of the help, real models")
    report.header("example", "rc", "model", "", widths=(90, -3, 18, 100))
    runner = Runner(report, work)
    for name in (harness.SMOLLM2, harness.QWEN, harness.GEMMA):
        done = runner.run(examples()[0], harness.model(name))
        report.check(harness.is_readable(done.stdout), f"{name}: {done.stdout!r} is not readable")
    return report.finish()


if __name__ == "__main__":
    harness.main({"help": tiny_help, "first_words": first_words})
