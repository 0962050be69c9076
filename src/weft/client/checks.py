"""Checks that SamplingParams cannot make by itself: token ids against the vocabulary, and the priority."""

from __future__ import annotations

from collections.abc import Iterable

from weft.core.params import SamplingParams
from weft.errors import RequestError

PRIORITIES = range(-(2**63), 2**63)  # the integers that MessagePack carries to the core


def check_ids(params: SamplingParams, vocab: int) -> None:
    """Raise RequestError, naming the field, for a token id that a vocabulary of `vocab` ids does not have."""
    fields: dict[str, Iterable[int]] = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": (token for word in params.bad_word_ids for token in word),
    }
    for field, ids in fields.items():
        for token in ids:
            if not 0 <= token < vocab:
                raise RequestError(
                    f"{field} has token id {token}, outside the vocabulary, 0 to {vocab - 1}",
                    param=field,
                    code="token-id-out-of-range",
                )


def check_priority(priority: object) -> None:
    """Raise RequestError for a priority that is no 64-bit integer."""
    if not isinstance(priority, int) or priority not in PRIORITIES:
        raise RequestError(
            f"priority is {priority!r:.60}; it must be a 64-bit integer", param="priority", code="invalid-priority"
        )
