"""Both executors: the same starts, results, failures and ends."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from fake_worker import GRAPHS, HERE, make_lock_step, make_plan, make_step, total

from tests.cpu.families import family
from tests.refusals import refuses
from weft.engine.core.commands import RankReport, RankStats
from weft.engine.core.step import StepResult
from weft.engine.executors import create_executor, rank_watch
from weft.engine.executors.base import Executor
from weft.engine.executors.inline import InlineExecutor
from weft.engine.executors.messages import FromRank
from weft.engine.executors.processes import ProcessExecutor
from weft.engine.processes import launch
from weft.errors import ConfigError, EngineError, PlanError
from weft.plan.memory import kv_blocks

KINDS: dict[str, Callable[..., Executor]] = {
    "inline": InlineExecutor,
    "processes": ProcessExecutor,
    "watched": partial(ProcessExecutor, stall_s=2.0),
}
WAIT_S = 60  # what a test waits at most for something that comes at once

Make = Callable[..., Executor]


@pytest.fixture
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes executors of fake workers, closes them, and sees that nothing of them is left."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    made: list[Executor] = []

    def make(worker: str = HERE) -> Executor:
        made.append(KINDS[request.param](worker=worker))
        return made[-1]

    before = set(threading.enumerate())
    yield make
    for executor in made:
        executor.close()
        executor.close()
    assert family() == []
    assert set(threading.enumerate()) - before == set()


both = pytest.mark.parametrize("make", ["inline", "processes"], indirect=True)
processes = pytest.mark.parametrize("make", ["processes"], indirect=True)


@both
@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_results_in_order(make: Make, tensor: int, stages: int) -> None:
    plan = make_plan(tensor=tensor, stages=stages)
    executor = make()
    ready = executor.start(plan)
    assert ready.num_blocks == kv_blocks(plan, ready.ranks)
    assert [capacity.weight_bytes for capacity in ready.ranks] == list(range(tensor * stages))
    steps = [make_step(n, [n, 2]) for n in range(20)]
    futures = [executor.submit(step) for step in steps]
    for step, future in zip(steps, futures, strict=True):
        assert future.result(WAIT_S) == StepResult(step.id, [total(plan, step.tokens)], [None], {})
    assert not executor.failure.done()


@both
def test_graphs_are_captured_between_steps_of_a_server_that_is_never_idle(make: Make) -> None:
    """By all ranks between the same two, while one step is always in flight behind the one that is waited for."""
    executor, plan = make(GRAPHS), make_plan(tensor=2)
    executor.start(plan)
    futures, number, captured = deque([executor.submit(make_step(0, [1]))]), 0, 0
    ends_s = time.monotonic() + WAIT_S / 4
    while captured < 3 and time.monotonic() < ends_s:
        number += 1
        futures.append(executor.submit(make_step(number, [1])))
        result = futures.popleft().result(WAIT_S)
        assert result.id == number - 1
        captured = result.tokens[0] // 100
    assert captured == 3
    futures.popleft().result(WAIT_S)


@pytest.mark.parametrize(("make", "phase"), [("watched", "load"), ("watched", "report")], indirect=["make"])
def test_a_start_or_a_command_that_hangs(make: Make, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """The rank answers heartbeats meanwhile."""
    monkeypatch.setattr(rank_watch, "SHORTEST_WORK_S", 1.0)
    executor, plan = make(), make_plan(f"hang 1 {phase}", stages=2)
    with refuses(EngineError, "rank-stuck") as caught:
        executor.start(plan)
        executor.call(RankStats()).result(WAIT_S)
    assert (caught.value.cause.rank, caught.value.cause.phase) == (1, phase)


@both
@pytest.mark.parametrize(
    ("groups", "tensor", "stages", "exchange"),
    [
        (2, 1, 1, "gather"),
        pytest.param(2, 2, 2, "dispatch", marks=pytest.mark.long),
        (3, 1, 1, "dispatch"),
    ],
)
def test_attention_groups_step_together(make: Make, groups: int, tensor: int, stages: int, exchange: str) -> None:
    """Each gets its own part of a step, knows the others', and answers for itself; one may have none."""
    plan = make_plan(groups=groups, tensor=tensor, stages=stages)
    assert plan.exchange == exchange
    executor = make()
    executor.start(plan)
    futures = {}
    for number in range(12):
        tokens = [[number, group + 1][: (number + group) % 3] for group in range(groups)]
        futures[number] = tokens, executor.submit(make_lock_step(number, *tokens))
        if number == 5:
            report = executor.call(RankStats())
    for number, (tokens, future) in futures.items():
        for group, (result, part) in enumerate(zip(future.result(WAIT_S).results, tokens, strict=True)):
            sampled = [total(plan, part, group)] if part else []
            assert result == StepResult(number if part else -1, sampled, [None] * len(sampled), {})
    assert [reply.steps for reply in report.result(WAIT_S) if isinstance(reply, RankReport)] == [6] * len(plan.places)


@both
def test_a_rank_that_fails_ends_the_steps_of_all_attention_groups(make: Make) -> None:
    executor = make()
    executor.start(make_plan("raise 1 step", groups=2))
    futures = [executor.submit(make_lock_step(n, [1], [])) for n in range(3)]
    for future in futures:
        error = future.exception(WAIT_S)
        assert isinstance(error, EngineError) and (error.cause.rank, error.cause.phase) == (1, "step")


@both
@pytest.mark.parametrize("phase", ["start", "load", "allocate"])
def test_a_rank_that_fails_fails_the_start(make: Make, phase: str) -> None:
    with pytest.raises(EngineError) as caught:
        make().start(make_plan(f"raise 1 {phase}", tensor=2))
    cause = caught.value.cause
    assert (cause.rank, cause.phase, cause.code) == (1, phase, "internal-error")
    assert cause.cause == f"ValueError: rank 1 does not like to {phase}"


@both
def test_a_rank_that_fails_in_a_step_fails_all_of_them(make: Make) -> None:
    """The other rank waits for it in a sum, and is no cause."""
    executor = make()
    executor.start(make_plan("raise 1 step", tensor=2))
    futures = [executor.submit(make_step(n, [1])) for n in range(3)]
    for future in futures:
        error = future.exception(WAIT_S)
        assert isinstance(error, EngineError)
        assert (error.cause.rank, error.cause.phase) == (1, "step")
    assert executor.failure.result(WAIT_S) == error.cause
    # What comes afterwards fails at once, for the same reason.
    late = executor.submit(make_step(3, [1])).exception(WAIT_S)
    assert isinstance(late, EngineError)
    assert late.cause == error.cause


@both
def test_advice_stays_what_it_is(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    with refuses(EngineError, "short-tensor") as caught:
        make().start(make_plan("refuse 0 load"))
    cause = caught.value.cause
    assert (cause.rank, cause.phase, cause.cause) == (0, "load", "model.safetensors is cut off")
    assert "Traceback" not in capfd.readouterr().err


@both
def test_out_of_memory_comes_with_a_way_out(make: Make) -> None:
    with refuses(EngineError, "out-of-memory") as caught:
        make().start(make_plan("exhaust 0 load"))
    assert "--tensor-parallel-size" in caught.value.cause.hint


@both
def test_a_worker_that_leaves_is_a_failure(make: Make) -> None:
    with refuses(EngineError, "internal-error") as caught:
        make().start(make_plan("leave 0 allocate"))
    cause = caught.value.cause
    assert (cause.rank, cause.phase, cause.cause) == (0, "allocate", "SystemExit: leaving")


@both
def test_no_room_for_a_block(make: Make) -> None:
    import msgspec

    with refuses(PlanError, "no-room-for-kv-cache"):
        make().start(msgspec.structs.replace(make_plan(tensor=2), kv_cache_bytes=1))


@both
def test_a_worker_that_is_not_there(make: Make) -> None:
    executor = make()
    executor._worker = "fake_worker:Missing"  # type: ignore[attr-defined]
    with refuses(EngineError, "internal-error") as caught:
        executor.start(make_plan())
    cause = caught.value.cause
    assert (cause.rank, cause.phase) == (0, "start") and "Missing" in cause.cause


@both
def test_closing_fails_what_is_in_flight(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    executor = make()
    executor.start(make_plan("hang 0 step" if isinstance(executor, ProcessExecutor) else "fine", tensor=2))
    future = executor.submit(make_step(0, [1]))
    executor.close()
    error = future.exception(WAIT_S)
    assert error is None or "closed" in str(error)
    assert "closed" in str(executor.submit(make_step(1, [1])).exception(WAIT_S))
    assert not executor.failure.done()


@both
@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), (2, 2)])
def test_commands_come_between_the_steps_before_and_after_them(make: Make, tensor: int, stages: int) -> None:
    executor = make()
    executor.start(make_plan(tensor=tensor, stages=stages))
    calls = []
    for number in range(3):
        for step in range(number):
            executor.submit(make_step(step, [1]))
        calls.append(executor.call(RankStats()))
    for call, steps in zip(calls, (0, 1, 3), strict=True):
        replies = call.result(WAIT_S)
        reports = [(reply.steps, reply.allocated_bytes) for reply in replies if isinstance(reply, RankReport)]
        assert reports == [(steps, rank) for rank in range(tensor * stages)]


@both
def test_a_rank_that_fails_in_a_command_fails_it_and_all_that_is_in_flight(make: Make) -> None:
    executor = make()
    executor.start(make_plan("raise 1 report", tensor=2))
    call = executor.call(RankStats())
    waiting = executor.submit(make_step(0, [1]))
    cause = executor.failure.result(WAIT_S)
    assert (cause.rank, cause.phase) == (1, "report")
    # A command to a rank that is gone fails at once.
    for future in (call, waiting, executor.call(RankStats())):
        error = future.exception(WAIT_S)
        assert isinstance(error, EngineError) and error.cause == cause


@processes
@pytest.mark.parametrize(
    ("deed", "cause"),
    [
        ("exit", "ended with status 7: the last thing it says"),
        ("kill", "killed by SIGKILL"),
        ("crash", "killed by SIGABRT: Fatal Python error: Aborted"),
    ],
)
def test_a_process_that_ends_without_a_word(make: Make, deed: str, cause: str) -> None:
    executor = make()
    executor.start(make_plan(f"{deed} 1 step", tensor=3))
    error = executor.submit(make_step(0, [1])).exception(WAIT_S)
    assert isinstance(error, EngineError)
    assert (error.cause.rank, error.cause.phase, error.cause.cause) == (1, "step", cause)


@processes
def test_the_one_that_died_is_the_cause_not_those_that_lost_it(make: Make) -> None:
    """Through gloo the rest notice too, and may say so first."""
    executor = make()
    executor.start(make_plan("kill 0 step", stages=2))
    error = executor.submit(make_step(0, [1])).exception(WAIT_S)
    assert isinstance(error, EngineError)
    assert error.cause.rank == 0


@processes
def test_a_rank_that_is_killed_in_a_command_is_the_cause(make: Make) -> None:
    executor = make()
    executor.start(make_plan("kill 0 report", tensor=2))
    error = executor.call(RankStats()).exception(WAIT_S)
    assert isinstance(error, EngineError)
    assert (error.cause.rank, error.cause.phase, error.code) == (0, "report", "process-killed")
    assert "SIGKILL" in error.cause.cause


@processes
def test_a_rank_that_dies_idle_is_noticed(make: Make) -> None:
    executor = make()
    executor.start(make_plan(tensor=2))
    victim = family()[1]
    victim.kill()
    cause = executor.failure.result(WAIT_S)
    assert cause.code == "process-killed" and "SIGKILL" in cause.cause


def test_create_knows_its_kinds() -> None:
    assert isinstance(create_executor("inline"), InlineExecutor)
    assert isinstance(create_executor("processes"), ProcessExecutor)
    with refuses(ConfigError, "unknown-executor") as refused:
        create_executor("threads")
    assert all(kind in str(refused.value) for kind in ("'threads'", "inline", "processes"))


def test_a_childs_output_is_copied_in_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[bytes] = []
    monkeypatch.setattr(launch, "_write_to_stderr", copied.append)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    child: launch.Child[FromRank] = launch.Child("broken_lines", FromRank)
    child.process.wait()
    child.drain_output()
    child.close()
    assert [output for output in copied if output] == [b"first second\n", b"third"]
