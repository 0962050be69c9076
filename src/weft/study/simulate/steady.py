"""steady(): rounds in which the running requests of a scheduler only decode, which a simulation takes at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from weft.engine.core.kv import KVManager
from weft.engine.core.sequence import Sequence as RequestSequence
from weft.engine.core.view import SchedulerView


class Steady(NamedTuple):
    """A number of rounds, from now on, that each give one token to each running request.

    A round is one step of every group of requests that take turns in the pipeline stages; without a pipeline, it is one
    step. `contexts` has a list for each group, in the order of their turns: by row, the tokens that attention sees in
    the first round, the row's own included.
    """

    rounds: int
    contexts: list[list[int]]


def steady(view: SchedulerView) -> Steady | None:
    """Decode-only rounds that `Scheduler.advance` can take at once; None if the next step is not such a round.

    In these rounds no request is admitted, preempted or prefilled. No request ends, except in the last round if no
    step is in flight then. Every running request samples its last token again. To be called when a step can be
    scheduled, under a policy in order of arrival or priority.
    """
    settings, running = view.settings, view.table.running.values()
    turns = view.table.turns(lookahead=settings.lookahead)
    if settings.speculation or not _is_stable(view, turns) or not _admits_none(view):
        return None
    rounds = rounds_before_end(running, settings.max_model_len)
    # Tokens in flight come in addition to the tokens of the rounds. With lookahead, no step follows a request's last.
    rounds -= 2 if settings.lookahead else settings.stages > 1
    if rounds > 0:
        rounds = rounds_with_room(running, view.kv, rounds)
    if rounds <= 0:
        return None
    return Steady(rounds, [[sequence.computed + 1 for sequence in rows] for rows in turns])


def _is_stable(view: SchedulerView, turns: list[list[RequestSequence]]) -> bool:
    """Return True if every running request takes part in one of these turns, no turn would be divided, and the steps
    in flight decode."""
    settings, flights, running = view.settings, view.table.in_flight, len(view.table.running)
    if settings.lookahead and (len(flights) != 1 or len(flights[0].rows) != running):
        return False
    sizes = [len(rows) for rows in turns]
    # A step takes a stage's share of the running requests: larger turns would be divided.
    most = min(-(-running // settings.stages), settings.max_num_batched_tokens)
    whole = bool(sizes[0]) and max(sizes) <= most and sum(sizes) == running
    return whole and all(
        len(flight.plan.tokens) == len(flight.rows) and all(row.slot >= 0 for row in flight.rows) for flight in flights
    )


def _admits_none(view: SchedulerView) -> bool:
    """Return True if no queued request can be admitted before a running one ends."""
    table, kv = view.table, view.kv
    if not table.queued:
        return True
    (owner,) = table.owners.values()
    first = owner.queue.first()
    if first is None:
        return False
    if not table.slots:
        return True
    first.unpack_prompt()
    running = table.running.values()
    if kv.caching and may_share(first.tokens, running):
        return False
    freed = freed_by_decoding(kv, running)
    return not kv.has_room(first, kv.match_prefix(first), freed=freed)


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
    if blocks_of_rounds(kv, running, rounds) <= kv.pool.free:
        return rounds
    return bisect_right(range(rounds), kv.pool.free, key=lambda fewer: blocks_of_rounds(kv, running, fewer)) - 1


def blocks_of_rounds(kv: KVManager, running: Iterable[RequestSequence], rounds: int) -> int:
    """Number of blocks that `rounds` more tokens of each running sequence need at most, one token at a time."""
    blocks = 0
    for sequence in running:
        new = sequence.computed + rounds - sequence.room
        if new <= 0:
            continue
        grown = kv.count_blocks(new)
        for group in kv.paged:
            if group.reach is None:
                blocks += grown
            else:
                held = sequence.blocks[group.number][sequence.freed[group.number] :]
                # A block that other sequences use as well does not become free when this sequence frees it.
                own = len(held) - group.pool.count_shared(held)
                blocks += min(grown, max(0, kv.count_blocks(group.reach) + 1 - own))
    return blocks


def freed_by_decoding(kv: KVManager, running: Iterable[RequestSequence]) -> int:
    """Largest number of blocks that the running sequences free minus the number that they take, in decode steps."""
    if not kv.frees:
        return 0
    blocks = 0
    for sequence in running:
        for group in kv.paged:
            if group.reach is not None:
                held = sequence.room // kv.block_size - sequence.freed[group.number]
                blocks += max(0, held - kv.count_blocks(group.reach + 1))
    return blocks


def may_share(tokens: Sequence[int], running: Collection[RequestSequence]) -> bool:
    """Return True if blocks that a running request fills with its answer may become a cached prefix of `tokens`."""
    for sequence in running:
        length = len(sequence.tokens)
        # The last token first: most requests differ there, however long a prompt they have in common.
        if length <= len(tokens) and tokens[length - 1] == sequence.tokens[-1] and tokens[:length] == sequence.tokens:
            return True
    return False
