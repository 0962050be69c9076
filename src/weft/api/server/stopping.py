"""Shutdown: signals, the drain of running requests, and the deadline for both."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from weft.api.observe.progress import StepProgress
from weft.api.server import stop_guard
from weft.engine.processes.launch import STACKS_SIGNAL
from weft.logs import event_fields

if TYPE_CHECKING:
    from weft.api.service.service import Service

log = logging.getLogger("weft.serving")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Time after requests were cut off, for their last bytes and the end of the engine.
CLOSE_S = 4.5
# Without a finished step, or with a stopped process: running requests are not expected to end.
STALL_S, STOPPED_S = 10.0, 1.0
POLL_S = 0.25
GUARD_S = 1.0  # after this process's own deadline
NOTED = 4096  # bytes, one for each signal
STDERR = 2


@contextlib.contextmanager
def handle_stop_signals(act: Callable[[signal.Signals, float], None], shutdown_timeout: float) -> Iterator[None]:
    """Call `act(signal, monotonic time)` in the event loop for each SIGINT and SIGTERM, and set an exit deadline.

    The process ends at the latest `shutdown_timeout` + CLOSE_S seconds after the first signal, and CLOSE_S seconds
    after any later signal. The handler runs between two Python instructions, so it runs even while the loop is busy. A
    C thread keeps the deadline without needing Python; it prints the stack of every thread and exits. If no Python runs
    at all, another process keeps it, GUARD_S seconds later (`api.server.stop_guard`). Children end with their death
    pipes.
    """
    loop = asyncio.get_running_loop()
    first = True
    guard = StopGuard(shutdown_timeout)

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        guard.note_signals()
        faulthandler.dump_traceback_later(CLOSE_S + (shutdown_timeout if first else 0.0), exit=True, file=STDERR)
        first = False
        loop.call_soon_threadsafe(act, signal.Signals(number), time.monotonic())

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    loop.add_reader(guard.wakeup, guard.note_signals)
    try:
        yield
    finally:
        loop.remove_reader(guard.wakeup)
        guard.close()
        for number, handler in before.items():
            signal.signal(number, handler)


class StopGuard:
    """The process that ends this process if it notices no signal, and the socket by which both learn of signals."""

    def __init__(self, shutdown_timeout: float) -> None:
        self.wakeup, self._writing = socket.socketpair()
        lifeline, self._lifeline = socket.socketpair()
        for end in (self.wakeup, self._writing):
            end.setblocking(False)
        limits = (CLOSE_S + GUARD_S + shutdown_timeout, CLOSE_S + GUARD_S)
        inherited = (self.wakeup.fileno(), lifeline.fileno())
        with lifeline:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", stop_guard.__file__, *map(str, (*inherited, os.getpid(), *limits))],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        faulthandler.register(STACKS_SIGNAL, file=STDERR, all_threads=True)
        self._before = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)

    def note_signals(self) -> None:
        """Read the bytes of the received signals: Python runs."""
        with contextlib.suppress(BlockingIOError):
            self.wakeup.recv(NOTED)

    def close(self) -> None:
        """End the process."""
        signal.set_wakeup_fd(self._before)
        faulthandler.unregister(STACKS_SIGNAL)
        self._lifeline.close()
        self._process.kill()
        self._process.wait()
        self.wakeup.close()
        self._writing.close()


def cancel_exit_deadline() -> None:
    """Cancel the exit deadline; call it when everything has ended."""
    faulthandler.cancel_dump_traceback_later()


async def drain(service: Service, end_s: float) -> None:
    """Wait until no request runs, at most until the monotonic clock reads `end_s`.

    The wait also ends if no step finishes for STALL_S seconds, or if a process has been stopped for STOPPED_S
    seconds: without it no request ends. Requests that wait for an engine to start again are not waited for.
    """
    progress = StepProgress(STALL_S, time.monotonic)
    while service.streams and (left := end_s - time.monotonic()) > 0:
        if progress.stalled_s(service.engine.stats.steps):
            log.warning(
                "no step has finished for %g s; not waiting any longer", STALL_S, extra=event_fields("engine-stalled")
            )
            return
        if service.engine.outage:
            log.warning("no engine runs; not waiting any longer", extra=event_fields("no-engine"))
            return
        if service.engine.stopped_s >= STOPPED_S:
            log.warning(
                "a process of the engine is stopped; not waiting any longer", extra=event_fields("process-stopped")
            )
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(POLL_S, left)):
                await service.idle.wait()
