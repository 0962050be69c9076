"""Worth: whether guessing pays, by the clock. That hangs on the machine, on the draft model and on the batch: beside
many rows a guess takes as long as a token does, and a draft may take as long as its model."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from weft.core.step import StepPlan

# Decode steps of a turn: to see what the other way takes, and to make use of the better one.
SHORT, LONG, LONGEST = 8, 256, 4096
FEW, LOST = 2, 1.5  # so many steps that take so many times as long are enough of a try
# Of a turn's beginning, which are not counted: a draft has no guesses for the first one.
SKIPPED = 2


class UnderWay(NamedTuple):
    """A step: since when, the turns that it is of, whether it may have guesses, and whether it counts."""

    began: float
    turns: Turns
    guessing: bool
    counts: bool


class Worth:
    """Steps of batches of about the same size, up to twice as many rows, take turns with guesses and without; the way
    that takes less time for a token has the long turns. Steps end in the order in which they began."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turns: defaultdict[int, Turns] = defaultdict(Turns)
        self._under_way: deque[UnderWay] = deque()
        self._ended = clock()

    def guessing(self, rows: int) -> bool:
        """Whether the next step is to have guesses, where so many requests run."""
        return self._of(rows).guessing

    def began(self, plan: StepPlan, rows: int) -> None:
        """That step has been made."""
        # One that reads prompts as well says nothing.
        counts = all(plan.samples) and all(map(_is_token, plan.counts, plan.guesses))
        turns = self._of(rows)
        self._under_way.append(UnderWay(self._clock(), turns, turns.guessing, counts))

    def ended(self, tokens: int) -> None:
        """The oldest step has brought so many tokens."""
        step, now = self._under_way.popleft(), self._clock()
        if step.counts:
            step.turns.note(step.guessing, tokens, now - max(step.began, self._ended))
        self._ended = now

    def _of(self, rows: int) -> Turns:
        return self._turns[rows.bit_length()]


def _is_token(count: int, guesses: int) -> bool:
    return count == 1 + guesses


class Turns:
    """Whose turn it is, among steps of about as many rows."""

    __slots__ = ("_counted", "_left", "_long", "_seconds", "_taken", "_tokens", "guessing")

    def __init__(self) -> None:
        self._taken: dict[bool, float] = {}  # seconds for a token, with guesses and without, in the last turn of either
        self._long = LONG
        self._begin(True, SHORT)

    def note(self, guessing: bool, tokens: int, seconds: float) -> None:
        """A step brought these tokens in this time."""
        if guessing != self.guessing:
            return  # it was in flight when the turn began
        self._left -= 1
        if self._left >= self._counted:
            return
        self._tokens += tokens
        self._seconds += seconds
        if not self._left or self._is_lost():
            self._end()

    def _rate(self) -> float:
        return self._seconds / max(1, self._tokens)

    def _is_lost(self) -> bool:
        """Whether a try has shown enough."""
        tried = self._counted - self._left
        return self._counted == SHORT and tried >= FEW and self._rate() > LOST * self._taken.get(not self.guessing, inf)

    def _end(self) -> None:
        tried, before = self._counted == SHORT, self._taken.get(True, inf) < self._taken.get(False, inf)
        self._taken[self.guessing] = self._rate()
        better = self._taken.get(True, inf) < self._taken.get(False, inf)
        if len(self._taken) < 2 or (not tried and better == self.guessing):
            self._begin(not self.guessing, SHORT)
            return
        # What has not changed is tried again after twice as long.
        self._long = min(2 * self._long, LONGEST) if tried and better == before else LONG
        self._begin(better, self._long)

    def _begin(self, guessing: bool, steps: int) -> None:
        self.guessing = guessing
        self._counted, self._left = steps, steps + SKIPPED
        self._tokens, self._seconds = 0, 0.0
