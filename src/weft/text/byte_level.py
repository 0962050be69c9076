"""Byte-level BPE: tokens are bytes, each spelled as one printable character, as GPT-2 began it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

# The bytes that are printable in Latin-1 stand for themselves, the others for U+0100 and on.
_PRINTABLE = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
ALPHABET = tuple(chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in range(256))
_BYTES = {char: byte for byte, char in enumerate(ALPHABET)}


def bytes_to_token(token: bytes) -> str:
    """Bytes as the vocabulary writes them."""
    return "".join([ALPHABET[byte] for byte in token])


def token_to_bytes(token: str) -> bytes:
    """The bytes of a token; a text with any other character (an added token) stands for itself."""
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:
        return token.encode()


def build_byte_level(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    *,
    whole_words: bool,
    normalizer: normalizers.Normalizer | None = None,
) -> Tokenizer:
    """A byte-level BPE. `whole_words`: a word that is a token is taken whole, whatever the merges say."""
    rust = Tokenizer(models.BPE(vocab=dict(vocab), merges=list(merges), ignore_merges=whole_words))
    rust.pre_tokenizer = pre_tokenizer
    rust.decoder = decoders.ByteLevel()
    if normalizer is not None:
        rust.normalizer = normalizer
    return rust
