"""Steady: rounds in which the running requests only decode, which a simulation takes at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from weft.engine.core.kv import KVManager
from weft.engine.core.sequence import Flight
from weft.engine.core.sequence import Sequence as RequestSequence


class Steady(NamedTuple):
    """A number of rounds, from now on, that each give one token to each running request.

    A round is one step of every group of requests that take turns in the pipeline stages; without a pipeline, it is one
    step. `contexts` has a list for each group, in the order of their turns: by row, the tokens that attention sees in
    the first round, the row's own included.
    """

    rounds: int
    contexts: list[list[int]]


def decodes_only(flights: Collection[Flight]) -> bool:
    """Return True if each row of these steps is a running request that computes one token."""
    return all(
        len(flight.plan.tokens) == len(flight.rows) and all(row.slot >= 0 for row in flight.rows) for flight in flights
    )


def rounds_before_end(running: Collection[RequestSequence], most: int) -> int:
    """Number of rounds, at most `most`, in which each of the running requests decodes and none ends before the last.

    Each samples its last token again in every round. 0 if a request still reads its prompt, or may end by a token.
    """
    rounds = most
    for sequence in running:
        tokens = sequence.tokens
        length = len(tokens)
        # The only token of each request that is not computed is the input of its next step, and no prompt token.
        if sequence.computed - sequence.pending + 1 != length or length == sequence.first:
            return 0
        if tokens[-1] in sequence.stop_ids:
            return 0
        left = sequence.limit - length
        if left < rounds:
            rounds = left
    return rounds


def rounds_with_room(running: Collection[RequestSequence], kv: KVManager, rounds: int) -> int:
    """The most rounds, up to `rounds`, that the free blocks suffice for."""
    if kv.blocks_of_rounds(running, rounds) <= kv.pool.free:
        return rounds
    low, high = 0, rounds
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if kv.blocks_of_rounds(running, middle) <= kv.pool.free else (low, middle - 1)
    return low


def may_share(tokens: Sequence[int], running: Collection[RequestSequence]) -> bool:
    """Return True if blocks that a running request fills with its answer may become a cached prefix of `tokens`."""
    for sequence in running:
        length = len(sequence.tokens)
        # The last token first: most requests differ there, however long a prompt they have in common.
        if length <= len(tokens) and tokens[length - 1] == sequence.tokens[-1] and tokens[:length] == sequence.tokens:
            return True
    return False
