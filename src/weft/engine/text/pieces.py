"""Incremental detokenization: the text that each token adds, computed once per token and cached."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Sequence
from copy import copy
from typing import Any

from tokenizers import Tokenizer

from weft.engine.text.byte_level import token_to_bytes
from weft.errors import ModelError

# Decoders that decode each token on its own, given whether it is the first.
PER_TOKEN_DECODERS = frozenset({"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"})
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_BEFORE = "a"  # any text before a token that is not the first


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """Replace every invalid byte by one U+FFFD, as SentencePiece does; Unicode replaces each run of them by a single
    one."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("weft-each-byte", _each_byte)


class Pieces:
    """The text or the bytes that each token of `hf_tokenizer` adds, according to the vocabulary's own decoder.

    `special`: ids that `skip_special_tokens` omits. `byte_fallback`: some tokens stand for single bytes, others for
    text. Raises ModelError for a decoder of an unknown kind.
    """

    def __init__(self, hf_tokenizer: Tokenizer) -> None:
        steps = (
            _decoder_steps(json.loads(hf_tokenizer.decoder.__getstate__())) if hf_tokenizer.decoder is not None else []
        )
        kinds = {step["type"] for step in steps}
        self.byte_level = "ByteLevel" in kinds
        unknown = sorted(kinds - ({"ByteLevel", "Fuse"} if self.byte_level else PER_TOKEN_DECODERS))
        if unknown:
            raise ModelError(
                f"the tokenizer decodes with {' and '.join(unknown)}, which Weft cannot do token by token "
                f"(it can: ByteLevel, or any of {', '.join(sorted(PER_TOKEN_DECODERS))}); give another with "
                "--tokenizer",
                code="unknown-decoder",
            )
        self.byte_fallback = "ByteFallback" in kinds
        self.special = frozenset(id for id, token in hf_tokenizer.get_added_tokens_decoder().items() if token.special)
        self._hf_tokenizer = hf_tokenizer
        self._decode = hf_tokenizer.decoder.decode if hf_tokenizer.decoder is not None else " ".join
        self._cache: dict[int, str | bytes | None] = {}
        self._texts: dict[int, str | None] = {}

    def piece(self, id: int) -> str | bytes | None:
        """Text or bytes that token `id` adds after other tokens; None for an id without a token, which adds nothing."""
        try:
            return self._cache[id]
        except KeyError:
            piece = self._cache[id] = self._compute(id, [_BEFORE])
            return piece

    def text(self, id: int) -> str | None:
        """Text that token `id` adds after whole characters; None if it is not whole characters itself."""
        try:
            return self._texts[id]
        except KeyError:
            text = self._texts[id] = _whole_text(self.piece(id))
            return text

    def first_piece(self, id: int) -> str | bytes | None:
        """Text or bytes of token `id` at the beginning of a text, where some vocabularies drop a space."""
        return self._compute(id, [])

    def _compute(self, id: int, before: Sequence[str]) -> str | bytes | None:
        token = self._hf_tokenizer.id_to_token(id)
        if token is None:
            return None
        if self.byte_level:
            return token_to_bytes(token)
        text = self._decode([*before, token])[sum(map(len, before)) :]
        byte = _BYTE.fullmatch(token) if self.byte_fallback and text else None
        return bytes([int(byte[1], 16)]) if byte else text


class Detokenizer:
    """Text from token ids as they arrive. `push` returns final text: bytes wait until they form a character."""

    def __init__(
        self, pieces: Pieces, *, skip_special: bool, context: Sequence[int] = (), shown: Collection[int] = ()
    ) -> None:
        """`context`: ids before the first pushed one; their text is not returned. `shown`: ids that are not skipped."""
        self._pieces = pieces
        self._skipped = pieces.special.difference(shown) if skip_special else frozenset()
        self._begun = any(self._piece(id) is not None for id in context)
        self._utf8 = self._decoder()
        self._utf8.decode(self._tail(context))
        self._waits = self._has_bytes()

    def fork(self) -> Detokenizer:
        """Copy with the same state, without reading the context again."""
        other = copy(self)
        other._utf8 = self._decoder()
        other._utf8.setstate(self._utf8.getstate())
        return other

    def push(self, id: int) -> str:
        """Text that is complete after token `id`."""
        if id in self._skipped:
            return ""
        if self._begun and not self._waits and (text := self._pieces.text(id)) is not None:
            return text
        text = self._push_piece(id)
        self._waits = self._has_bytes()
        return text

    def _push_piece(self, id: int) -> str:
        if self._begun:
            piece = self._pieces.piece(id)
        else:
            piece = self._pieces.first_piece(id)
            self._begun = piece is not None
        if piece is None:
            return ""
        if isinstance(piece, bytes):
            return self._utf8.decode(piece)
        return self.flush() + piece

    def flush(self) -> str:
        """Waiting bytes as replacement characters; call it when nothing can complete them any more."""
        return self._utf8.decode(b"", final=True)

    def _has_bytes(self) -> bool:
        """Return True if bytes wait for the rest of their character."""
        return bool(self._utf8.getstate()[0])

    def _decoder(self) -> codecs.IncrementalDecoder:
        return codecs.getincrementaldecoder("utf-8")("weft-each-byte" if self._pieces.byte_fallback else "replace")

    def _piece(self, id: int) -> str | bytes | None:
        return None if id in self._skipped else self._pieces.piece(id)

    def _tail(self, context: Sequence[int]) -> bytes:
        """Last bytes of the context. Three suffice: an incomplete character has at most three."""
        tail = b""
        for id in reversed(context):
            piece = self._piece(id)
            if isinstance(piece, str) or len(tail) >= 3:
                break
            tail = (piece or b"") + tail
        return tail


def _whole_text(piece: str | bytes | None) -> str | None:
    if not isinstance(piece, bytes):
        return piece or ""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _decoder_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _decoder_steps(part)]
