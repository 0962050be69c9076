"""SpeculationGate: enables draft tokens only while they reduce the measured time per token.

The effect depends on the machine, the draft model and the batch. With many rows a draft token takes as long as any
other token, and a draft model may take as long as the large model.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection
from math import inf
from typing import NamedTuple

from weft.engine.core.step import EngineStep

# Decode steps of a turn. A short turn measures the other mode (with drafts or without), a long turn uses the faster
# mode.
SHORT_TURN, LONG_TURN = 8, 256
# A short turn is lost once FEW steps took LOST times as long per token as the other mode.
FEW, LOST = 2, 1.5
# Warm-up steps at the start of a turn are not timed: a draft model has no tokens for the first step. A step in which
# the draft model still catches up counts as READING of a step: if requests arrive all the time, there may be no other
# steps.
SKIPPED, READING = 2, 1 / 32
# Share of the time until the next short turn that a lost turn may cost, and the longest such time in seconds.
SHARE, LONGEST_S = 1 / 64, 600.0


class StepInFlight(NamedTuple):
    """A step in flight: when it started, the gate of its batch size, and what the gate needs to know of it.

    `decodes` is True if no row reads a prompt. `requested` are the slots for which a draft model is to propose tokens.
    """

    started_s: float
    gate: BatchSizeGate
    drafting: bool
    decodes: bool
    requested: list[int]


class SpeculationGate:
    """Alternates decode steps with and without draft tokens; the mode with less time per token has the long turns.

    Batches of 2^(n-1) to 2^n - 1 rows are measured separately. Steps finish in the order in which they start.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._gates: defaultdict[int, BatchSizeGate] = defaultdict(BatchSizeGate)
        self._in_flight: deque[StepInFlight] = deque()
        self._last_end_s = clock()

    def allows_drafts(self, rows: int) -> bool:
        """Return True if the next step, with `rows` active requests, is to have draft tokens."""
        return self._gate(rows).drafting

    def step_started(self, plan: EngineStep, rows: int) -> None:
        """Note a step that was scheduled."""
        # The time of a step that also reads prompts says nothing about drafts.
        decodes = all(plan.samples) and all(map(_is_decode, plan.counts, plan.draft_counts))
        requested = []
        if plan.draft_requests:
            requested = [slot for slot, count in zip(plan.slots, plan.draft_requests, strict=True) if count]
        gate = self._gate(rows)
        self._in_flight.append(StepInFlight(self._clock(), gate, gate.drafting, decodes, requested))

    def step_finished(self, tokens: int, answered: Collection[int]) -> None:
        """Note that the oldest step brought `tokens` tokens, and a draft model's answer for the slots in `answered`."""
        step, now = self._in_flight.popleft(), self._clock()
        if step.decodes:
            ready = all(slot in answered for slot in step.requested)
            step.gate.record_step(step.drafting, tokens, now - max(step.started_s, self._last_end_s), ready)
        self._last_end_s = now

    def _gate(self, rows: int) -> BatchSizeGate:
        return self._gates[rows.bit_length()]


def _is_decode(count: int, drafts: int) -> bool:
    return count == 1 + drafts


class BatchSizeGate:
    """The turns with and without drafts among steps of about as many rows. `drafting` is True in a turn with drafts."""

    __slots__ = (
        "_extra_s",
        "_last_loss_s",
        "_least_s",
        "_left",
        "_rates",
        "_seconds",
        "_skip",
        "_steps",
        "_tokens",
        "drafting",
    )

    def __init__(self) -> None:
        self._rates: dict[bool, float] = {}  # seconds per token in the last turn with drafts, and without
        self._last_loss_s = 0.0  # what the last short turn cost, if it was lost
        self._begin_turn(True, SHORT_TURN)

    def record_step(self, drafting: bool, tokens: int, seconds: float, ready: bool) -> None:
        """Note a step's tokens and time. Unless it was `ready`, a draft model still catches up with the text."""
        if drafting != self.drafting:
            return  # the step was in flight when the turn began
        self._extra_s += seconds - tokens * self._rates.get(not drafting, inf)
        if self._skip > 0:
            self._skip -= 1 if ready else READING
            return
        self._left -= 1
        self._tokens += tokens
        self._seconds += seconds
        if (self._left <= 0 and self._seconds >= self._least_s) or self._is_lost():
            self._end_turn()

    @property
    def _rate(self) -> float:
        """Seconds per token of this turn."""
        return self._seconds / max(1, self._tokens)

    @property
    def _is_short(self) -> bool:
        return self._steps == SHORT_TURN

    def _is_lost(self) -> bool:
        """Return True if a short turn has shown enough to end early."""
        other = self._rates.get(not self.drafting, inf)
        return self._is_short and self._steps - self._left >= FEW and self._rate > LOST * other

    def _end_turn(self) -> None:
        self._rates[self.drafting] = self._rate
        faster = self._rates.get(True, inf) < self._rates.get(False, inf)
        if len(self._rates) < 2 or (not self._is_short and faster == self.drafting):
            self._begin_turn(not self.drafting, SHORT_TURN)
        else:
            # The more time a short turn has lost, the catching up of the draft model included, the longer until the
            # next. The cheaper of two successive turns counts: during the other the machine may have been suspended or
            # compiling.
            loss_s = self._extra_s if self._is_short and faster != self.drafting else 0.0
            least_s = min(LONGEST_S, min(loss_s, self._last_loss_s) / SHARE)
            self._last_loss_s = loss_s
            self._begin_turn(faster, LONG_TURN, least_s)

    def _begin_turn(self, drafting: bool, steps: int, least_s: float = 0.0) -> None:
        """Begin a turn of at least `steps` timed steps and `least_s` seconds."""
        self.drafting = drafting
        self._steps = self._left = steps
        self._least_s = least_s
        self._skip: float = SKIPPED
        # _extra_s: seconds in addition to the time of the other mode for as many tokens.
        self._extra_s = self._seconds = 0.0
        self._tokens = 0
