"""A tokenizer's vocabulary in the form of llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

SPECIAL = b"\xff"  # before the text of a special token, which no text of a grammar matches


class _Wrapped:
    """The interface that llguidance's TokenizerWrapper asks for."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: int) -> None:
        special = tokenizer.special_ids
        self.eos_token_id = eos
        self.bos_token_id = None
        self.tokens = [_token_bytes(tokenizer, id, id in special) for id in range(vocab)]
        self.special_token_ids = sorted(id for id in special if id < vocab)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        given = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode_literally(given)


def _token_bytes(tokenizer: Tokenizer, id: int, special: bool) -> bytes:
    text = tokenizer.token_bytes(id)
    if special:
        return SPECIAL + text
    # An id without a token must never be sampled: only a special token is never part of a text.
    return text or SPECIAL + f"<[{id}]>".encode()


def build_vocabulary(tokenizer: Tokenizer, vocab: int, eos: Sequence[int]) -> LLTokenizer:
    """The vocabulary of a model with `vocab` embedding rows, whose answers end with one of `eos`.

    It takes about 10 microseconds per token.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = [id for id in eos if id < vocab] or [0]
    return LLTokenizer(TokenizerWrapper(_Wrapped(tokenizer, vocab, ends[0])), n_vocab=vocab, eos_token=ends)
