"""Prompt: what a caller gives, as token ids."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from weft.engine.core.identity import PLAIN, RequestIdentity
from weft.engine.core.token_ids import NO_IDS, TokenIds
from weft.errors import RequestError

PromptLike = str | Sequence[int] | Mapping[str, Any]


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as token ids, and as text if the caller gave text.

    Prompts share cached KV only with prompts of the same `cache_salt`. `answered` are the token ids of an answer that
    has begun elsewhere, and goes on here.
    """

    ids: TokenIds
    text: str | None = None
    cache_salt: str | None = None
    answered: TokenIds = NO_IDS


def list_ids(prompt: object, param: str) -> list[int]:
    """List the token ids of a prompt that is no text. Raises RequestError for anything else."""
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise RequestError(
            f"a prompt is a text or a list of token ids, not {type(prompt).__name__}",
            param=param,
            code="invalid-prompt",
        )
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise RequestError(
            "a prompt given as a list must hold token ids, all integers", param=param, code="prompt-not-token-ids"
        ) from None


def identity_of(prompt: Prompt) -> RequestIdentity:
    return PLAIN if prompt.cache_salt is None else RequestIdentity(cache_salt=prompt.cache_salt)
