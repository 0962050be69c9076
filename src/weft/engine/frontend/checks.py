"""Checks of a request that SamplingParams does not do: token ids, priority, cache salt, and the size of its result."""

from __future__ import annotations

from collections.abc import Iterable

from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Request
from weft.engine.processes import framing
from weft.errors import RequestError

# Most bytes in MessagePack for the logprobs of a prompt's position, and for each alternative: a float takes 9, a rank
# or a token id 5, the rest are the heads of lists.
POSITION_BYTES, ALTERNATIVE_BYTES = 21, 14
OTHER_BYTES = 1 << 16  # left in a frame for the rest of an output, and the stats
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


def check_frame(request: Request) -> None:
    """Raise RequestError for a prompt whose logprobs are too large for a frame: they come with its first token."""
    top = request.params.prompt_logprobs
    if top is None:
        return
    most = (framing.MAX_FRAME - OTHER_BYTES) // (POSITION_BYTES + ALTERNATIVE_BYTES * top)
    if len(request.prompt) > most:
        raise RequestError(
            f"prompt_logprobs of {top} alternatives for a prompt of {len(request.prompt):,} tokens are too large; at "
            f"most {most:,} tokens may have this many: ask for fewer alternatives, or send a shorter prompt",
            param="prompt_logprobs",
            code="prompt-logprobs-too-large",
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
