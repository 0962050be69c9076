"""SpeculationGate: whether guessing pays, by the clock. That hangs on the machine, on the draft model and on the batch: beside
many rows a guess takes as long as a token does, and a draft may take as long as its model."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection
from math import inf
from typing import NamedTuple

from weft.core.step import StepPlan

# Decode steps of a turn: to see what the other way takes, and to make use of the better one.
SHORT, LONG = 8, 256
FEW, LOST = 2, 1.5  # so many steps that take so many times as long are enough of a try
# Of a turn's beginning, which are not counted: a draft has no guesses for the first one. One in which it still reads
# what it has missed is READING of a step: where requests come all the time there may be no others.
SKIPPED, READING = 2, 1 / 32
# What a try may cost of the time until the next one, and how many seconds that is at most.
SHARE, LONGEST_S = 1 / 64, 600.0


class UnderWay(NamedTuple):
    """A step: since when, the turns that it is of, whether it may have guesses, whether it is of decoding alone, and
    the slots that a draft is asked about."""

    began: float
    turns: BatchSizeGate
    guessing: bool
    decodes: bool
    asked: list[int]


class SpeculationGate:
    """Steps of batches of about the same size, up to twice as many rows, take turns with guesses and without; the way
    that takes less time for a token has the long turns. Steps end in the order in which they began."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turns: defaultdict[int, BatchSizeGate] = defaultdict(BatchSizeGate)
        self._under_way: deque[UnderWay] = deque()
        self._ended = clock()

    def allows_drafts(self, rows: int) -> bool:
        """Whether the next step is to have guesses, where so many requests run."""
        return self._of(rows).guessing

    def step_started(self, plan: StepPlan, rows: int) -> None:
        """That step has been made."""
        # One that reads prompts as well says nothing.
        decodes = all(plan.samples) and all(map(_is_token, plan.counts, plan.draft_counts))
        asked = (
            [slot for slot, asks in zip(plan.slots, plan.draft_requests, strict=True) if asks]
            if plan.draft_requests
            else []
        )
        turns = self._of(rows)
        self._under_way.append(UnderWay(self._clock(), turns, turns.guessing, decodes, asked))

    def step_finished(self, tokens: int, answered: Collection[int]) -> None:
        """The oldest step has brought so many tokens, and a draft has said something about these slots."""
        step, now = self._under_way.popleft(), self._clock()
        if step.decodes:
            ready = all(slot in answered for slot in step.asked)
            step.turns.note(step.guessing, tokens, now - max(step.began, self._ended), ready)
        self._ended = now

    def _of(self, rows: int) -> BatchSizeGate:
        return self._turns[rows.bit_length()]


def _is_token(count: int, guesses: int) -> bool:
    return count == 1 + guesses


class BatchSizeGate:
    """Whose turn it is, among steps of about as many rows."""

    __slots__ = ("_cost", "_least_s", "_left", "_lost", "_seconds", "_skip", "_steps", "_taken", "_tokens", "guessing")

    def __init__(self) -> None:
        self._taken: dict[bool, float] = {}  # seconds for a token, with guesses and without, in the last turn of either
        self._lost = 0.0  # what the last try cost, where it was lost
        self._begin(True, SHORT)

    def note(self, guessing: bool, tokens: int, seconds: float, ready: bool) -> None:
        """A step brought these tokens in this time. Where it was not `ready`, a draft still reads what it missed."""
        if guessing != self.guessing:
            return  # it was in flight when the turn began
        self._cost += seconds - tokens * self._taken.get(not guessing, inf)
        if self._skip > 0:
            self._skip -= 1 if ready else READING
            return
        self._left -= 1
        self._tokens += tokens
        self._seconds += seconds
        if (self._left <= 0 and self._seconds >= self._least_s) or self._is_lost():
            self._end()

    @property
    def _rate(self) -> float:
        return self._seconds / max(1, self._tokens)

    @property
    def _is_try(self) -> bool:
        return self._steps == SHORT

    def _is_lost(self) -> bool:
        """Whether a try has shown enough."""
        other = self._taken.get(not self.guessing, inf)
        return self._is_try and self._steps - self._left >= FEW and self._rate > LOST * other

    def _end(self) -> None:
        self._taken[self.guessing] = self._rate
        better = self._taken.get(True, inf) < self._taken.get(False, inf)
        if len(self._taken) < 2 or (not self._is_try and better == self.guessing):
            self._begin(not self.guessing, SHORT)
        else:
            # The more has been lost by a try, what a draft had to read first among it, the longer until the next. The
            # cheaper of two in a row counts: in one the machine may have stood still, or compiled something.
            lost = self._cost if self._is_try and better != self.guessing else 0.0
            least_s = min(LONGEST_S, min(lost, self._lost) / SHARE)
            self._lost = lost
            self._begin(better, LONG, least_s)

    def _begin(self, guessing: bool, steps: int, least_s: float = 0.0) -> None:
        """So many steps that count, and so long."""
        self.guessing = guessing
        self._steps = self._left = steps
        self._least_s = least_s
        self._skip: float = SKIPPED
        self._cost = self._seconds = 0.0  # _cost: what it took beyond what the other way takes for as many tokens
        self._tokens = 0
