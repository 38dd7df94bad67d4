"""What the end-to-end tests share: where things are, running llama.cpp's unmodified programs, tables, verdicts.

Every test is a script that prints compact tables and exits with 0 (passed), 1 (failed) or 77 (skipped: a
program or a model is missing). ctest sets the environment; by hand, set QEVICT_LLAMA_BIN_DIR, QEVICT_PLUGIN,
QEVICT_TINY_DIR and QEVICT_MODEL_DIR, or keep llama.cpp and the models in the cache folder and the build in
build/release.
"""

import dataclasses
import os
import pathlib
import re
import string
import subprocess
import sys
import tempfile
import time

SKIP = 77
ROOT = pathlib.Path(os.environ.get("QEVICT_SOURCE_DIR") or pathlib.Path(__file__).resolve().parents[2])
CACHE = pathlib.Path(os.environ.get("QEVICT_CACHE_DIR") or pathlib.Path.home() / ".cache" / "qevict")
BIN = pathlib.Path(os.environ.get("QEVICT_LLAMA_BIN_DIR") or CACHE / "llama-build" / "bin")
PLUGIN = pathlib.Path(os.environ.get("QEVICT_PLUGIN") or ROOT / "build" / "release" / "lib" / "libggml-qevict.so")
PROBE = pathlib.Path(os.environ.get("QEVICT_PROBE") or ROOT / "build" / "release" / "bin" / "e2e_probe")
COMMAND = pathlib.Path(os.environ.get("QEVICT_COMMAND") or ROOT / "build" / "release" / "bin" / "qevict")
TINY = pathlib.Path(os.environ.get("QEVICT_TINY_DIR") or CACHE / "tiny")
MODELS = pathlib.Path(os.environ.get("QEVICT_MODEL_DIR") or CACHE / "models")
TEXT = ROOT / "tests" / "data" / "dorian_gray.txt"
THREADS = str(min(2, os.cpu_count() or 1))

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN = "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"
GEMMA = "gemma-3-270m-Q4_K_M.gguf"

# Architectures of scripts/tiny_gguf.py whose caches are refused, and why; all others work.
REFUSED = {"mamba": "recurrent", "lfm2-hd64": "recurrent", "deepseek2-mla": "MLA"}


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(SKIP)


def needed(path, what):
    if not pathlib.Path(path).exists():
        skip(f"{what} {path} does not exist")
    return pathlib.Path(path)


def program(name):
    return needed(BIN / name, "the program")


def plugin():
    return needed(PLUGIN, "the plug-in")


def tiny(name):
    return needed(TINY / f"{name}.gguf", "the model")


def tiny_names():
    """All tiny models that the plug-in has to run."""
    names = sorted(path.stem for path in TINY.glob("*.gguf") if path.stem not in REFUSED)
    if not names:
        skip(f"there are no models in {TINY}; scripts/tiny_gguf.py makes them")
    return names


def model(file):
    return needed(MODELS / file, "the model")


def f32_model(file):
    """The model with its weights as f32, made by llama-quantize beside it and kept."""
    source = model(file)
    target = source.with_name(source.stem + ".f32.gguf")
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}.partial")
        done = subprocess.run([program("llama-quantize"), "--allow-requantize", source, partial, "f32"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"llama-quantize failed: {done.stdout.decode(errors='replace')[-500:]}")
        partial.replace(target)
    return target


def text(n_chars, start=0):
    """Part of the public-domain novel, without its line breaks."""
    whole = " ".join(TEXT.read_text(encoding="utf-8").split())
    return whole[start:start + n_chars]


# --- Running programs ---------------------------------------------------------------------------------------------


def environment(config=None, **more):
    """The environment of a run: nothing of llama.cpp's or ours but what the test asks for.

    config: QEVICT_CONFIG, or None for a run without the plug-in."""
    env = {k: v for k, v in os.environ.items() if not re.match(r"LLAMA_|GGML_|QEVICT_(?!SIMD)", k)}
    if config is not None:
        env |= {"GGML_BACKEND_PATH": str(plugin()), "QEVICT_CONFIG": config}
    return env | more


@dataclasses.dataclass
class Run:
    command: str
    rc: int  # negative: ended by a signal; None: ran past its time
    out: bytes
    log: str
    seconds: float

    @property
    def errors(self):
        return error_lines(self.log)

    def sentences(self):
        """What the plug-in said, without prefixes."""
        return re.findall(r"qevict: (.*)", self.log)


# Words of an ordinary log that sound like errors.
HARMLESS = re.compile(r"Final estimate|no error|error_rate|--no-warn|_error_|failed to (fit|find) .* using default", re.IGNORECASE)


def error_lines(log):
    lines = (line.strip() for line in log.splitlines())
    return [line for line in lines
            if re.search(r"\b(error|failed|failure|abort(ed)?|assert|invalid)\b", line, re.IGNORECASE) and not HARMLESS.search(line)]


# The last line of the log of programs that end with their timings. llama.cpp's logger drops what is still queued when
# the program ends, standard output included.
TIMINGS = "graphs reused"


def run(name, *args, config=None, device=None, timeout=170, env=None, stdin=None, until=None):
    """Runs a program of llama.cpp's build. config None: CPU backend; else the plug-in with that QEVICT_CONFIG.

    device: overrides `-dev`; "" leaves the option out (the environment chooses).
    until: text that the output must have, or else the logger has lost its end and the program is run again."""
    if device is None:
        device = "none" if config is None else "QEVICT"
    command = [str(program(name)), *(str(a) for a in args)]
    if device:
        command += ["-dev", device]
    for _ in range(20):
        done = execute(command, environment(config, **(env or {})), timeout, stdin)
        if not until or done.rc != 0 or until in done.log or until.encode() in done.out:
            break
    return done


def execute(command, env, timeout, stdin=None):
    begin = time.monotonic()
    source = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    try:
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout, check=False, **source)
        rc, out, log = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        rc, out, log = None, late.stdout or b"", late.stderr or b""
    return Run(" ".join(command), rc, out, log.decode(errors="replace"), time.monotonic() - begin)


def complete(model_path, prompt, n, *args, config=None, **more):
    """Greedy text of llama-completion as bytes, prompt included; any number of tokens, end of text ignored."""
    return run("llama-completion", "-m", model_path, "-p", prompt, "-n", n, "-no-cnv", "--temp", "0", "--ignore-eos",
               "-t", THREADS, *args, config=config, until=TIMINGS, **more)


def probe(command, timeout=170, env=None, **options):
    """Runs the probe; returns what it printed (numbers by name) and the run. Underscores in options become dashes."""
    arguments = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    command = [str(needed(PROBE, "the probe")), command, *arguments]
    done = execute(command, environment(QEVICT_PLUGIN=str(plugin()), **(env or {})), timeout)
    values = {}
    for line in done.out.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        try:
            values[key] = float(value)
        except ValueError:
            values[key] = value
    return values, done


# Largest difference of logits that the reference's own rounding (queries to f16) explains: see `exact.py tiny`.
NEAR_TIE = 0.01


def explain_difference(path, prompt, n, work):
    """Where the greedy texts of the CPU backend and of the plug-in part, and whether that was a near tie."""
    file = work / "prompt.txt"
    file.write_text(prompt, encoding="utf-8")
    found, _ = probe("greedy", model=path, text=file, generate=n, ctx=4096, config="preset=full")
    margin = found.get("margin", float("nan"))
    kind = "near tie" if margin < NEAR_TIE else "DIFFERENT"
    return f"{kind}: token {int(found.get('equal', -1))}, reference ahead by {margin:.4f}"


# --- Judging --------------------------------------------------------------------------------------------------------


def is_readable(answer, least=0.9):
    """Non-empty, and most of it words, digits and punctuation in ASCII."""
    if isinstance(answer, bytes):
        answer = answer.decode(errors="replace")
    answer = answer.strip()
    return bool(answer) and sum(c in string.printable for c in answer) >= least * len(answer)


def common_prefix(a, b):
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


class Report:
    """Collects verdicts; prints a table row by row."""

    def __init__(self, title):
        self.failures = []
        self.checks = 0
        self.begin = time.monotonic()
        self.widths = []
        print(f"== {title}", flush=True)

    def header(self, *cells, widths):
        self.widths = widths
        self.row(*cells)
        print("  ".join("-" * abs(w) for w in widths), flush=True)

    def row(self, *cells):
        """Widths: positive = left, negative = right."""
        padded = (str(c).ljust(w) if w > 0 else str(c).rjust(-w) for c, w in zip(cells, self.widths))
        print("  ".join(padded).rstrip(), flush=True)

    def check(self, ok, what):
        self.checks += 1
        if not ok:
            self.failures.append(what)
            print(f"   FAILED: {what}", flush=True)
        return ok

    def check_run(self, done, what):
        """Exit code 0 and a log without errors."""
        state = "ran past its time" if done.rc is None else f"exit code {done.rc}"
        ok = self.check(done.rc == 0, f"{what}: {state}: {done.command}\n{done.log[-1500:]}")
        errors = done.errors
        return self.check(not errors, f"{what}: the log says {errors[:3]}") and ok

    def finish(self):
        seconds = time.monotonic() - self.begin
        print(f"== {self.checks - len(self.failures)} of {self.checks} checks passed in {seconds:.0f} s", flush=True)
        for failure in self.failures:
            print(f"   failed: {failure.splitlines()[0][:300]}")
        return 1 if self.failures else 0


def main(parts, default=None):
    """Runs the parts named on the command line (default: all); parts: name -> function(work folder) -> exit code."""
    names = sys.argv[1:] or default or list(parts)
    if unknown := [n for n in names if n not in parts]:
        print(f"no part {unknown[0]}; there are {', '.join(parts)}", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory(prefix="qevict-e2e-") as work:
        codes = [parts[n](pathlib.Path(work)) for n in names]
    sys.exit(max(codes))
