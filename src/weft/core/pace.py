"""Pace: prompt tokens of a step while running requests await their next token, bounded by the clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

STEP_S = 0.2  # a step with prompts may take this long,
DECODE_STEPS = 2.0  # or as long as so many steps without: on slow hardware a decode step alone takes longer
LEAST_SHARE = 8  # a step may always have this part of the planned prompt tokens: smaller ones waste too much
RECENT = 0.1  # weight of the last step without prompts in their average


class Pace:
    """Adapts `tokens`, the prompt tokens that the next step may have, to the time that steps really take.

    The plan chose `most` by predicted times; a busy machine is slower. `tokens` doubles after a step that leaves time
    for twice as many, and shrinks after one that took longer than the limit. Steps end in the order of their begin.
    """

    def __init__(self, clock: Callable[[], float], most: int) -> None:
        self.tokens = self._least = max(1, most // LEAST_SHARE)
        self._clock = clock
        self._most = most
        self._under_way: deque[tuple[float, int]] = deque()  # begin in seconds, prompt tokens
        self._ended_s = float("-inf")
        self._decode_s = 0.0

    @property
    def limit_s(self) -> float:
        """Seconds that a step with prompts may take."""
        return max(STEP_S, DECODE_STEPS * self._decode_s)

    def step_started(self, prompt_tokens: int) -> None:
        """Note a step that was submitted."""
        self._under_way.append((self._clock(), prompt_tokens))

    def step_finished(self) -> None:
        """Learn from the oldest step. Its time begins with the end of the one before it, if that is later."""
        began_s, count = self._under_way.popleft()
        now = self._clock()
        took_s = now - max(began_s, self._ended_s)
        self._ended_s = now
        if not count:
            self._decode_s += (took_s - self._decode_s) * (RECENT if self._decode_s else 1.0)
            return
        prompts_s = max(took_s - self._decode_s, 1e-9)  # what the prompts added to a step of decodes
        room_s = self.limit_s - self._decode_s
        if prompts_s > room_s:
            self.tokens = max(self._least, min(self.tokens, int(count * room_s / prompts_s)))
        elif count >= self.tokens and 2 * prompts_s < room_s:
            self.tokens = min(self._most, 2 * self.tokens)
