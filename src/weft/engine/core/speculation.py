"""DraftProposer: speculative decoding's draft tokens for one sequence, by prompt lookup or from a draft model.

A step computes the logits after each draft token. Every position is sampled as it would be without drafts, from its own
random stream, and a draft token is accepted if it equals the sampled token. So the answer is the same token for token,
greedy or not; only the number of steps changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.plan import Speculation

MEMORY = 0.8  # weight of the past in the average number of accepted tokens per step
MIN_ACCEPTED = 0.4  # accepted tokens per step, on average; below it, proposing pauses
PAUSE = 24  # tokens that a pause lasts before one draft token is tried again
PLACES = 64  # earlier occurrences of a run that are compared, latest first


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix. For draft and sampled tokens, that is the number of accepted draft tokens."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(n for n in range(length) if first[n] != second[n])


class DraftProposer:
    """Proposes draft tokens for one sequence: about as many as were accepted lately, none during a pause."""

    __slots__ = ("_accepted", "_earlier", "_index", "_longest", "_model_drafts", "_most", "_pause", "_shortest")

    def __init__(self, speculation: Speculation) -> None:
        self._most = speculation.tokens
        self._shortest, self._longest = speculation.lookup_min, 0 if speculation.draft else speculation.lookup_max
        self._accepted = float(speculation.tokens)  # per step, on average
        self._pause = 0  # tokens until the pause ends
        self._model_drafts: list[int] = []
        # For each run of the shortest length, the position after its latest occurrence; and for each such position, the
        # position after the occurrence before it (0: none). Longer runs are found by comparing backwards from there,
        # since an index of all lengths takes megabytes.
        self._index: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []

    def draft_limit(self, most: int) -> int:
        """Number of draft tokens to propose for the next step, at most `most`."""
        # One more than was accepted lately, so that the number can grow.
        return 0 if self._pause else max(0, min(most, self._most, int(self._accepted + 1.5)))

    def set_model_drafts(self, drafts: list[int]) -> None:
        """Take a draft model's tokens for the next step, to be proposed in place of a prompt lookup."""
        self._model_drafts = drafts

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` draft tokens to follow `tokens`."""
        if self._pause:
            self._pause -= 1
            self._model_drafts = []
            return []
        most = self.draft_limit(most)
        if not most:
            return []
        drafts, self._model_drafts = self._model_drafts[:most], []
        return drafts or self._look_up(tokens, most)

    def record_accepted(self, proposed: int, accepted: int) -> None:
        """Note that `accepted` of a step's `proposed` draft tokens were accepted."""
        if not proposed:
            return
        self._accepted = MEMORY * self._accepted + (1 - MEMORY) * accepted
        if self._accepted < MIN_ACCEPTED:
            self._accepted, self._pause = MIN_ACCEPTED, PAUSE

    def _look_up(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the tokens that followed an earlier occurrence of the last tokens: of the longest run, the latest."""
        if not self._longest:
            return []
        self._extend_index(tokens)
        end, shortest = len(tokens), self._shortest
        best_length, best = 0, 0
        place = self._index.get(tuple(tokens[end - shortest : end]), 0) if end > shortest else 0
        for _ in range(PLACES):
            if not place or best_length == self._longest:
                break
            length = self._match_length(tokens, place)
            if length > best_length:
                best_length, best = length, place
            place = self._earlier[place]
        # An occurrence near the end has too few tokens after it: the text may repeat itself.
        return [tokens[best + step % (end - best)] for step in range(most)] if best else []

    def _extend_index(self, tokens: Sequence[int]) -> None:
        """Index each run that has a token after it, once."""
        index, earlier, shortest = self._index, self._earlier, self._shortest
        for last in range(len(earlier), len(tokens)):
            run = tuple(tokens[last - shortest : last]) if last >= shortest else ()
            earlier.append(index.get(run, 0))
            if run:
                index[run] = last

    def _match_length(self, tokens: Sequence[int], place: int) -> int:
        """Length of the run before `place` that equals the last tokens, at most the longest that is looked up."""
        length, end = self._shortest, len(tokens)
        while length < min(self._longest, place) and tokens[place - length - 1] == tokens[end - length - 1]:
            length += 1
        return length
