"""Servers under abuse: `weft serve` or `weft gateway` as a process of its own, its log, memory and end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]
START_S = 120.0
END_S = 60.0  # after SIGTERM, before SIGKILL; well above the goal, so that a miss is measured
KEY = "abuse"


class StartError(Exception):
    """A server that does not serve; its log is the message."""


class Server:
    """A running `weft serve WORDS`, with at most `files` open files where that is given. `address` is (host, port), or
    the path of a socket."""

    command: tuple[str, ...] = ("serve", "--clip-max-tokens", "--api-key", KEY)  # attacks ask for endless answers
    address: tuple[str, int] | str

    def __init__(
        self, *words: str, files: int | None = None, environment: dict[str, str] | None = None, wait: bool = True
    ) -> None:
        where = () if "--uds" in words else ("--port", "0")
        command = [sys.executable, "-m", "weft", *self.command, *words, *where]
        if files is not None:
            command = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", *command]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `kill`
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        )
        self.served = False
        if wait:
            try:
                self.wait_until_served()
            except BaseException:
                self.kill()
                raise

    def wait_until_served(self) -> None:
        """Return once it says that it serves. Raises StartError if it ends, or says nothing for START_S seconds."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if match := re.search(
                r"(?:serving|upstreams,) .*at (?:http://([^:\s]+):(\d+)|(?:unix:)?(/\S+))", self.log()
            ):
                self.address = match[3] or (match[1], int(match[2]))
                self.served = True
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise StartError(self.log() or f"nothing was said in {START_S:g} s")

    def log(self, start: int = 0) -> str:
        """Output of the server from byte `start` on."""
        size = os.fstat(self._log.fileno()).st_size - start
        return os.pread(self._log.fileno(), max(0, size), start).decode(errors="replace")

    def log_bytes(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def memory_bytes(self) -> int:
        """Proportional set size of the API's process."""
        return int(psutil.Process(self.process.pid).memory_full_info().pss)

    def processes(self) -> list[psutil.Process]:
        """The API's process, and those that it has started."""
        return [psutil.Process(self.process.pid), *self._family()]

    def ranks(self) -> list[psutil.Process]:
        return [process for process in self._family() if "weft.worker" in " ".join(process.cmdline())]

    def core(self) -> psutil.Process:
        """The process of the engine's core."""
        (core,) = [process for process in self._family() if "weft.engine.client" in " ".join(process.cmdline())]
        return core

    def terminate(self) -> float:
        """Seconds from SIGTERM until it has ended; END_S if it had to be killed."""
        family, began = self._family(), time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        took_s = time.monotonic() - began
        _, alive = psutil.wait_procs(family, timeout=5)
        self._kill(alive)
        return took_s

    def kill(self) -> None:
        """End it and all that it has started, at once."""
        self._kill([*self._family(), psutil.Process(self.process.pid)] if self.process.poll() is None else [])
        self.process.wait()
        self._log.close()

    def _family(self) -> list[psutil.Process]:
        if self.process.poll() is not None:
            return []
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    @staticmethod
    def _kill(processes: list[psutil.Process]) -> None:
        for process in processes:
            if process.is_running():
                process.kill()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._log.closed:
            self.kill()


class Gateway(Server):
    """A running `weft gateway WORDS`."""

    command = ("gateway",)


class Stranger:
    """A server that somebody else has started, at an address of this machine: its log is not known."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.pid: int | None = next(
            (
                connection.pid
                for connection in psutil.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == address[1]
            ),
            None,
        )

    def processes(self) -> list[psutil.Process]:
        """The server's process and those that it has started; none if another user's process listens."""
        if self.pid is None:
            return []
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def memory_bytes(self) -> int | None:
        return int(psutil.Process(self.pid).memory_full_info().pss) if self.pid else None

    def log(self, start: int = 0) -> str:
        return ""

    def log_bytes(self) -> int:
        return 0

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        pass
