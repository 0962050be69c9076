"""Pace: how many prompt tokens a step may have while running requests await their next token, by the clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

STEP_S = 0.2  # what a step with prompts may delay the tokens of those that run
FIRST, LEAST = 128, 16  # prompt tokens: of the first such step, and of any


class Pace:
    """Learns from steps that have ended. `tokens` prompt tokens, at most `most`, are what the next step may have: twice
    as many after a step that used them in less than half of STEP_S, fewer after one that took longer than STEP_S.
    Steps end in the order in which they began."""

    def __init__(self, clock: Callable[[], float], most: int) -> None:
        self.tokens = min(FIRST, most)
        self._clock = clock
        self._most = most
        self._under_way: deque[tuple[float, int]] = deque()  # when a step began, and its prompt tokens
        self._ended_s = float("-inf")

    def began(self, prompt_tokens: int) -> None:
        """Note a step that was submitted."""
        self._under_way.append((self._clock(), prompt_tokens))

    def ended(self) -> None:
        """Learn from the oldest step. Its time begins with the end of the one before it, if that is later."""
        began_s, count = self._under_way.popleft()
        now = self._clock()
        took_s = now - max(began_s, self._ended_s)
        self._ended_s = now
        if not count:
            return
        if took_s > STEP_S:
            self.tokens = max(LEAST, min(self.tokens, int(count * STEP_S / took_s)))
        elif count >= self.tokens and took_s < STEP_S / 2:
            self.tokens = min(self._most, 2 * self.tokens)
