"""tokenizer.json, the file of the tokenizers library: its sizes are checked before the library reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from weft.checkpoint.files import limits
from weft.checkpoint.files.model_file import read_model_file
from weft.engine.text.growth import MAX_WORD, check_growth
from weft.engine.text.panics import damaged_tokenizer


class _Model(msgspec.Struct):
    """The fields of a model that tell its size."""

    type: str | None = None
    vocab: dict[str, int] | list[tuple[str, float]] = msgspec.field(default_factory=dict)
    merges: list[msgspec.Raw] | None = None
    max_input_chars_per_word: int | None = None


class _File(msgspec.Struct):
    """A tokenizer.json, as far as it is checked here."""

    model: _Model
    added_tokens: list[msgspec.Raw] | None = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def read_tokenizer_json(file: Path) -> Tokenizer:
    """Read the tokenizer in a file. Raises ModelError if it is damaged, or beyond any published tokenizer."""
    data = read_model_file(file, limits.TOKENIZER_BYTES, code="cannot-read-tokenizer")
    try:
        content = msgspec.json.decode(data, type=_File)
        _check_model(content)
        check_growth(msgspec.structs.asdict(content))
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise damaged_tokenizer(file, error) from error
    return Tokenizer.from_buffer(data)


def _check_model(content: _File) -> None:
    model = content.model
    count = len(model.vocab) + len(content.added_tokens or ())
    limits.check_vocabulary(count, len(model.merges or ()))
    if (model.max_input_chars_per_word or 0) > MAX_WORD:
        raise ValueError(f"words of {model.max_input_chars_per_word:,} characters; at most {MAX_WORD:,} are read")
    if isinstance(model.vocab, list):  # Unigram, which looks for pieces of every length at each character
        longest = max((len(text) for text, _ in model.vocab), default=0)
        if longest > limits.TOKEN_CHARACTERS:
            raise ValueError(f"a token of {longest:,} characters; at most {limits.TOKEN_CHARACTERS:,} are read")
