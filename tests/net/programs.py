"""Programs on the hosts of a test: a head that is an LLM or a server, and other nodes."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.net.namespaces import HOSTS, Cable

ROOT = Path(__file__).parents[2]
WAIT_S = 240  # at most, for something that takes seconds on an idle machine
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1_000_000,
}
PORT = 29701
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h

_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """A test run that is killed leaves no program behind."""
    _libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)


def own_environment() -> dict[str, str]:
    """Variables of a program: no settings of Weft's, and no proxy, which Ray's gRPC would ask for private addresses."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("WEFT_") and not name.lower().endswith("_proxy")
    }
    return own | {"PYTHONPATH": f"{ROOT}/src:{ROOT}"}


class Program:
    """A process, with what it prints. `words` follow Python's name; `inside` runs it on a host."""

    def __init__(self, inside: Sequence[str], words: Sequence[str], log: Path, **environment: str) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [*inside, sys.executable, *words],
                env={**own_environment(), **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                preexec_fn=_die_with_parent,
            )

    def say(self, line: str = "") -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"it has ended:\n{self.printed}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def printed(self) -> str:
        return self.log.read_text()

    def until(self, pattern: str) -> None:
        """Wait until the program has printed a line with this pattern."""
        deadline = time.monotonic() + WAIT_S
        while not re.search(pattern, self.printed):
            assert self.process.poll() is None and time.monotonic() < deadline, self.printed
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        """Wait for the end; return status and last line."""
        status = self.process.wait(WAIT_S)
        return status, self.printed.strip().splitlines()[-1]

    def ranks(self) -> list[psutil.Process]:
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [member for member in family if "weft.worker.process" in member.cmdline()]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Pair:
    """Starts the head on the first host, and the other node on the second."""

    def __init__(self, cable: Cable, model: str, folder: Path) -> None:
        self._cable, self._model, self._folder = cable, model, folder
        self.key = self.write_key("right.key", "7" * 64)
        self.socket = str(folder / "http")
        self.programs: list[Program] = []

    def write_key(self, name: str, text: str) -> str:
        file = self._folder / name
        file.write_text(text)
        file.chmod(0o600)
        return str(file)

    def head(self, **options: Any) -> Program:
        """An LLM, see `tests.net.head`."""
        address = {"nnodes": 2, "master_addr": HOSTS[0], "master_port": PORT, "cluster_key_file": self.key}
        words = [str(ROOT / "tests/net/head.py"), self._model, json.dumps({**COMMON, **address, **options})]
        return self._start(0, words, "head.log")

    def server(self, *flags: str) -> Program:
        """A server at the Unix socket `self.socket`, which all namespaces reach."""
        own = f"--kv-cache-memory-bytes 1000000 --uds {self.socket}"
        return self._start(0, [*self._serve(self.key), *own.split(), *flags], "server.log")

    def other(self, *flags: str, key: str = "", **environment: str) -> Program:
        words = [*self._serve(key or self.key), "--headless", "--node-rank", "1", *flags]
        return self._start(1, words, f"other{len(self.programs)}.log", **environment)

    def changed_other(self, change: str) -> Program:
        """The other node, with a line of Python that changes Weft before it starts."""
        code = f"import sys, weft; {change}; from weft.cli.main import main; sys.exit(main(sys.argv[1:]))"
        words = self._serve(self.key)[2:]
        return self._start(1, ["-c", code, *words, "--headless", "--node-rank", "1"], f"other{len(self.programs)}.log")

    def under_torchrun(self, host: int, *flags: str) -> Program:
        """The same command on both hosts: the numbers of the nodes come from torchrun."""
        run = f"-m torch.distributed.run --nnodes 2 --node-rank {host} --nproc-per-node 1 --master-addr {HOSTS[0]} "
        run += f"--master-port {PORT} --no-python {sys.executable} -m weft serve {self._model} --load-format dummy "
        run += f"--dtype float32 --kv-cache-memory-bytes 1000000 --cluster-key-file {self.key} --uds {self.socket}"
        return self._start(host, [*run.split(), *flags], f"torchrun{host}.log")

    def _serve(self, key: str) -> list[str]:
        words = f"-m weft serve {self._model} --load-format dummy --dtype float32 --nnodes 2"
        return f"{words} --master-addr {HOSTS[0]} --master-port {PORT} --cluster-key-file {key}".split()

    def _start(self, host: int, words: Sequence[str], log: str, **environment: str) -> Program:
        self.programs.append(Program(self._cable.inside(host), words, self._folder / log, **environment))
        return self.programs[-1]

    def close(self) -> None:
        for program in self.programs:
            program.close()


class LocalConnection(http.client.HTTPConnection):
    """A connection to a server's Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=WAIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def ask(path: str, route: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a server's answer."""
    connection = LocalConnection(path)
    try:
        text = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", route, text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        return response.status, json.loads(content) if content.startswith(b"{") else {}
    finally:
        connection.close()


def complete(path: str, model: str, prompt: list[int], tokens: int) -> list[int]:
    """Token ids of an answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    status, answer = ask(path, "/v1/completions", {**body, "return_token_ids": True})
    assert status == 200, answer
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def until_health(path: str, status: int) -> dict[str, Any]:
    """Wait until /health answers with a status; return its JSON."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            found, answer = ask(path, "/health")
            if found == status:
                return answer
        time.sleep(0.05)
    raise AssertionError(f"/health has not answered with {status}")
