"""Work of strangers in child processes: what breaks a limit is refused, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.pure.api.test_tools import world_saying
from tests.pure.worlds import refused
from tests.refusals import refuses
from weft.engine.sandbox import zygote
from weft.engine.sandbox.isolated import Isolated, Result, advance, run_blocking
from weft.engine.sandbox.limits import Limits
from weft.engine.sandbox.pool import SandboxBusyError
from weft.engine.templates import rendering
from weft.engine.templates.rendering import Settings
from weft.engine.templates.template import ChatTemplate
from weft.errors import RequestError

# A loop of ten billion turns, and texts of 28 MB each: within the budgets of a template, not within the limits below.
ENDLESS = """
{%- set ns = namespace(texts=[]) %}
{%- if messages[0].content == 'spin' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif messages[0].content == 'grow' %}
{%- for i in range(30) %}{% set ns.texts = ns.texts + ['😀' * 7000000] %}{% endfor %}
{%- else %}{{ messages[0].content }}{% endif %}"""
ROOT = Path(__file__).parents[3]
QUICK = Limits(cpu_s=1, wall_s=5.0, memory=256 << 20)


def isolated(source: str = ENDLESS, limits: Limits = QUICK, **changes: Any) -> Isolated:
    return Isolated(
        "weft.engine.templates.rendering:prepare",
        lambda: rendering.encode_setup(ChatTemplate(source)),
        limits,
        refusal="it does not end",
        param="messages",
        code="too-expensive",
        **changes,
    )


def job(content: str) -> bytes:
    return rendering.encode_rendering([{"role": "user", "content": content}], Settings(opens=True))


async def finish(work: Any) -> bytes:
    """Run a coroutine to its end in the event loop."""
    arrived: list[Any] = []
    while not isinstance(step := advance(work, arrived), Result):
        arrived.append(await step.function.pool.call(step.data))
    return step.value


@pytest.mark.parametrize("content", ["spin", "grow"])
def test_what_breaks_a_limit_is_refused_and_the_next_call_is_answered(content: str) -> None:
    function = isolated()
    assert run_blocking(function.call(job("hi"))) == b"hi"
    with refuses(RequestError, "too-expensive") as caught:
        run_blocking(function.call(job(content)))
    assert caught.value.param == "messages"
    assert run_blocking(function.call(job("hi"))) == b"hi"


async def test_others_do_not_wait_for_what_spins() -> None:
    function = isolated(limits=Limits(cpu_s=3, wall_s=20.0, memory=256 << 20))
    assert await finish(function.call(job("hi"))) == b"hi"
    spinning = asyncio.create_task(finish(function.call(job("spin"))))
    others = [asyncio.create_task(finish(function.call(job(f"{number}")))) for number in range(40)]
    answers = await asyncio.gather(*others)
    assert not spinning.done()
    assert answers == [f"{number}".encode() for number in range(40)]
    with pytest.raises(RequestError):  # by whichever limit comes first on a busy machine
        await spinning


def test_the_process_ends_with_its_last_user() -> None:
    first, second = isolated(), isolated()
    for function in (first, second):
        assert run_blocking(function.call(job("hi"))) == b"hi"
    gc.collect()  # functions of other tests
    current = zygote.current_zygote()
    first.close()
    assert current.alive and zygote.current_zygote() is current
    current._registered &= {second._number}  # as if the others' owners had ended
    second.close()
    assert not current.alive


async def test_an_answer_does_not_wait_for_the_next_job() -> None:
    """Both come in one message; the quick one is the first, and is not taken for the one that spins."""
    function = isolated(limits=Limits(cpu_s=3, wall_s=20.0, memory=256 << 20))
    assert await finish(function.call(job("hi"))) == b"hi"
    quick, spinning = (asyncio.create_task(finish(function.call(job(content)))) for content in ("first", "spin"))
    assert await quick == b"first"
    assert not spinning.done()
    with pytest.raises(RequestError):
        await spinning


async def test_a_call_that_is_given_up_frees_its_place() -> None:
    function = isolated(limits=Limits(cpu_s=60, wall_s=60.0, memory=256 << 20))
    for _ in range(10):  # more than there are places
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await finish(function.call(job("spin")))
    assert await finish(function.call(job("hi"))) == b"hi"


async def test_a_worker_that_is_killed_costs_one_call() -> None:
    function = isolated()
    await finish(function.call(job("hi")))
    [worker] = function.pool._workers
    calls = [asyncio.create_task(finish(function.call(job(f"{number}")))) for number in range(3)]
    await asyncio.sleep(0)
    worker._ends.lifeline.close()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(outcome, RequestError) for outcome in outcomes) <= 1
    assert [one for one in outcomes if isinstance(one, bytes)] == [
        f"{number}".encode() for number, outcome in enumerate(outcomes) if isinstance(outcome, bytes)
    ]


def test_a_zygote_that_is_killed_is_started_again() -> None:
    function = isolated(lasting=False)
    assert run_blocking(function.call(job("hi"))) == b"hi"
    first = zygote.current_zygote()
    os.kill(first._process.pid, signal.SIGKILL)
    first._process.wait()
    assert run_blocking(function.call(job("hi"))) == b"hi"
    assert zygote.current_zygote() is not first


def test_no_secret_and_no_file_reaches_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_ADMIN_KEY", "secret")
    assert "WEFT_ADMIN_KEY" not in zygote._environment()


def test_an_object_that_is_collected_while_a_lock_is_held_waits_for_none() -> None:
    """A finaliser runs wherever the collector does, also in the thread that holds the zygote's lock."""
    current = zygote.current_zygote()
    with current._lock:
        isolated()
        gc.collect()
    assert zygote.forgotten


def test_children_end_with_their_parent() -> None:
    program = (
        "import time\n"
        "from tests.pure.engine.test_sandbox import isolated, job\n"
        "from weft.engine.sandbox import zygote\n"
        "from weft.engine.sandbox.isolated import run_blocking\n"
        "function = isolated()\n"
        "run_blocking(function.call(job('hi')))\n"
        "print(zygote.current_zygote()._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        worker = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        parent.kill()
    for one in (pid, worker):
        while is_running(one):
            time.sleep(0.02)


def is_running(pid: int) -> bool:
    """False for a process that has ended, whether somebody has waited for it or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_data_that_is_none_is_refused() -> None:
    with refuses(RequestError, "messages-not-data"):
        rendering.encode_rendering([{"role": "user", "content": object()}], Settings(opens=True))
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with refuses(RequestError, "messages-not-data"):
        rendering.encode_rendering([{"role": "user", "content": deep}], Settings(opens=True))
    while deep:  # Python would free it by recursion
        deep = deep[0]
    assert json.loads(rendering.encode_rendering(({"role": "a", "content": "\ud800"},), Settings(opens=True)))[0] == [
        {"role": "a", "content": "\ud800"}
    ]


async def test_a_zygote_that_is_killed_costs_no_call_that_has_not_begun() -> None:
    function = isolated(lasting=False)
    assert await finish(function.call(job("hi"))) == b"hi"
    process = zygote.current_zygote()._process
    os.kill(process.pid, signal.SIGSTOP)
    calls = [asyncio.create_task(finish(function.call(job(f"{number}")))) for number in range(3)]
    await asyncio.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    assert await asyncio.gather(*calls) == [b"0", b"1", b"2"]


async def test_a_call_without_descriptors_left_is_refused_at_once() -> None:
    """It waited for ever: nobody saw the exception of the callback."""
    function = isolated(lasting=False)
    assert await finish(function.call(job("hi"))) == b"hi"
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)  # of the numbers that are free
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        with pytest.raises(SandboxBusyError):
            await asyncio.wait_for(finish(function.call(job("hi"))), 60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert await finish(function.call(job("hi"))) == b"hi"


def test_a_blocking_caller_notices_that_its_worker_has_ended_meanwhile() -> None:
    function = isolated()
    assert run_blocking(function.call(job("hi"))) == b"hi"
    workers = Path(f"/proc/{zygote.current_zygote()._process.pid}/task").glob("*/children")
    for pid in " ".join(file.read_text() for file in workers).split():
        os.kill(int(pid), signal.SIGKILL)
    time.sleep(0.2)
    assert run_blocking(function.call(job("hi"))) == b"hi"


def living_errors() -> list[RequestError]:
    """By their type: objects of other packages answer a question for their class with a warning."""
    return [one for one in gc.get_objects() if issubclass(type(one), RequestError)]


async def test_a_refused_request_is_gone_with_its_answer() -> None:
    """An error keeps the frames that it passed; in a circle with them it would keep each request's body for minutes."""
    world = world_saying("", "{{ raise_exception('no ' ~ messages[0].content) }}")
    grammar = {"structured_outputs": {"grammar": "start: a"}}
    refused(await world.complete(**grammar))
    gc.collect()
    before = set(map(id, living_errors()))  # of other tests
    gc.disable()
    try:
        for _ in range(3):
            refused(await world.chat())
            refused(await world.complete(**grammar))
        await asyncio.sleep(0.1)  # the last thread lets go of its future
        left = living_errors()
    finally:
        gc.enable()
    assert not [one for one in left if one.__traceback__ is not None and id(one) not in before]
