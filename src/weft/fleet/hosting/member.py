"""Member: the process that serves one model of a set, on a Unix socket that only this user can reach."""

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
from weft.engine.processes.causes import describe_exit
from weft.errors import error_reason
from weft.fleet.upstreams.breaker import Breaker
from weft.fleet.upstreams.checks import ask_small
from weft.fleet.upstreams.config import Timeouts, UpstreamConfig
from weft.fleet.upstreams.replica import Attempt, UpstreamReplica
from weft.fleet.upstreams.upstream import UpstreamConnection, UpstreamError
from weft.http.errors import HttpError

log = logging.getLogger("weft.hosting")

POLL_S = 0.05  # pause between two checks of a starting process
STOP_S = 3.0  # seconds from SIGTERM to SIGKILL
ADMIN_S = 300.0  # seconds for the response to an administrator's request: a large model may have to be read again
TAIL_LINES = 20  # last lines of output that are kept
MODULE = "weft.cli.serve.member"


class SteadyBreaker(Breaker):
    """A breaker that never opens.

    There is no other replica to fall back to, and `Keeper` kills an unresponsive process.
    """

    def fail(self, now: float, reason: str, *, probe: bool) -> None:
        self.failures += 1
        self.last_failure = reason


class MemberReplica(UpstreamReplica):
    """A member's server, in the form to which the gateway's code sends requests."""

    def __init__(self, names: Sequence[str], path: Path) -> None:
        super().__init__(UpstreamConfig(url="http://localhost", models=list(names)))
        self.name, self._path = f"unix://{path}", os.fspath(path)
        self.breaker = SteadyBreaker()
        self.draining = True  # no requests until `Keeper` marks the model as awake

    async def _open(self) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(UpstreamConnection, self._path)
        return connection


class Member:
    """One model's process, which starts its ranks. `replica` is its server.

    The socket is in a folder of this user alone: no other user can connect to it, or listen at its path before the
    process does. Its keys are random.
    """

    def __init__(self, name: str, names: Sequence[str], *, environment: Mapping[str, str], path: Path) -> None:
        self.name, self._names = name, tuple(names)
        self._key, self._admin_key = secrets.token_hex(16), secrets.token_hex(16)
        self._environment = {**environment, "VLLM_API_KEY": self._key, "WEFT_ADMIN_KEY": self._admin_key}
        self._logs_json = environment.get(logs.FORMAT_VARIABLE) == "json"
        self.replica = MemberReplica(names, path)
        self.replica.key = self._key
        self._path = path
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: socket.socket | None = None
        self._reading: asyncio.Task[None] | None = None
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._kill_reason = ""

    @property
    def is_running(self) -> bool:
        """True if the process has been started, and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.is_running else None

    @property
    def is_suspended(self) -> bool:
        """True if a signal such as SIGSTOP has suspended the process, see proc_pid_stat(5)."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    async def start(self, model: str, arguments: Sequence[str]) -> None:
        """Start `weft serve MODEL ARGUMENTS`, and wait until its server is ready. Raises HttpError 503 with the cause.

        The arguments are sent through the lifeline socket before it is only watched: one of them may be a token, which
        others must not see in `ps`.
        """
        self.tail.clear()
        self._kill_reason = ""
        serve_arguments = [model, *arguments, f"--uds={self._path}", "--served-model-name", *self._names]
        try:
            await self._start_process(json.dumps(serve_arguments).encode() + b"\n")
        except BrokenPipeError:
            pass  # it has ended already, and its lines say why
        except OSError as error:
            self._close_lifeline()
            raise HttpError(
                503, f"{self.name!r} cannot be started: {error_reason(error)}", code="model-down", retry_after_s=5
            ) from None
        await self._until_ready()

    async def _start_process(self, line: bytes) -> None:
        """Start the process, and send it the line with its arguments. Raises OSError."""
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
                start_new_session=True,  # Ctrl-C goes to the parent only, which then ends its members
            )
        self._reading = asyncio.create_task(self._read_lines(process))
        ours.sendall(line)

    async def _until_ready(self) -> None:
        """Wait without a deadline, since loading may take long; `Keeper` kills a process that is suspended.

        Raises HttpError 503 if the process ends.
        """
        while self.is_running:
            with contextlib.suppress(UpstreamError):
                status, _ = await self.request("GET", "/health/ready", 5.0)
                if status == 200:
                    return
            await asyncio.sleep(POLL_S)
        await self.wait_ended()
        raise self.exit_error()

    def exit_error(self) -> HttpError:
        """The error of a process that has ended: the signal that ended it, or the last line that names a cause."""
        return HttpError(503, f"{self.name!r} does not run: {self._exit_cause()}", code="model-down", retry_after_s=5)

    def _exit_cause(self) -> str:
        if self._kill_reason:
            return self._kill_reason
        status = self._process.returncode if self._process is not None else None
        lines = [line for line in self.tail if "error" in line.lower()] or list(self.tail)
        if status is not None and status < 0:  # its last log line is no cause
            return describe_exit(status, "").cause
        return lines[-1] if lines else f"exit status {status}"

    async def _read_lines(self, process: asyncio.subprocess.Process) -> None:
        """Pass on what the process prints, each line with the model's name."""
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                continue  # longer than any line that Weft prints
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            row = _json_row(text) if self._logs_json else None
            self.tail.append(f"{row.get('level', '')} {row.get('message', '')}".strip() if row else text)
            shown = json.dumps({"model": self.name, **(row or {"message": text})}) if self._logs_json else None
            with contextlib.suppress(OSError):  # the output of this process may be closed; the model's process goes on
                print(shown or f"{self.name} | {text}", file=sys.stderr, flush=True)

    async def wait_ended(self) -> None:
        """Wait until the process has ended, and its lines are read."""
        if self._process is not None:
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def post_admin(self, path: str) -> None:
        """POST to an administrator's path. Raises HttpError 502 if the status is not 200."""
        status, body = await self.request_as_admin("POST", path)
        if status != 200:
            text = body[:200].decode(errors="replace")
            raise HttpError(502, f"{path} of {self.name!r}: status {status}: {text}", code="model-failed")

    async def request_as_admin(self, method: str, path: str) -> tuple[int, bytes]:
        """Status and body of a request with the administrator's key. Raises HttpError 502."""
        try:
            return await self.request(method, path, ADMIN_S, admin=True)
        except UpstreamError as error:
            raise HttpError(502, f"the process of {self.name!r}: {error}", code="model-failed") from None

    async def ask_health(self, limit_s: float) -> str:
        """The fault that the process's /health reports, "" for none. Raises UpstreamError without a response."""
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
        """End the process: SIGTERM, then SIGKILL after STOP_S. Its ranks notice, and end too."""
        process = self._process
        if process is None:
            return
        self.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            self.kill()
        await self.wait_ended()
        self._close_lifeline()

    def terminate(self) -> None:
        """Send SIGTERM: the server finishes its requests, then exits.

        A suspended process cannot handle the signal, and is killed.
        """
        if self.is_suspended:
            self.kill()
        elif self._process is not None and self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self, reason: str = "") -> None:
        """Send SIGKILL; the process's ranks notice, and end too. `exit_error` will report `reason` as the cause."""
        if self._process is not None and self.is_running:
            self._kill_reason = reason
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
