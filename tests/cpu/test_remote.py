"""AsyncEngine and the core process, over ranks that are fakes."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from fake_worker import HERE, make_plan

from tests.cpu.families import family
from tests.cpu.kept_forks import take_back
from tests.refusals import refuses
from weft.config import EngineConfig
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Output, Request
from weft.engine.core.token_ids import TokenIds
from weft.engine.executors.processes import start_server
from weft.engine.processes import forks
from weft.engine.replicas import remote
from weft.engine.replicas.remote import AsyncEngine
from weft.errors import CORE, EngineError, QueueFullError, RequestError
from weft.plan.plan import Plan

WAIT_S = 60


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fakes are found, and no process is left."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    yield
    take_back()
    assert family() == []


async def start(
    model: str = "fine", *, tensor: int = 1, stages: int = 1, max_num_queued_reqs: int = 1024
) -> AsyncEngine:
    """Start an engine in new interpreters, as a first start does."""
    plan = make_plan(model, tensor=tensor, stages=stages)
    config = EngineConfig(model=model, max_num_queued_reqs=max_num_queued_reqs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forks, "can_fork", lambda environment: False)
        return await AsyncEngine.start(plan, config, HERE)


async def fork(model: str = "fine", *, max_num_queued_reqs: int = 1024, **layout: int) -> AsyncEngine:
    """Start an engine as a restart does: core and ranks are forks of a server that has imported all."""
    return await fork_plan(make_plan(model, **layout), max_num_queued_reqs=max_num_queued_reqs)


async def fork_plan(plan: Plan, *, max_num_queued_reqs: int = 1024) -> AsyncEngine:
    config = EngineConfig(model=plan.model, max_num_queued_reqs=max_num_queued_reqs)
    server = start_server(plan)
    return await AsyncEngine.start(plan, config, HERE, forks=server, forks_core=server is not None)


def ask(id: str, tokens: int = 3, prompt: int = 2) -> Request:
    return Request(id=id, prompt=TokenIds.pack([1] * prompt), params=SamplingParams(max_tokens=tokens))


async def collect(stream: AsyncIterator[Output]) -> dict[str, list[int]]:
    """The tokens of each request, once all have finished."""
    tokens: dict[str, list[int]] = {}
    async with asyncio.timeout(WAIT_S):
        async for output in stream:
            tokens.setdefault(output.id, []).extend(output.tokens)
    return tokens


def has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in library.path for library in process.memory_maps())


async def test_many_streams_at_once() -> None:
    """Over two stages, so that steps are in flight while others are applied."""
    engine = await start(stages=2)
    try:
        assert engine.alive
        assert len(engine.ready.ranks) == 2
        core, *ranks = family()
        assert not has_torch(core)
        assert all(map(has_torch, ranks))
        streams = [engine.submit([ask(f"{n}-{choice}", 1 + n % 7) for choice in range(2)]) for n in range(40)]
        for n, answer in enumerate(await asyncio.gather(*map(collect, streams))):
            assert {id: len(tokens) for id, tokens in answer.items()} == {f"{n}-0": 1 + n % 7, f"{n}-1": 1 + n % 7}
        assert engine.stats.generation_tokens == sum(2 * (1 + n % 7) for n in range(40))
        assert engine.stats.running == engine.stats.waiting == engine.stats.blocks_used == 0
    finally:
        await engine.close()
    assert engine.failure is None
    assert not engine.alive
    await engine.close()
    with refuses(EngineError, "engine-closed"):
        engine.submit([ask("late")])


async def test_the_queue_is_bounded_and_takes_all_or_none() -> None:
    """Four may run (the plan says) and two wait."""
    engine = await fork(max_num_queued_reqs=2)
    try:
        for _ in range(6):  # what cannot be sent takes no room
            with pytest.raises(OverflowError):
                engine.submit([msgspec.structs.replace(ask("big"), priority=2**64)])
        streams = [engine.submit([ask(str(n), 40)]) for n in range(5)]
        with refuses(QueueFullError, "queue-full") as refused:
            engine.submit([ask("5"), ask("6")])
        assert re.findall(r"\d+", str(refused.value)) == ["5", "2", "6"]
        streams.append(engine.submit([ask("5")]))
        answers = await asyncio.gather(*map(collect, streams))
        assert [list(answer) for answer in answers] == [[str(n)] for n in range(6)]
        await collect(engine.submit([ask("7")]))
    finally:
        await engine.close()


async def test_refusals_of_the_core_are_told() -> None:
    engine = await fork()
    try:
        with refuses(RequestError, "prompt-too-long") as caught:
            await collect(engine.submit([ask("0", prompt=100)]))
        assert caught.value.param == "prompt" and " 100 " in str(caught.value)
        assert len(await collect(engine.submit([ask("1")]))) == 1
    finally:
        await engine.close()


@pytest.mark.parametrize("begun", [False, True])
async def test_a_listener_who_goes_frees_the_blocks(begun: bool) -> None:
    """Before the first output too: then nothing has been iterated yet."""
    # Answers that would take seconds: who goes is heard before their end, however busy the machine.
    long = 50_000
    plan = msgspec.structs.replace(make_plan(), max_model_len=long + 2, kv_cache_bytes=256 << 20)
    engine = await fork_plan(plan)
    try:
        stream = engine.submit([ask("0", long), ask("1", long)])
        if begun:
            await anext(stream)
        await stream.aclose()
        await collect(engine.submit([ask("2", 1)]))
        assert engine.stats.blocks_used == engine.stats.running == 0
        assert engine.stats.generation_tokens < long
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    finally:
        await engine.close()


async def test_a_cancelled_listener_aborts_too() -> None:
    engine = await fork("hang 0 step")
    try:
        task = asyncio.create_task(collect(engine.submit([ask("0")])))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.submit([ask("0")])  # its name is free again
    finally:
        await engine.close()


async def test_one_choice_is_aborted_and_the_other_goes_on() -> None:
    engine = await fork()
    try:
        stream = engine.submit([ask("0", 20), ask("1", 20)])
        first = await anext(stream)
        engine.abort([first.id, "unknown"])
        rest = await collect(stream)
        other = "1" if first.id == "0" else "0"
        assert len(rest[other]) >= 19
    finally:
        await engine.close()


async def test_every_stream_fails_with_the_cause() -> None:
    engine = await fork("raise 1 step", tensor=2)
    try:
        streams = [engine.submit([ask(str(n))]) for n in range(3)]
        died = asyncio.create_task(engine.died())
        for stream in streams:
            with pytest.raises(EngineError) as caught:
                await collect(stream)
            cause = caught.value.cause
            assert (cause.rank, cause.phase, cause.code) == (1, "step", "internal-error")
        await died
        assert engine.failure is not None
        assert engine.failure.cause == caught.value.cause
        with pytest.raises(EngineError) as late:
            engine.submit([ask("late")])
        assert late.value.cause == caught.value.cause
    finally:
        await engine.close()


async def test_an_idle_engine_notices_a_dead_rank() -> None:
    engine = await fork(tensor=2)
    try:
        _, *ranks = family()
        ranks[0].kill()
        await asyncio.wait_for(engine.died(), WAIT_S)
        assert engine.failure is not None
        assert engine.failure.code == "process-killed" and "SIGKILL" in engine.failure.cause.cause
        assert engine.failure.cause.rank >= 0
    finally:
        await engine.close()


async def test_closing_fails_what_runs() -> None:
    engine = await fork("hang 0 step")
    stream = engine.submit([ask("0")])
    await engine.close()
    with refuses(EngineError, "engine-closed"):
        await anext(stream)


async def test_a_start_that_fails_says_why() -> None:
    with refuses(EngineError, "short-tensor") as caught:
        await fork("refuse 0 load")
    cause = caught.value.cause
    assert (cause.rank, cause.phase, cause.cause) == (0, "load", "model.safetensors is cut off")


async def test_a_close_that_is_cancelled_leaves_no_descriptors() -> None:
    engine = await fork()
    ended = remote.end_children
    began, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def end_slowly(*given: Any) -> None:
        loop.call_soon_threadsafe(began.set)
        may_end.wait(WAIT_S)
        ended(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "end_children", end_slowly)
        closing = asyncio.create_task(engine.close())
        await began.wait()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert engine._child.channel.socket.fileno() == engine._child._lifeline.fileno() == -1
        may_end.set()
    await asyncio.to_thread(engine._child.process.wait, WAIT_S)


async def test_a_length_that_was_asked_for_and_does_not_fit() -> None:
    plan = msgspec.structs.replace(make_plan(), max_model_len=10**6, max_model_len_given=True)
    with refuses(EngineError, "context-exceeds-kv-cache") as caught:
        await fork_plan(plan)
    assert (caught.value.cause.rank, caught.value.cause.phase) == (CORE, "allocate")
    assert " 1,000,000 " in str(caught.value)


async def test_the_plan_that_runs_has_the_length_that_fits() -> None:
    plan = msgspec.structs.replace(make_plan(), max_model_len=10**6)
    engine = await fork_plan(plan)
    try:
        assert engine.plan.max_model_len == engine.ready.num_blocks * plan.block_size
    finally:
        await engine.close()


async def test_idle_means_idle() -> None:
    """Not one time slice: core and rank sleep until something comes."""
    engine = await fork()
    try:
        await collect(engine.submit([ask("0")]))
        members = family()
        await asyncio.sleep(0.2)  # what the last step started, ends
        before = [sum(member.num_ctx_switches()) for member in members]
        await asyncio.sleep(1.0)
        after = [sum(member.num_ctx_switches()) for member in members]
        assert [b - a for a, b in zip(before, after, strict=True)] == [0, 0]
    finally:
        await engine.close()


def test_under_uvloop() -> None:
    """The loop that serving takes where it is there. It raises for what is sent through a connection that is lost."""

    async def run() -> None:
        engine = await start()
        try:
            assert {id: len(tokens) for id, tokens in (await collect(engine.submit([ask("0")]))).items()} == {"0": 3}
            left, told = engine.submit([ask("1", 50)]), engine.submit([ask("2", 50)])
            engine._child.process.kill()
            async with asyncio.timeout(WAIT_S):
                while engine.alive:
                    await asyncio.sleep(0)
            assert engine.failure is None and engine.outage
            with refuses(EngineError, "connection-closed"):
                engine.submit([ask("3")])
            await left.aclose()
            assert [*engine._streams] == ["2"]
            with refuses(EngineError, "process-killed"):
                await collect(told)
            assert engine.failure is not None and not engine._streams
        finally:
            await engine.close()
        with refuses(EngineError, "short-tensor"):
            await start("refuse 0 load")

    pytest.importorskip("uvloop").run(run())
