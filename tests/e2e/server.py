#!/usr/bin/env python3
"""llama.cpp's unmodified server with the plug-in.

  unified  default flags (one unified cache, four slots, idle slots saved), 20%: 40 mixed requests on SmolLM2
  slots4   the same with four caches (-np 4)
  exact    f32 weights, full budget: answers of parallel requests are those of the CPU backend one at a time
  fitted   a machine too small for an f16 cache (--fit-target): every layer is held, and what is resident is the budget's
  saved    a slot saved, erased, restored and continued: as if it had never been away, at full budget and at 20%
"""

import concurrent.futures
import re

import harness
from harness import Report
from llama_server import Server, text_of

TOO_LONG = "exceeds the available context size"


def requests():
    """(kind, path, body): 40 of different kinds and lengths, in an order that mixes them."""
    lengths = [20, 60, 150, 400, 900, 1800, 3600, 30, 250, 700]  # characters
    mixed = []
    for i in range(30):
        n_chars = lengths[i % 10] + 7 * i
        if i in (6, 21):
            n_chars = 12000
        body = {"prompt": harness.text(n_chars, 431 * i % 15000), "n_predict": 12 + i % 5 * 8, "temperature": 0 if i % 2 else 0.7,
                "seed": i}
        mixed.append(("stream" if i % 3 == 0 else "plain", "/completion", body))
    for i in range(8):
        question = ["What is a garden?", "Name three colours.", "Why is the sky blue?", "Who was Oscar Wilde?"][i % 4]
        story = harness.text(1200, 900 * i) + "\n\n" if i % 2 else ""
        body = {"messages": [{"role": "user", "content": story + question}], "max_tokens": 24, "temperature": 0}
        mixed.append(("turns" if i % 4 == 1 else "chat", "/v1/chat/completions", body))
    order = [(17 * i) % len(mixed) for i in range(len(mixed))]
    mixed = [mixed[i] for i in order]
    mixed.insert(11, ("cancelled", "/completion", {"prompt": harness.text(900), "n_predict": 400, "temperature": 0}))
    mixed.insert(23, ("too long", "/completion", {"prompt": " ".join([harness.text(30000)] * 3), "n_predict": 8}))
    return mixed


def send(server, kind, path, body):
    """Answers of one request as a list of (status, text)."""
    if kind == "cancelled":
        return [server.stream(path, body, cancel_after=3)]
    if kind == "stream":
        return [server.stream(path, body)]
    status, answer = server.post(path, body)
    answers = [(status, text_of(answer) if status == 200 else str(answer))]
    if kind == "turns" and status == 200:
        messages = body["messages"] + [{"role": "assistant", "content": answers[0][1]}, {"role": "user", "content": "Tell me more."}]
        status, answer = server.post(path, body | {"messages": messages, "cache_prompt": True})
        answers.append((status, text_of(answer)))
    return answers


def mixed(work, title, *args):
    report = Report(f"40 requests to llama-server, {title}, SmolLM2 at 20%")
    model = harness.model(harness.SMOLLM2)
    counts = {}
    with Server(model, *args, "--slot-save-path", str(work), config="budget=20%", work=work) as server:
        def one(request):
            try:
                return send(server, *request)
            except (OSError, ValueError) as error:
                return [(0, repr(error))]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            answered = list(zip(requests(), pool.map(one, requests())))
        # A slot that is saved, erased, restored and continued between other requests.
        story = harness.text(5000)
        first = server.complete(story, 16, id_slot=1, cache_prompt=True)
        saved = server.slot("save", "slot", 1)
        server.slot("erase", slot=1)
        server.complete(harness.text(600, 9000), 16)
        restored = server.slot("restore", "slot", 1)
        second = server.complete(story + first["content"] + " And then", 16, id_slot=1, cache_prompt=True)
        report.check(saved["n_saved"] == restored["n_restored"] > 1000, f"slot: {saved} but {restored}")
        report.check(second["timings"]["prompt_n"] < 100, f"slot: {second['timings']['prompt_n']} tokens read again after the restore")
        answered.append((("slot", "", {}), [(200, first["content"]), (200, second["content"])]))
        healthy = server.get("/health")[0]

    report.header("request", "number", "example", widths=(10, -6, 70))
    for (kind, _, body), answers in answered:
        counts.setdefault(kind, []).append(answers[-1])
        for status, text in answers:
            if kind == "too long":
                report.check(400 <= status < 500, f"too long a prompt: answer {status}: {text[:200]}")
            else:
                what = str(body.get("prompt") or body.get("messages"))[-60:]
                report.check(status == 200, f"{kind} {what!r}: answer {status}: {text[:200]}")
                report.check(harness.is_readable(text), f"{kind} {what!r}: {text!r} is not readable")
    for kind, answers in counts.items():
        report.row(kind, len(answers), " ".join(answers[0][1].split())[:70])
    report.check(len(answered) >= 40, f"only {len(answered)} requests")
    report.check(healthy == 200, "the server is not healthy at the end")
    report.check(server.rc == 0, f"the server ends with {server.rc}")
    errors = [line for line in harness.error_lines(server.log) if TOO_LONG not in line]
    report.check(not errors, f"the log says {errors[:5]}")
    for said in re.findall(r"qevict: (KV .*)", server.log)[-2:]:
        print(f"   {said}")
    return report.finish()


def unified(work):
    return mixed(work, "default flags")


def slots4(work):
    return mixed(work, "-np 4", "-np", 4, "-c", 16384)


def exact(work):
    report = Report("f32 weights, full budget: parallel requests against the CPU backend one at a time")
    report.header("model", "server", "answers", "equal", "near ties", widths=(14, 14, -7, -6, -9))
    for name in ("llama-hd64", "qwen3-hd128", "gemma3-hd64"):
        model = harness.tiny(name)
        prompts = [harness.text(n, 800 * i) for i, n in enumerate((40, 200, 600, 1500, 90, 1000, 300, 2500))]
        n = 48
        with Server(model, "-np", 1, "-fa", "off", work=work, name="cpu") as server:
            expected = [server.complete(p, n)["tokens"] for p in prompts]
        report.check(server.rc == 0, f"the CPU backend's server ends with {server.rc}")
        for title, args in (("default flags", ()), ("-np 4", ("-np", 4, "-c", 16384))):
            with Server(model, *args, config="preset=full", work=work, name="ours") as server:
                with concurrent.futures.ThreadPoolExecutor(4) as pool:
                    found = list(pool.map(lambda p: server.complete(p, n)["tokens"], prompts))  # pylint: disable=cell-var-from-loop
            report.check(server.rc == 0 and not harness.error_lines(server.log), f"{name}, {title}: {harness.error_lines(server.log)[:3]}")
            equal = ties = 0
            for prompt, a, b in zip(prompts, expected, found):
                equal += a == b
                if a != b:
                    verdict = harness.explain_difference(model, prompt, n, work)
                    near = "near tie" in verdict
                    ties += near
                    report.check(near, f"{name}, {title}: {len(prompt)} characters, {harness.common_prefix(a, b)} tokens equal, "
                                       f"the reference alone: {verdict}")
            report.row(name, title, len(prompts), equal, ties)
            report.check(equal >= len(prompts) - 2, f"{name}, {title}: only {equal} answers are equal")
    return report.finish()


def available_mib():
    """What the device reports as free."""
    found = re.search(r"MemAvailable: +(\d+) kB", open("/proc/meminfo", encoding="ascii").read())
    return int(found.group(1)) // 1024


def resident_mib(pid):
    status = open(f"/proc/{pid}/status", encoding="ascii").read()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) // 1024


def fitted(work):
    report = Report("SmolLM2, 65536 tokens (1440 MiB of f16) at 5%, room for 700 MiB")
    report.header("started by", "cache on QEVICT", "other", "resident", widths=(16, -16, -8, -9))
    model = harness.model(harness.SMOLLM2)
    n_ctx = 65536
    for name in ("llama-server", "qevict serve"):
        fit = ("--fit-target", available_mib() - 700)
        with_plugin = Server(model, "-c", n_ctx, *fit, config="budget=5%,prefill=bounded", work=work)
        if name == "qevict serve":
            with_plugin.command = [str(harness.COMMAND), "serve", "-m", str(model), "-c", str(n_ctx), "--budget", "5%", "--host",
                                   "127.0.0.1", "--port", str(with_plugin.port), "-t", "2", "--", *map(str, fit), "-lv", "4"]
        with with_plugin as server:
            text = server.complete(harness.text(9000), 24)["content"]
            resident = resident_mib(server.process.pid)
        held = re.findall(r"QEVICT KV buffer size = +([\d.]+)", server.log)
        other = re.findall(r"CPU KV buffer size = +([\d.]+)", server.log)
        layers = re.findall(r"qevict: KV cache of (\d+) layers, (\d+) cells", server.log)
        report.row(name, held[-1] if held else "-", other[-1] if other else "-", resident)
        report.check(not other, f"{name}: {other} MiB of the cache are not held")
        report.check(layers == [("30", str(n_ctx))], f"{name}: holds {layers}")
        report.check(held and float(held[-1]) < 80, f"{name}: reports {held} MiB")
        report.check(resident < 500, f"{name}: {resident} MiB resident")
        report.check(harness.is_readable(text), f"{name}: {text!r} is not readable")
    return report.finish()


class Saved:
    """A conversation on slot 0 that is continued once directly and once after save, erase and restore."""

    def __init__(self, report, work, model, config, args):
        self.report, self.work, self.model, self.config, self.args = report, work, model, config, args

    def conversation(self, away):
        with Server(self.model, *self.args, "--slot-save-path", str(self.work), config=self.config, work=self.work) as server:
            story = server.post("/tokenize", {"content": harness.text(4000), "add_special": True})[1]["tokens"]
            first = server.complete(story, 41, id_slot=0, cache_prompt=True)
            if away:
                server.slot("save", "state")
                server.slot("erase")
                server.slot("restore", "state")
            more = story + first["tokens"] + story[200:240]
            second = server.complete(more, 40, id_slot=0, cache_prompt=True, n_probs=5)
        self.report.check(server.rc == 0 and not harness.error_lines(server.log), f"the log says {harness.error_lines(server.log)[:3]}")
        tiers = re.findall(r"KV bytes .*?\)", server.log)
        return first, second, tiers

    def compare(self, label):
        first, stayed, tiers = self.conversation(False)
        first2, returned, tiers2 = self.conversation(True)
        self.report.check(first["tokens"] == first2["tokens"], f"{label}: two equal runs differ before the save")
        equal = harness.common_prefix(stayed["tokens"], returned["tokens"])
        difference = 0.0
        for a, b in zip(stayed["completion_probabilities"][:equal], returned["completion_probabilities"][:equal]):
            tops = {t["id"]: t["logprob"] for t in b["top_logprobs"]}
            difference = max([difference] + [abs(t["logprob"] - tops[t["id"]]) for t in a["top_logprobs"] if t["id"] in tops])
        read_again = returned["timings"]["prompt_n"]
        self.report.row(label, equal, len(stayed["tokens"]), f"{difference:.1e}", read_again, tiers[-1][3:] if tiers else "-")
        self.report.check(stayed["tokens"] == returned["tokens"], f"{label}: the text differs after {equal} tokens")
        self.report.check(difference < 1e-3, f"{label}: log probabilities differ by {difference}")
        self.report.check(read_again <= 41, f"{label}: {read_again} tokens were read again after the restore")
        self.report.check(tiers == tiers2, f"{label}: {tiers} without, {tiers2} with the restore")


def saved(work):
    report = Report("llama-server: save, erase, restore, continue")
    report.header("model, configuration", "equal", "of", "dlogprob", "read", "bytes at the end", widths=(34, -5, -4, -8, -5, 100))
    for name, args in (("llama-hd64", ("-np", 1)), ("llama-hd64", ()), ("gpt2-hd64", ("-np", 1, "-c", 4096)), ("qwen2-hd64", ("-np", 2, "-c", 8192))):
        for config in ("preset=full", "budget=30%,promotion=none"):  # dormant codes are not saved
            label = f"{name} {' '.join(str(a) for a in args)} {config}"
            Saved(report, work, harness.tiny(name), config, args).compare(label)
    return report.finish()


if __name__ == "__main__":
    harness.main({"unified": unified, "slots4": slots4, "exact": exact, "fitted": fitted, "saved": saved})
