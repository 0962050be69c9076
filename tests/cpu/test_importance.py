"""Importance of columns by their activations, and the loss of rounding to 4 bits with it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.cpu import checkpoints
from tests.cpu.checkpoints import make, reference
from tests.cpu.fake_cuda import CUDA, Card, OnCard, the_card  # noqa: F401
from tests.cpu.importances import INT4, WIDE, importance_by_rank
from tests.cpu.layouts import plan_for
from tests.cpu.test_quantised import measured, true_perplexity
from weft.checkpoint.architectures.place import Place, Span
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.tensor_index import expected_tensors, locate_tensors
from weft.ranks.comm import Links
from weft.ranks.weights.load import allocate_parameters, open_source
from weft.ranks.weights.stored import StoredWeights
from weft.ranks.worker import importance
from weft.ranks.worker.importance import TOKENS, needs_importance, random_batch, relative_importance

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A 32-bit checkpoint whose matrices have columns in whole groups."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(checkpoints.RECIPES, "wide", WIDE)
        yield make("wide", tmp_path_factory.mktemp("importance"))


@torch.inference_mode()
def of_transformers(path: Path) -> dict[str, torch.Tensor]:
    """By the last words of its name, mean squares of what each product of each layer takes."""
    model, found = reference(path), dict[str, torch.Tensor]()
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "o_proj", "gate_proj", "down_proj")):
            _, _, layer, _, product = name.split(".")

            def note(_: Any, inputs: tuple[torch.Tensor], key: str = f"{layer}.{product}") -> None:
                found[key] = inputs[0][0].square().mean(dim=0)

            module.register_forward_pre_hook(note)
    model(random_batch(model.config.vocab_size, TOKENS, CPU).tokens[None].long())
    return found


def columns(shape: ModelShape, place: Place, product: str) -> Span:
    """Columns of a rank."""
    whole = {"qkv": Span(0, shape.hidden), "gate_up": Span(0, shape.hidden), "down": place.ffn}
    return whole.get(product, place.q_heads.scaled(shape.mixers[0].head_dim))


@pytest.mark.parametrize("layout", ["whole", "tp3", "tp 2:1", "pp 1,3,1", "tp2 x pp2"])
def test_importance_is_by_the_activations_of_transformers(
    wide: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth, plan, seen = of_transformers(wide), plan_for(wide, layout, **INT4), 0
    theirs = {"qkv": "q_proj", "out": "o_proj", "gate_up": "gate_proj", "down": "down_proj"}
    for rank, found in importance_by_rank(plan, monkeypatch).items():
        for name, got in found.items():
            _, layer, _, product, _ = name.split(".")
            cols = columns(plan.shape, plan.places[rank], product)
            want = truth[f"{layer}.{theirs[product]}"][cols.start : cols.stop]
            torch.testing.assert_close(got, relative_importance(want), rtol=1e-3, atol=1e-3)
        assert len(found) == 4 * len(plan.places[rank].layers)
        seen += len(found)
    assert seen >= 4 * len(plan.shape.layers)


@pytest.mark.parametrize(
    ("quantization", "wanted"),
    [("auto", False), ("none", False), ("int8", False), ("int4", False), ("q4_0", True)],
)
def test_importance_is_for_weights_rounded_to_4_bits(quantization: str, wanted: bool) -> None:
    """The demo's file is in q4_1, which int4 means."""
    plan = plan_for(Path(resolve("demo").path), "whole", quantization=quantization)
    assert needs_importance(plan, open_source(plan)) == wanted


@torch.inference_mode()
def test_a_card_multiplies_in_one_thread(wide: Path, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps memory for each that multiplies; and finds what a CPU finds."""
    plan, links = plan_for(wide, "whole", **INT4), Links()
    product, seen = F.linear, set[str]()

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if isinstance(x, OnCard):
            seen.add(threading.current_thread().name)
        return product(x, weight)

    monkeypatch.setattr(importance.F, "linear", linear)
    monkeypatch.setattr(importance, "row_bands", partial(bands_of, 16))
    here, there = (
        importance.measure_importance(plan, 0, links, allocate_parameters(plan, plan.places[0], device), device)
        for device in (CPU, CUDA)
    )
    assert seen == {threading.current_thread().name}
    assert here.keys() == there.keys()
    for name, found in there.items():
        torch.testing.assert_close(found.cpu(), here[name], rtol=1e-3, atol=1e-3)


def bands_of(count: int, rows: Span, *_: int) -> list[Span]:
    """Bands of `count` rows."""
    return [Span(row, min(row + count, rows.stop)) for row in range(rows.start, rows.stop, count)]


def test_weights_that_are_made_up_need_none(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = msgspec.structs.replace(plan_for(wide, "whole", **INT4), load_format="dummy")
    assert importance_by_rank(plan, monkeypatch) == {0: {}}


def test_a_column_that_is_no_number_counts_as_others() -> None:
    squares = torch.rand(3, 32) + 1
    squares[0], squares[1, 3], squares[2, 5] = 0, torch.nan, torch.inf
    found = relative_importance(squares.flatten()).view(3, 32)
    assert (found[0] == 1).all()
    assert found.isfinite().all() and found.min() >= importance.MIN_IMPORTANCE


# --- the real model ---


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with its channels in another order, in 16 bits: the same model to the last bit, but no group of 32 lies
    on the 4-bit grid that its file has."""
    path, demo = tmp_path_factory.mktemp("shuffled"), resolve("demo")
    shape, source = demo.shape, StoredWeights(locate_tensors(demo.path, demo.format, demo.shape))
    generator = torch.Generator().manual_seed(1)
    hidden, ffn = (torch.randperm(size, generator=generator) for size in (shape.hidden, shape.ffn))
    # Of the heads' channels those that values go through; a KV head's are those of its whole group.
    inside = torch.randperm(shape.mixers[0].head_dim, generator=generator)
    value, out = (
        (torch.arange(heads)[:, None] * shape.mixers[0].head_dim + inside).flatten()
        for heads in (shape.kv_heads, shape.q_heads)
    )
    made = {}
    for name, dims in expected_tensors(shape):
        weight = torch.empty(dims, dtype=torch.bfloat16)
        source.read_range(name, Span(0, dims[0]), None, weight)
        rows, cols = {
            "v_proj": (value, hidden),
            "o_proj": (hidden, out),
            "gate_proj": (ffn, hidden),
            "up_proj": (ffn, hidden),
            "down_proj": (hidden, ffn),
        }.get(name.split(".")[-2], (None, hidden))
        if len(dims) == 1:
            rows, cols = hidden, None
        weight = weight if rows is None else weight[rows]
        made[name] = weight if cols is None else weight[:, cols].contiguous()
    save_file(made, path / "model.safetensors")
    config = {
        "architectures": [shape.architecture],
        "num_hidden_layers": len(shape.layers),
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm.eps,
        "rope_theta": shape.mixers[0].rope.theta,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_rounding_off_the_grid_costs_little(shuffled: Path) -> None:
    """4 bits in which all columns count alike cost a fifth of the perplexity."""
    how = {"model": str(shuffled), "tokenizer": resolve("demo").path}
    truth = measured(quantization="none", **how)
    assert truth == pytest.approx(true_perplexity(), rel=0.005)
    assert measured(quantization="int4", **how) < 1.1 * truth
