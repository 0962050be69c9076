"""Router: chooses the replica for each request, by the work that the replicas have and by what their caches may hold.

Without sockets and clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from weft.engine.core.groups import MAX_ANSWER_TOKENS
from weft.engine.core.request import Request

PIECE = 64  # tokens of a prompt that are remembered together
MAX_PIECES = 256  # pieces remembered of one prompt; the rest hardly helps to tell prompts apart
MEMORY = 65_536  # pieces that are remembered, the last ones used


def work_of(request: Request) -> int:
    """Tokens that a request counts for: its prompt, and of its answer at most MAX_ANSWER_TOKENS."""
    return request.length + min(MAX_ANSWER_TOKENS, request.params.max_tokens or MAX_ANSWER_TOKENS)


class Router:
    """Chooses the replica that will have done all its work the soonest.

    `weights` are the replicas' speeds in any unit. The work of a request is less on a replica that has had a prompt
    with the same beginning, whose KV blocks its prefix cache may still hold.
    """

    def __init__(self, weights: Sequence[float], *, caching: bool) -> None:
        """With `caching` the replicas have prefix caches."""
        self._weights = tuple(weights)
        self._caching = caching
        self._holders: OrderedDict[int, int] = OrderedDict()  # by piece of a prompt: a bit for each replica
        self._turns = [0] * len(self._weights)  # number of the last request that each got
        self._count = 0

    def choose_replica(self, request: Request, loads: Sequence[int | None]) -> int:
        """Number of the replica for a request. `loads` are tokens of unfinished requests, None for a replica without
        engine.

        At least one replica must have an engine.
        """
        work = work_of(request)
        pieces = list(_pieces(request)) if self._caching else []
        known = self._known_pieces(pieces)
        scores = [
            (self._finish(number, load + work - PIECE * known[number]), self._turns[number], number)
            for number, load in enumerate(loads)
            if load is not None
        ]
        _, _, chosen = min(scores)
        self._count += 1
        self._turns[chosen] = self._count
        self._remember(pieces, chosen)
        return chosen

    def forget_replica(self, number: int) -> None:
        """Forget what the cache of a replica held: its engine has ended."""
        for piece in self._holders:
            self._holders[piece] &= ~(1 << number)

    def _finish(self, number: int, work: int) -> float:
        return work / self._weights[number]

    def _known_pieces(self, pieces: Sequence[int]) -> list[int]:
        """Number of pieces from the beginning that each replica has had."""
        known = [0] * len(self._weights)
        having = (1 << len(self._weights)) - 1
        for piece in pieces:
            having &= self._holders.get(piece, 0)
            if not having:
                break
            for number in range(len(known)):
                known[number] += having >> number & 1
        return known

    def _remember(self, pieces: Sequence[int], number: int) -> None:
        for piece in pieces:
            self._holders[piece] = self._holders.get(piece, 0) | 1 << number
            self._holders.move_to_end(piece)
        while len(self._holders) > MEMORY:
            self._holders.popitem(last=False)


def _pieces(request: Request) -> Iterator[int]:
    """A number for each full piece of a prompt, which tells it from others with another beginning or identity."""
    packed, size = request.prompt.packed, 4 * PIECE
    key = hash(request.identity)
    for start in range(0, min(len(packed) // size, MAX_PIECES) * size, size):
        key = hash((key, packed[start : start + size]))
        yield key
