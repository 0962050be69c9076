"""*.tiktoken files: lines of a token in base64 and its rank, as Qwen's first models came."""

from __future__ import annotations

import binascii
from base64 import b64decode
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, normalizers

from weft.errors import ModelError
from weft.text.byte_level import build_byte_level, bytes_to_token
from weft.text.merges import derive_merges
from weft.text.pretokenizers import QWEN
from weft.text.settings import TokenizerSettings

# Tokens that Qwen's own tokeniser puts after the file's, in this order.
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205)))
ENDS = 3  # the first of them end an answer


def read_tiktoken(path: Path) -> tuple[Tokenizer, TokenizerSettings]:
    """The vocabulary of a .tiktoken file, with Qwen's words, special tokens and NFC normalisation."""
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise ModelError(f"{path} is no tiktoken file, or a damaged one: {error}") from error
    pairs = derive_merges(ranks)
    rust = build_byte_level(
        {bytes_to_token(token): rank for token, rank in ranks.items()},
        [(bytes_to_token(left), bytes_to_token(right)) for left, right in pairs],
        QWEN.pre_tokenizer(),
        whole_words=True,
        normalizer=normalizers.NFC(),
    )
    rust.add_special_tokens([AddedToken(text, normalized=False) for text in QWEN_SPECIAL])
    end_ids = tuple(id for text in QWEN_SPECIAL[:ENDS] if (id := rust.token_to_id(text)) is not None)
    return rust, TokenizerSettings(tokens={"eos_token": QWEN_SPECIAL[0]}, add_bos=False, add_eos=False, end_ids=end_ids)
