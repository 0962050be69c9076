"""Tokenizers from GGUF metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from weft.checkpoint.files import limits
from weft.checkpoint.files.gguf import Gguf
from weft.checkpoint.files.gguf import read_gguf as read_header
from weft.engine.text import byte_level, spm
from weft.engine.text.pretokenizers import PRE_TOKENIZERS
from weft.engine.text.settings import TokenizerSettings
from weft.errors import ModelError

PREFIX = "tokenizer.ggml."
MODELS = ("gpt2", "llama")

# The metadata field with the id of each named token.
NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Fields with ids that end a completion, and control tokens that end one in models whose files name only one id.
END_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")


def read_gguf_tokenizer(path: Path) -> tuple[Tokenizer, TokenizerSettings]:
    """Read the tokenizer in a GGUF file. Raises ModelError for a kind that Weft does not know."""
    header = read_header(path)
    kind = header.metadata.get(PREFIX + "model")
    limits.check_vocabulary(header.count(PREFIX + "tokens"), header.count(PREFIX + "merges"))
    tokens = [str(token) for token in header.array(PREFIX + "tokens")]
    if kind not in MODELS or not tokens:
        raise ModelError(
            f"{path} has a tokenizer of kind {kind!r:.80} with {len(tokens)} tokens; Weft reads "
            f"{' and '.join(MODELS)}; give another with --tokenizer",
            code="unknown-gguf-tokenizer",
        )
    types = [int(type) for type in header.array(PREFIX + "token_type")] or [spm.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(
            f"{path} is damaged: {len(types)} token types for {len(tokens)} tokens; fetch it again",
            code="token-types-of-other-length",
        )
    create = _create_sentencepiece if kind == "llama" else _create_byte_level
    hf_tokenizer, add_bos = create(header, tokens, types)
    return hf_tokenizer, _settings(header, tokens, types, add_bos)


def _create_byte_level(header: Gguf, tokens: Sequence[str], types: Sequence[int]) -> tuple[Tokenizer, bool]:
    """A byte-level BPE tokenizer, and True if such models begin with BOS by default."""
    name = header.metadata.get(PREFIX + "pre", "default")
    spec = PRE_TOKENIZERS.get(str(name))
    if spec is None:
        raise ModelError(
            f"{header.path} cuts words as {name!r:.80} does, which Weft does not know; known: "
            f"{', '.join(sorted(PRE_TOKENIZERS))}; give the model's own tokenizer with --tokenizer",
            code="unknown-pre-tokenizer",
        )
    vocab = {token: id for id, token in enumerate(tokens)}
    hf_tokenizer = byte_level.build_byte_level(
        vocab, _merges(header, vocab), spec.create_pre_tokenizer(), whole_words=spec.whole
    )
    spm.add_tokens(
        hf_tokenizer, [(token, type) for token, type in zip(tokens, types, strict=True) if type != spm.UNKNOWN]
    )
    return hf_tokenizer, spec.bos


def _merges(header: Gguf, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """The file's merges. Raises ModelError for a merge that does not merge two tokens into a third."""
    merges = []
    for text in map(str, header.array(PREFIX + "merges")):
        parts = text.split(" ")
        if len(parts) != 2 or not vocab.keys() >= {*parts, "".join(parts)}:
            raise ModelError(
                f"{header.path} is damaged: {text!r:.80} merges no two of its tokens; fetch it again",
                code="merge-of-no-tokens",
            )
        merges.append((parts[0], parts[1]))
    return merges


def _create_sentencepiece(header: Gguf, tokens: Sequence[str], types: Sequence[int]) -> tuple[Tokenizer, bool]:
    """A SentencePiece tokenizer, and True: such models begin with BOS by default."""
    scores = [float(score) for score in header.array(PREFIX + "scores")]
    if len(scores) != len(tokens):
        raise ModelError(
            f"{header.path} is damaged: {len(scores)} scores for {len(tokens)} tokens; fetch it again",
            code="token-scores-of-other-length",
        )
    unk = _id(header, "unknown_token_id", len(tokens))
    hf_tokenizer = spm.build_sentencepiece(
        [spm.Piece(*piece) for piece in zip(tokens, scores, types, strict=True)],
        unigram=False,
        unk_id=0 if unk is None else unk,
        byte_fallback=True,
        prefix=_flag(header, "add_space_prefix", default=True),
    )
    return hf_tokenizer, True


def _settings(header: Gguf, tokens: Sequence[str], types: Sequence[int], add_bos: bool) -> TokenizerSettings:
    named_ids = {name: _id(header, field, len(tokens)) for name, field in NAMED.items()}
    named = {name: tokens[id] for name, id in named_ids.items() if id is not None}
    template, tool_template = (_template(header, name) for name in ("chat_template", "chat_template.tool_use"))
    return TokenizerSettings(
        tokens=named,
        add_bos=_flag(header, "add_bos_token", default=add_bos) and "bos_token" in named,
        add_eos=_flag(header, "add_eos_token", default=False) and "eos_token" in named,
        end_ids=_end_ids(header, tokens, types),
        chat_template=template or tool_template,
        tool_template=tool_template,
    )


def _template(header: Gguf, name: str) -> str | None:
    template = header.metadata.get(f"tokenizer.{name}")
    if not isinstance(template, str):
        return None
    limits.check_template(template, header.path)
    return template


def _end_ids(header: Gguf, tokens: Sequence[str], types: Sequence[int]) -> tuple[int, ...]:
    """Ids that end a completion, without duplicates."""
    ids = [_id(header, field, len(tokens)) for field in END_FIELDS]
    ids += [id for id, token in enumerate(tokens) if token in END_TOKENS and types[id] == spm.CONTROL]
    return tuple(id for id in dict.fromkeys(ids) if id is not None)


def _flag(header: Gguf, field: str, *, default: bool) -> bool:
    return bool(header.metadata.get(PREFIX + field, default))


def _id(header: Gguf, field: str, vocab: int) -> int | None:
    """The token id in a metadata field, or None if it is outside the vocabulary; files write 2**32-1 for no token."""
    id = header.metadata.get(PREFIX + field)
    return id if isinstance(id, int) and 0 <= id < vocab else None
