"""ReplicaSet over engines that are fakes: requests go on elsewhere if an engine dies, and it starts again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.pure.machines import host
from tests.pure.worlds import PLAN, READY
from tests.refusals import refuses
from weft.client import replicas
from weft.client.remote import OutputSink
from weft.client.replicas import GIVE_UP, MOVES, ReplicaSet
from weft.client.routing import PIECE, Router
from weft.config import EngineConfig
from weft.core.commands import Command, Done, Replies, ResetPrefixCache, Sleep, SwapWeights, Wake
from weft.core.identity import RequestIdentity
from weft.core.params import SamplingParams
from weft.core.request import Output, Request, Stats
from weft.core.token_ids import TokenIds
from weft.errors import Cause, EngineError, QueueFullError, RequestError
from weft.plan.plan import Plan
from weft.planner.replicas import ReplicaPlan

WAIT_S = 20
CAUSE = Cause(rank=0, phase="step", code="process-killed", cause="killed")


class FakeEngine:
    """An engine whose steps a test takes: each gives every request the number after its last token."""

    started: list[FakeEngine]
    broken_starts = 0

    def __init__(self, plan: Plan, config: EngineConfig) -> None:
        self.plan, self.ready, self.config = plan, READY, config
        self.stats = Stats(blocks_total=10)
        self.failure: EngineError | None = None
        self.closed = False
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.sinks: dict[str, OutputSink] = {}
        self.called: list[object] = []
        self._death = asyncio.Event()

    @classmethod
    async def start(cls, plan: Plan, config: EngineConfig, worker: str) -> FakeEngine:
        await asyncio.sleep(0)
        if cls.broken_starts:
            FakeEngine.broken_starts -= 1
            raise EngineError(CAUSE)
        engine = cls(plan, config)
        cls.started.append(engine)
        return engine

    @property
    def alive(self) -> bool:
        return self.failure is None and not self.closed

    def send_requests(self, requests: Sequence[Request], sink: OutputSink) -> None:
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
        await asyncio.sleep(0)
        if isinstance(command, Sleep) and command.level > 2:
            raise RequestError("no such level", code="unknown-sleep-level")
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

    async def close(self) -> None:
        self.closed = True
        for sink in list(self.sinks.values()):
            sink.put(EngineError(CAUSE))
        self.sinks.clear()


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "AsyncEngine", FakeEngine)
    monkeypatch.setattr(replicas, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(replicas, "LONGEST_PAUSE_S", 0.0)
    FakeEngine.started, FakeEngine.broken_starts = [], 0


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
            [10 * int(r.id) + 1, 10 * int(r.id) + 2] for r in begun
        ]
        assert len(begun) == 4
        answers = await stepped(*streams)
        assert answers == [{str(n): [10 * n + k + 1 for k in range(6)]} for n in range(8)]
        assert len(FakeEngine.started) == 3
        assert engine.stats.running == engine.stats.waiting == 0
        assert sum(stats.generation_tokens for stats in engine.replica_stats) == 48
        assert [replica.load for replica in engine._replicas] == [0, 0]


async def test_an_answer_that_began_elsewhere_keeps_its_beginning() -> None:
    async with running(1, 1) as engine:
        stream = engine.submit([ask("0", first=1, tokens=6, answered=TokenIds.pack([2, 3]))])
        dying = next(one for one in FakeEngine.started if one.requests)
        dying.step()
        dying.fail()
        assert await stepped(stream) == [{"0": [4, 5, 6, 7]}]


async def test_without_an_engine_requests_wait_for_one() -> None:
    async with running(1, 1) as engine:
        before = engine.submit([ask("0")])
        for one in list(FakeEngine.started):
            one.fail()
        assert engine.outage
        after = engine.submit([ask("1", first=5)])
        assert engine.stats.waiting == 2
        assert await stepped(before, after) == [{"0": [2, 3, 4, 5]}, {"1": [6, 7, 8, 9]}]
        assert not engine.outage


async def test_requests_wait_no_longer_than_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "WAIT_S", 0.0)
    monkeypatch.setattr(replicas, "LONGEST_PAUSE_S", 60.0)
    monkeypatch.setattr(replicas, "FIRST_PAUSE_S", 60.0)
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
        assert len(FakeEngine.started) >= 2 + MOVES
        assert await stepped(engine.submit([ask("2")])) == [{"2": [2, 3, 4, 5]}]


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


async def test_waiting_requests_move_to_an_engine_that_is_back() -> None:
    async with running(1, 1) as engine:
        first, second = FakeEngine.started
        streams = [engine.submit([ask(str(n), first=n)]) for n in range(8)]
        second.step()  # these have begun, and stay
        begun = set(second.requests)
        first.fail()
        await until(lambda: len(FakeEngine.started) == 3 and bool(FakeEngine.started[2].requests))
        assert begun <= second.requests.keys()
        assert second.requests.keys().isdisjoint(FakeEngine.started[2].requests)
        assert await stepped(*streams) == [{str(n): [n + k + 1 for k in range(4)]} for n in range(8)]


async def test_an_engine_that_stalls_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "STALL_POLL_S", 0.0)
    async with running(1, 1, stall_s=0.05) as engine:
        stream = engine.submit([ask("0")])
        hanging = next(one for one in FakeEngine.started if one.requests)
        await until(lambda: hanging.failure is not None)
        assert hanging.failure and hanging.failure.code == "replica-stalled"
        assert await stepped(stream) == [{"0": [2, 3, 4, 5]}]
        # One with nothing to do stalls as little as one that sleeps.
        await asyncio.sleep(0.1)
        assert len(FakeEngine.started) == 3


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
        one = next(one for one in FakeEngine.started if "0" in one.requests)
        one.sinks["0"].put(RequestError("too long", code="prompt-too-long"))
        with refuses(RequestError, "prompt-too-long"):
            await collect(stream)
        assert not any(one.requests for one in FakeEngine.started)
