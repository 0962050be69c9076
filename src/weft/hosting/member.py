"""Member: the process group that serves one model of a set, on a Unix socket that only this user can reach."""

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft import logs
from weft.errors import error_reason
from weft.gateway.breaker import Breaker
from weft.gateway.checks import ask_small
from weft.gateway.config import Timeouts, UpstreamConfig
from weft.gateway.replica import Attempt, Replica
from weft.gateway.upstream import UpstreamConnection, UpstreamError
from weft.serving.errors import HttpError

log = logging.getLogger("weft.hosting")

POLL_S = 0.05  # between two looks at a process that starts
STOP_S = 3.0  # from SIGTERM to SIGKILL
COMMAND_S = 300.0  # for the answer to a command: a large model may have to be read again
TAIL = 20  # of the last lines of a process that are kept
MODULE = "weft.cli.member"


class SteadyBreaker(Breaker):
    """A breaker that stays closed: no other process has the model, and `Keeper` ends one that does not respond."""

    def fail(self, now: float, reason: str, *, probe: bool) -> None:
        self.failures += 1
        self.last_failure = reason


class MemberReplica(Replica):
    """A member's server, as the gateway's code sends requests to it."""

    def __init__(self, names: Sequence[str], path: Path) -> None:
        super().__init__(UpstreamConfig(url="http://localhost", models=list(names)))
        self.name, self._path = f"unix://{path}", os.fspath(path)
        self.breaker = SteadyBreaker()
        self.draining = True  # until it is ready

    async def _open(self) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(UpstreamConnection, self._path)
        return connection


class Member:
    """One model's process group. `replica` is its server.

    The socket is in a folder of this user alone: no other user reaches it, nor can be there in its place while the
    process starts. Its keys are random.
    """

    def __init__(self, name: str, names: Sequence[str], *, environment: Mapping[str, str], path: Path) -> None:
        self.name = name
        self._key, self._admin_key = secrets.token_hex(16), secrets.token_hex(16)
        self._environment = {**environment, "VLLM_API_KEY": self._key, "WEFT_ADMIN_KEY": self._admin_key}
        self._logs_json = environment.get(logs.FORMAT_VARIABLE) == "json"
        self.replica = MemberReplica(names, path)
        self.replica.key = self._key
        self._words = [f"--uds={path}"]
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: socket.socket | None = None
        self._reading: asyncio.Task[None] | None = None
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._killed_for = ""

    @property
    def runs(self) -> bool:
        """True if the process has been started, and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.runs else None

    @property
    def stopped(self) -> bool:
        """True if a signal has stopped the process, see proc_pid_stat(5)."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    async def start(self, model: str, names: Sequence[str], words: Sequence[str]) -> None:
        """Start the process, and wait until its server is ready. Raises HttpError 503 with the cause.

        The words come through the lifeline: one of them may be a token, which others must not see in `ps`.
        """
        self.tail.clear()
        self._killed_for = ""
        command = [model, *words, *self._words, "--served-model-name", *names]
        try:
            await self._begin(json.dumps(command).encode() + b"\n")
        except BrokenPipeError:
            pass  # it has ended already, and its lines say why
        except OSError as error:
            self._close_lifeline()
            raise HttpError(
                503, f"{self.name!r} cannot be started: {error_reason(error)}", code="model-down", retry_after_s=5
            ) from None
        await self._until_ready()

    async def _begin(self, command: bytes) -> None:
        """Start the process, and tell it its words. Raises OSError."""
        self._close_lifeline()
        ours, theirs = socket.socketpair()
        self._lifeline = ours
        with theirs:
            self._process = process = await asyncio.create_subprocess_exec(
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
        self._reading = asyncio.create_task(self._read_lines(process))
        ours.sendall(command)

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
        cause = self._killed_for or (
            lines[-1] if lines else f"exit status {self._process and self._process.returncode}"
        )
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
            row = _json_row(text) if self._logs_json else None
            self.tail.append(f"{row.get('level', '')} {row.get('message', '')}".strip() if row else text)
            shown = json.dumps({"model": self.name, **(row or {"message": text})}) if self._logs_json else None
            with contextlib.suppress(OSError):  # nobody may read our own lines any more; the process is to go on
                print(shown or f"{self.name} | {text}", file=sys.stderr, flush=True)

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

    async def ask_health(self, limit_s: float) -> str:
        """The fault that the process's /health tells; "" if there is none. Raises UpstreamError without a response."""
        status, body = await self.request("GET", "/health", limit_s)
        return "" if status == 200 else _message_of(body) or f"status {status} of /health"

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
        self.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            self.kill()
        await self.ended()
        self._close_lifeline()

    def terminate(self) -> None:
        """Ask the process to end, once its running requests have ended; a stopped one cannot, and ends at once."""
        if self.stopped:
            self.kill()
        elif self._process is not None and self.runs:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self, reason: str = "") -> None:
        """End the process at once; its ranks notice, and end too. `reason` is what `failure` is to say of it."""
        if self._process is not None and self.runs:
            self._killed_for = reason
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End the process, and the connections to it."""
        await self.stop()
        self.replica.close()

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None


def _json_row(text: str) -> dict[str, Any] | None:
    """The object of a line of JSON; None for any other line."""
    try:
        row = json.loads(text)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _message_of(body: bytes) -> str:
    """The message of an error's body; "" if it has none."""
    row = _json_row(body.decode(errors="replace")) or {}
    error = row.get("error")
    return str(error.get("message", "")) if isinstance(error, dict) else ""
