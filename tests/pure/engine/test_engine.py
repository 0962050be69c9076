"""EngineCore: steps in flight, and what becomes of a failure."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from tests.pure.ranks import Ranks, expected
from tests.pure.scheduling import layout
from tests.pure.shapes import dense_shape
from tests.refusals import refuses
from weft.config import EngineConfig
from weft.engine.core.commands import (
    Command,
    Done,
    FinishSwap,
    PrepareSwap,
    Profile,
    RankCommand,
    RankStats,
    Refused,
    Replies,
    ResetPrefixCache,
    Sleep,
    SwapWeights,
    Wake,
)
from weft.engine.core.engine import EngineCore
from weft.engine.core.grammar import Matcher
from weft.engine.core.kv import KVManager
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Output, Request
from weft.engine.core.scheduler import Scheduler
from weft.engine.core.step import StepPlan, StepResult
from weft.engine.core.token_ids import TokenIds
from weft.engine.core.view import SchedulerSettings
from weft.errors import CORE, Cause, EngineError, QueueFullError, RequestError
from weft.plan.places import cut_places
from weft.plan.plan import Plan, named_devices

SIZES = {"num_blocks": 20, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}


class Rehearsal:
    """An executor whose steps finish when they are waited for, or when the test says so."""

    def __init__(self) -> None:
        self.ranks = Ranks(**SIZES)
        self.submitted: list[StepPlan] = []
        self.futures: list[Future[StepResult]] = []
        self.refusal: Exception | None = None
        self.called: list[tuple[int, RankCommand]] = []  # with the number of steps before
        self.replies: list[Future[Replies]] = []
        self.at_once = True

    def call(self, command: RankCommand) -> Future[Replies]:
        assert all(future.done() for future in self.futures), "a command waits for the steps in flight"
        self.called.append((len(self.submitted), command))
        if isinstance(command, Sleep | FinishSwap):
            self.ranks.kv.clear()
        reply: Future[Replies] = Future()
        self.replies.append(reply)
        if self.at_once:
            reply.set_result([Done()])
        return reply

    def submit(self, step: StepPlan) -> Future[StepResult]:
        if self.refusal:
            raise self.refusal
        future: Future[StepResult] = Future()
        self.submitted.append(step)
        self.futures.append(future)
        if self.at_once:
            future.set_result(self.ranks.execute(step))
        return future


def core(*, stages: int = 1, depth: int | None = None, **change: Any) -> tuple[EngineCore, Rehearsal]:
    executor = Rehearsal()
    limits = {**SIZES, "max_num_queued": 8, "max_model_len": 64, "policy": "fcfs", **change}
    kv = KVManager(layout(), limits.pop("num_blocks"), max_num_seqs=limits["max_num_seqs"], caching=True)
    assert limits.pop("block_size") == kv.block_size
    grammars = limits.pop("grammars", None)
    scheduler = Scheduler(SchedulerSettings(**limits, stages=stages), kv, grammars)
    return EngineCore(scheduler, executor, depth=depth or stages), executor


def request(id: str, prompt: list[int], **params: Any) -> Request:
    return Request(id=id, prompt=TokenIds.pack(prompt), params=SamplingParams(**params))


def step(engine: EngineCore) -> list[Output]:
    """Submit what can be, and what the oldest step in flight brings."""
    engine.pump()
    return engine.finish_oldest() if engine.pending else []


class HeldGrammars:
    """Grammars that are compiled when the test says so."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once  # a thread begins with each
        self.compiling: list[Future[Matcher]] = []

    def compile(self, grammar: str, answered: Sequence[int]) -> Future[Matcher]:
        self.compiling.append(Future())
        if self.at_once:
            self.compiling[-1].set_running_or_notify_cancel()
        return self.compiling[-1]

    def masks(self, rows: Sequence[tuple[Matcher, Sequence[int]]]) -> list[bytes]:
        raise NotImplementedError


def test_a_grammar_of_an_aborted_request_is_not_that_of_a_later_one() -> None:
    grammars = HeldGrammars()
    engine, executor = core(grammars=grammars)
    engine._grammars = grammars
    asked = replace(request("a", [1], max_tokens=2), grammar="root ::= 'x'")
    engine.add(asked)
    engine.abort(["a"])
    engine.add(asked)
    before, after = grammars.compiling
    before.set_exception(RequestError("no such rule", code="bad-grammar"))
    engine.pump()
    assert engine.take_uncompiled() == [] and not executor.submitted
    assert engine.stats().waiting == 1
    after.set_exception(RequestError("no such root", code="other-grammar"))
    engine.pump()
    assert [output.error.code for output in engine.take_uncompiled() if output.error] == ["other-grammar"]


def test_grammars_of_aborted_requests_are_not_compiled() -> None:
    """Grammars of others would wait behind them."""
    grammars = HeldGrammars(at_once=False)
    engine, _ = core(grammars=grammars)
    engine._grammars = grammars
    asked = replace(request("a", [1], max_tokens=2), grammar="root ::= 'x'")
    for id in "abc":
        engine.add(replace(asked, id=id))
    begun, waiting, other = grammars.compiling
    begun.set_running_or_notify_cancel()
    engine.abort(["a", "b"])
    engine.pump()
    assert waiting.cancelled() and not begun.cancelled() and not other.cancelled()
    begun.set_exception(RequestError("too late", code="bad-grammar"))
    engine.pump()
    assert engine.take_uncompiled() == [] and engine.stats().waiting == 1


def busy(engine: EngineCore) -> bool:
    stats = engine.stats()
    return bool(engine.pending or stats.running or stats.waiting)


def run(engine: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while busy(engine):
        for output in step(engine):
            tokens.setdefault(output.id, []).extend(output.tokens)
    return tokens


@pytest.mark.parametrize(("stages", "depth"), [(1, 1), (1, 2), (2, 2), (3, 3), (2, 4)])
def test_requests_to_their_end(stages: int, depth: int) -> None:
    engine, executor = core(stages=stages, depth=depth)
    requests = [request(f"r{i}", [i] * (3 * i + 1), max_tokens=7) for i in range(7)]
    for item in requests:
        engine.add(item)
    tokens = run(engine)
    assert tokens == {item.id: expected(item, 64)[0] for item in requests}
    stats = engine.stats()
    assert stats.steps == len(executor.submitted) > 0
    assert stats.generation_tokens == 49 and stats.running == stats.waiting == 0


def test_no_more_in_flight_than_asked() -> None:
    engine, executor = core(stages=3, depth=2)
    executor.at_once = False
    for i in range(3):
        engine.add(request(f"r{i}", [i], max_tokens=3))
    engine.pump()
    engine.pump()
    assert len(engine.pending) == 2 and [len(step.slots) for step in executor.submitted] == [1, 1]
    executor.futures[0].set_result(executor.ranks.execute(executor.submitted[0]))
    assert engine.pending[0].done() and [output.id for output in engine.finish_oldest()] == ["r0"]
    engine.pump()
    assert len(engine.pending) == 2 and len(executor.submitted) == 3


def test_idle_is_idle() -> None:
    engine, executor = core()
    assert not busy(engine) and step(engine) == [] and executor.submitted == []


def test_a_step_whose_requests_are_all_aborted_is_still_work() -> None:
    engine, _ = core()
    engine.add(request("a", [1], max_tokens=5))
    engine.pump()
    engine.abort(["a"])
    assert busy(engine)
    assert step(engine) == [] and not busy(engine)


def test_an_interrupted_wait_loses_nothing() -> None:
    engine, executor = core()
    executor.at_once = False
    item = request("a", [1, 2], max_tokens=3)
    engine.add(item)
    engine.pump()
    real = executor.futures[0]

    class Interrupted(Future[StepResult]):
        def result(self, timeout: float | None = None) -> StepResult:
            raise KeyboardInterrupt

    engine.pending[0] = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        engine.finish_oldest()
    engine.pending[0] = real
    executor.at_once = True
    real.set_result(executor.ranks.execute(executor.submitted[0]))
    assert run(engine) == {"a": expected(item, 64)[0]}


@pytest.mark.parametrize("where", ["result", "submit"])
def test_a_failure_is_everybodys_with_its_cause(where: str) -> None:
    engine, executor = core(stages=2)
    executor.at_once = False
    cause = Cause(rank=1, phase="step", code="out-of-memory", cause="out of memory", hint="lower --max-num-seqs")
    for i in range(6):
        engine.add(request(f"r{i}", [i], max_tokens=3))
    if where == "result":
        engine.pump()
        for future in executor.futures:
            future.set_exception(EngineError(cause))
    else:
        executor.refusal = EngineError(cause)
    with pytest.raises(EngineError) as failed:
        step(engine)
    assert failed.value.cause == cause
    # And again to whoever asks, whatever they ask.
    for ask in (engine.pump, engine.finish_oldest, lambda: engine.add(request("x", [1]))):
        with refuses(EngineError, "out-of-memory"):
            ask()
    assert engine.failure is not None and engine.failure.cause == cause
    engine.abort(f"r{i}" for i in range(6))
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.blocks_used == 0


def test_a_failure_of_any_kind_has_a_cause() -> None:
    engine, executor = core()
    executor.at_once = False
    engine.add(request("a", [1]))
    engine.pump()
    executor.futures[0].set_exception(OSError("the line is dead"))
    with pytest.raises(EngineError) as failed:
        step(engine)
    assert failed.value.cause == Cause(
        rank=CORE, phase="step", code="internal-error", cause="OSError: the line is dead"
    )


def test_errors_of_a_request_are_its_own() -> None:
    engine, _ = core(max_num_queued=0)
    for i in range(4):
        engine.add(request(f"r{i}", [1], max_tokens=2))
    with pytest.raises(QueueFullError):
        engine.add(request("more", [1]))
    assert len(run(engine)) == 4 and engine.failure is None


def test_limits_come_from_the_plan_and_the_config() -> None:
    shape = dense_shape(
        architecture="LlamaForCausalLM",
        layers=4,
        hidden=16,
        q_heads=2,
        kv_heads=2,
        head_dim=8,
        ffn=32,
        vocab=64,
        max_positions=64,
    )
    plan = Plan(
        model="m",
        checkpoint="",
        load_format="dummy",
        shape=shape,
        dtype="float32",
        places=tuple(cut_places(shape, [1.0], [2, 2])),
        devices=named_devices("cpu", "cpu"),
        cores=((0,), (0,)),
        max_model_len=48,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        block_size=4,
    )
    config = EngineConfig(model="m", max_num_queued_reqs=3, scheduling_policy="priority", enable_prefix_caching=False)
    engine = EngineCore.from_plan(plan, 20, Rehearsal(), config)
    assert engine.depth == engine.scheduler.settings.stages == 2
    assert (engine.scheduler.settings.max_model_len, engine.scheduler.settings.max_num_queued) == (48, 3)
    assert engine.stats().blocks_total == 20 and not engine.scheduler.kv.caching
    outputs: list[Output] = []
    engine.add(request("a", [1] * 40, max_tokens=None))
    while busy(engine):
        outputs += step(engine)
    assert len(outputs) == 8 and outputs[-1].finish_reason == "length"


def test_a_command_waits_for_the_steps_in_flight_and_no_step_starts_before_it_is_over() -> None:
    engine, executor = core(stages=2)
    executor.at_once = False
    for i in range(2):
        engine.add(request(f"r{i}", [i], max_tokens=4))
    engine.pump()
    assert len(executor.submitted) == 2
    first, second = engine.call(RankStats()), engine.call(Profile(3, ""))
    for number in range(2):
        executor.futures[number].set_result(executor.ranks.execute(executor.submitted[number]))
        engine.finish_oldest()
        engine.pump()
        assert len(executor.submitted) == 2
    assert executor.called == [(2, RankStats())] and not first.done()
    executor.replies[0].set_result([Done()])
    engine.pump()
    assert first.result(0) == [Done()] and executor.called[1:] == [(2, Profile(3, ""))]
    executor.replies[1].set_result([])
    engine.pump()
    assert second.done() and len(executor.submitted) == 4


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("command", [Sleep(1), SwapWeights("other", "safetensors")], ids=["sleep", "swap"])
def test_running_requests_lose_their_kv_and_no_token(command: Command, stages: int) -> None:
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [9]]
    engine, executor = core(stages=stages)
    requests = [request(f"r{i}", prompt, max_tokens=9) for i, prompt in enumerate(prompts)]
    for one in requests:
        engine.add(one)
    tokens: dict[str, list[int]] = {one.id: [] for one in requests}

    def take(outputs: list[Output]) -> None:
        for output in outputs:
            tokens[output.id] += output.tokens

    for _ in range(4):
        take(step(engine))
    promise = engine.call(command)
    while not promise.done():
        take(step(engine))
    if isinstance(command, Sleep):
        steps = len(executor.submitted)
        engine.add(request("late", [1, 2, 3, 4, 5], max_tokens=2))
        tokens["late"] = []
        engine.pump()
        assert engine.stats().sleep_level == 1 and len(executor.submitted) == steps and not engine.stats().running
        engine.call(Wake())
    while busy(engine):
        take(step(engine))
    assert engine.stats().sleep_level == 0
    for one in requests:
        assert tokens[one.id] == expected(one, 64)[0]


def test_weights_that_one_rank_refuses_are_dropped_by_all() -> None:
    engine, executor = core()
    executor.at_once = False
    swap, prepare = SwapWeights("other", "gguf"), partial(PrepareSwap, "other", "gguf")
    for refused in (0, 1, None):
        executor.called.clear()
        executor.replies.clear()
        promise = engine.call(swap)
        for number, command in enumerate([prepare(stage=False), prepare(stage=True), FinishSwap(take=True)]):
            engine.pump()
            assert executor.called[-1] == (0, command) and not promise.done()
            reply = Refused("damaged", "a hole in it") if number == refused else Done()
            executor.replies[-1].set_result([Done(), reply])
            if number == refused:
                engine.pump()
                assert executor.called[-1] == (0, FinishSwap(take=False))
                executor.replies[-1].set_result([Done(), Done()])
                break
        engine.pump()
        if refused is None:
            assert promise.result(0) == [Done(), Done()]
        else:
            with refuses(RequestError, "damaged", "rank 1", "a hole in it"):
                promise.result(0)


def test_the_prefix_cache_is_reset_by_the_core_alone() -> None:
    engine, executor = core()
    prompt = [*range(12)]
    for cached, resets in ((0, False), (8, False), (0, True)):
        if resets:
            promise = engine.call(ResetPrefixCache())
            engine.pump()
            assert promise.result(0) == []
        engine.add(request("a", prompt, max_tokens=2))
        outputs = step(engine)
        assert outputs[0].cached_tokens == cached
        run(engine)
    assert executor.called == [] and engine.stats().blocks_used == 0


def test_a_state_that_a_command_does_not_fit() -> None:
    engine, executor = core()
    with refuses(RequestError, "awake-already"):
        engine.call(Wake())
    for level in (0, 3):
        with refuses(RequestError, "unknown-sleep-level"):
            engine.call(Sleep(level))
    engine.call(Sleep(2))
    # Before it sleeps, too: the second would come after it.
    with refuses(RequestError, "asleep-already"):
        engine.call(Sleep(1))
    engine.call(Wake())
    engine.call(Sleep(1))
    engine.pump()
    assert [command for _, command in executor.called] == [Sleep(2), Wake(), Sleep(1)] and engine.failure is None


def test_a_command_that_fails_ends_the_engine() -> None:
    engine, executor = core()
    executor.at_once = False
    first, second = engine.call(RankStats()), engine.call(Sleep(1))
    engine.pump()
    cause = Cause(rank=1, phase="report", code="out-of-memory", cause="out of memory")
    executor.replies[0].set_exception(EngineError(cause))
    with pytest.raises(EngineError, match="out of memory"):
        engine.pump()
    for promise in (first, second):
        error = promise.exception(0)
        assert isinstance(error, EngineError) and error.cause == cause
    with pytest.raises(EngineError):
        engine.call(Wake())
