"""Tokenizers from SentencePiece models.

The file is a protocol buffer, sentencepiece_model.proto of https://github.com/google/sentencepiece. The few fields that
matter here are decoded directly, which avoids two dependencies.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from weft.checkpoint.files import limits
from weft.checkpoint.files.model_file import read_model_file
from weft.engine.text.charsmap import check_charsmap
from weft.engine.text.growth import MAX_GROWTH
from weft.engine.text.merges import derive_merges
from weft.engine.text.settings import TokenizerSettings
from weft.errors import ModelError

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of pieces; GGUF uses the same numbers
UNIGRAM, BPE = 1, 2  # model types

VARINT_BYTES = 10  # of a number of 64 bits

# Field numbers.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
PIECE_TEXT, PIECE_SCORE, PIECE_TYPE = 1, 2, 3
MODEL_TYPE, BYTE_FALLBACK = 3, 35
NAMED = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2)}  # field with the id, default id
CHARSMAP, ADD_PREFIX, REMOVE_EXTRA_SPACES = 2, 3, 4

Fields = dict[int, int | bytes]  # of a message, by number


class Piece(NamedTuple):
    """An entry of the vocabulary."""

    text: str
    score: float
    type: int


def read_sentencepiece(path: Path) -> tuple[Tokenizer, TokenizerSettings]:
    """Read a SentencePiece model file. Raises ModelError for a damaged one."""
    try:
        return parse_sentencepiece(read_model_file(path, limits.TOKENIZER_BYTES, code="cannot-read-tokenizer"))
    except (ValueError, IndexError, struct.error) as error:
        raise ModelError(
            f"{path} is no SentencePiece model that Weft can read, or a damaged one: {error!s:.200}",
            code="damaged-sentencepiece",
        ) from error


def parse_sentencepiece(data: bytes) -> tuple[Tokenizer, TokenizerSettings]:
    """Decode a BPE or Unigram model. BOS is added to texts if the model has one.

    Raises ValueError, IndexError or struct.error for damaged data.
    """
    pieces, trainer, normalizer = _decode_model(data)
    named = {name: _signed(trainer.get(number, default)) for name, (number, default) in NAMED.items()}
    tokens = {name: pieces[id].text for name, id in named.items() if id >= 0}
    prefix = bool(normalizer.get(ADD_PREFIX, True))
    type = trainer.get(MODEL_TYPE, UNIGRAM)
    if type not in (UNIGRAM, BPE):
        raise ValueError(f"it is of type {type!r:.40}, not {UNIGRAM} (Unigram) or {BPE} (BPE)")
    hf_tokenizer = build_sentencepiece(
        pieces,
        unigram=type == UNIGRAM,
        unk_id=named["unk_token"],
        byte_fallback=bool(trainer.get(BYTE_FALLBACK, False)),
        prefix=prefix,
        normalizer_steps=_normalizers(normalizer),
    )
    return hf_tokenizer, TokenizerSettings(
        tokens=tokens,
        add_bos="bos_token" in tokens,
        add_eos=False,
        end_ids=(named["eos_token"],) if "eos_token" in tokens else (),
    )


def _decode_model(data: bytes) -> tuple[list[Piece], Fields, Fields]:
    """Pieces, trainer fields and normalizer fields of a model."""
    pieces: list[Piece] = []
    trainer: Fields = {}
    normalizer: Fields = {}
    for number, value in _fields(data):
        if number == PIECES and isinstance(value, bytes):
            pieces.append(_piece(value))
            limits.check_vocabulary(len(pieces), most=limits.CONVERTED_TOKENS)
        elif number == TRAINER and isinstance(value, bytes):
            trainer = dict(_fields(value))
        elif number == NORMALIZER and isinstance(value, bytes):
            normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("it has no pieces")
    longest = max(len(piece.text) for piece in pieces)
    if longest > limits.TOKEN_CHARACTERS:
        raise ValueError(f"a token of {longest:,} characters; at most {limits.TOKEN_CHARACTERS:,} are read")
    return pieces, trainer, normalizer


def build_sentencepiece(
    pieces: Sequence[Piece],
    *,
    unigram: bool,
    unk_id: int,
    byte_fallback: bool,
    prefix: bool,
    normalizer_steps: Sequence[normalizers.Normalizer] = (),
) -> Tokenizer:
    """Create a tokenizer from SentencePiece's list of pieces.

    `prefix`: put a space before a text, and before the text after a special token. `normalizer_steps` run first.
    Control tokens and the unknown token become special tokens.
    """
    if unigram:
        hf_tokenizer = Tokenizer(models.Unigram([(p.text, p.score) for p in pieces], unk_id, byte_fallback))
    else:
        hf_tokenizer = Tokenizer(_create_bpe(pieces, unk_id, byte_fallback))
    steps = [*normalizer_steps, *([normalizers.Prepend(SPACE)] if prefix else []), normalizers.Replace(" ", SPACE)]
    hf_tokenizer.normalizer = normalizers.Sequence(steps)
    hf_tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            *([decoders.ByteFallback()] if byte_fallback else []),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    add_tokens(hf_tokenizer, [(piece.text, piece.type) for piece in pieces])
    return hf_tokenizer


def prefix_first_only(hf_tokenizer: Tokenizer) -> None:
    """Put the space before a text at its beginning only, not after special tokens, and not before a space.

    This is Transformers' `legacy: false`.
    """
    steps = list(hf_tokenizer.normalizer or ())
    others = [step for step in steps if not isinstance(step, normalizers.Prepend)]
    if len(others) < len(steps):
        hf_tokenizer.normalizer = normalizers.Sequence(others)
        hf_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)


def _create_bpe(pieces: Sequence[Piece], unk_id: int, byte_fallback: bool) -> models.BPE:
    ids = {piece.text: id for id, piece in enumerate(pieces)}
    ranks = {piece.text: -piece.score for piece in pieces if piece.type == NORMAL}
    unk = pieces[unk_id].text if unk_id >= 0 else None
    return models.BPE(ids, derive_merges(ranks), unk_token=unk, fuse_unk=True, byte_fallback=byte_fallback)


def add_tokens(hf_tokenizer: Tokenizer, tokens: Sequence[tuple[str, int]]) -> None:
    """Add the control, unknown and user-defined tokens of (text, type): each is one token anywhere in a text."""
    hf_tokenizer.add_tokens(
        [
            AddedToken(text, normalized=False, special=type != USER_DEFINED)
            for text, type in tokens
            if type in (UNKNOWN, CONTROL, USER_DEFINED) and text
        ]
    )


def _normalizers(fields: Fields) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    charsmap = fields.get(CHARSMAP)
    if charsmap and isinstance(charsmap, bytes):
        if (growth := check_charsmap(charsmap)) > MAX_GROWTH:
            raise ValueError(f"a character map that makes {growth:,} characters of one; at most {MAX_GROWTH} are read")
        steps.append(normalizers.Precompiled(charsmap))
    if fields.get(REMOVE_EXTRA_SPACES, True):
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" +"), " ")]
    return steps


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    text, score, type = fields.get(PIECE_TEXT, b""), fields.get(PIECE_SCORE, b"\0" * 4), fields.get(PIECE_TYPE, NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(type, int):
        raise ValueError("a piece has fields of wrong types")
    return Piece(text.decode(), struct.unpack("<f", score)[0], type)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Fields of a message as (number, value): a varint as int, any other type as its bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + size > len(data):
            raise ValueError(f"a field reaches beyond its {len(data)} bytes")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for end in range(at + 1, at + 1 + VARINT_BYTES):
        byte = data[end - 1]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, end
        shift += 7
    raise ValueError(f"a number of more than {VARINT_BYTES} bytes")


def _signed(value: int | bytes) -> int:
    """Decode an int32; protocol buffers write negative ones in 64 bits."""
    if not isinstance(value, int):
        raise ValueError("an id is no number")
    return value - (1 << 64) if value >= 1 << 63 else value
