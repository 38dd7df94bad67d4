"""llama.cpp's unmodified server as a child process, and requests to it."""

import http.client
import json
import signal
import socket
import subprocess
import time

import harness
from harness import THREADS


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """config None: CPU backend. Use as a context manager; `log` and `rc` are complete after it."""

    def __init__(self, model, *args, config=None, work, name="server"):
        self.port = free_port()
        self.log_path = work / f"{name}.log"
        self.command = [str(harness.program("llama-server")), "-m", str(model), "--host", "127.0.0.1", "--port", str(self.port),
                        "-t", THREADS, "-lv", "4", *(str(a) for a in args), "-dev", "none" if config is None else "QEVICT"]
        self.config = config
        self.process = None
        self.rc = None

    def __enter__(self):
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(self.command, env=harness.environment(self.config), stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=subprocess.STDOUT)
        until = time.monotonic() + 60
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if self.get("/health")[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.1)
        self.__exit__(None, None, None)
        raise RuntimeError(f"the server does not start: {self.log[-1500:]}")

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.rc = self.process.returncode

    @property
    def log(self):
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def get(self, path, timeout=10):
        return self.exchange("GET", path, None, timeout)

    def post(self, path, body=None, timeout=170):
        return self.exchange("POST", path, body or {}, timeout)

    def exchange(self, method, path, body, timeout):
        """Status and decoded answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read().decode(errors="replace")
            return reply.status, json.loads(text) if text else {}
        finally:
            connection.close()

    def stream(self, path, body, cancel_after=None, timeout=170):
        """Status and text of a streamed answer; cancel_after: closes the connection after so many events."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("POST", path, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            pieces = []
            for line in reply:
                event = line.decode(errors="replace").strip()
                if not event.startswith("data: ") or event == "data: [DONE]":
                    continue
                pieces.append(text_of(json.loads(event[6:])))
                if cancel_after and len(pieces) >= cancel_after:
                    break
            return reply.status, "".join(pieces)
        finally:
            connection.close()

    def complete(self, prompt, n, **more):
        """Greedy /completion; a failed request is an exception."""
        status, answer = self.post("/completion", {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True,
                                                   "return_tokens": True} | more)
        if status != 200:
            raise RuntimeError(f"/completion answers {status}: {answer}")
        return answer

    def slot(self, action, file=None, slot=0):
        status, answer = self.post(f"/slots/{slot}?action={action}", {"filename": file} if file else {})
        if status != 200:
            raise RuntimeError(f"slot {action} answers {status}: {answer}")
        return answer


def text_of(event):
    """The text in an answer or in an event of a stream, of either interface."""
    if "choices" in event:
        choice = event["choices"][0] if event["choices"] else {}
        part = choice.get("message") or choice.get("delta") or {}
        return part.get("content") or ""
    return event.get("content") or ""
