"""What each token adds to a text, found once per token instead of decoding the whole text again for each."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from copy import copy
from typing import Any

from tokenizers import Tokenizer

from weft.errors import ModelError
from weft.text.byte_level import token_to_bytes

# Decoders that give each token's text by itself, once it is known whether it is the first.
KNOWN = frozenset({"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"})
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_BEFORE = "a"  # stands for the text before a token that is not the first


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """SentencePiece shows every byte that belongs to no character as one U+FFFD, Unicode each run of them."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("weft-each-byte", _each_byte)


class Pieces:
    """The text or the bytes that a token of `rust` adds, as the vocabulary's own decoder has it.

    `special` are the ids that `skip_special_tokens` leaves out; `byte_fallback` says that some tokens stand
    for single bytes beside others that stand for text. Raises ModelError for a decoder of an unknown kind.
    """

    def __init__(self, rust: Tokenizer) -> None:
        steps = _steps(json.loads(rust.decoder.__getstate__())) if rust.decoder is not None else []
        kinds = {step["type"] for step in steps}
        self.byte_level = "ByteLevel" in kinds
        unknown = sorted(kinds - ({"ByteLevel", "Fuse"} if self.byte_level else KNOWN))
        if unknown:
            raise ModelError(
                f"the tokenizer decodes with {' and '.join(unknown)}, which Weft cannot do token by token "
                f"(it can: ByteLevel, or any of {', '.join(sorted(KNOWN))}); give another with --tokenizer"
            )
        self.byte_fallback = "ByteFallback" in kinds
        self.special = frozenset(id for id, token in rust.get_added_tokens_decoder().items() if token.special)
        self._rust = rust
        self._joined = rust.decoder.decode if rust.decoder is not None else " ".join
        self._known: dict[int, str | bytes | None] = {}

    def piece(self, id: int) -> str | bytes | None:
        """What token `id` adds to a text that has begun; None for an id without a token, which adds nothing."""
        try:
            return self._known[id]
        except KeyError:
            piece = self._known[id] = self._find(id, [_BEFORE])
            return piece

    def first(self, id: int) -> str | bytes | None:
        """What token `id` is at the beginning of a text, where some vocabularies drop a space."""
        return self._find(id, [])

    def _find(self, id: int, before: Sequence[str]) -> str | bytes | None:
        token = self._rust.id_to_token(id)
        if token is None:
            return None
        if self.byte_level:
            return token_to_bytes(token)
        text = self._joined([*before, token])[sum(map(len, before)) :]
        byte = _BYTE.fullmatch(token) if self.byte_fallback and text else None
        return bytes([int(byte[1], 16)]) if byte else text


class Detokenizer:
    """Text from token ids as they come. What `push` gives stands: bytes wait until they are a character."""

    def __init__(self, pieces: Pieces, *, skip_special: bool, context: Sequence[int] = ()) -> None:
        """`context` are the ids before the first one that is pushed: their text is not given again."""
        self._pieces = pieces
        self._skipped = pieces.special if skip_special else frozenset()
        self._begun = any(self._piece(id) is not None for id in context)
        self._utf8 = self._decoder()
        self._utf8.decode(self._tail(context))

    def fork(self) -> Detokenizer:
        """Another one in the same state, without another look at the context."""
        other = copy(self)
        other._utf8 = self._decoder()
        other._utf8.setstate(self._utf8.getstate())
        return other

    def push(self, id: int) -> str:
        if id in self._skipped:
            return ""
        if self._begun:
            piece = self._pieces.piece(id)
        else:
            piece = self._pieces.first(id)
            self._begun = piece is not None
        if piece is None:
            return ""
        if isinstance(piece, bytes):
            return self._utf8.decode(piece)
        return self.flush() + piece

    def flush(self) -> str:
        """The bytes that wait, as replacement characters: nothing can complete them any more."""
        return self._utf8.decode(b"", final=True)

    def _decoder(self) -> codecs.IncrementalDecoder:
        return codecs.getincrementaldecoder("utf-8")("weft-each-byte" if self._pieces.byte_fallback else "replace")

    def _piece(self, id: int) -> str | bytes | None:
        return None if id in self._skipped else self._pieces.piece(id)

    def _tail(self, context: Sequence[int]) -> bytes:
        """The last bytes of a text: an unfinished character has at most three, so three tell all there is to know."""
        tail = b""
        for id in reversed(context):
            piece = self._piece(id)
            if isinstance(piece, str) or len(tail) >= 3:
                break
            tail = (piece or b"") + tail
        return tail


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]
