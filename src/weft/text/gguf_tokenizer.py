"""Tokenisers from GGUF metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from weft.errors import ModelError
from weft.formats.gguf import Gguf
from weft.formats.gguf import read_gguf as read_header
from weft.text import byte_level, spm
from weft.text.pretokenizers import WORDS
from weft.text.settings import Settings

PREFIX = "tokenizer.ggml."
MODELS = ("gpt2", "llama")

# Named tokens by their id's field.
NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Ids that end an answer, and the control tokens that do so in models whose files name only one of them.
END_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")


def read(path: Path) -> tuple[Tokenizer, Settings]:
    """The tokenizer that a GGUF file describes. ModelError for a kind that Weft does not know."""
    header = read_header(path)
    kind = header.metadata.get(PREFIX + "model")
    tokens = [str(token) for token in header.array(PREFIX + "tokens")]
    if kind not in MODELS or not tokens:
        raise ModelError(
            f"{path} has a tokenizer of kind {kind!r} with {len(tokens)} tokens; Weft reads {' and '.join(MODELS)}; "
            "give another with --tokenizer"
        )
    types = [int(type) for type in header.array(PREFIX + "token_type")] or [spm.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{path} is damaged: {len(types)} token types for {len(tokens)} tokens; fetch it again")
    make = _sentencepiece if kind == "llama" else _byte_level
    rust, add_bos = make(header, tokens, types)
    return rust, _settings(header, tokens, types, add_bos)


def _byte_level(header: Gguf, tokens: Sequence[str], types: Sequence[int]) -> tuple[Tokenizer, bool]:
    name = header.metadata.get(PREFIX + "pre", "default")
    words = WORDS.get(str(name))
    if words is None:
        raise ModelError(
            f"{header.path} cuts words as {name!r} does, which Weft does not know; known: {', '.join(sorted(WORDS))}; "
            "give the model's own tokenizer with --tokenizer"
        )
    merges = [str(merge).split(" ") for merge in header.array(PREFIX + "merges")]
    vocab = {token: id for id, token in enumerate(tokens)}
    for merge in merges:
        if len(merge) != 2 or merge[0] not in vocab or merge[1] not in vocab or merge[0] + merge[1] not in vocab:
            raise ModelError(
                f"{header.path} is damaged: {' '.join(merge)!r} merges no two of its tokens; fetch it again"
            )
    pairs = [(left, right) for left, right in merges]
    rust = byte_level.build(vocab, pairs, words.pre_tokenizer(), whole_words=words.whole)
    spm.add_tokens(rust, [(token, type) for token, type in zip(tokens, types, strict=True) if type != spm.UNKNOWN])
    return rust, words.bos


def _sentencepiece(header: Gguf, tokens: Sequence[str], types: Sequence[int]) -> tuple[Tokenizer, bool]:
    scores = [float(score) for score in header.array(PREFIX + "scores")]
    if len(scores) != len(tokens):
        raise ModelError(f"{header.path} is damaged: {len(scores)} scores for {len(tokens)} tokens; fetch it again")
    unk = _id(header, "unknown_token_id", len(tokens))
    rust = spm.build(
        [spm.Piece(*piece) for piece in zip(tokens, scores, types, strict=True)],
        unigram=False,
        unk_id=0 if unk is None else unk,
        byte_fallback=True,
        prefix=_flag(header, "add_space_prefix", default=True),
    )
    return rust, True


def _settings(header: Gguf, tokens: Sequence[str], types: Sequence[int], add_bos: bool) -> Settings:
    ids = {field: _id(header, field, len(tokens)) for field in (*NAMED.values(), *END_FIELDS)}
    named = {name: tokens[id] for name, field in NAMED.items() if (id := ids[field]) is not None}
    ends = [id for field in END_FIELDS if (id := ids[field]) is not None]
    ends += [id for id, token in enumerate(tokens) if token in END_TOKENS and types[id] == spm.CONTROL]
    template = header.metadata.get("tokenizer.chat_template")
    return Settings(
        tokens=named,
        add_bos=_flag(header, "add_bos_token", default=add_bos) and "bos_token" in named,
        add_eos=_flag(header, "add_eos_token", default=False) and "eos_token" in named,
        end_ids=tuple(dict.fromkeys(ends)),
        chat_template=template if isinstance(template, str) else None,
    )


def _flag(header: Gguf, field: str, *, default: bool) -> bool:
    return bool(header.metadata.get(PREFIX + field, default))


def _id(header: Gguf, field: str, vocab: int) -> int | None:
    """A token id, where the file has one that is in the vocabulary; files say 2**32-1 for none."""
    id = header.metadata.get(PREFIX + field)
    return id if isinstance(id, int) and 0 <= id < vocab else None
