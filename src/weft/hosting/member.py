"""Member: the process group that serves one model of a set, on a port of the loopback that only the front knows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence

from weft.errors import error_reason
from weft.gateway.checks import ask_small
from weft.gateway.config import Timeouts, UpstreamConfig
from weft.gateway.replica import Attempt, Replica
from weft.gateway.upstream import UpstreamError
from weft.serving.errors import HttpError

log = logging.getLogger("weft.hosting")

POLL_S = 0.05  # between two looks at a process that starts
STOP_S = 3.0  # from SIGTERM to SIGKILL
COMMAND_S = 300.0  # for the answer to a command: a large model may have to be read again
TAIL = 20  # of the last lines of a process that are kept
MODULE = "weft.cli.member"


class Member:
    """One model's process group. `replica` is its server, as the gateway's code sends requests to it.

    The port is taken by a socket of ours as long as the set runs, so that nobody else gets it between two starts. The
    keys are random: another user of this machine who finds the port gets no answer.
    """

    def __init__(self, name: str, names: Sequence[str], *, environment: dict[str, str]) -> None:
        self.name = name
        self._reservation = _reserve_port()
        port = self._reservation.getsockname()[1]
        self._key, self._admin_key = secrets.token_hex(16), secrets.token_hex(16)
        self._environment = {**environment, "VLLM_API_KEY": self._key, "WEFT_ADMIN_KEY": self._admin_key}
        self.replica = Replica(UpstreamConfig(url=f"http://127.0.0.1:{port}", models=list(names)))
        self.replica.key = self._key
        self.replica.draining = True  # until it is ready
        self._words = [f"--port={port}", "--host=127.0.0.1", "--shutdown-timeout=1"]
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: socket.socket | None = None
        self._reading: asyncio.Task[None] | None = None
        self.tail: deque[str] = deque(maxlen=TAIL)

    @property
    def runs(self) -> bool:
        """True if the process has been started, and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.runs else None

    async def start(self, model: str, names: Sequence[str], words: Sequence[str]) -> None:
        """Start the process, and wait until its server is ready. Raises HttpError 503 with the cause.

        The words come through the lifeline: one of them may be a token, which others must not see in `ps`.
        """
        ours, theirs = socket.socketpair()
        command = [model, *words, *self._words, "--served-model-name", *names]
        self.tail.clear()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                MODULE,
                str(theirs.fileno()),
                self.name,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the front's
            )
        self._close_lifeline()
        self._lifeline = ours
        ours.setblocking(True)
        ours.sendall(json.dumps(command).encode() + b"\n")
        self._reading = asyncio.create_task(self._read_lines(self._process))
        await self._until_ready()

    async def _until_ready(self) -> None:
        while self.runs:
            with contextlib.suppress(UpstreamError):
                status, _ = await self.request("GET", "/health/ready", 5.0)
                if status == 200:
                    return
            await asyncio.sleep(POLL_S)
        await self.ended()
        raise self.failure()

    def failure(self) -> HttpError:
        """The error of a process that has ended, with the last line that names a cause."""
        lines = [line for line in self.tail if "error" in line.lower()] or list(self.tail)
        cause = lines[-1] if lines else f"exit status {self._process.returncode if self._process else None}"
        return HttpError(503, f"{self.name!r} does not run: {cause}", code="model-down", retry_after_s=5)

    async def _read_lines(self, process: asyncio.subprocess.Process) -> None:
        """Pass on what the process prints, each line with the model's name."""
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                continue  # longer than any line of ours
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self.tail.append(text)
            print(f"{self.name} | {text}", file=sys.stderr, flush=True)

    async def ended(self) -> None:
        """Wait until the process has ended, and its lines are read."""
        if self._process is not None:
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def command(self, path: str) -> None:
        """POST a command of the administrator. Raises HttpError 502 if it fails."""
        status, body = await self.fetch("POST", path)
        if status != 200:
            text = body[:200].decode(errors="replace")
            raise HttpError(502, f"{path} of {self.name!r}: status {status}: {text}", code="model-failed")

    async def fetch(self, method: str, path: str) -> tuple[int, bytes]:
        """Status and body of a request with the administrator's key. Raises HttpError 502."""
        try:
            return await self.request(method, path, COMMAND_S, admin=True)
        except UpstreamError as error:
            raise HttpError(502, f"the process of {self.name!r}: {error}", code="model-failed") from None

    async def request(self, method: str, path: str, limit_s: float, *, admin: bool = False) -> tuple[int, bytes]:
        """Status and body of a small response. Raises UpstreamError."""
        attempt, key = Attempt(self.replica, counted=False), self._admin_key if admin else self._key
        try:
            return await ask_small(attempt, method, path, key=key, limit_s=limit_s, timeouts=Timeouts())
        finally:
            attempt.close()

    async def stop(self) -> None:
        """End the process group: gently, and after STOP_S at once."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            self.kill()
        await self.ended()
        self._close_lifeline()

    def kill(self) -> None:
        """End the process at once; its ranks notice, and end too."""
        if self._process is not None and self.runs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Stop, and give the port back."""
        await self.stop()
        self.replica.close()
        self._reservation.close()

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None


def _reserve_port() -> socket.socket:
    """A socket bound to a free port of the loopback, beside which another socket may be bound that listens."""
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reservation.bind(("127.0.0.1", 0))
    except OSError as error:
        reservation.close()
        raise HttpError(503, f"no port of the loopback is free: {error_reason(error)}", code="no-free-port") from None
    return reservation
