"""Processes of a soak: replicas that can be killed, stopped, slowed and restarted, and the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[3]
START_S = 120.0
END_S = 20.0  # after SIGTERM, before SIGKILL
TICK_S = 0.05  # of a slowed process: so long it runs, and so long it stands
MODEL = "soak"


class StartError(Exception):
    """A process that does not serve; its log is the message."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A server of this machine at a port that stays. `ours`: it is Weft, whose answers others continue."""

    def __init__(self, name: str, port: int, command: list[str], log: Path, *, ours: bool = False) -> None:
        self.name, self.port, self.ours = name, port, ours
        self.url = f"http://127.0.0.1:{port}"
        self._command, self._log = command, log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, path: str = "/health") -> None:
        """Start it, and wait until it answers. Raises StartError."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
                    "OMP_NUM_THREADS": "1",
                },
            )
        deadline = time.monotonic() + START_S
        async with httpx.AsyncClient(timeout=2.0) as client:
            while time.monotonic() < deadline and self._process.returncode is None:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(self.url + path)).status_code < 500:
                        return
                await asyncio.sleep(0.1)
        raise StartError(f"{self.name} does not serve: {self._log.read_text()[-2000:]}")

    async def kill(self) -> None:
        """kill -9 of the server's first process; those that it has started have to end by themselves."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def end(self) -> None:
        """SIGTERM, and SIGKILL after END_S."""
        if self._process is None or self._process.returncode is not None:
            return
        family = self.family
        self._process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_S)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """A signal to the process and all that it has started."""
        for process in self.family:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    async def stop(self, seconds: float) -> None:
        """Stand still for a while."""
        self.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.send(signal.SIGCONT)

    async def slow(self, seconds: float) -> None:
        """Run half of the time, for a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            await self.stop(TICK_S)
            await asyncio.sleep(TICK_S)

    @property
    def family(self) -> list[psutil.Process]:
        """The server's first process, and those that it has started; none once it has ended."""
        if self._process is None or self._process.returncode is not None:
            return []
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        return []


def weft_process(name: str, model: str, flags: list[str], folder: Path) -> ServerProcess:
    """A real `weft serve`."""
    port = free_port()
    words = ["serve", model, "--port", str(port), "--served-model-name", MODEL, *flags]
    return ServerProcess(name, port, [sys.executable, "-m", "weft", *words], folder / f"{name}.log", ours=True)


def stub_process(name: str, pause_s: float, folder: Path) -> ServerProcess:
    """A server of another vendor, whose bill is the file NAME.bill."""
    port = free_port()
    words = ["-m", "scripts.programs.soak_gateway.stub", name, str(port), str(folder / f"{name}.bill"), str(pause_s)]
    return ServerProcess(name, port, [sys.executable, *words], folder / f"{name}.log")


def llama_process(python: str, model: str, folder: Path) -> ServerProcess:
    """llama-cpp-python's server, with a GGUF file, by an interpreter that has it."""
    port = free_port()
    words = [
        "-m",
        "llama_cpp.server",
        "--model",
        model,
        "--model_alias",
        "theirs",
        "--port",
        str(port),
        "--n_ctx",
        "2048",
        "--interrupt_requests",  # else it ends a running stream, as if it were complete, when the next request comes
        "False",
    ]
    return ServerProcess("vendor", port, [python, *words], folder / "vendor.log")
