"""Pace: limit on the prompt tokens of a step while running requests await their next token, adapted by the clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

STEP_S = 0.15  # seconds that a step with prompts may take,
DECODE_STEPS = 2.0  # or this many times a step without: on slow hardware a decode step alone takes longer
# The first step may have 1/8 of the planned prompt tokens, and every step 1/32: smaller chunks waste too much.
FIRST_SHARE, LEAST_SHARE = 8, 32
RECENT = 0.1  # weight of the latest decode-only step in their average time
# Cached prompt tokens that count as one computed token beside decodes: attention reads all of them. Computing a token
# took as long as reading 1,800 to 4,300, for a model of 135M on two cores; by FLOPS and bandwidth, it is 400 to 5,000
# for models of up to 8B on CPUs and GPUs.
CACHED_TOKENS = 1024
# Under the policy "fair", seconds that a step of answers may take, and the rows that it may have in any case. 32 rows
# took 0.09 s for a model of 135M on two cores, 64 rows 0.13 s, and 256 rows 0.7 s, which is no more tokens a second.
ROWS_S, LEAST_ROWS = 0.075, 8


class Pace:
    """Adapts `tokens`, the number of prompt tokens that the next step may have, to measured step times.

    The plan chose `most` by predicted times; a busy machine is slower. `tokens` doubles after a step that leaves time
    for twice as many prompt tokens, and shrinks after a step that took longer than the limit. Steps finish in the order
    in which they start. `rows`, the number of rows that the next step may have, is adapted likewise; 0: it is not.
    """

    def __init__(self, clock: Callable[[], float], most: int, most_rows: int = 0) -> None:
        """`most_rows` is the largest number of rows of a step, if that is to be adapted too."""
        self.rows = self._most_rows = most_rows
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

    def step_started(self, prompt_tokens: int, rows: int = 0) -> None:
        """Note a step that was submitted with this number of prompt tokens, and of rows if they are adapted."""
        self._in_flight.append((self._clock(), prompt_tokens, rows))

    def step_finished(self) -> None:
        """Adapt to the time of the oldest step in flight, which begins no earlier than the end of the step before."""
        started_s, count, rows = self._in_flight.popleft()
        now = self._clock()
        step_s = now - max(started_s, self._last_end_s)
        self._last_end_s = now
        if not count:
            self._decode_s += (step_s - self._decode_s) * (RECENT if self._decode_s else 1.0)
            if rows:
                self._adapt_rows(rows, step_s)
            return
        prompts_s = max(step_s - self._decode_s, 1e-9)  # what the prompts added to a decode step
        room_s = self.limit_s - self._decode_s
        if prompts_s > room_s:
            self.tokens = max(self._least, min(self.tokens, int(count * room_s / prompts_s)))
        elif count >= self.tokens and 2 * prompts_s < room_s:
            self.tokens = min(self._most, 2 * self.tokens)

    def _adapt_rows(self, rows: int, step_s: float) -> None:
        """Halve the rows after a step of answers that took too long; double them after one that leaves time for it."""
        if step_s > ROWS_S:
            self.rows = max(LEAST_ROWS, min(self.rows, rows // 2))
        elif rows >= self.rows and 2 * step_s < ROWS_S:
            self.rows = min(self._most_rows, 2 * self.rows)
