"""The probe of a tokenizer: steps that a model's file brings along may grow a text without end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from tests.refusals import refuses
from weft.engine.frontend import text_tools
from weft.engine.sandbox.limits import Limits
from weft.errors import ModelError

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(text_tools, "PROBE_LIMITS", Limits(cpu_s=1, wall_s=20.0, memory=1 << 30))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def folder(path: Path, **steps: Any) -> Path:
    path.mkdir()
    written = json.loads(Tokenizer(models.BPE({letter: id for id, letter in enumerate("abc")}, [])).to_str())
    (path / "tokenizer.json").write_text(json.dumps({**written, **steps}))
    return path


@pytest.mark.parametrize(
    "limits",
    [Limits(cpu_s=1, wall_s=0.001, memory=1 << 30), Limits(cpu_s=1, wall_s=20.0, memory=1 << 20)],
    ids=["time", "memory"],
)
def test_steps_that_break_a_limit_are_refused(tmp_path: Path, limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tools, "PROBE_LIMITS", limits)
    with refuses(ModelError, "tokenizer-too-expensive"):
        text_tools.probe_tokenizer(folder(tmp_path / "model"))


def test_steps_that_grow_a_text_are_refused(tmp_path: Path) -> None:
    """By the bounds on the file, before anything is tokenized."""
    doubled = {"type": "Sequence", "normalizers": [DOUBLE] * 12}
    with refuses(ModelError, "damaged-tokenizer"):
        text_tools.probe_tokenizer(folder(tmp_path / "model", normalizer=doubled))


def test_steps_that_have_passed_are_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower = {"type": "Lowercase"}
    text_tools.probe_tokenizer(folder(tmp_path / "first", normalizer=lower))
    monkeypatch.setattr(text_tools, "Isolated", None)
    text_tools.probe_tokenizer(folder(tmp_path / "second", normalizer=lower))
    with pytest.raises(TypeError):
        text_tools.probe_tokenizer(folder(tmp_path / "other", normalizer={"type": "NFC"}))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    with refuses(ModelError, "damaged-tokenizer"):
        text_tools.probe_tokenizer(folder(tmp_path / "model", normalizer={"type": "Unheard-of"}))
