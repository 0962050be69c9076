"""Neighbour: a client whose stream runs all the time, in a process of its own, and the gaps between its tokens."""

from __future__ import annotations

import json
import multiprocessing
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Lap:
    """A neighbour's stream since it was asked before: the longest time between two events of one answer, the current
    one included; events; seconds; and answers that were refused or broke off."""

    worst_stall_s: float
    events: int
    seconds: float
    failures: tuple[str, ...]


class Neighbour:
    """Asks for one completion of `tokens` tokens after the other. What the attacker's own process does is not
    measured: this is another one."""

    def __init__(self, address: tuple[str, int], key: str | None, tokens: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_stream, args=(theirs, address, key, tokens), daemon=True)
        self._process.start()
        theirs.close()

    def lap(self) -> Lap:
        """What happened since the last call."""
        self._pipe.send("lap")
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError("the neighbour's process does not answer")
        lap: Lap = self._pipe.recv()
        return lap

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


class _Gaps:
    """What the thread that reads has seen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.perf_counter()
        self._last: float | None = None  # event of the answer that runs
        self._worst, self._events = 0.0, 0
        self._failures: list[str] = []

    def event(self) -> None:
        with self._lock:
            now = time.perf_counter()
            if self._last is not None:
                self._worst = max(self._worst, now - self._last)
            self._last = now
            self._events += 1

    def end(self, failure: str | None = None) -> None:
        with self._lock:
            self._last = None
            if failure:
                self._failures.append(failure)

    def lap(self) -> Lap:
        with self._lock:
            now = time.perf_counter()
            if self._last is not None:
                self._worst = max(self._worst, now - self._last)
            lap = Lap(self._worst, self._events, now - self._began, tuple(self._failures))
            self._began, self._worst, self._events = now, 0.0, 0
            self._failures.clear()
            return lap


def _stream(pipe: Connection, address: tuple[str, int], key: str | None, tokens: int) -> None:
    gaps = _Gaps()
    threading.Thread(target=_ask_for_ever, args=(gaps, address, key, tokens), daemon=True).start()
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pipe.send(gaps.lap())


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
