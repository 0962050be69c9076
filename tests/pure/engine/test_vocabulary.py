"""A tokenizer that does not fit its model."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.cpu import tiny
from tests.pure.letters import VOCAB
from tests.refusals import refuses
from weft.checkpoint.checkpoint import Checkpoint, resolve
from weft.engine.replicas.opening import check_vocabulary
from weft.engine.text.tokenizer import Tokenizer, load_tokenizer
from weft.errors import ModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "model")


def with_rows(folder: Path, rows: int) -> tuple[Tokenizer, Checkpoint]:
    """The model's tokenizer, and its checkpoint with another number of rows in its embedding."""
    checkpoint = resolve(str(folder), load_format="dummy")
    return load_tokenizer(str(folder)), replace(checkpoint, shape=replace(checkpoint.shape, vocab=rows))


def test_a_vocabulary_larger_than_the_embedding(folder: Path) -> None:
    tokenizer, checkpoint = with_rows(folder, 5)
    with refuses(
        ModelError, "vocabulary-beyond-embedding", folder, tokenizer.base_size, "embed_tokens.weight", folder, "5 rows"
    ):
        check_vocabulary(tokenizer, checkpoint, str(folder))


def test_added_tokens_need_no_row(folder: Path) -> None:
    tokenizer, _ = with_rows(folder, VOCAB)
    assert tokenizer.base_size <= VOCAB
    check_vocabulary(*with_rows(folder, tokenizer.base_size), str(folder))
