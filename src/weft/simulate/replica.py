"""Replica: one scheduler on a virtual clock, step by step or in stretches of steps that are alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from math import inf, sqrt

import msgspec

from weft.core.blocks import BlockPool
from weft.core.params import SamplingParams
from weft.core.request import Request
from weft.core.step import StepPlan
from weft.planner.steps import StepPredictor, StepSeconds
from weft.simulate.ask import Ask
from weft.simulate.blocks import CountedBlocks
from weft.simulate.scheduler import StretchScheduler
from weft.simulate.tally import Answer, Tally


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica is: what its steps take, and its scheduler's limits. As many steps are under way as there are
    `stages`, and with `lookahead` one more."""

    steps: StepPredictor
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued: int
    max_model_len: int
    stages: int
    lookahead: bool = False


class Stretch:
    """Rounds from `start_s` on, the first of which takes `first_s`, and each `growth_s` more than the one before."""

    __slots__ = ("first_s", "growth_s", "rounds", "start_s")

    def __init__(self, start_s: float, rounds: int, first_s: float, last_s: float) -> None:
        self.start_s, self.rounds, self.first_s = start_s, rounds, first_s
        self.growth_s = (last_s - first_s) / max(1, rounds - 1)

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds(self.rounds)

    def seconds(self, rounds: int) -> float:
        """Of the first so many rounds."""
        return rounds * (self.first_s + self.growth_s * (rounds - 1) / 2)

    def over_by(self, now: float) -> int:
        """The rounds that are over at a time before the end."""
        past, half = now - self.start_s, self.growth_s / 2
        linear = self.first_s - half
        # half * rounds^2 + linear * rounds = past, in the form that also bears a growth of nothing.
        rounds = int(2 * past / (linear + sqrt(linear * linear + 4 * half * past)))
        while self.seconds(rounds) > past:
            rounds -= 1
        while rounds < self.rounds and self.seconds(rounds + 1) <= past:
            rounds += 1
        return rounds


class Replica:
    """Takes requests and, at the times that it says, is woken. Times are seconds of the virtual clock.

    `due` is when it wants to be woken next, infinity while it has nothing to do.
    """

    def __init__(self, spec: Spec, tally: Tally, *, prefix_caching: bool, stretches: bool = True) -> None:
        self.due = inf
        # A lone request may outgrow a small cache, and ends there.
        self.longest = min(spec.max_model_len, spec.num_blocks * spec.block_size)
        self.most = spec.max_num_queued + spec.max_num_seqs  # requests that it takes
        # Without a prefix cache one block is as good as any other.
        size = spec.num_blocks, spec.block_size
        pool = BlockPool(*size, caching=True) if prefix_caching else CountedBlocks(*size)
        self.scheduler = StretchScheduler(
            pool=pool,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_num_queued=spec.max_num_queued,
            max_model_len=spec.max_model_len,
            stages=spec.stages,
            policy="fcfs",
            lookahead=spec.lookahead,
        )
        self._steps, self._tally, self._stretches = spec.steps, tally, stretches
        self._stages, self._depth = spec.stages, spec.stages + spec.lookahead
        self._flights: deque[tuple[StepPlan, float]] = deque()  # with the time of each one's result
        self._last_result = 0.0
        self._stretch: Stretch | None = None
        self._answers: dict[str, Answer] = {}
        self._seen_s = 0.0  # up to when its use is accounted for

    def wake(self) -> list[Answer]:
        """Do what is due. Returns the requests that have ended."""
        if self._stretch is None:
            return self._finish()
        ended = self._advance(self._stretch)
        self._pump(self.due)
        return ended

    def settle(self, now: float) -> list[Answer]:
        """Come to a time before `due` at which something can be added. Returns the requests that have ended."""
        ended: list[Answer] = []
        stretch = self._stretch
        if stretch is None:
            return ended
        over = stretch.over_by(now)
        if self._stages == 1:
            # To the end of the step under way.
            stretch.rounds = min(stretch.rounds, over + 1)
            self.due = stretch.end_s
        else:
            # The round under way becomes steps that can be seen.
            stretch.rounds = over
            self._advance(stretch)
            self._pump(stretch.end_s, stretches=False)
            while self.due <= now:
                ended += self._finish(stretches=False)
        return ended

    def add(self, now: float, ask: Ask, answer: Answer) -> None:
        """A request comes in; `answer` is where its times are put down. To be settled before. Raises QueueFullError,
        and RequestError for one that can never run."""
        request = Request(id=answer.id, prompt=ask.prompt(), params=_params(ask.output_len), key=ask.own)
        self.scheduler.add(request)
        self._answers[answer.id] = answer
        if self.due == inf:
            self._account(now, 0, 0)
        self._pump(now, stretches=False)

    def _pump(self, now: float, *, stretches: bool = True) -> None:
        """Have as many steps under way as there are stages, or begin a stretch of them."""
        scheduler, flights = self.scheduler, self._flights
        while len(flights) < self._depth and self._stretch is None:
            if stretches and self._stretches and self._begin(now):
                break
            plan = scheduler.schedule()
            if plan is None:
                break
            for id in scheduler.started:
                self._answers[id].began_s = now
            took = self._cost(plan)
            self._last_result = max(now + took.latency_s, self._last_result + took.interval_s)
            flights.append((plan, self._last_result))
        if self._stretch:
            self.due = self._stretch.end_s
        else:
            self.due = flights[0][1] if flights else inf

    def _cost(self, plan: StepPlan) -> StepSeconds:
        groups = min(len(self._flights) + 1, self._stages)
        if len(plan.tokens) == len(plan.slots):
            return self._steps.step_s([start + 1 for start in plan.starts], groups=groups)
        contexts, chunks, ends = [], [], 0
        for start, count, samples in zip(plan.starts, plan.counts, plan.samples, strict=True):
            if count == 1:
                contexts.append(start + 1)
            else:
                chunks.append((start, count))
                ends += samples
        return self._steps.step_s(contexts, chunks, ends=ends, groups=groups)

    def _finish(self, *, stretches: bool = True) -> list[Answer]:
        """The oldest step under way is over."""
        plan, now = self._flights.popleft()
        self._account(now, self.scheduler.blocks_used, len(self.scheduler.running))
        ended, gaps, tally = [], [], self._tally
        outputs = self.scheduler.finish(plan)
        for output in outputs:
            answer = self._answers[output.id]
            if answer.last_s is None:
                answer.first_s = now
                tally.read(now, answer)
            else:
                gaps.append(now - answer.last_s)
            answer.last_s = now
            if output.finish_reason:
                ended.append(self._answers.pop(output.id))
        tally.wrote(now, len(outputs))
        tally.gaps(now, gaps)
        self._pump(now, stretches=stretches)
        return ended

    # Stretches

    def _begin(self, now: float) -> bool:
        """Begin a stretch where one begins here."""
        rounds = self.scheduler.quiet_rounds()
        if not rounds:
            return False
        groups = [[sequence.computed + 1 for sequence in group] for group in self.scheduler.groups()]
        for window in filter(None, self._steps.windows):
            # Up to it each round takes as much longer as the one before; there a new stretch begins.
            left = (window - context + 1 for group in groups for context in group if context < window)
            rounds = min(rounds, *left, rounds)
        last = [[context + rounds - 1 for context in group] for group in groups]
        self._stretch = Stretch(now, rounds, self._round_s(groups), self._round_s(last))
        return True

    def _round_s(self, groups: Sequence[Sequence[int]]) -> float:
        """One step of each of these groups, as many as are under way at once."""
        steps = [self._steps.step_s(contexts, groups=len(groups)) for contexts in groups]
        return max(max(step.latency_s for step in steps), sum(step.interval_s for step in steps))

    def _advance(self, stretch: Stretch) -> list[Answer]:
        """The stretch is over. Returns the requests that have ended."""
        self._stretch = None
        if not stretch.rounds:
            return []
        scheduler, tally, now = self.scheduler, self._tally, stretch.end_s
        took, running, tokens = now - stretch.start_s, list(scheduler.running), stretch.rounds * len(scheduler.running)
        self._account(now, scheduler.blocks_used + tokens / 2 / scheduler.pool.block_size, len(running))
        ended = scheduler.advance(stretch.rounds)
        for id in running:
            answer = self._answers[id]
            assert answer.last_s is not None
            # Of several groups each has its own time.
            answer.last_s = now if self._depth == 1 else answer.last_s + took
        tally.wrote_evenly(stretch.start_s, now, tokens)
        tally.stretch(now, stretch.rounds, len(running), stretch.first_s, stretch.growth_s)
        # What is under way now is what was then, a few tokens on.
        self._flights = deque((plan, result + took) for plan, result in self._flights)
        self._last_result += took
        return [self._answers.pop(id) for id in ended]

    def _account(self, now: float, blocks: float, requests: int) -> None:
        """So much has been in use since it was last asked."""
        self._tally.used(self._seen_s, now, blocks, requests, busy=self.due < inf)
        self._seen_s = now


@cache
def _params(output_len: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_len, ignore_eos=True)
