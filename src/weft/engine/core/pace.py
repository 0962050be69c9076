"""Pace: limit on the prompt tokens of a step while running requests await their next token, adapted by the clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from weft.engine.core.scheduled import StepLimits

STEP_S = 0.15  # seconds that a step with prompts may take;
DECODE_STEPS = 2.0  # or this many times a decode-only step, which takes longer than STEP_S on slow hardware
# The first step may have 1/8 of the planned prompt tokens, and every step 1/32: smaller chunks waste too much.
FIRST_SHARE, MIN_SHARE = 8, 32
RECENT = 0.1  # weight of the latest decode-only step in their average time
# Cached prompt tokens that count as one computed token in steps with decodes, since attention reads all of them.
# Measured for a model of 135M on two cores: computing a token takes as long as reading 1,800 to 4,300. By FLOPS and
# bandwidth: 400 to 5,000, for models of up to 8B on CPUs and GPUs.
CACHED_TOKENS = 1024
# Policy "fair": FAIR_S is the longest time of any step, since a newcomer waits for its end. A step may also take
# DECODE_STEPS times the fastest of the LAST steps of at most MIN_TOKENS; every step may have MIN_TOKENS. With 0.075 s,
# prompts took a third longer on two cores, in small chunks; with 0.15 s, a newcomer waited for the time of 100 tokens.
FAIR_S, MIN_TOKENS, LAST = 0.1, 16, 8
# For this many seconds after a newcomer arrives, other steps take at most its prefill time, or DECODE_STEPS times the
# fastest of the smallest steps: the next newcomer should not wait longer than its own prefill takes.
NEWCOMER_S = 60.0


class Pace:
    """Adapts `tokens`, the number of prompt tokens that the next step may have, to measured step times.

    The plan chose `most` by predicted times; a busy machine is slower. `tokens` doubles after a step that leaves time
    for twice as many prompt tokens, and shrinks after a step that took longer than the limit. Steps finish in the order
    in which they start.
    """

    def __init__(self, clock: Callable[[], float], most: int) -> None:
        self.tokens, self._least = max(1, most // FIRST_SHARE), max(1, most // MIN_SHARE)
        self._clock = clock
        self._most = most
        self._in_flight: deque[tuple[float, int, int]] = deque()  # start in seconds, prompt tokens, rows
        self._last_end_s = float("-inf")
        self._decode_s = 0.0

    @property
    def limit_s(self) -> float:
        """Seconds that a step with prompts may take."""
        return max(STEP_S, DECODE_STEPS * self._decode_s)

    def limits(self) -> StepLimits:
        """The limits of the next step."""
        return StepLimits(prompt_tokens=self.tokens)

    def step_started(self, prompt_tokens: int, rows: int, newcomer_tokens: int = 0) -> None:
        """Note a step that was scheduled, with this number of prompt tokens and of rows.

        `newcomer_tokens` is the number of tokens of the shortest newcomer's prompt that it admits, or 0.
        """
        self._in_flight.append((self._clock(), prompt_tokens, rows))

    def step_finished(self) -> None:
        """Adapt to the time of the oldest step in flight, which begins no earlier than the end of the step before."""
        started_s, prompt_tokens, rows = self._in_flight.popleft()
        now = self._clock()
        step_s = now - max(started_s, self._last_end_s)
        self._last_end_s = now
        self._adapt(prompt_tokens, rows, step_s)

    def _adapt(self, count: int, rows: int, step_s: float) -> None:
        if not count:
            self._decode_s += (step_s - self._decode_s) * (RECENT if self._decode_s else 1.0)
            return
        prompts_s = max(step_s - self._decode_s, 1e-9)  # what the prompts added to a decode step
        room_s = self.limit_s - self._decode_s
        if prompts_s > room_s:
            self.tokens = max(self._least, min(self.tokens, int(count * room_s / prompts_s)))
        elif count >= self.tokens and 2 * prompts_s < room_s:
            self.tokens = min(self._most, 2 * self.tokens)


class FairPace(Pace):
    """The pace under the policy "fair": `tokens` is the limit on all tokens of a step with a newcomer's prompt.

    `busy` is the limit on all tokens of other steps.
    """

    def __init__(self, clock: Callable[[], float], most: int) -> None:
        super().__init__(clock, most)
        self.busy = self.tokens
        self._small_s: deque[float] = deque(maxlen=LAST)  # times of the last steps of at most MIN_TOKENS
        self._newcomer_tokens = 0  # of the last step
        self._newcomers: deque[tuple[float, int]] = deque()  # times of newcomers, and tokens of their prompts

    @property
    def limit_s(self) -> float:
        """Seconds that a step may take."""
        return max(FAIR_S, self._least_s)

    @property
    def busy_limit_s(self) -> float:
        """Seconds that a step without a newcomer's prompt may take."""
        if not self._newcomers:
            return self.limit_s
        shortest = self._newcomers[0][1]
        return min(self.limit_s, max(self._least_s, self.limit_s * shortest / self.tokens))

    @property
    def _least_s(self) -> float:
        """Seconds that every step may take, from the times of the smallest steps."""
        return DECODE_STEPS * min(self._small_s, default=0.0)

    def limits(self) -> StepLimits:
        """The limits of the next step."""
        now = self._clock()
        if self._newcomer_tokens:
            self._note_newcomer(now, self._newcomer_tokens)
            self._newcomer_tokens = 0
        while self._newcomers and self._newcomers[0][0] < now - NEWCOMER_S:
            self._newcomers.popleft()
        return StepLimits(step_tokens=self.tokens, busy_tokens=min(self.busy, self.tokens))

    def step_started(self, prompt_tokens: int, rows: int, newcomer_tokens: int = 0) -> None:
        """Note a step that was scheduled, as `Pace.step_started`."""
        super().step_started(prompt_tokens, rows)
        self._newcomer_tokens = newcomer_tokens

    def _note_newcomer(self, now: float, tokens: int) -> None:
        """Note a newcomer. Earlier newcomers with prompts no shorter are dropped, so the first has the shortest."""
        while self._newcomers and self._newcomers[-1][1] >= tokens:
            self._newcomers.pop()
        self._newcomers.append((now, tokens))

    def _adapt(self, count: int, rows: int, step_s: float) -> None:
        count += rows
        if count <= MIN_TOKENS:
            self._small_s.append(step_s)
        self.tokens = self._adapted(self.tokens, count, step_s, self.limit_s)
        self.busy = self._adapted(self.busy, count, step_s, self.busy_limit_s)

    def _adapted(self, tokens: int, count: int, step_s: float, limit_s: float) -> int:
        """A limit of `tokens`, after a step of `count` tokens."""
        fitting = int(count * limit_s / max(step_s, 1e-9))
        if fitting < count:
            return max(MIN_TOKENS, min(tokens, fitting))
        return max(tokens, min(self._most, 2 * tokens, fitting))
