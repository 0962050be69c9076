"""Python's overhead on top of the model: of the scheduler alone, and of the core's whole work for a step."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from statistics import median
from types import FrameType
from typing import Any

from weft.checkpoint.architectures.kv import KVLayout, KVSpec, kv_groups
from weft.engine.core.commands import RankCommand, Replies
from weft.engine.core.engine import EngineCore
from weft.engine.core.kv import KVManager
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Request
from weft.engine.core.scheduler import Scheduler
from weft.engine.core.step import StepPlan, StepResult
from weft.engine.core.token_ids import TokenIds
from weft.engine.core.view import SchedulerSettings
from weft.engine.frontend.collector import Collector

PROMPT, ANSWER, BLOCK = 128, 100_000, 16  # tokens; no request ends during the measurement
ROUNDS = 5  # the median counts
MEASURE_S = 0.2  # seconds for each round
RUNNING, BATCH = 256, 32  # requests for the scheduler alone, and for the core
ITERATIONS = 256  # iterations of the reference loop


def endless_request(number: int, prompt: int = PROMPT) -> Request:
    """A request that decodes without end; no two share a block."""
    return Request(id=str(number), prompt=TokenIds.pack([number] * prompt), params=SamplingParams(max_tokens=ANSWER))


def make_scheduler(running: int, *, lookahead: bool) -> Scheduler:
    """A scheduler with KV blocks for `running` requests and their outputs, as an engine creates it."""
    groups = kv_groups([KVSpec(kind="heads")])
    layout = KVLayout(groups=groups, block_size=BLOCK, chunk=running * PROMPT)
    settings = SchedulerSettings(
        max_num_seqs=running,
        max_num_batched_tokens=running * PROMPT,
        max_num_queued=running,
        max_model_len=PROMPT + ANSWER,
        stages=1,
        policy="fcfs",
        lookahead=lookahead,
    )
    kv = KVManager(layout, running * (PROMPT + ANSWER) // BLOCK, max_num_seqs=running, caching=True)
    return Scheduler(settings, kv)


class SchedulerSteps:
    """A scheduler whose `running` requests all decode; a call schedules and applies one step.

    With `lookahead` another step is in flight at the same time, as on a GPU.
    """

    def __init__(self, running: int, *, lookahead: bool = False) -> None:
        self._scheduler = make_scheduler(running, lookahead=lookahead)
        self._flights: deque[StepPlan] = deque()
        self._depth = 1 + lookahead
        for number in range(running):
            self._scheduler.add(endless_request(number))
        for _ in range(self._depth + 1):  # the prompts
            self()

    def __call__(self) -> None:
        while len(self._flights) < self._depth and (scheduled := self._scheduler.schedule()):
            self._flights.append(scheduled.step)
        self._scheduler.apply(sample_result(self._flights.popleft()))


class InstantExecutor:
    """An executor whose ranks take no time."""

    def submit(self, step: Any) -> Future[StepResult]:
        """A finished step with a token for each row that samples."""
        future: Future[StepResult] = Future()
        future.set_result(sample_result(step))
        return future

    def call(self, command: RankCommand) -> Future[Replies]:
        """A command that every one of no ranks has executed."""
        future: Future[Replies] = Future()
        future.set_result([])
        return future


class CoreSteps:
    """The work of the core and of the caller's side, without text, for `batch` requests; a call is one step."""

    def __init__(self, batch: int, *, lookahead: bool = False) -> None:
        self._core = EngineCore(make_scheduler(batch, lookahead=lookahead), InstantExecutor(), depth=1 + lookahead)
        self._jobs: dict[str, Collector] = {}
        for number in range(batch):
            request = endless_request(number)
            self._jobs[request.id] = Collector(request.id, None, request.params, [request], None, 0.0)
            self._core.add(request)
        for _ in range(3):
            self()

    def __call__(self) -> None:
        self._core.pump()
        for output in self._core.finish_oldest():
            self._jobs[output.id].add(output, 0.0)


def sample_result(plan: StepPlan) -> StepResult:
    """Result of a step: a token for each row that samples."""
    count = plan.samples.count(True)
    return StepResult(plan.id, [7] * count, [None] * count, {})


def cpu_seconds(step: Callable[[], object]) -> float:
    """Processor seconds of one call on one core: the median of ROUNDS stretches."""
    rounds = []
    for _ in range(ROUNDS):
        calls, start = 0, time.process_time()
        while (seconds := time.process_time() - start) < MEASURE_S:
            step()
            calls += 1
        rounds.append(seconds / calls)
    return median(rounds)


def count_instructions(step: Callable[[], object]) -> int:
    """Number of Python bytecode instructions that a call executes; the same on every machine, busy or idle."""
    count = 0

    def inside(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return inside

    def entered(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        step()
    finally:
        sys.settrace(before)
    return count


def reference_loop() -> int:
    """A fixed loop, the unit of `loops_per_request`: it looks up, compares, appends and adds."""
    table: dict[int, list[int]] = {number: [] for number in range(ITERATIONS)}
    total = 0
    for number in range(ITERATIONS):
        row = table[number]
        row.append(number)
        if len(row) == 1:
            total += row[0]
    return total


def loops_per_request(step: SchedulerSteps | CoreSteps, requests: int) -> float:
    """Instructions per request of a step, in iterations of the reference loop, which makes versions of Python
    comparable.

    The mean is over as many steps as a block has tokens: one of them takes new blocks, and one registers the full
    blocks for reuse.
    """
    counted = sum(count_instructions(step) for _ in range(BLOCK)) / BLOCK / requests
    return counted / (count_instructions(reference_loop) / ITERATIONS)


def overhead_report() -> dict[str, Any]:
    """Figures of this machine (`*_per_s`, `*_ms`) and of the code on any machine (`*_instructions`)."""
    alone, ahead = SchedulerSteps(RUNNING), SchedulerSteps(RUNNING, lookahead=True)
    return {
        "scheduled_per_s": round(RUNNING / cpu_seconds(alone)),
        "scheduled_ahead_per_s": round(RUNNING / cpu_seconds(ahead)),
        "core_step_ms": round(1000 * cpu_seconds(CoreSteps(BATCH)), 4),
        "scheduler_instructions": round(loops_per_request(alone, RUNNING), 3),
        "core_instructions": round(loops_per_request(CoreSteps(BATCH), BATCH), 3),
    }
