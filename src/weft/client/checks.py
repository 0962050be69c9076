"""Checks of a request beside those of SamplingParams: token ids against the vocabulary, priority, cache salt."""

from __future__ import annotations

from collections.abc import Iterable

from weft.core.params import SamplingParams
from weft.errors import RequestError

PRIORITIES = range(-(2**63), 2**63)  # the integers that MessagePack carries to the core
MAX_SALT = 1024  # characters; 43 of base64 are 256 random bits


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


def check_cache_salt(salt: object) -> None:
    """Raise RequestError for a cache salt that is neither None nor a text of 1 to MAX_SALT characters."""
    if salt is None:
        return
    if not isinstance(salt, str) or not 0 < len(salt) <= MAX_SALT or not _is_utf8(salt):
        raise RequestError(
            f"cache_salt is {salt!r:.60}; it must be a text of 1 to {MAX_SALT} characters, or left out",
            param="cache_salt",
            code="invalid-cache-salt",
        )


def _is_utf8(text: str) -> bool:
    """Return True if a text can be sent as UTF-8: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
