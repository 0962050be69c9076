"""Tokenizers from tiktoken files: lines with a token in base64 and its rank, as published for Qwen's first models
(*.tiktoken) and for Kimi-K2 (tiktoken.model)."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, normalizers

from weft.checkpoint.files import limits
from weft.checkpoint.files.model_file import read_model_file
from weft.engine.text.byte_level import build_byte_level, spell_bytes
from weft.engine.text.merges import derive_merges
from weft.engine.text.pretokenizers import KIMI, QWEN, PreTokenizerSpec
from weft.engine.text.settings import TokenizerSettings
from weft.errors import ModelError

# Special tokens that Qwen's own tokenizer appends to the file's, in this order.
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205)))
RESERVED = 256  # special tokens of Kimi-K2 after the file's, most of them without a name
RANK_DIGITS, RANKS = 10, 1 << 31  # ids are that large at most
NUM_ENDS = 3  # the first of them end a completion


def read_tiktoken(path: Path) -> tuple[Tokenizer, TokenizerSettings]:
    """Read a .tiktoken file, with Qwen's pre-tokenizer, special tokens and NFC normalization."""
    hf_tokenizer = _read_ranked(path, QWEN, normalizers.NFC())
    hf_tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in QWEN_SPECIAL])
    ids = (hf_tokenizer.token_to_id(text) for text in QWEN_SPECIAL[:NUM_ENDS])
    end_ids = tuple(id for id in ids if id is not None)
    return hf_tokenizer, TokenizerSettings(
        tokens={"eos_token": QWEN_SPECIAL[0]}, add_bos=False, add_eos=False, end_ids=end_ids
    )


def read_kimi(path: Path) -> tuple[Tokenizer, TokenizerSettings]:
    """Read Kimi-K2's tiktoken.model, without special tokens, whose names are in tokenizer_config.json."""
    return _read_ranked(path, KIMI, None), TokenizerSettings(add_bos=False, add_eos=False)


def reserve_tokens(hf_tokenizer: Tokenizer, names: Mapping[int, str]) -> None:
    """Add Kimi-K2's special tokens: tokens with `names`, by their ids, and reserved ones between and after them.

    Source: tokenization_kimi.py in the repository moonshotai/Kimi-K2-Instruct on the Hugging Face hub.
    """
    first = hf_tokenizer.get_vocab_size(with_added_tokens=False)
    ids = range(first, first + RESERVED)
    texts = [names.get(id, f"<|reserved_token_{id}|>") for id in ids]
    hf_tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in texts])


def _read_ranked(path: Path, words: PreTokenizerSpec, normalizer: normalizers.Normalizer | None) -> Tokenizer:
    ranks = _read_ranks(path)
    pairs = derive_merges(ranks)
    return build_byte_level(
        {spell_bytes(token): rank for token, rank in ranks.items()},
        [(spell_bytes(left), spell_bytes(right)) for left, right in pairs],
        words.create_pre_tokenizer(),
        whole_words=True,
        normalizer=normalizer,
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        data = read_model_file(path, limits.TOKENIZER_BYTES, code="cannot-read-tokenizer")
        lines = [line.split() for line in data.splitlines() if line]
        limits.check_vocabulary(len(lines), most=limits.CONVERTED_TOKENS)
        pairs = [(b64decode(token, validate=True), _rank(rank)) for token, rank in lines]
    except (ValueError, binascii.Error) as error:
        raise ModelError(
            f"{path} is no tiktoken file, or a damaged one: {error!s:.200}", code="damaged-tiktoken"
        ) from error
    for name, entries in zip(("token", "rank"), zip(*pairs, strict=True), strict=False):
        _check_unique(path, name, entries)
    return dict(pairs)


def _rank(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > RANK_DIGITS or int(digits) >= RANKS:
        raise ValueError(f"the rank {digits!r:.40} is no whole number below {RANKS:,}")
    return int(digits)


def _check_unique(path: Path, name: str, entries: Sequence[object]) -> None:
    if len(set(entries)) == len(entries):
        return
    [(entry, _)] = Counter(entries).most_common(1)
    raise ModelError(f"{path} has the {name} {entry!r:.80} twice; fetch it again", code="tiktoken-entry-twice")
