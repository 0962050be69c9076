"""Speculation: tokens that are guessed ahead, to be confirmed many at a time by one step.

A step computes the logits after each guess, and every position is sampled as it would be without guesses, from its own
random stream; guesses are right as far as they equal what was sampled. So the answer is the same token for token,
greedy or not; only the number of steps changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.planner.plan import Speculation

# Of what a guess was worth lately, so much is kept when the next one is judged.
MEMORY = 0.8
WORTH = 0.4  # confirmed guesses per step, below which guessing rests
REST = 24  # tokens that it rests for, before one guess is tried again


class Guesser:
    """Guesses for one sequence, as many as were worth it lately, none while it rests."""

    __slots__ = ("_confirmed", "_index", "_longest", "_most", "_offered", "_resting", "_seen", "_shortest")

    def __init__(self, how: Speculation) -> None:
        self._most = how.tokens
        self._shortest, self._longest = how.lookup_min, 0 if how.draft else how.lookup_max
        self._confirmed = float(how.tokens)  # a step's, on average
        self._resting = 0
        self._offered: list[int] = []
        # Where each run of tokens was last followed by another.
        self._index: dict[tuple[int, ...], int] = {}
        self._seen = 0

    @property
    def awake(self) -> bool:
        return not self._resting

    def offer(self, guesses: list[int]) -> None:
        """What a draft model guesses for the next step, in place of a look into the text."""
        self._offered = guesses

    def guesses(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow `tokens`."""
        if self._resting:
            self._resting -= 1
            self._offered = []
            return []
        # One more than was confirmed lately: so the number can grow.
        most = min(most, self._most, int(self._confirmed + 1.5))
        if most < 1:
            return []
        found, self._offered = self._offered[:most], []
        return found or self._look_up(tokens, most)

    def judge(self, guessed: int, confirmed: int) -> None:
        """How many of a step's guesses were right."""
        if not guessed:
            return
        self._confirmed = MEMORY * self._confirmed + (1 - MEMORY) * confirmed
        if self._confirmed < WORTH:
            self._confirmed, self._resting = WORTH, REST

    def _look_up(self, tokens: Sequence[int], most: int) -> list[int]:
        """What followed when the text's last tokens came before: the longest run counts, the latest of its places."""
        if not self._longest:
            return []
        index, end = self._index, len(tokens)
        # Runs that have a token after them, each once.
        for last in range(max(self._seen, 1), end):
            for length in range(self._shortest, min(self._longest, last) + 1):
                index[tuple(tokens[last - length : last])] = last
        self._seen = max(self._seen, end)
        for length in range(min(self._longest, end), self._shortest - 1, -1):
            place = index.get(tuple(tokens[end - length : end]))
            if place is not None:
                # Near its end, the text may be going round in a circle.
                return [tokens[place + step % (end - place)] for step in range(most)]
        return []
