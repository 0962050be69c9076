"""A rank's life: results leave in the order of their steps, whatever each of them waits for."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from weft.engine.core.commands import Command, Done, Reply
from weft.engine.core.step import StepPlan, StepResult
from weft.engine.executors.messages import RankFailed, RunStep, StepDone
from weft.engine.executors.rank import gc_paused, run_rank
from weft.plan.memory import Capacity


def result(id: int) -> StepResult:
    return StepResult(id, [], [], {})


class Scripted:
    """Answers each step with what it is told to: a result, or a function that waits for one."""

    def __init__(self, answers: list[StepResult | Callable[[], StepResult] | None]) -> None:
        self.answers = answers

    def load(self) -> Capacity:
        return Capacity(
            rank=0, host="", device="", weight_bytes=0, activation_bytes=0, free_bytes=0, block_bytes=0, load_s=0.0
        )

    def allocate(self, num_blocks: int) -> int:
        return 0

    def call(self, command: Command) -> Reply:
        return Done()

    def execute(self, step: StepPlan) -> StepResult | Callable[[], StepResult] | None:
        return self.answers[step.id]

    def close(self) -> None: ...


def said_by(worker: Scripted) -> list[Any]:
    """Messages of a rank about the steps that it has answers to."""
    inbox: SimpleQueue[Any] = SimpleQueue()
    said: list[msgspec.Struct] = []
    for id in range(len(worker.answers)):
        inbox.put(RunStep(StepPlan(id, [], [], [], [], [], [], [], [], [])))

    inbox.put(None)
    thread = threading.Thread(target=run_rank, args=(0, inbox, said.append, lambda: worker))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return [message for message in said if isinstance(message, StepDone | RankFailed)]


def test_a_result_at_once_does_not_overtake_one_that_is_waited_for() -> None:
    arrived = threading.Event()

    def late() -> StepResult:
        assert arrived.wait(30)
        return result(0)

    class Slow(Scripted):
        """The first result arrives when all steps are through."""

        def execute(self, step: StepPlan) -> StepResult | Callable[[], StepResult] | None:
            if step.id == 3:
                arrived.set()
            return super().execute(step)

    said = said_by(Slow([late, result(1), None, lambda: result(3)]))
    assert [message.result.id for message in said] == [0, 1, 3]


def test_results_that_wait_for_nothing_need_no_thread() -> None:
    before = threading.active_count()
    said = said_by(Scripted([result(0), result(1)]))
    assert [message.result.id for message in said] == [0, 1] and threading.active_count() == before


def test_a_failure_in_a_result_is_the_last_message() -> None:
    def broken() -> StepResult:
        raise ValueError("an illegal access")

    said = said_by(Scripted([result(0), broken, result(2)]))
    assert isinstance(said[0], StepDone) and isinstance(said[1], RankFailed) and len(said) == 2
    assert "an illegal access" in said[1].cause.cause


@pytest.mark.parametrize("before", [True, False])
def test_nothing_is_collected_while_torch_is_imported(before: bool) -> None:
    was = gc.isenabled()
    (gc.enable if before else gc.disable)()
    gc.unfreeze()
    try:
        with pytest.raises(ImportError), gc_paused():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == before and not gc.get_freeze_count()
    finally:
        gc.freeze()
        (gc.enable if was else gc.disable)()


def test_a_heap_that_the_caller_has_frozen_stays_so_if_all_is_imported() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with gc_paused():
        import weft.engine.executors.rank  # noqa: F401
    assert gc.get_freeze_count() > 0.9 * before > 0
