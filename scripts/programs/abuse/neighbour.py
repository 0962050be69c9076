"""Neighbour: a client whose stream runs all the time, in a process of its own, and the gaps between its tokens."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from scripts.programs.abuse.host import stolen_s

ROOT = Path(__file__).parents[3]
PATIENCE_S = 120.0
KEY_VARIABLE = "WEFT_NEIGHBOUR_KEY"


@dataclass(frozen=True)
class Lap:
    """A neighbour's stream since it was asked before: the longest time between two events of one answer, the current
    one included; CPU seconds of all cores that the host took away in that time; events; seconds; and answers that were
    refused or broke off."""

    worst_stall_s: float
    stolen_s: float
    events: int
    seconds: float
    failures: tuple[str, ...]


class Neighbour:
    """Stream of one completion of `tokens` tokens after the other. The attacker's own process would disturb what is
    measured, so the stream runs in another one: a line to its standard input asks for a lap, a line of JSON answers."""

    def __init__(self, address: tuple[str, int], key: str | None, tokens: int) -> None:
        host, port = address
        command = [sys.executable, "-m", "scripts.programs.abuse.neighbour", host, str(port), str(tokens)]
        environment = os.environ | ({KEY_VARIABLE: key} if key else {})
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def lap(self) -> Lap:
        """Figures since the last call."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(b"lap\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise TimeoutError("the neighbour's process does not answer")
        return msgspec.json.decode(line, type=Lap)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Gaps:
    """Gaps that the reading thread has seen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.perf_counter()
        self._last: float | None = None  # event of the answer that runs
        self._last_stolen_s = 0.0  # at that event
        self._worst, self._worst_stolen_s, self._events = 0.0, 0.0, 0
        self._failures: list[str] = []

    def event(self) -> None:
        with self._lock:
            self._last, self._last_stolen_s = self._measure_gap()
            self._events += 1

    def end(self, failure: str | None = None) -> None:
        with self._lock:
            self._last = None
            if failure:
                self._failures.append(failure)

    def lap(self) -> Lap:
        with self._lock:
            now, _ = self._measure_gap()
            seconds = now - self._began
            lap = Lap(self._worst, self._worst_stolen_s, self._events, seconds, tuple(self._failures))
            self._began, self._worst, self._worst_stolen_s, self._events = now, 0.0, 0.0, 0
            self._failures.clear()
            return lap

    def _measure_gap(self) -> tuple[float, float]:
        """The time, and the CPU seconds stolen up to now; the gap that ends here is kept if it is the worst."""
        now, stolen = time.perf_counter(), stolen_s()
        if self._last is not None and now - self._last > self._worst:
            self._worst, self._worst_stolen_s = now - self._last, stolen - self._last_stolen_s
        return now, stolen


def main() -> None:
    host, port, tokens = sys.argv[1:]
    gaps = _Gaps()
    arguments = (gaps, (host, int(port)), os.environ.get(KEY_VARIABLE), int(tokens))
    threading.Thread(target=_ask_for_ever, args=arguments, daemon=True).start()
    for _ in sys.stdin:
        print(msgspec.json.encode(gaps.lap()).decode(), flush=True)


def _ask_for_ever(gaps: _Gaps, address: tuple[str, int], key: str | None, tokens: int) -> None:
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: neighbour\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    if key:
        head += f"Authorization: Bearer {key}\r\n"
    request = head.encode() + b"\r\n" + body
    while True:
        try:
            with socket.create_connection(address, timeout=PATIENCE_S) as client:
                client.sendall(request)
                whole = _watch(gaps, client)
            gaps.end(None if whole else "a neighbour's answer was refused or broke off")
        except OSError as error:
            whole = False
            gaps.end(f"a neighbour's connection: {error}")
        if not whole:
            time.sleep(0.05)


def _watch(gaps: _Gaps, client: socket.socket) -> bool:
    """Read an answer to its end; true if it is whole."""
    tail = b""
    while data := client.recv(2**16):
        if b"data:" in data:
            gaps.event()
        tail = (tail + data)[-100:]
    return b"[DONE]" in tail


if __name__ == "__main__":
    main()
