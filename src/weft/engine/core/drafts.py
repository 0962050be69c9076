"""Draft tokens of a running sequence: proposing them, requesting them from a draft model, and accepting them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weft.engine.core.sequence import Sample, Sequence
from weft.engine.core.speculation import common_prefix_length


def propose_drafts(sequence: Sequence, most: int) -> list[int]:
    """Return at most `most` draft tokens after a sequence's last token, as far as the sequence may grow and its grammar
    allows."""
    assert sequence.proposer
    most = min(most, sequence.limit - len(sequence.tokens) - 1)
    if most < 1:
        discard_drafts(sequence)
        return []
    drafts = sequence.proposer.propose(sequence.tokens, most)
    return drafts[: sequence.matcher.count_valid(drafts)] if sequence.matcher and drafts else drafts


def discard_drafts(sequence: Sequence) -> None:
    """Forget the draft model's proposals: the answer continues without them."""
    assert sequence.proposer
    sequence.proposer.set_model_drafts([])


def draft_request(sequence: Sequence) -> int:
    """Number of tokens to request from the draft model, after a step that brings a sequence at least one token."""
    if sequence.proposer is None:
        return 0
    return sequence.proposer.draft_limit(sequence.limit - len(sequence.tokens) - 2)


def keep_model_drafts(rows: Iterable[Sequence], drafts: Mapping[int, list[int]]) -> None:
    """Keep a draft model's tokens, by slot, for the next step of each sequence."""
    for sequence in rows:
        # A sequence that was preempted since the request has no slot.
        if sequence.proposer and sequence.slot in drafts:
            sequence.proposer.set_model_drafts(drafts[sequence.slot])


def accept_drafts(sequence: Sequence, drafts: list[int], samples: list[Sample]) -> list[Sample]:
    """Return the samples after accepted draft tokens, and the one after the token before the drafts."""
    accepted = common_prefix_length(drafts, [token for token, _ in samples])
    assert sequence.proposer
    sequence.proposer.record_accepted(len(drafts), accepted)
    if sequence.slot >= 0:
        # The KV of rejected drafts is written over.
        sequence.computed -= len(drafts) - accepted
    return samples[: accepted + 1]
