"""ReplicaSet over engines that are fakes: requests go on elsewhere if an engine dies, and it starts again."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.log_events import logged
from tests.pure.machines import host
from tests.pure.worlds import PLAN, READY
from tests.refusals import refuses
from weft.config import EngineConfig
from weft.engine.core.commands import Command, Done, Replies, ResetPrefixCache, Sleep, SwapWeights, Wake
from weft.engine.core.identity import RequestIdentity
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Output, Request, Stats
from weft.engine.core.token_ids import TokenIds
from weft.engine.replicas import handover, replica, replicas, restarts
from weft.engine.replicas.engine_nodes import EngineNodes
from weft.engine.replicas.output_stream import OutputSink
from weft.engine.replicas.replicas import ReplicaSet, start_engine
from weft.engine.replicas.restarts import GIVE_UP, step_limit_s
from weft.engine.replicas.routing import PIECE, Router
from weft.engine.replicas.suspects import LOST
from weft.errors import Cause, ConfigError, EngineError, FatalRequestError, NoEngineError, QueueFullError, RequestError
from weft.plan.plan import Plan
from weft.planner.execution.replicas import ReplicaPlan

WAIT_S = 20
CAUSE = Cause(rank=0, phase="step", code="process-killed", cause="killed")


class FakeEngine:
    """An engine whose steps a test takes: each gives every request the number after its last token."""

    started: list[FakeEngine]
    broken_starts = 0
    start_error: Exception = EngineError(CAUSE)
    lengths: list[int]  # max_model_len of the next to start

    def __init__(self, plan: Plan, config: EngineConfig) -> None:
        self.plan, self.ready, self.config = plan, READY, config
        self.stats = Stats(blocks_total=10)
        self.failure: EngineError | None = None
        self.closed = self.lost = False
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.sinks: dict[str, OutputSink] = {}
        self.called: list[object] = []
        self.calling, self.computes, self.stopped_s, self.watched = False, False, 0.0, True
        self.gate = asyncio.Event()  # commands wait for it
        self.gate.set()
        self.refusal: RequestError | None = None
        self._death = asyncio.Event()

    @classmethod
    async def start(
        cls, plan: Plan, config: EngineConfig, worker: str, others: object = None, **_: object
    ) -> FakeEngine:
        await asyncio.sleep(0)
        if cls.broken_starts:
            FakeEngine.broken_starts -= 1
            raise cls.start_error
        engine = cls(replace(plan, max_model_len=cls.lengths.pop(0)) if cls.lengths else plan, config)
        cls.started.append(engine)
        return engine

    @property
    def alive(self) -> bool:
        return self.failure is None and not self.closed and not self.lost

    @property
    def outage(self) -> str:
        return str(self.failure or ("the connection is lost" if self.lost else ""))

    @property
    def ids(self) -> set[str]:
        """The callers' ids of the requests."""
        return {callers_id(id) for id in self.requests}

    def send_requests(self, requests: Sequence[Request], sink: OutputSink) -> None:
        if not self.alive:
            raise EngineError(CAUSE)
        for request in requests:
            if not request.prompt:
                raise OverflowError
            self.requests[request.id], self.sinks[request.id] = request, sink
            self.answers[request.id] = list(request.answered)

    def withdraw(self, ids: Iterable[str]) -> dict[str, OutputSink]:
        for id in ids:
            self.requests.pop(id, None)
        return {id: self.sinks.pop(id) for id in ids if id in self.sinks}

    def abort(self, ids: Iterable[str]) -> None:
        for id, sink in self.withdraw(list(ids)).items():
            sink.drop_request(id)

    async def call(self, command: Command | ResetPrefixCache) -> Replies:
        self.calling = True
        await asyncio.sleep(0)
        await self.gate.wait()
        self.calling = False
        if isinstance(command, Sleep) and command.level > 2:
            raise RequestError("no such level", code="unknown-sleep-level")
        if self.refusal:
            raise self.refusal
        if self.failure:
            raise self.failure
        self.called.append(command)
        return [Done()]

    def step(self) -> None:
        """Each request gets a token; one whose last token is 99 kills the engine instead."""
        if any([*request.prompt, *self.answers[id]][-1] == 99 for id, request in self.requests.items()):
            self.fail()
            return
        self.stats.steps += 1
        for id, request in list(self.requests.items()):
            answer = self.answers[id]
            token = [*request.prompt, *answer][-1] + 1
            answer.append(token)
            self.stats.generation_tokens += 1
            ends = len(answer) == request.params.max_tokens
            self.sinks[id].put(Output(id, [token], [None], "length" if ends else None))
            if ends:
                del self.requests[id]
                self.sinks.pop(id).close_request(id)

    def fail(self, cause: Cause = CAUSE) -> None:
        self.failure = EngineError(cause)
        for sink in list(self.sinks.values()):
            sink.put(EngineError(cause))
        self.sinks.clear()
        self._death.set()

    async def died(self) -> None:
        await self._death.wait()

    def abandon(self) -> None:
        self.closed = True
        self.gate.set()

    async def close(self) -> None:
        self.closed = True
        for sink in list(self.sinks.values()):
            sink.put(EngineError(CAUSE))
        self.sinks.clear()


def callers_id(id: str) -> str:
    """The id that a caller gave, of that which an engine has."""
    return id.rpartition("@")[0]


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "AsyncEngine", FakeEngine)
    monkeypatch.setattr(replica, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(replica, "LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr(FakeEngine, "start_error", EngineError(CAUSE))
    FakeEngine.started, FakeEngine.broken_starts, FakeEngine.lengths = [], 0, []


@asynccontextmanager
async def running(*weights: float, stall_s: float | None = None, queue: int = 100) -> AsyncIterator[ReplicaSet]:
    planned = [ReplicaPlan(PLAN, host(), weight) for weight in weights]
    made = await ReplicaSet.start(planned, EngineConfig(model="m", max_num_queued_reqs=queue), stall_s=stall_s)
    try:
        yield made
    finally:
        await made.close()
        assert all(engine.closed for engine in FakeEngine.started)


def ask(id: str, first: int = 1, tokens: int = 4, length: int = 1, **fields: Any) -> Request:
    return Request(id=id, prompt=TokenIds.pack([first] * length), params=SamplingParams(max_tokens=tokens), **fields)


async def collect(stream: AsyncIterator[Output]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    async with asyncio.timeout(WAIT_S):
        async for output in stream:
            tokens.setdefault(output.id, []).extend(output.tokens)
    return tokens


async def stepped(*streams: AsyncIterator[Output], stepping: bool = True) -> list[Any]:
    """The answers of streams, while all engines step."""
    tasks = [asyncio.create_task(collect(stream)) for stream in streams]
    async with asyncio.timeout(WAIT_S):
        while not all(task.done() for task in tasks):
            for engine in FakeEngine.started:
                if engine.alive and stepping:
                    engine.step()
            await asyncio.sleep(0)
    return await asyncio.gather(*tasks, return_exceptions=True)


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not check():
            await asyncio.sleep(0)


async def test_requests_go_on_where_an_engine_lives() -> None:
    async with running(1, 1) as engine:
        streams = [engine.submit([ask(str(n), first=10 * n, tokens=6)]) for n in range(8)]
        first, second = FakeEngine.started
        assert len(first.requests) == len(second.requests) == 4
        for _ in range(2):
            first.step()
            second.step()
        first.fail()
        assert len(second.requests) == 8
        begun = [request for request in second.requests.values() if request.answered]
        assert [list(request.answered) for request in begun] == [
            [10 * int(callers_id(r.id)) + k for k in (1, 2)] for r in begun
        ]
        assert len(begun) == 4
        answers = await stepped(*streams)
        assert answers == [{str(n): [10 * n + k + 1 for k in range(6)]} for n in range(8)]
        assert len(FakeEngine.started) == 3
        assert engine.stats.running == engine.stats.waiting == 0
        assert sum(stats.generation_tokens for stats in engine.replica_stats) == 48
        assert [one.load for one in engine._replicas] == [0, 0]


async def test_an_answer_that_began_elsewhere_keeps_its_beginning() -> None:
    async with running(1, 1) as engine:
        stream = engine.submit([ask("0", first=1, tokens=6, answered=TokenIds.pack([2, 3]))])
        dying = next(one for one in FakeEngine.started if one.requests)
        dying.step()
        dying.fail()
        assert await stepped(stream) == [{"0": [4, 5, 6, 7]}]


async def test_without_an_engine_requests_wait_for_one() -> None:
    async with running(1, 1) as engine:
        first, second = FakeEngine.started
        second.fail()
        before = engine.submit([ask("0")])
        first.fail()
        assert engine.outage
        after = engine.submit([ask("1", first=5)])
        assert engine.stats.waiting == 2
        assert await stepped(before, after) == [{"0": [2, 3, 4, 5]}, {"1": [6, 7, 8, 9]}]
        assert not engine.outage


async def test_requests_wait_no_longer_than_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "WAIT_S", 0.0)
    monkeypatch.setattr(replica, "LONGEST_PAUSE_S", 60.0)
    monkeypatch.setattr(replica, "FIRST_PAUSE_S", 60.0)
    async with running(1, 1) as engine:
        FakeEngine.broken_starts = 2
        stream = engine.submit([ask("0")])
        for one in list(FakeEngine.started):
            one.fail()
        with refuses(EngineError, "process-killed"):
            await collect(stream)
        assert engine.stats.waiting == 0


async def test_a_request_that_kills_engines_ends() -> None:
    """And takes those beside it no further than that."""
    async with running(1, 1) as engine:
        poison, fine = engine.submit([ask("0", first=99)]), engine.submit([ask("1")])
        broken, answered = await stepped(poison, fine)
        assert isinstance(broken, EngineError)
        assert answered == {"1": [2, 3, 4, 5]} or isinstance(answered, EngineError)
        assert len(FakeEngine.started) == 2 + LOST
        assert await stepped(engine.submit([ask("2")])) == [{"2": [2, 3, 4, 5]}]


async def test_a_request_that_killed_two_engines_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with running(1, 1) as engine:
        (failed,) = await stepped(engine.submit([ask("0", first=99)]))
        assert isinstance(failed, EngineError)
        await until(lambda: len(FakeEngine.started) == 2 + LOST)
        with refuses(FatalRequestError, "request-ends-engines"):
            engine.submit([ask("1", first=99)])
        assert logged(caplog, "request-ends-engines")
        assert await stepped(engine.submit([ask("2")])) == [{"2": [2, 3, 4, 5]}]


async def test_copies_of_a_request_that_kills_end_with_the_first_that_tells() -> None:
    async with running(1, 1, 1, 1, 1) as engine:
        streams = [engine.submit([ask(str(n), first=99)]) for n in range(3)]
        results = await stepped(*streams)
        assert sorted(type(result).__name__ for result in results) == ["EngineError", *["FatalRequestError"] * 2]
        await until(lambda: engine.stats.waiting == 0)


async def test_a_single_engine_refuses_what_killed_it_twice() -> None:
    async with running(1) as engine:
        engine._requests._lost = 1  # as `ReplicaSet` has it for one engine that a server restarts
        for _ in range(2):
            (failed,) = await stepped(engine.submit([ask("0", first=99)]))
            assert isinstance(failed, EngineError)
            await until(lambda: engine.outage == "")
        with refuses(FatalRequestError, "request-ends-engines"):
            engine.submit([ask("0", first=99)])


async def test_of_all_requests_of_an_engine_only_the_killer_is_refused() -> None:
    """The others are asked one after the other, and answered."""
    async with running(1, 1) as engine:
        first, second = FakeEngine.started
        second.fail()  # so that all are together
        streams = [engine.submit([ask(str(n), first=n)]) for n in range(1, 6)]
        killer = engine.submit([ask("0", first=99)])
        assert len(first.requests) == 6
        broken, *answered = await stepped(killer, *streams)
        assert isinstance(broken, EngineError)
        assert answered == [{str(n): [n + k + 1 for k in range(4)]} for n in range(1, 6)]
        for n in range(1, 6):
            assert await stepped(engine.submit([ask("x", first=n)])) == [{"x": [n + k + 1 for k in range(4)]}]
        with refuses(FatalRequestError, "request-ends-engines"):
            engine.submit([ask("0", first=99)])


async def test_suspects_wait_for_one_another_no_longer_than_for_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "WAIT_S", 0.05)
    async with running(1, 1) as engine:
        first, second = FakeEngine.started
        streams = [engine.submit([ask(str(n), first=n)]) for n in range(1, 5)]
        first.fail()
        assert len(second.requests) == 3 and engine.stats.waiting == 1  # of two, one is a suspect that must wait
        await until(lambda: engine.stats.waiting == 0)
        assert await stepped(*streams) == [{str(n): [n + k + 1 for k in range(4)]} for n in range(1, 5)]


async def test_a_wait_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often an engine comes back and dies before it gets the request."""
    async with running(1) as engine:
        FakeEngine.broken_starts = 3
        FakeEngine.started[0].fail()
        stream = engine.submit([ask("0")])
        (routed,) = engine._requests._waiting
        deadline_s = routed.deadline_s
        for _ in range(3):
            engine._requests.welcome(engine._replicas[0])
            assert routed.deadline_s == deadline_s > 0
        monkeypatch.setattr(replica, "LONGEST_PAUSE_S", 0.0)
        assert await stepped(stream) == [{"0": [2, 3, 4, 5]}]
        assert not routed.deadline_s


async def test_a_request_that_no_engine_could_take_is_told_from_one_that_lost_its_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handover, "WAIT_S", 0.0)
    async with running(1) as engine:
        FakeEngine.broken_starts = 1
        FakeEngine.started[0].fail()
        with refuses(NoEngineError, "process-killed"):
            await collect(engine.submit([ask("0")]))


async def test_all_ends_after_too_many_failed_starts() -> None:
    async with running(1, 1) as engine:
        stream = engine.submit([ask("0")])
        FakeEngine.broken_starts = 2 * GIVE_UP + 5
        for one in list(FakeEngine.started):
            one.fail()
        async with asyncio.timeout(WAIT_S):
            await engine.died()
        with refuses(EngineError, "process-killed"):
            await collect(stream)
        assert not engine.alive and engine.failure
        with refuses(EngineError, "process-killed"):
            engine.submit([ask("1")])


async def test_a_single_engine_starts_again_without_the_requests_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "start_server", lambda plan: None)
    engine = await start_engine([ReplicaPlan(PLAN, host())], EngineConfig(model="m"), stall_s=60.0)
    assert isinstance(engine, ReplicaSet)
    try:
        had = engine.submit([ask("0")])
        FakeEngine.started[0].fail()
        assert "the engine starts again" in engine.outage
        came = engine.submit([ask("1", first=5)])
        failed, answered = await stepped(had, came)
        assert isinstance(failed, EngineError) and failed.code == "process-killed"
        assert answered == {"1": [6, 7, 8, 9]} and not engine.outage
    finally:
        await engine.close()


async def test_restarts_in_vain_come_to_an_end(caplog: pytest.LogCaptureFixture) -> None:
    """An answered request begins a new row."""
    async with running(1) as engine:
        for row in range(2):
            for restart in range(GIVE_UP):
                FakeEngine.started[-1].fail()
                await until(lambda: engine.outage == "")
                assert len(FakeEngine.started) == 2 + row * GIVE_UP + restart
            if not row:
                assert await stepped(engine.submit([ask("0")])) == [{"0": [2, 3, 4, 5]}]
        with caplog.at_level(logging.ERROR, "weft"):
            FakeEngine.started[-1].fail()
            async with asyncio.timeout(WAIT_S):
                await engine.died()
        assert engine.failure and engine.failure.code == "process-killed" and engine.outage == str(engine.failure)
        assert len(FakeEngine.started) == 1 + 2 * GIVE_UP
        assert f"{GIVE_UP} restarts" in caplog.text


async def test_pauses_grow_until_a_request_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(replica, "LONGEST_PAUSE_S", 4.0)
    one = replica.Replica(ReplicaPlan(PLAN, host()), 0, 0)
    one.started_s = 100.0
    assert [one.next_pause_s(101.0) for _ in range(5)] == [0.0, 1.0, 2.0, 4.0, 4.0]
    one.note_answer()
    assert one.next_pause_s(101.0) == 0.0 < one.next_pause_s(101.0)
    assert one.next_pause_s(100.0 + replica.LIVED_S + 1) == 0.0


class FakeNodes:
    """Nodes that are missing for some time whenever an engine starts again."""

    lasting = True

    def __init__(self, missing: int) -> None:
        self.missing, self.taken, self.closed = missing, 0, False

    async def take(self, number: int) -> tuple[Plan, object]:
        await asyncio.sleep(0)
        if self.taken and self.missing:
            self.missing -= 1
            raise ConfigError("node 1 did not come", code="nodes-missing")
        self.taken += 1
        return replace(PLAN, model=f"start {self.taken}"), object()

    def close(self) -> None:
        self.closed = True


async def test_an_engine_waits_for_its_nodes_as_long_as_it_takes() -> None:
    """Missing nodes are no failed starts; the new plan is that for the nodes which have come."""
    nodes = FakeNodes(GIVE_UP + 3)
    planned = [ReplicaPlan(PLAN, host())]
    engine = await start_engine(planned, EngineConfig(model="m"), nodes=cast(EngineNodes, nodes))
    try:
        assert isinstance(engine, ReplicaSet)
        stream = engine.submit([ask("0")])
        FakeEngine.started[0].fail()
        await until(lambda: "node 1 did not come" in engine.outage)
        assert await stepped(stream) == [{"0": [2, 3, 4, 5]}]
        assert [one.plan.model for one in FakeEngine.started] == ["start 1", "start 2"] and not nodes.missing
    finally:
        await engine.close()
    assert nodes.closed


async def test_the_first_failed_start_ends_the_others() -> None:
    FakeEngine.broken_starts = 1
    with refuses(EngineError, "process-killed"):
        async with running(1, 1, 1):
            pass
    assert all(engine.closed for engine in FakeEngine.started)


async def test_aborted_requests_are_forgotten_wherever_they_are() -> None:
    async with running(1, 1) as engine:
        stream = engine.submit([ask("0"), ask("1")])
        engine.abort(["0", "unknown"])
        assert sum(len(one.requests) for one in FakeEngine.started) == 1
        assert await stepped(stream) == [{"1": [2, 3, 4, 5]}]
        for one in list(FakeEngine.started):
            one.fail()
        waiting = engine.submit([ask("2")])
        await waiting.aclose()
        assert engine.stats.waiting == 0
        await until(lambda: not engine.outage)
        assert not any(one.requests for one in FakeEngine.started)


async def test_the_queue_of_all_is_bounded() -> None:
    async with running(1, 1, queue=2) as engine:
        most = 2 * PLAN.max_num_seqs + 2
        stream = engine.submit([ask(str(n)) for n in range(most)])
        with refuses(QueueFullError, "queue-full", most, 1, most):
            engine.submit([ask("one more")])
        # Each engine takes the requests of all.
        assert {one.config.max_num_queued_reqs for one in FakeEngine.started} == {most}
        await stream.aclose()
        with pytest.raises(OverflowError):
            engine.submit([ask("unsendable", length=0)])
        assert await stepped(engine.submit([ask("1")])) == [{"1": [2, 3, 4, 5]}]


async def test_an_engine_that_is_back_follows_the_others() -> None:
    async with running(1, 1) as engine:
        swap = SwapWeights("/other", "safetensors")
        await engine.call(swap)
        assert [len(replies) for _, replies in await engine.call_each(Sleep(1))] == [1, 1]
        FakeEngine.started[0].fail()
        await until(lambda: len(FakeEngine.started) == 3 and len(engine.replicas) == 2)
        assert FakeEngine.started[2].called == [swap, Sleep(1)]
        await engine.call(Wake())
        FakeEngine.started[1].fail()
        assert [replica.number for replica, _ in await engine.call_each(ResetPrefixCache())] == [0]
        await until(lambda: len(FakeEngine.started) == 4 and len(engine.replicas) == 2)
        assert FakeEngine.started[3].called == [swap]
        with refuses(RequestError, "unknown-sleep-level"):
            await engine.call(Sleep(7))
        assert [replica.first_rank for replica in engine.replicas] == [0, 2]


async def test_an_engine_joins_while_no_command_runs() -> None:
    async with running(1, 1) as engine:
        first, second = FakeEngine.started
        second.gate.clear()
        swap = SwapWeights("/other", "safetensors")
        caller = asyncio.create_task(engine.call(swap))
        await until(lambda: first.called == [swap])
        first.fail()
        await until(lambda: len(FakeEngine.started) == 3)
        later = asyncio.create_task(engine.call(Sleep(1)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(engine.replicas) == 1  # not yet with the old weights
        caller.cancel()  # which does not undo the command
        second.gate.set()
        await later
        await until(lambda: len(engine.replicas) == 2)
        assert FakeEngine.started[2].called[0] == swap
        assert FakeEngine.started[2].called[-1] == Sleep(1) == second.called[-1]
        assert second.called == [swap, Sleep(1)]


async def test_weights_of_one_path_are_swapped_in_again_by_an_engine_that_starts() -> None:
    async with running(1, 1) as engine:
        swap = SwapWeights("/other", "safetensors")
        await engine.call(swap)
        FakeEngine.started[0].fail()
        await until(lambda: len(FakeEngine.started) == 3)
        third, second = FakeEngine.started[2], FakeEngine.started[1]
        third.gate.clear()
        await until(lambda: third.calling)
        await engine.call(swap)
        third.gate.set()
        await until(lambda: len(engine.replicas) == 2)
        assert third.called == second.called == [swap, swap]


async def test_one_that_refuses_a_change_of_the_others_starts_again_and_follows() -> None:
    async with running(1, 1) as engine:
        first, second = FakeEngine.started
        first.refusal = RequestError("no such file", code="checkpoint-missing")
        swap = SwapWeights("/other", "safetensors")
        with refuses(RequestError, "checkpoint-missing"):
            await engine.call(swap)
        assert second.called == [swap]
        assert first.failure and first.failure.code == "replica-left-behind"
        await until(lambda: len(FakeEngine.started) == 3 and len(engine.replicas) == 2)
        assert FakeEngine.started[2].called == [swap]
        # Commands that change nothing leave the engine that refuses them where it is.
        second.refusal = first.refusal
        with refuses(RequestError, "checkpoint-missing"):
            await engine.call(ResetPrefixCache())
        assert second.alive


async def test_errors_of_the_system_are_failed_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(1, 1) as engine:
        monkeypatch.setattr(FakeEngine, "start_error", OSError(24, "Too many open files"))
        FakeEngine.broken_starts = 2
        FakeEngine.started[0].fail()
        await until(lambda: len(FakeEngine.started) == 3 and len(engine.replicas) == 2)
        assert FakeEngine.broken_starts == 0
        for one in FakeEngine.started[1:]:
            one.fail()
        FakeEngine.broken_starts = 2 * GIVE_UP + 5
        async with asyncio.timeout(WAIT_S):
            await engine.died()
        assert engine.failure and "Too many open files" in str(engine.failure)


async def test_a_death_right_after_the_start_and_an_engine_that_does_not_close(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(1, 1) as engine:
        stream = engine.submit([ask("0"), ask("1"), ask("2")])
        first, second = FakeEngine.started
        start, close = FakeEngine.start, FakeEngine.close

        async def dies(plan: Plan, config: EngineConfig, worker: str, **_: object) -> FakeEngine:
            monkeypatch.setattr(FakeEngine, "start", start)
            made = await start(plan, config, worker)
            made.fail()
            return made

        async def breaks(self: FakeEngine) -> None:
            await close(self)
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(FakeEngine, "start", dies)
        monkeypatch.setattr(FakeEngine, "close", breaks)
        first.fail()
        await until(lambda: len(FakeEngine.started) == 4 and len(engine.replicas) == 2)
        monkeypatch.setattr(FakeEngine, "close", close)
        assert await stepped(stream) == [{id: [2, 3, 4, 5] for id in "012"}]
        assert second.alive


async def test_a_request_that_waits_and_cannot_be_sent_fails_alone() -> None:
    async with running(1, 1) as engine:
        for one in list(FakeEngine.started):
            one.fail()
        broken, fine = engine.submit([ask("0", length=0)]), engine.submit([ask("1")])
        failure, answer = await stepped(broken, fine)
        assert isinstance(failure, EngineError)
        assert answer == {"1": [2, 3, 4, 5]}
        await until(lambda: len(FakeEngine.started) == 4 and len(engine.replicas) == 2)


async def test_the_end_of_a_task_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async with running(1, 1) as engine:

        def breaks(number: int) -> None:
            raise ZeroDivisionError("in the router")

        monkeypatch.setattr(engine._keeper._router, "forget_replica", breaks)
        with caplog.at_level(logging.ERROR, "weft"):
            FakeEngine.started[0].fail()
            await until(lambda: any(record.exc_info for record in caplog.records))
        await FakeEngine.started[0].close()


async def test_an_engine_that_is_back_serves_no_shorter_requests() -> None:
    async with running(1, 1) as engine:
        FakeEngine.lengths = [PLAN.max_model_len - 1]
        FakeEngine.started[0].fail()
        await until(lambda: len(FakeEngine.started) == 4 and len(engine.replicas) == 2)
        third, fourth = FakeEngine.started[2:]
        assert third.closed and fourth.plan.max_model_len == PLAN.max_model_len
        with refuses(EngineError, "replica-too-short", PLAN.max_model_len - 1, PLAN.max_model_len):
            raise engine._requests.last_death or AssertionError


async def test_a_request_that_comes_back_to_an_engine_is_a_new_one_there() -> None:
    async with running(1, 1) as engine:
        streams = [engine.submit([ask(str(n), first=n)]) for n in range(8)]
        first, second = FakeEngine.started
        first.step()  # with a token, nobody suspects them
        first.fail()
        before = {callers_id(id): id for id in second.requests}
        await until(lambda: len(FakeEngine.started) == 3 and bool(FakeEngine.started[2].requests))
        third = FakeEngine.started[2]
        third.step()
        moved = {callers_id(id) for id in third.requests}
        third.fail()
        after = {callers_id(id): id for id in second.requests}
        assert before.keys() == after.keys() and moved
        assert {id for id in before if before[id] != after[id]} == moved
        assert await stepped(*streams) == [{str(n): [n + k + 1 for k in range(4)]} for n in range(8)]


async def test_ids_of_open_requests_are_refused() -> None:
    async with running(1, 1) as engine:
        stream = engine.submit([ask("0")])
        with refuses(RequestError, "duplicate-request-id", "'0'"):
            engine.submit([ask("0")])
        assert await stepped(stream) == [{"0": [2, 3, 4, 5]}]
        assert await stepped(engine.submit([ask("0")])) == [{"0": [2, 3, 4, 5]}]


async def test_waiting_requests_move_to_an_engine_that_is_back() -> None:
    async with running(1, 1) as engine:
        first, second = FakeEngine.started
        streams = [engine.submit([ask(str(n), first=n)]) for n in range(8)]
        second.step()  # these have begun, and stay
        begun = second.ids
        first.fail()
        await until(lambda: len(FakeEngine.started) == 3 and bool(FakeEngine.started[2].requests))
        assert begun <= second.ids
        assert second.ids.isdisjoint(FakeEngine.started[2].ids)
        assert await stepped(*streams) == [{str(n): [n + k + 1 for k in range(4)]} for n in range(8)]


async def test_an_engine_that_stalls_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "STALL_POLL_S", 0.0)
    monkeypatch.setattr(restarts, "CORE_STALL_S", 0.0)
    async with running(1, 1, stall_s=0.05) as engine:
        stream = engine.submit([ask("0")])
        hanging = next(one for one in FakeEngine.started if one.requests)
        await until(lambda: hanging.failure is not None)
        assert hanging.failure and hanging.failure.code == "replica-stalled"
        assert await stepped(stream) == [{"0": [2, 3, 4, 5]}]
        # One with nothing to do stalls as little as one that sleeps.
        await asyncio.sleep(0.1)
        assert len(FakeEngine.started) == 3


async def test_time_in_which_this_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    polls, lead_s = 0, 0.0

    def monotonic() -> float:
        return time.monotonic() + lead_s

    async def sleep(seconds: float) -> None:
        nonlocal polls, lead_s
        await asyncio.sleep(0.001)
        polls += 1
        lead_s += 1000 * (polls == 2)

    async with running(1, 1, stall_s=60.0) as engine:
        monkeypatch.setattr(restarts, "time", SimpleNamespace(monotonic=monotonic))
        monkeypatch.setattr(restarts, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
        stream = engine.submit([ask("0")])
        await until(lambda: polls > 5)
        assert all(one.failure is None for one in FakeEngine.started)
        assert await stepped(stream) == [{"0": [2, 3, 4, 5]}]


async def test_an_engine_that_executes_a_command_does_not_stall() -> None:
    async with running(1, 1) as engine:
        stream = engine.submit([ask("0"), ask("1")])
        first = FakeEngine.started[0]
        first.gate.clear()
        caller = asyncio.create_task(engine.call(ResetPrefixCache()))
        await until(lambda: first.calling)
        replica = engine._replicas[0]
        now = replica.moved_s
        assert replica.stalled_s(now + 1) == pytest.approx(1)
        assert step_limit_s(cast(Any, first), 0.1) > 10, "a command has more time than a step"
        first.computes = True
        assert replica.stalled_s(now + 50) == 0
        first.computes = first.watched = False  # nobody sees whether ranks execute it
        assert replica.stalled_s(now + 100) == 0
        first.gate.set()
        await caller
        assert replica.stalled_s(now + 150) == pytest.approx(50)
        await stream.aclose()


async def test_an_engine_whose_connection_is_lost_gets_nothing() -> None:
    """Its end is known only later."""
    async with running(1) as engine:
        first = FakeEngine.started[0]
        gone, told = engine.submit([ask("0")]), engine.submit([ask("1")])
        first.lost = True
        assert "the connection is lost" in engine.outage and not engine.failure
        later = engine.submit([ask("2", first=5)])
        await gone.aclose()
        assert first.ids == {"1"} and engine._replicas[0].open == 1
        first.fail()
        with refuses(EngineError, "process-killed"):
            await collect(told)
        assert await stepped(later) == [{"2": [6, 7, 8, 9]}]
        replica = engine._replicas[0]
        assert (replica.open, replica.load) == (0, 0) and replica.stalled_s(replica.moved_s + 100) == 0


async def test_callers_are_told_of_the_end() -> None:
    async with running(1, 1) as engine:
        stream = engine.submit([ask("0")])
        await engine.close()
        with refuses(EngineError, "engine-closed"):
            await collect(stream)
        with refuses(EngineError, "engine-closed"):
            engine.submit([ask("1")])
        assert len(FakeEngine.started) == 2


async def test_faster_replicas_get_more() -> None:
    async with running(1, 3) as engine:
        streams = [engine.submit([ask(str(n), tokens=100)]) for n in range(40)]
        assert [len(one.requests) for one in FakeEngine.started] == [10, 30]
        assert [stats.steps for stats in engine.replica_stats] == [0, 0]
        for stream in streams:
            await stream.aclose()


def test_prompts_with_one_beginning_go_to_one_replica() -> None:
    router = Router([1, 1], caching=True)
    talk = [ask(str(n), first=7, length=PIECE * (n + 1)) for n in range(6)]
    assert len({router.choose_replica(request, [0, 0]) for request in talk}) == 1
    # Not at any price: beside much work, the other one computes the prompt again.
    here = router.choose_replica(talk[5], [0, 0])
    loads = [0, 0]
    loads[here] = 10_000
    assert router.choose_replica(talk[5], loads) != here
    router.forget_replica(0)
    router.forget_replica(1)
    assert {router.choose_replica(request, [0, 0]) for request in (talk[5], ask("o", 1))} == {0, 1}


def test_nothing_is_remembered_of_other_identities_or_without_caches() -> None:
    secret = ask("1", first=7, length=4 * PIECE, identity=RequestIdentity(cache_salt="salt"))
    open_to_all = ask("0", first=7, length=4 * PIECE)
    router = Router([1, 1], caching=True)
    assert {router.choose_replica(open_to_all, [0, 0]), router.choose_replica(secret, [0, 0])} == {0, 1}
    router = Router([1, 1], caching=False)
    assert {router.choose_replica(open_to_all, [0, 0]) for _ in range(2)} == {0, 1}
    assert router.choose_replica(open_to_all, [None, 10**9]) == 1


async def test_errors_other_than_deaths_reach_their_caller() -> None:
    async with running(1, 1) as engine:
        stream = engine.submit([ask("0"), ask("1")])
        one = next(one for one in FakeEngine.started if "0" in one.ids)
        next(sink for id, sink in one.sinks.items() if callers_id(id) == "0").put(
            RequestError("too long", code="prompt-too-long")
        )
        with refuses(RequestError, "prompt-too-long"):
            await collect(stream)
        assert not any(one.requests for one in FakeEngine.started)


class SlowGroup:
    """Nodes whose plan takes until `planned` is set."""

    def __init__(self) -> None:
        self.planning, self.planned, self.let_go = threading.Event(), threading.Event(), threading.Event()
        self.handed_over_in: list[threading.Thread] = []

    def hand_over(self) -> str:
        self.handed_over_in.append(threading.current_thread())
        return "nodes"

    def dismiss(self, error: BaseException) -> None:
        self.let_go.set()


@pytest.mark.parametrize("late", [False, True], ids=["while they are planned for", "once they are"])
async def test_nodes_of_a_cancelled_start_are_let_go(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    group = SlowGroup()

    def plan(*arguments: object) -> str:
        group.planning.set()
        assert group.planned.wait(20)
        return "plan"

    monkeypatch.setattr("weft.engine.replicas.engine_nodes.plan_group", plan)
    assembly: Any = SimpleNamespace(
        groups=[group], gather_again=lambda number, cancelled: group, close=lambda: None, lasting=True
    )
    first: Any = SimpleNamespace(plan="plan")
    nodes = EngineNodes(EngineConfig(model="m"), cast(Any, None), assembly, [first])
    nodes.take_first()
    taking = asyncio.create_task(nodes.take(0))
    await asyncio.to_thread(group.planning.wait, 20)
    if late:  # the thread has ended before the event loop hears of the end
        group.planned.set()
        nodes._threads.shutdown(wait=True)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    group.planned.set()
    assert await asyncio.to_thread(group.let_go.wait, 20)
    assert group.handed_over_in == [threading.main_thread()], "only those of the first start"
    nodes.close()


async def test_nodes_are_handed_over_by_the_one_who_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SlowGroup()
    monkeypatch.setattr("weft.engine.replicas.engine_nodes.plan_group", lambda *arguments: "plan")
    assembly: Any = SimpleNamespace(groups=[group], gather_again=lambda number, cancelled: group, close=lambda: None)
    nodes = EngineNodes(EngineConfig(model="m"), cast(Any, None), assembly, [cast(Any, SimpleNamespace(plan="plan"))])
    assert await nodes.take(0) == await nodes.take(0) == ("plan", "nodes")
    assert group.handed_over_in == [threading.main_thread()] * 2 and not group.let_go.is_set()
    nodes.close()
