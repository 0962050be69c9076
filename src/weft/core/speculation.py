"""Speculation: tokens that are guessed ahead, to be confirmed many at a time by one step.

A step computes the logits after each guess, and every position is sampled as it would be without guesses, from its own
random stream; guesses are right as far as they equal what was sampled. So the answer is the same token for token,
greedy or not; only the number of steps changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.plan import Speculation

# Of what a guess was worth lately, so much is kept when the next one is judged.
MEMORY = 0.8
WORTH = 0.4  # confirmed guesses per step, below which guessing rests
PLACES = 64  # where a run came before that are looked at, the latest ones
REST = 24  # tokens that it rests for, before one guess is tried again


def common_prefix_length(these: Sequence[int], those: Sequence[int]) -> int:
    """How many tokens both begin with: of guesses and what was sampled, how many are right."""
    length = min(len(these), len(those))
    if these[:length] == those[:length]:
        return length
    return next(n for n in range(length) if these[n] != those[n])


class DraftProposer:
    """Guesses for one sequence, as many as were worth it lately, none while it rests."""

    __slots__ = ("_confirmed", "_earlier", "_index", "_longest", "_most", "_offered", "_resting", "_shortest")

    def __init__(self, how: Speculation) -> None:
        self._most = how.tokens
        self._shortest, self._longest = how.lookup_min, 0 if how.draft else how.lookup_max
        self._confirmed = float(how.tokens)  # a step's, on average
        self._resting = 0
        self._offered: list[int] = []
        # Where each run of the shortest length was last followed by another, and by place where it was before that
        # (0: nowhere). Longer runs are found by looking back from there, since an index of them all takes megabytes.
        self._index: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []

    def draft_limit(self, most: int) -> int:
        """How many guesses a step is worth, of at most so many."""
        # One more than was confirmed lately: so the number can grow.
        return 0 if self._resting else max(0, min(most, self._most, int(self._confirmed + 1.5)))

    def set_model_drafts(self, guesses: list[int]) -> None:
        """What a draft model guesses for the next step, in place of a look into the text."""
        self._offered = guesses

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow `tokens`."""
        if self._resting:
            self._resting -= 1
            self._offered = []
            return []
        most = self.draft_limit(most)
        if not most:
            return []
        found, self._offered = self._offered[:most], []
        return found or self._look_up(tokens, most)

    def record_accepted(self, guessed: int, confirmed: int) -> None:
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
        index, earlier, shortest, end = self._index, self._earlier, self._shortest, len(tokens)
        # Runs that have a token after them, each once.
        for last in range(len(earlier), end):
            run = tuple(tokens[last - shortest : last]) if last >= shortest else ()
            earlier.append(index.get(run, 0))
            if run:
                index[run] = last
        best, found = 0, 0
        place = index.get(tuple(tokens[end - shortest : end]), 0) if end > shortest else 0
        for _ in range(PLACES):
            if not place or best == self._longest:
                break
            length = shortest
            while length < min(self._longest, place) and tokens[place - length - 1] == tokens[end - length - 1]:
                length += 1
            if length > best:
                best, found = length, place
            place = earlier[place]
        # Near its end, the text may be going round in a circle.
        return [tokens[found + step % (end - found)] for step in range(most)] if found else []
