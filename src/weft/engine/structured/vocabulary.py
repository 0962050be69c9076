"""A tokenizer's vocabulary in the form of llguidance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from weft.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

SPECIAL = b"\xff"  # before the text of a special token, which no text of a grammar matches

Encode = Callable[[str], Sequence[int]]


class Vocabulary(msgspec.Struct):
    """The bytes of every token of a model, the special ones, and the ids that end an answer."""

    tokens: list[bytes]
    special: list[int]
    ends: list[int]


class _Wrapped:
    """The interface that llguidance's TokenizerWrapper asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self.eos_token_id = vocabulary.ends[0]
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return list(self._encode(text if isinstance(text, str) else text.decode(errors="replace")))


def list_vocabulary(tokenizer: Tokenizer, vocab: int, eos: Sequence[int]) -> Vocabulary:
    """The vocabulary of a model with `vocab` embedding rows, whose answers end with an id in `eos`."""
    special = tokenizer.special_ids
    ends = sorted({*eos, *tokenizer.end_ids})
    return Vocabulary(
        tokens=[_token_bytes(tokenizer, id, id in special) for id in range(vocab)],
        special=sorted(id for id in special if id < vocab),
        ends=[id for id in ends if id < vocab] or [0],
    )


def _token_bytes(tokenizer: Tokenizer, id: int, special: bool) -> bytes:
    text = tokenizer.token_bytes(id)
    if special:
        return SPECIAL + text
    # An id without a token must never be sampled: only a special token is never part of a text.
    return text or SPECIAL + f"<[{id}]>".encode()


def build_vocabulary(vocabulary: Vocabulary, encode: Encode | None = None) -> LLTokenizer:
    """The library's form of a vocabulary; it takes about 10 microseconds per token, with `list_vocabulary`.

    `encode` is the model's tokenizer; without it texts that a grammar forces become the longest tokens.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    greedy: list[LLTokenizer] = []

    def longest(text: str) -> Sequence[int]:
        return greedy[0].greedy_tokenize(text) if greedy else []

    wrapped = TokenizerWrapper(_Wrapped(vocabulary, encode or longest))
    tokenizer = LLTokenizer(wrapped, n_vocab=len(vocabulary.tokens), eos_token=vocabulary.ends)
    greedy.append(tokenizer)
    return tokenizer
