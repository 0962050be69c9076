"""Signals: the bound on a stop, whatever the event loop does, and how long running requests are waited for."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.log_events import logged
from tests.pure.worlds import DEAD, FakeEngine, World, endless, refused
from weft.api.server import stopping
from weft.engine.executors.ranks import CLOSED
from weft.errors import EngineError
from weft.http.errors import describe_error

PROGRAM = """
import asyncio, ctypes, re, sys, time, uvloop
from weft.api.server import stopping

stopping.CLOSE_S, stopping.GUARD_S = 0.5, 0.3

def block():
    print("blocked", flush=True)
    {block}

async def main():
    asyncio.get_running_loop().call_soon(block)
    done = asyncio.Event()
    with stopping.handle_stop_signals(lambda number, at_s: (print(number.name, flush=True), done.set()), 0.2):
        await done.wait()
    stopping.cancel_exit_deadline()
    time.sleep(0.8)

with asyncio.Runner(loop_factory={loop}) as runner:
    runner.run(main())
"""
UVLOOP = "uvloop.new_event_loop"
# A mutex that is locked twice, by a call that keeps the lock of Python.
HELD = "lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, bytes(64); lock(mutex); lock(mutex)"
BLOCKS = [("None", "while True: pass"), (UVLOOP, "while True: pass"), (UVLOOP, "re.fullmatch('(a|a)*b', 'a' * 60)")]


def run(loop: str, block: str, *numbers: signal.Signals) -> tuple[int, str, str]:
    """Status, output and errors of a program whose event loop is busy when the signals come."""
    program = PROGRAM.format(block=block, loop=loop)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            begun = process.stdout.readline()
            while block == HELD and "futex" not in Path(f"/proc/{process.pid}/wchan").read_text():
                time.sleep(0.01)
            for number in numbers:
                process.send_signal(number)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    return process.returncode, begun + out, err


@pytest.mark.parametrize(("loop", "block"), BLOCKS, ids=["asyncio", "uvloop", "regular expression"])
def test_a_loop_that_is_blocked_for_good_does_not_hold_up_the_end(loop: str, block: str) -> None:
    status, out, err = run(loop, block, signal.SIGTERM)
    assert (status, out) == (1, "blocked\n")
    assert "Timeout" in err and "in block" in err  # what it was doing


@pytest.mark.parametrize("loop", ["None", UVLOOP])
@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM]], ids=["once", "twice"])
def test_a_library_that_keeps_the_lock_of_python_does_not_hold_up_the_end(loop: str, numbers: list[Any]) -> None:
    """No handler of Python's can run; the process ends all the same, and says where it was."""
    status, out, err = run(loop, HELD, *numbers)
    assert (status, out) == (-signal.SIGKILL, "blocked\n")
    assert "in block" in err and "runs no Python" in err


@pytest.mark.parametrize("loop", ["None", UVLOOP])
def test_a_loop_that_comes_round_ends_by_itself(loop: str) -> None:
    assert run(loop, "pass", signal.SIGINT) == (0, "blocked\nSIGINT\n", "")


async def test_requests_are_waited_for_until_they_end() -> None:
    world = World(FakeEngine(endless))
    asked = asyncio.create_task(world.complete())
    while not world.engine.open:
        await asyncio.sleep(0)
    waiting = asyncio.create_task(stopping.drain(world.service, time.monotonic() + 60))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    for answer in world.service.streams:
        answer.cut_off()
    await asyncio.wait_for(waiting, 60)
    refused(await asked, 503, code="shutting_down")


@pytest.mark.parametrize(("stall_s", "limit_s", "told"), [(0.1, 60.0, True), (60.0, 0.1, False)])
async def test_a_thread_that_cannot_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stall_s: float, limit_s: float, told: bool
) -> None:
    monkeypatch.setattr(stopping, "STALL_S", stall_s)
    monkeypatch.setattr(stopping, "POLL_S", 0.01)
    world = World(FakeEngine(endless))
    asked = asyncio.create_task(world.complete())
    while not world.engine.open:
        await asyncio.sleep(0)
    await asyncio.wait_for(stopping.drain(world.service, time.monotonic() + limit_s), 60)
    assert world.service.streams and bool(logged(caplog, "engine-stalled")) == told
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


async def test_an_engine_that_starts_again_is_not_waited_for() -> None:
    world = World(FakeEngine(endless))
    asked = asyncio.create_task(world.complete())
    while not world.engine.open:
        await asyncio.sleep(0)
    world.engine.failure = DEAD
    await asyncio.wait_for(stopping.drain(world.service, time.monotonic() + 60), 60)
    assert world.service.streams
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.parametrize(
    ("error", "status", "code"), [(EngineError(CLOSED), 503, "shutting_down"), (DEAD, 500, "engine_dead")]
)
def test_an_engine_that_was_closed_has_not_died(error: Any, status: int, code: str) -> None:
    number, body, headers = describe_error(error)
    assert (number, body.code) == (status, code) and ("Retry-After" in headers) == (status == 503)
