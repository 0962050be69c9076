"""The catalogue: every model of the tables (tests/data), to the parameter, under every name that people use."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pure.shapes import figures, windows
from tests.refusals import has_values, refuses
from weft.checkpoint.architectures.kv import kv_bytes, kv_bytes_per_token, kv_specs
from weft.checkpoint.architectures.parameters import parameter_count
from weft.checkpoint.architectures.shape import Experts, ModelShape
from weft.checkpoint.names import catalogue
from weft.checkpoint.quantised.precision import NAMES, canonical, weight_bytes
from weft.errors import ModelError
from weft.plan.places import cut_places

DATA = Path(__file__).parents[2] / "data"


def table(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


MODELS, SHAPES = table("models.csv"), table("shapes.csv")


def router_corrections(shape: ModelShape) -> int:
    """Number of router corrections, which are float32 in every precision."""
    mixtures = [layer.ffn for layer in shape.layers if isinstance(layer.ffn, Experts)]
    return sum(experts.count for experts in mixtures if experts.correction)


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row["model"])
def test_models_are_reproduced_exactly(row: dict[str, str]) -> None:
    model = catalogue.find(row["model"])
    shape = model.shape
    assert model.name == row["model"]
    assert model.params == parameter_count(shape) == int(row["params"])
    halves = 2 * int(row["params"]) + 2 * router_corrections(shape)
    assert weight_bytes(shape, "bf16") == weight_bytes(shape, "fp16") == halves
    decimals = len(row["bf16_gb"].partition(".")[2])
    assert f"{weight_bytes(shape, 'bf16') / 1e9:.{decimals}f}" == row["bf16_gb"]
    assert kv_bytes_per_token(shape) == int(row["kv_bytes_per_token_bf16"])
    assert shape.architecture == row["architecture"]
    assert not row["layers"] or len(shape.layers) == int(row["layers"])
    for key in ("hidden", "q_heads", "kv_heads", "vocab"):
        assert not row[key] or getattr(shape, key) == int(row[key])
    assert not row["head_dim"] or {mixer.head_dim for mixer in shape.mixers} == {int(row["head_dim"])}
    assert not row["ffn"] or int(row["ffn"]) in (shape.ffn, shape.experts.width if shape.experts else 0)


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row["model"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_kv_bytes_per_rank(row: dict[str, str], ranks: int) -> None:
    """Latent attention is the same on every rank; else a rank pays for its heads, at least one, and all together
    for the model's where no head is held twice."""
    shape = catalogue.find(row["model"]).shape
    per_rank = [
        kv_bytes_per_token(shape, "bf16", place) for place in cut_places(shape, [1.0] * ranks, [len(shape.layers)])
    ]
    per_token = int(row["kv_bytes_per_token_bf16"])
    if shape.has_latents:
        assert per_rank == [per_token] * ranks
    else:
        assert min(per_rank) >= per_token // shape.kv_heads
        assert sum(per_rank) == per_token // shape.kv_heads * max(ranks, shape.kv_heads)
        if shape.kv_heads % ranks == 0:
            assert set(per_rank) == {per_token // ranks}
    halves = cut_places(shape, [1.0], [len(shape.layers) - 1, 1])
    assert sum(kv_bytes_per_token(shape, "bf16", place) for place in halves) == per_token


@pytest.mark.parametrize("row", SHAPES, ids=lambda row: row["model"])
def test_shapes_are_reproduced_exactly(row: dict[str, str]) -> None:
    model = catalogue.find(row["model"])
    shape = model.shape
    assert model.name == row["model"] and shape.architecture == row["architecture"]
    assert not row["params"] or model.params == parameter_count(shape) == int(row["params"])
    assert len(shape.layers) == int(row["layers"])
    for key in ("hidden", "q_heads", "kv_heads", "vocab"):
        assert getattr(shape, key) == int(row[key])
    assert {mixer.head_dim for mixer in shape.mixers} == {int(row["head_dim"])}
    assert int(row["ffn"]) == (shape.experts.width if shape.experts else shape.ffn)
    assert figures(shape)["qk_norm"] == ("qk-norm" in row["note"] or "MiniMax" in row["model"])


@pytest.mark.parametrize("entry", catalogue.entries(), ids=lambda entry: entry.names[0])
def test_every_line_adds_up_to_its_published_total(entry: catalogue.Entry) -> None:
    model = catalogue.find(entry.names[0])
    assert parameter_count(model.shape) == entry.params == model.params
    assert model.source and canonical(model.precision) == model.precision
    assert model.shape.q_heads % model.shape.kv_heads == 0
    assert {catalogue.find(name).shape for name in entry.names} == {model.shape}
    assert set(entry.nicknames.values()) <= set(entry.names)


def test_no_name_stands_for_two_models() -> None:
    names = Counter(name.casefold() for entry in catalogue.entries() for name in entry.names)
    assert [name for name, count in names.items() if count > 1] == []


def test_every_short_name_that_was_measured() -> None:
    for name in {row["model"] for row in table("measured_speed.csv")}:
        found = catalogue.find(name)
        assert name in found.name


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
        ("Qwen2.5-73B-Instruct", "Qwen/Qwen2.5-7"),
        ("lama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("Qwen2.5-73B-Instruct-AWQ", "Qwen/"),
        ("", "hub"),
        ("-AWQ", "; "),
        ("xyzzy" * 1000, "hub"),
    ],
)
def test_unknown_names_get_the_nearest(name: str, hint: str) -> None:
    assert catalogue.find_known(name) is None
    with refuses(ModelError, "unknown-model", repr(name), hint):
        catalogue.find(name)


def test_windows_cap_what_a_sequence_keeps() -> None:
    shape = catalogue.find("gpt-oss-120b").shape
    assert windows(shape)[:4] == (128, None, 128, None)
    each = kv_specs(shape)[0].bytes_per_token
    assert each == 2 * 8 * 64 * 2
    assert kv_bytes(shape, 100) == 100 * kv_bytes_per_token(shape)
    assert kv_bytes(shape, 10_000) == 18 * each * (128 + 10_000)
    assert kv_bytes(shape, 10_000, "fp8") == 18 * each * (128 + 10_000) // 2
    gemma = catalogue.find("gemma-3-27b-it").shape
    assert [layer for layer in range(62) if gemma.layers[layer].window is None] == [
        5,
        11,
        17,
        23,
        29,
        35,
        41,
        47,
        53,
        59,
    ]
    assert set(windows(gemma)) == {1024, None}


def test_every_model_has_bytes_in_every_precision() -> None:
    for entry in catalogue.entries():
        shape = catalogue.find(entry.names[0]).shape
        sizes = {precision: weight_bytes(shape, precision) for precision in NAMES}
        assert sizes["fp32"] == 2 * sizes["bf16"] - 4 * router_corrections(shape)
        assert sizes["int4"] < sizes["int8"] < sizes["bf16"]


# --- names that people use ---

EVERY_ID = [(entry, name) for entry in catalogue.entries() for name in entry.names]


def ollama_like(name: str) -> str:
    """meta-llama/Llama-3.3-70B-Instruct as llama3.3:70b-instruct, gemma-3-27b-it as gemma3:27b-it."""
    bare = re.sub(r"(?<=[a-z])-(?=\d+(\.\d+)?-)", "", name.rpartition("/")[2].lower(), count=1)
    return re.sub(r"-(?=\d[\d.x]*[bm]\b)", ":", bare, count=1)


def numbers(name: str) -> Counter[str]:
    return Counter(re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d)_(?=\d)", ".", name.rpartition("/")[2])))


def spellings(entry: catalogue.Entry, name: str) -> set[str]:
    short = re.sub(r"-(instruct|chat|it)\b", "", name.rpartition("/")[2].lower())
    nicknames = {nick for nick, full in entry.nicknames.items() if full == name}
    return {name, name.rpartition("/")[2], short, ollama_like(name), ollama_like(short), *nicknames}


def with_another_digit(name: str) -> Iterator[str]:
    """The name with each of its digits one up, and one down."""
    owner, slash, bare = name.rpartition("/")
    for place, digit in enumerate(bare):
        if digit.isdecimal():
            for other in {(int(digit) + 1) % 10, (int(digit) - 1) % 10}:
                yield f"{owner}{slash}{bare[:place]}{other}{bare[place + 1 :]}"


def is_told_by(name: str, full: str, entry: catalogue.Entry) -> bool:
    """True if every number of `name` is in the id, or is the model's size."""
    sizes = {f"{entry.params / unit:.{digits}f}" for unit in (1e6, 1e9) for digits in (0, 1)}
    sizes |= {f"{int(entry.params / 1e9)}"}
    return all(number in sizes for number in (numbers(name) - numbers(full)).elements())


@pytest.mark.parametrize(("entry", "name"), EVERY_ID, ids=lambda value: value if isinstance(value, str) else "")
def test_a_name_is_never_taken_for_another_version(entry: catalogue.Entry, name: str) -> None:
    lines = {full: line for line, full in EVERY_ID}
    assert catalogue.full_name(name) == name
    for spelt in spellings(entry, name):
        full = catalogue.full_name(spelt)
        assert full is None or is_told_by(spelt, full, lines[full]), (spelt, full)
        for other in with_another_digit(spelt):
            full = catalogue.full_name(other)
            assert full is None or is_told_by(other, full, lines[full]), (other, full)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("llama3.3:70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("llama3.1:70b", "meta-llama/Llama-3.1-70B-Instruct"),
        ("Llama-3.3-70B", "meta-llama/Llama-3.3-70B-Instruct"),
        ("llama3:8b", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("qwen3:8b", "Qwen/Qwen3-8B"),
        ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("qwen3:30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("phi4", "microsoft/phi-4"),
        ("gemma2:2b", "google/gemma-2-2b-it"),
        ("gemma-2-2b", "google/gemma-2-2b"),
        ("mistral:7b", "mistralai/Mistral-7B-Instruct-v0.3"),
        ("qwen1:8b", None),
        ("llama3.4:70b", None),
        ("llama33:70b", None),
        ("meta-llama/Llama-3.3-70B", None),
        ("qwen3", None),
    ],
)
def test_short_names(name: str, full: str | None) -> None:
    assert catalogue.full_name(name) == full


@pytest.mark.parametrize(
    ("name", "first", "others"),
    [
        ("llama3.3", "meta-llama/Llama-3.3-70B-Instruct", r"Llama-3\.3"),
        ("qwen3", "Qwen/Qwen3-8B", "Qwen3-"),
        ("llama3", "meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-"),
        ("mistral", "mistralai/Mistral-7B-Instruct-v0.3", "Mistral-"),
        ("meta-llama/Llama-3.3-70B", "meta-llama/Llama-3.3-70B-Instruct", r"Llama-3\.3"),
        ("dmo", "demo", "demo"),
    ],
)
def test_a_family_lists_its_own(name: str, first: str, others: str) -> None:
    near = catalogue.nearest(name)
    assert near[0] == first and all(re.search(others, full) for full in near)
    has_values(catalogue.did_you_mean(name), first)
    assert catalogue.did_you_mean("xyzzy") == ""
