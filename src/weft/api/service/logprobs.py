"""Logprobs in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from weft.api.service.openai_types import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from weft.engine.frontend.outputs import Logprob

LOWEST = -9999.0  # JSON has no infinity; this is the value that OpenAI sends instead


def top_entries(position: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest tokens of a position as (id, logprob), best first."""
    return sorted(position.items(), key=lambda item: item[1].rank or 0)[:count]


def chat_logprobs(
    positions: Iterable[dict[int, Logprob]], top: int, token_bytes: Callable[[int], bytes]
) -> ChatLogprobs:
    """Logprobs of a chat choice. The first entry of each position is the sampled token."""

    def fields(token: int, entry: Logprob) -> tuple[str, float, list[int]]:
        return entry.decoded_token or "", max(entry.logprob, LOWEST), list(token_bytes(token))

    content = []
    for position in positions:
        text, logprob, raw = fields(*next(iter(position.items())))
        tops = []
        for token, entry in top_entries(position, top):
            top_text, top_logprob, top_raw = fields(token, entry)
            tops.append(TopLogprob(token=top_text, logprob=top_logprob, bytes=top_raw))
        content.append(TokenLogprob(token=text, logprob=logprob, bytes=raw, top_logprobs=tops))
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokens: Sequence[str], positions: Sequence[dict[int, Logprob] | None], top: int, offset: int
) -> CompletionLogprobs:
    """Logprobs of a completion choice, or of a part of a choice.

    `tokens[i]` is the text of position i. `positions[i]` is None for the first token of a prompt. `offset` is the
    number of characters of the choice's text before the first token.
    """
    logprobs = CompletionLogprobs([], [], [], [])
    for token, position in zip(tokens, positions, strict=True):
        logprobs.tokens.append(token)
        logprobs.text_offset.append(offset)
        offset += len(token)
        if position is None:
            logprobs.token_logprobs.append(None)
            logprobs.top_logprobs.append(None)
        else:
            sampled = next(iter(position.values()))
            entries = [sampled, *(entry for _, entry in top_entries(position, top))]
            logprobs.token_logprobs.append(max(sampled.logprob, LOWEST))
            logprobs.top_logprobs.append({entry.decoded_token or "": max(entry.logprob, LOWEST) for entry in entries})
    return logprobs
