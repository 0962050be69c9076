"""Stopping: signals, the time that running requests get, and the bound on all of it."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from weft.serving.progress import Progress

if TYPE_CHECKING:
    from weft.serving.service import Service

log = logging.getLogger("weft.serving")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# After requests have been cut off: for their last bytes, and for the engine's end.
CLOSE_S = 4.5
STALL_S = 10.0  # without a step, after which nothing that runs is expected to end
LOOK_S = 0.25
STDERR = 2


@contextlib.contextmanager
def handle_stop_signals(act: Callable[[signal.Signals, float], None], shutdown_timeout: float) -> Iterator[None]:
    """Have the event loop call `act` for each SIGINT and SIGTERM, with its time on the monotonic clock, and end this
    process at the latest `shutdown_timeout` + CLOSE_S seconds after the first, CLOSE_S after any other.

    The handler runs between two instructions of Python, so also while the loop is busy; the bound is kept by a thread
    of C that needs nothing from Python. It prints what every thread was doing. Children end with their death pipes.
    """
    loop = asyncio.get_running_loop()
    first = True

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        faulthandler.dump_traceback_later(CLOSE_S + (shutdown_timeout if first else 0.0), exit=True, file=STDERR)
        first = False
        loop.call_soon_threadsafe(act, signal.Signals(number), time.monotonic())

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def cancel_exit_deadline() -> None:
    """Lift the bound: everything has ended."""
    faulthandler.cancel_dump_traceback_later()


async def drain(service: Service, end_s: float) -> None:
    """Wait until no request runs, until the monotonic clock is at `end_s`, or until no step has finished for STALL_S
    seconds: a rank that is stopped ends nothing."""
    progress = Progress(STALL_S, time.monotonic)
    while service.streams and (left := end_s - time.monotonic()) > 0:
        if progress.stalled_s(service.engine.stats.steps):
            log.warning("no step has finished for %g s; not waiting any longer", STALL_S)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(LOOK_S, left)):
                await service.idle.wait()
