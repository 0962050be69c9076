"""Logprobs in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from weft.client.outputs import Logprob
from weft.serving.openai_types import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

LOWEST = -9999.0  # JSON has no infinity; OpenAI's own stand-in


def best(position: dict[int, Logprob], top: int) -> list[tuple[int, Logprob]]:
    """The `top` likeliest of a position with their ids, best first."""
    return sorted(position.items(), key=lambda item: item[1].rank or 0)[:top]


def chat_logprobs(
    positions: Iterable[dict[int, Logprob]], top: int, token_bytes: Callable[[int], bytes]
) -> ChatLogprobs:
    """The first entry of each position is the token that was chosen."""

    def fields(token: int, entry: Logprob) -> tuple[str, float, list[int]]:
        return entry.decoded_token or "", max(entry.logprob, LOWEST), list(token_bytes(token))

    content = []
    for position in positions:
        text, logprob, raw = fields(*next(iter(position.items())))
        tops = [TopLogprob(token=t, logprob=p, bytes=b) for t, p, b in (fields(*item) for item in best(position, top))]
        content.append(TokenLogprob(token=text, logprob=logprob, bytes=raw, top_logprobs=tops))
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokens: Sequence[str], positions: Sequence[dict[int, Logprob] | None], top: int, offset: int
) -> CompletionLogprobs:
    """`tokens[i]` is the text of position i, `positions[i]` None for the first of a prompt; `offset` is where
    the first token lies in the choice's text, in characters."""
    made = CompletionLogprobs([], [], [], [])
    for token, position in zip(tokens, positions, strict=True):
        made.tokens.append(token)
        made.text_offset.append(offset)
        offset += len(token)
        if position is None:
            made.token_logprobs.append(None)
            made.top_logprobs.append(None)
        else:
            chosen = next(iter(position.values()))
            likeliest = [entry for _, entry in best(position, top)]
            made.token_logprobs.append(max(chosen.logprob, LOWEST))
            made.top_logprobs.append({e.decoded_token or "": max(e.logprob, LOWEST) for e in (chosen, *likeliest)})
    return made
