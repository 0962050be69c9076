"""Pace: limit on the prompt tokens of a step while running requests await their next token, adapted by the clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

STEP_S = 0.15  # seconds that a step with prompts may take,
DECODE_STEPS = 2.0  # or this many times a step without: on slow hardware a decode step alone takes longer
# The first step may have 1/8 of the planned prompt tokens, and every step 1/32: smaller chunks waste too much.
FIRST_SHARE, LEAST_SHARE = 8, 32
RECENT = 0.1  # weight of the latest decode-only step in their average time
# Cached prompt tokens that count as one computed token beside decodes: attention reads all of them. Computing a token
# took as long as reading 1,800 to 4,300, for a model of 135M on two cores; by FLOPS and bandwidth, it is 400 to 5,000
# for models of up to 8B on CPUs and GPUs.
CACHED_TOKENS = 1024
# Under the policy "fair", seconds that any step may take, since a newcomer waits for its end, or DECODE_STEPS times the
# fastest of the LAST steps of at most LEAST_TOKENS, which every step may have. With 0.075 s, chunks of prompts were so
# small on two cores that they took a third longer; with 0.15 s, a newcomer waited as long as 100 tokens take.
FAIR_S, LEAST_TOKENS, LAST = 0.1, 16, 8


class Limited(Protocol):
    """A scheduler: its limit on prompt tokens beside answers, and under the policy "fair" on all tokens of a step."""

    prompt_limit: int
    step_limit: int


class Pace:
    """Adapts `tokens`, the number of prompt tokens that the next step may have, to measured step times.

    The plan chose `most` by predicted times; a busy machine is slower. `tokens` doubles after a step that leaves time
    for twice as many prompt tokens, and shrinks after a step that took longer than the limit. Steps finish in the order
    in which they start.
    """

    def __init__(self, clock: Callable[[], float], most: int) -> None:
        self.tokens, self._least = max(1, most // FIRST_SHARE), max(1, most // LEAST_SHARE)
        self._clock = clock
        self._most = most
        self._in_flight: deque[tuple[float, int, int]] = deque()  # start in seconds, prompt tokens, rows
        self._last_end_s = float("-inf")
        self._decode_s = 0.0

    @property
    def limit_s(self) -> float:
        """Seconds that a step with prompts may take."""
        return max(STEP_S, DECODE_STEPS * self._decode_s)

    def set_limits(self, limited: Limited) -> None:
        """Set the limits of the next step."""
        limited.prompt_limit = self.tokens

    def step_started(self, prompt_tokens: int, rows: int) -> None:
        """Note a step that was submitted, with this number of prompt tokens and of rows."""
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
    """The pace under the policy "fair": `tokens` is the limit on all tokens of a step, half of them for rows."""

    def __init__(self, clock: Callable[[], float], most: int) -> None:
        super().__init__(clock, most)
        self._small_s: deque[float] = deque(maxlen=LAST)  # times of the last steps of at most LEAST_TOKENS

    @property
    def limit_s(self) -> float:
        """Seconds that a step may take."""
        return max(FAIR_S, DECODE_STEPS * min(self._small_s, default=0.0))

    def set_limits(self, limited: Limited) -> None:
        """Set the limits of the next step."""
        limited.step_limit = self.tokens

    def _adapt(self, count: int, rows: int, step_s: float) -> None:
        count += rows
        if count <= LEAST_TOKENS:
            self._small_s.append(step_s)
        fitting = int(count * self.limit_s / max(step_s, 1e-9))
        if fitting < count:
            self.tokens = max(LEAST_TOKENS, min(self.tokens, fitting))
        elif count >= self.tokens or rows >= self.tokens // 2:
            self.tokens = max(self.tokens, min(self._most, 2 * self.tokens, fitting))
