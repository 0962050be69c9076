"""TokenizerSettings: a model's settings for its tokens, without the vocabulary itself."""

from __future__ import annotations

import msgspec


class TokenizerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a tokenizer.

    `tokens`: named tokens by Transformers' names ("bos_token": "<s>"), which chat templates may use.
    `add_bos`, `add_eos`: add these tokens to a text; None leaves it to the vocabulary's own post-processor.
    `end_ids`: ids that end a completion, as far as the tokenizer knows.
    `tool_template`: the chat template of requests with tools, if it is another than `chat_template`.
    """

    tokens: dict[str, str] = {}
    add_bos: bool | None = None
    add_eos: bool | None = None
    end_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    tool_template: str | None = None
