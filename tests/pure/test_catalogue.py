"""The catalogue: every model of the tables (tests/data), to the parameter, under every name that people use."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from weft.errors import ModelError
from weft.facts import catalogue
from weft.facts.kv import kv_bytes, kv_bytes_per_token, layer_bytes_per_token
from weft.facts.parameters import params
from weft.facts.precision import NAMES, canonical, weight_bytes
from weft.planner.place import places

DATA = Path(__file__).parents[1] / "data"


def table(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


MODELS, SHAPES = table("models.csv"), table("shapes.csv")


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row["model"])
def test_models_are_reproduced_exactly(row: dict[str, str]) -> None:
    model = catalogue.find(row["model"])
    shape = model.shape
    assert model.name == row["model"]
    assert model.params == params(shape) == int(row["params"])
    assert weight_bytes(shape, "bf16") == weight_bytes(shape, "fp16") == 2 * int(row["params"])
    decimals = len(row["bf16_gb"].partition(".")[2])
    assert f"{weight_bytes(shape, 'bf16') / 1e9:.{decimals}f}" == row["bf16_gb"]
    assert kv_bytes_per_token(shape) == int(row["kv_bytes_per_token_bf16"])
    assert shape.architecture == row["architecture"]
    for key in ("layers", "hidden", "q_heads", "kv_heads", "vocab", "head_dim", "ffn"):
        assert not row[key] or getattr(shape, key) == int(row[key])


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row["model"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_kv_bytes_per_rank(row: dict[str, str], ranks: int) -> None:
    """Latent attention is the same on every rank; else a rank pays for its heads, at least one, and all together
    for the model's where no head is held twice."""
    shape = catalogue.find(row["model"]).shape
    per_rank = [kv_bytes_per_token(shape, "bf16", place) for place in places(shape, [1.0] * ranks, [shape.layers])]
    per_token = int(row["kv_bytes_per_token_bf16"])
    if shape.mla:
        assert per_rank == [per_token] * ranks
    else:
        assert min(per_rank) >= per_token // shape.kv_heads
        assert sum(per_rank) == per_token // shape.kv_heads * max(ranks, shape.kv_heads)
        if shape.kv_heads % ranks == 0:
            assert set(per_rank) == {per_token // ranks}
    halves = places(shape, [1.0], [shape.layers - 1, 1])
    assert sum(kv_bytes_per_token(shape, "bf16", place) for place in halves) == per_token


@pytest.mark.parametrize("row", SHAPES, ids=lambda row: row["model"])
def test_shapes_are_reproduced_exactly(row: dict[str, str]) -> None:
    model = catalogue.find(row["model"])
    shape = model.shape
    assert model.name == row["model"] and shape.architecture == row["architecture"]
    assert not row["params"] or model.params == params(shape) == int(row["params"])
    for key in ("layers", "hidden", "q_heads", "kv_heads", "vocab", "head_dim"):
        assert getattr(shape, key) == int(row[key])
    assert int(row["ffn"]) == (shape.experts.ffn if shape.experts else shape.ffn)
    assert shape.qk_norm == ("qk-norm" in row["note"] or "MiniMax" in row["model"])


@pytest.mark.parametrize("entry", catalogue.entries(), ids=lambda entry: entry.names[0])
def test_every_line_adds_up_to_its_published_total(entry: catalogue.Entry) -> None:
    model = catalogue.find(entry.names[0])
    assert params(model.shape) == entry.params == model.params
    assert model.source and canonical(model.precision) == model.precision
    assert model.shape.q_heads % model.shape.kv_heads == 0
    assert {catalogue.find(name).shape for name in entry.names} == {model.shape}


def test_no_name_stands_for_two_models() -> None:
    names = Counter(name.casefold() for entry in catalogue.entries() for name in entry.names)
    assert [name for name, count in names.items() if count > 1] == []


def test_every_short_name_that_was_measured() -> None:
    for name in {row["model"] for row in table("measured_speed.csv")}:
        found = catalogue.find(name)
        assert found.name.rpartition("/")[2] == name


@pytest.mark.parametrize(
    ("name", "model", "precision"),
    [
        ("qwen2.5-72b-instruct", "Qwen/Qwen2.5-72B-Instruct", "bf16"),
        (" Qwen2.5 72B Instruct ", "Qwen/Qwen2.5-72B-Instruct", "bf16"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "Qwen/Qwen2.5-72B-Instruct", "int4"),
        ("Qwen2.5-32B-Instruct-GPTQ-Int8", "Qwen/Qwen2.5-32B-Instruct", "int8"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "meta-llama/Llama-3.3-70B-Instruct", "fp8"),
        ("nvidia/DeepSeek-R1-0528-NVFP4", "deepseek-ai/DeepSeek-R1-0528", "nvfp4"),
        ("DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.1", "fp8"),
        ("openai/gpt-oss-20b", "openai/gpt-oss-20b", "mxfp4"),
        ("llama3.1:8b", "meta-llama/Llama-3.1-8B-Instruct", "bf16"),
        ("gpt2", "gpt2", "bf16"),
        ("demo", "demo", "q4_1"),
    ],
)
def test_names(name: str, model: str, precision: str) -> None:
    found = catalogue.find(name)
    assert (found.name, found.precision) == (model, precision)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Qwen2.5-73B-Instruct", "nearest: Qwen/Qwen2.5-7"),
        ("lama-3.1-8b", "nearest: meta-llama/Llama-3.1-8B"),
        ("Qwen2.5-73B-Instruct-AWQ", "nearest: Qwen"),
        ("", "give a name on the hub"),
        ("-AWQ", "give a name on the hub|nearest"),
        ("xyzzy" * 1000, "give a name on the hub"),
    ],
)
def test_unknown_names_get_the_nearest(name: str, hint: str) -> None:
    assert catalogue.look_up(name) is None
    with pytest.raises(ModelError, match=hint) as error:
        catalogue.find(name)
    assert "\n" not in str(error.value)


def test_windows_cap_what_a_sequence_keeps() -> None:
    shape = catalogue.find("gpt-oss-120b").shape
    assert shape.windows[:4] == (128, None, 128, None)
    each = layer_bytes_per_token(shape)
    assert each == 2 * 8 * 64 * 2
    assert kv_bytes(shape, 100) == 100 * kv_bytes_per_token(shape)
    assert kv_bytes(shape, 10_000) == 18 * each * (128 + 10_000)
    assert kv_bytes(shape, 10_000, "fp8") == 18 * each * (128 + 10_000) // 2
    gemma = catalogue.find("gemma-3-27b-it").shape
    assert [layer for layer in range(62) if gemma.window(layer) is None] == [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]
    assert set(gemma.windows) == {1024, None}


def test_every_model_has_bytes_in_every_precision() -> None:
    for entry in catalogue.entries():
        shape = catalogue.find(entry.names[0]).shape
        sizes = {precision: weight_bytes(shape, precision) for precision in NAMES}
        assert sizes["fp32"] == 2 * sizes["bf16"]
        assert sizes["int4"] < sizes["int8"] < sizes["bf16"]
