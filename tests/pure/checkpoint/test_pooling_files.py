"""Declarations of embeddings and scores in a checkpoint's files, and the flags beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pure import gguf_files
from tests.pure.checkpoint.test_gguf_shape import QWEN3, header
from tests.refusals import refuses
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.config.pooling import PoolingSettings, read_pooling
from weft.cli.run.shard import copy_texts
from weft.config import EngineConfig
from weft.errors import ConfigError, ModelError
from weft.plan.opening import RERANKER as OVERRIDES
from weft.plan.opening import pooling_task

ST = "sentence_transformers.models."
QWEN3_EMBEDDING = [
    {"idx": 0, "name": "0", "path": "", "type": f"{ST}Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{ST}Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{ST}Normalize"},
]
LAST = {"word_embedding_dimension": 12, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
EMBEDS = PoolingSettings(task="embed", generates=False)
RERANKER = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
    {"idx": 1, "name": "1", "path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.LogitScore"},
]


def folder(path: Path, modules: Any = None, pooling: Any = None, scoring: Any = None, **config: Any) -> Path:
    """A directory with these files, and the fields of its config.json."""
    files = {"modules.json": modules, "1_Pooling/config.json": pooling, "1_LogitScore/config.json": scoring}
    files["config.json"] = config
    for name, content in files.items():
        if content is not None:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("files", "declared"),
    [
        ({}, None),
        ({"modules": QWEN3_EMBEDDING, "pooling": LAST}, EMBEDS),
        ({"pooling": LAST}, EMBEDS),
        ({"pooling": {"pooling_mode": "lasttoken"}}, EMBEDS),
        ({"pooling": {"pooling_mode": ["lasttoken"]}}, EMBEDS),
        (
            {"modules": QWEN3_EMBEDDING[:2], "pooling": LAST},
            PoolingSettings(task="embed", normalises=False, generates=False),
        ),
        (
            {"pooling": LAST, "matryoshka_dimensions": [4, 8]},
            PoolingSettings(task="embed", dimensions=(4, 8), generates=False),
        ),
        (
            {"modules": RERANKER, "scoring": {"true_token_id": 9, "false_token_id": 2}},
            PoolingSettings(task="score", tokens=(9, 2)),
        ),
    ],
)
def test_files(tmp_path: Path, files: dict[str, Any], declared: PoolingSettings | None) -> None:
    assert read_pooling(folder(tmp_path, **files), QWEN3, "auto") == declared
    assert read_pooling(tmp_path, QWEN3, "generate") is None


def test_shards_carry_the_declaration(tmp_path: Path) -> None:
    whole = folder(tmp_path / "whole", modules=QWEN3_EMBEDDING, pooling=LAST)
    (tmp_path / "cut").mkdir()
    copy_texts(whole, tmp_path / "cut")
    assert read_pooling(tmp_path / "cut", QWEN3, "auto") == EMBEDS


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"pooling": {"pooling_mode_mean_tokens": True}}, "mean_tokens"),
        ({"pooling": {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}}, "lasttoken and cls_token"),
        ({"modules": [*QWEN3_EMBEDDING, {"path": "3_Dense", "type": f"{ST}Dense"}], "pooling": LAST}, "Dense"),
        ({"modules": RERANKER, "scoring": {"true_token_id": 9}}, "no two tokens"),
    ],
)
def test_what_weft_does_not_compute(tmp_path: Path, files: dict[str, Any], why: str) -> None:
    """Left alone, the model still generates; asked for, it is an error and never something else."""
    assert read_pooling(folder(tmp_path, **files), QWEN3, "auto") is None
    for task in ("embed", "pooling"):
        with refuses(ModelError, "pooling-not-supported", why):
            read_pooling(tmp_path, QWEN3, task)  # type: ignore[arg-type]


def test_a_projection_behind_the_states_is_not_computed(tmp_path: Path) -> None:
    shape = msgspec.structs.replace(QWEN3, embedding_dim=8)
    with refuses(ModelError, "pooling-not-supported", "projection"):
        read_pooling(folder(tmp_path), shape, "embed")


def test_damaged_files(tmp_path: Path) -> None:
    with refuses(ModelError, "wrong-field-value", "../other"):
        read_pooling(folder(tmp_path, [{"path": "../other", "type": f"{ST}Pooling"}]), QWEN3, "auto")
    (tmp_path / "modules.json").write_text("{")
    with refuses(ModelError, "damaged-config"):
        read_pooling(tmp_path, QWEN3, "auto")


def test_models_that_declare_nothing_may_be_converted(tmp_path: Path) -> None:
    folder(tmp_path)
    assert read_pooling(tmp_path, QWEN3, "embed") == PoolingSettings(task="embed")
    assert read_pooling(tmp_path, QWEN3, "pooling") == PoolingSettings(task="embed")
    assert read_pooling(tmp_path, QWEN3, "score") == PoolingSettings(task="score")


@pytest.mark.parametrize(
    ("kind", "declared"),
    [(None, None), (0, None), (3, EMBEDS), (4, "rank"), (1, "mean")],
)
def test_gguf_files(tmp_path: Path, kind: int | None, declared: PoolingSettings | str | None) -> None:
    metadata = header(tmp_path, {"pooling_type": kind}, shape=QWEN3).metadata
    if not isinstance(declared, str):
        assert read_pooling(tmp_path / "m.gguf", QWEN3, "auto", metadata) == declared
        return
    assert read_pooling(tmp_path / "m.gguf", QWEN3, "auto", metadata) is None
    with refuses(ModelError, "pooling-not-supported", declared):
        read_pooling(tmp_path / "m.gguf", QWEN3, "embed", metadata)


def test_a_whole_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = gguf_files.metadata_of(QWEN3) | {"qwen3.pooling_type": 3}
    monkeypatch.setattr(gguf_files, "metadata_of", lambda shape: metadata)
    gguf_files.write_model(tmp_path / "m.gguf", QWEN3)
    assert resolve(str(tmp_path / "m.gguf")).pooling == EMBEDS
    assert resolve(str(tmp_path / "m.gguf"), task="generate").pooling is None


@pytest.mark.parametrize(
    ("flags", "task"),
    [
        ({}, "auto"),
        ({"runner": "generate"}, "generate"),
        ({"runner": "pooling"}, "pooling"),
        ({"runner": "pooling", "convert": "embed"}, "embed"),
        ({"convert": "classify"}, "score"),
        ({"convert": "none"}, "generate"),
        ({"task": "embedding"}, "embed"),
        ({"task": "classify"}, "score"),
        ({"task": "embed", "runner": "pooling"}, "embed"),
        ({"hf_overrides": {**OVERRIDES, "is_matryoshka": True}}, "score"),
        ({"hf_overrides": {"is_matryoshka": True}, "runner": "pooling"}, "pooling"),
    ],
    ids=str,
)
def test_flags(flags: dict[str, str], task: str) -> None:
    assert pooling_task(EngineConfig(model="m", **flags)) == task  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "flags", [{"runner": "generate", "convert": "embed"}, {"task": "score", "convert": "embed"}], ids=str
)
def test_flags_that_contradict(flags: dict[str, str]) -> None:
    with refuses(ConfigError, "two-tasks", *sorted(flags.values(), key=["score", "embed", "generate"].index)):
        pooling_task(EngineConfig(model="m", **flags))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "overrides", [{"rope_theta": 5.0}, OVERRIDES | {"num_labels": 2}, {"is_matryoshka": False}, {"architectures": []}]
)
def test_other_overrides_of_a_config(overrides: dict[str, Any]) -> None:
    with refuses(ConfigError, "unknown-overrides", next(iter(overrides))):
        pooling_task(EngineConfig(model="m", hf_overrides=overrides))
