"""Replica: an engine's schedulers on a virtual clock, advanced step by step, or by stretches of steps with one
batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from math import inf, sqrt

import msgspec

from weft.checkpoint.architectures.kv import KVLayout
from weft.engine.core.groups import GroupedScheduler
from weft.engine.core.kv import KVManager
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Output, Request
from weft.engine.core.scheduler import Scheduler
from weft.engine.core.step import LockStep, LockStepResult, StepPlan, StepResult
from weft.engine.core.view import SchedulerSettings
from weft.planner.speed.steps import StepPredictor, StepSeconds
from weft.study.simulate.simulated_request import SimulatedRequest
from weft.study.simulate.steady import steady
from weft.study.simulate.tally import SimulatedTimes, Tally


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Step times and schedulers of one replica, or of one engine of several attention groups.

    `predictors` has an entry per attention group. `scheduler` are the settings of each group's scheduler: `stages`
    steps are in flight at once, and with `lookahead` one more. `num_blocks` KV blocks are kept as `kv` says.
    """

    predictors: tuple[StepPredictor, ...]
    kv: KVLayout
    num_blocks: int
    scheduler: SchedulerSettings

    @property
    def all_blocks(self) -> int:
        """KV blocks of all groups."""
        return len(self.predictors) * self.num_blocks

    @property
    def most(self) -> int:
        """Number of requests that all groups accept at once."""
        return len(self.predictors) * (self.scheduler.max_num_queued + self.scheduler.max_num_seqs)


class Stretch:
    """Consecutive rounds of decode steps whose batch does not change.

    The first round takes `first_s`, and each later round `growth_s` more than the one before.
    """

    __slots__ = ("first_s", "growth_s", "rounds", "start_s")

    def __init__(self, start_s: float, rounds: int, first_s: float, last_s: float) -> None:
        self.start_s, self.rounds, self.first_s = start_s, rounds, first_s
        self.growth_s = (last_s - first_s) / max(1, rounds - 1)

    @property
    def end_s(self) -> float:
        """Time at which the last round ends."""
        return self.start_s + self.length_s(self.rounds)

    def length_s(self, rounds: int) -> float:
        """Duration of the first `rounds` rounds."""
        return rounds * (self.first_s + self.growth_s * (rounds - 1) / 2)

    def rounds_done(self, now: float) -> int:
        """Number of rounds that have ended at a time before `end_s`."""
        past, half = now - self.start_s, self.growth_s / 2
        linear = self.first_s - half
        # half * rounds^2 + linear * rounds = past, in the form that is also stable for a growth of 0.
        rounds = int(2 * past / (linear + sqrt(linear * linear + 4 * half * past)))
        while self.length_s(rounds) > past:
            rounds -= 1
        while rounds < self.rounds and self.length_s(rounds + 1) <= past:
            rounds += 1
        return rounds


class SimulatedReplica:
    """One simulated replica, or engine of several attention groups. Times are seconds of the virtual clock.

    Groups take every step together, each of which lasts as long as the slowest group's.

    `due`: time at which `wake` must be called next, infinity while the replica is idle.
    """

    def __init__(self, spec: ReplicaSpec, tally: Tally, *, prefix_caching: bool, stretches: bool = True) -> None:
        self.due = inf
        # A lone request may outgrow a small cache, and ends there.
        settings = spec.scheduler
        self.longest = spec.kv.longest(spec.num_blocks, settings.max_model_len)
        self.most = spec.most
        self._groups = [_create_scheduler(spec, prefix_caching) for _ in spec.predictors]
        self.scheduler = self._groups[0] if len(self._groups) == 1 else GroupedScheduler(self._groups)
        self._predictors, self._tally, self._stretches = spec.predictors, tally, stretches
        self._blocks_per_token = spec.kv.blocks_per_token
        self._stages, self._depth = settings.stages, settings.stages + settings.lookahead
        # The steps in flight, with the times of their results and the results.
        self._flights: deque[tuple[StepPlan | LockStep, float, StepResult | LockStepResult]] = deque()
        self._keys = [[0] * settings.max_num_seqs for _ in spec.predictors]  # by group: key of the request in each slot
        self._last_result_s = 0.0
        self._stretch: Stretch | None = None
        self._unfinished: dict[str, SimulatedTimes] = {}
        self._counted_s = 0.0  # time up to which blocks and requests in use are counted

    def wake(self) -> list[SimulatedTimes]:
        """Process the event that is due. Return the requests that have ended."""
        if self._stretch is None:
            return self._finish_step()
        ended = self._advance(self._stretch)
        self._start_steps(self.due)
        return ended

    def settle(self, now: float) -> list[SimulatedTimes]:
        """Bring the replica to a state at `now`, before `due`, in which a request can be added.

        Returns the requests that have ended.
        """
        ended: list[SimulatedTimes] = []
        stretch = self._stretch
        if stretch is None:
            return ended
        done = stretch.rounds_done(now)
        if self._stages == 1:
            # Shorten the stretch to the end of the step in flight.
            stretch.rounds = min(stretch.rounds, done + 1)
            self.due = stretch.end_s
        else:
            # Replace the current round by its single steps.
            stretch.rounds = done
            self._advance(stretch)
            self._start_steps(stretch.end_s, stretches=False)
            while self.due <= now:
                ended += self._finish_step(stretches=False)
        return ended

    def add_request(self, now: float, simulated: SimulatedRequest, times: SimulatedTimes) -> None:
        """Add a request, whose times are recorded in `times`. Call `settle` before.

        Raises QueueFullError, and RequestError for a request that can never run.
        """
        params = _sampling_params(simulated.output_len)
        self.scheduler.add(Request(id=times.id, prompt=simulated.packed_prompt(), params=params, key=simulated.own))
        self._unfinished[times.id] = times
        if self.due == inf:
            self._count_use(now, 0, 0)
        self._start_steps(now, stretches=False)

    def _start_steps(self, now: float, *, stretches: bool = True) -> None:
        """Schedule steps until as many are in flight as the stages hold, or begin a stretch."""
        scheduler, flights = self.scheduler, self._flights
        while len(flights) < self._depth and self._stretch is None:
            if stretches and self._stretches and self._begin_stretch(now):
                break
            scheduled = scheduler.schedule()
            if scheduled is None:
                break
            for id in scheduled.started:
                self._unfinished[id].began_s = now
            cost = self._step_seconds(scheduled.step)
            self._last_result_s = max(now + cost.latency_s, self._last_result_s + cost.interval_s)
            flights.append((scheduled.step, self._last_result_s, self._sample(scheduled.step)))
        self._update_due()

    def _update_due(self) -> None:
        if self._stretch:
            self.due = self._stretch.end_s
        else:
            self.due = self._flights[0][1] if self._flights else inf

    def _sample(self, step: StepPlan | LockStep) -> StepResult | LockStepResult:
        """Result of a step. A request's sampled tokens are its key: requests with one key have equal contents."""
        if isinstance(step, LockStep):
            both = zip(step.plans, self._keys, strict=True)
            return LockStepResult([_sampled(plan, keys) for plan, keys in both])
        return _sampled(step, self._keys[0])

    def _step_seconds(self, step: StepPlan | LockStep) -> StepSeconds:
        """Seconds that a step takes, of several groups the time of the slowest one."""
        flights = min(len(self._flights) + 1, self._stages)
        if isinstance(step, StepPlan):
            contexts, chunks, ends = _rows(step)
            return self._predictors[0].step_s(contexts, chunks, ends=ends, groups=flights)
        rows = [_rows(plan) for plan in step.plans]
        routed = (
            sum(len(contexts) for contexts, _, _ in rows),
            sum(count for _, chunks, _ in rows for _, count in chunks),
        )
        costs = [
            predictor.step_s(contexts, chunks, ends=ends, groups=flights, routed=routed)
            for predictor, (contexts, chunks, ends) in zip(self._predictors, rows, strict=True)
        ]
        return StepSeconds(max(cost.latency_s for cost in costs), max(cost.interval_s for cost in costs))

    def _finish_step(self, *, stretches: bool = True) -> list[SimulatedTimes]:
        """Apply the result of the oldest step in flight. Return the requests that have ended."""
        _, now, result = self._flights.popleft()
        blocks = sum(group.kv.used for group in self._groups)
        self._count_use(now, blocks, sum(len(group.table.running) for group in self._groups))
        ended, gaps, tally = [], [], self._tally
        outputs = self._apply(result)
        for output in outputs:
            times = self._unfinished[output.id]
            if times.last_s is None:
                times.first_s = now
                tally.count_prompt(now, times)
            else:
                gaps.append(now - times.last_s)
            times.last_s = now
            if output.finish_reason:
                ended.append(self._unfinished.pop(output.id))
        tally.count_tokens(now, len(outputs))
        tally.count_gaps(now, gaps)
        self._start_steps(now, stretches=stretches)
        return ended

    def _apply(self, result: StepResult | LockStepResult) -> list[Output]:
        """Apply a result of `_sample`, which is of the scheduler's own kind."""
        if isinstance(self.scheduler, GroupedScheduler):
            assert isinstance(result, LockStepResult)
            return self.scheduler.apply(result)
        assert isinstance(result, StepResult)
        return self.scheduler.apply(result)

    # Stretches, of a single group

    def _begin_stretch(self, now: float) -> bool:
        """Begin a stretch, if possible."""
        rest = steady(self._groups[0].view) if len(self._groups) == 1 else None
        if rest is None:
            return False
        rounds, groups = rest
        for window in filter(None, self._predictors[0].windows):
            # The rounds' times grow evenly until a context reaches the window of a layer; a new stretch begins there.
            below = [context for group in groups for context in group if context < window]
            if below:
                rounds = min(rounds, window - max(below) + 1)
        last = [[context + rounds - 1 for context in group] for group in groups]
        self._stretch = Stretch(now, rounds, self._round_s(groups), self._round_s(last))
        return True

    def _round_s(self, groups: Sequence[Sequence[int]]) -> float:
        """Seconds for one step of each group; the groups' steps are in flight together."""
        steps = [self._predictors[0].step_s(contexts, groups=len(groups)) for contexts in groups]
        return max(max(step.latency_s for step in steps), sum(step.interval_s for step in steps))

    def _advance(self, stretch: Stretch) -> list[SimulatedTimes]:
        """Finish a stretch. Return the requests that have ended."""
        self._stretch = None
        if not stretch.rounds:
            return []
        scheduler, tally, now = self._groups[0], self._tally, stretch.end_s
        took_s, running = now - stretch.start_s, list(scheduler.table.running)
        tokens = stretch.rounds * len(running)
        self._count_use(now, scheduler.kv.used + tokens / 2 * self._blocks_per_token, len(running))
        ended = scheduler.advance(stretch.rounds)
        for id in running:
            times = self._unfinished[id]
            assert times.last_s is not None
            # With several groups, each has its own times.
            times.last_s = now if self._depth == 1 else times.last_s + took_s
        tally.count_tokens_evenly(stretch.start_s, now, tokens)
        tally.count_stretch(now, stretch.rounds, len(running), stretch.first_s, stretch.growth_s)
        # The steps in flight now are the earlier steps, a few tokens later; their rows may have another order.
        self._flights = deque((step, result_s + took_s, self._sample(step)) for step, result_s, _ in self._flights)
        self._last_result_s += took_s
        return [self._unfinished.pop(id) for id in ended]

    def _count_use(self, now: float, blocks: float, requests: int) -> None:
        """Count the blocks and requests in use since the last call."""
        self._tally.count_use(self._counted_s, now, blocks, requests, busy=self.due < inf)
        self._counted_s = now


def _create_scheduler(spec: ReplicaSpec, prefix_caching: bool) -> Scheduler:
    """The scheduler of one attention group. Without a prefix cache, blocks are interchangeable."""
    blocks, slots = spec.num_blocks, spec.scheduler.max_num_seqs
    kv = KVManager(spec.kv, blocks, max_num_seqs=slots, caching=prefix_caching, counted=not prefix_caching)
    return Scheduler(spec.scheduler, kv)


def _sampled(plan: StepPlan, keys: list[int]) -> StepResult:
    """Result of one group's step; `keys`, by slot, get the keys of the requests that it admits."""
    for admission in plan.admitted:
        keys[admission.slot] = admission.key
    tokens = [keys[slot] for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
    return StepResult(plan.id, tokens, [None] * len(tokens), {})


def _rows(plan: StepPlan) -> tuple[list[int], list[tuple[int, int]], int]:
    """(contexts of the decoded rows, chunks of prompts, number of prompts that end) as `StepPredictor.step_s` takes
    them."""
    if len(plan.tokens) == len(plan.slots):
        return [start + 1 for start in plan.starts], [], 0
    contexts, chunks, ends = [], [], 0
    for start, count, samples in zip(plan.starts, plan.counts, plan.samples, strict=True):
        if count == 1:
            contexts.append(start + 1)
        else:
            chunks.append((start, count))
            ends += samples
    return contexts, chunks, ends


@cache
def _sampling_params(output_len: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_len, ignore_eos=True)
