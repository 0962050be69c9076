"""Byte-level BPE, as GPT-2 introduced it: the vocabulary writes each byte of a token as one printable character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

# Bytes that are printable in Latin-1 are written as themselves, the others as U+0100 and up.
_PRINTABLE = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))
_UNPRINTABLE = [byte for byte in range(256) if byte not in _PRINTABLE]
ALPHABET = tuple(chr(byte if byte in _PRINTABLE else 256 + _UNPRINTABLE.index(byte)) for byte in range(256))
_BYTES = {char: byte for byte, char in enumerate(ALPHABET)}


def spell_bytes(token: bytes) -> str:
    """The vocabulary's spelling of a token's bytes."""
    return "".join([ALPHABET[byte] for byte in token])


def token_to_bytes(token: str) -> bytes:
    """Bytes of a token. A token with a character outside ALPHABET is an added token, and stands for its own text."""
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
    """Create a byte-level BPE tokenizer. `whole_words`: a word that is in the vocabulary is not merged from parts."""
    hf_tokenizer = Tokenizer(models.BPE(vocab=dict(vocab), merges=list(merges), ignore_merges=whole_words))
    hf_tokenizer.pre_tokenizer = pre_tokenizer
    hf_tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        hf_tokenizer.normalizer = normalizer
    return hf_tokenizer
