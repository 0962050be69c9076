"""What a model says about its tokens beside the vocabulary itself."""

from __future__ import annotations

import msgspec


class TokenizerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens` are the named ones by Transformers' names ("bos_token": "<s>"), which chat templates know.

    `add_bos` and `add_eos`: whether a text gets them; None leaves it to the vocabulary's own post-processor.
    `end_ids` are all tokens that end an answer as far as the tokeniser knows.
    """

    tokens: dict[str, str] = {}
    add_bos: bool | None = None
    add_eos: bool | None = None
    end_ids: tuple[int, ...] = ()
    chat_template: str | None = None
