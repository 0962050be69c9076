"""Weights rounded in C++ beside what torch makes of them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from tests.cpu import checkpoints
from tests.cpu.fake_cuda import CUDA, Card, the_card  # noqa: F401
from tests.cpu.layouts import plan_for
from tests.cpu.matrices import CPU, KINDS
from tests.cpu.test_kernels import native
from tests.pure.costs import cut
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.names.catalogue import find
from weft.checkpoint.quantised.schemes import ALL_SCHEMES, SCHEMES, Scheme
from weft.machine.native.structures import LOWEST_KINDS
from weft.plan.fills import rank_fills
from weft.ranks.kernels import create_rounding
from weft.ranks.kernels.attention import AttentionShape
from weft.ranks.kernels.native.rounding import NativeRounding, supports_scheme
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.quant.rounding import ROUND, Rounding, round_into
from weft.ranks.weights.load import allocate_parameters, load_weights
from weft.ranks.weights.quantised import quantise, row_bands

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPE = AttentionShape(
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    windows=(None,),
    scale=1.0,
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    block_size=16,
    rows=1,
    tokens=1,
    length=1,
)
WIDTH = 576  # four groups of 128 and a half


def test_every_kind_of_lowest_is_in_every_table() -> None:
    kinds = set(get_args(get_type_hints(Scheme)["lowest"]))
    assert kinds == LOWEST_KINDS.keys() == ROUND.keys() == {scheme.lowest for scheme in ALL_SCHEMES.values()}


@pytest.mark.parametrize("name", [next(n for n, s in ALL_SCHEMES.items() if s.lowest == kind) for kind in LOWEST_KINDS])
def test_a_matrix_of_every_kind_is_rounded_held_and_read_again(name: str) -> None:
    """Every kind is allocated, rounded to and turned into floats."""
    weight = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    into = QuantisedWeight.empty(name, 8, Span(0, 512), torch.bfloat16, CPU)
    round_into(weight, into, None)
    assert torch.allclose(into.dequantise().float(), weight, atol=1.0)  # MXFP4 clips what is just below a power of two


@pytest.fixture(scope="module")
def ours() -> NativeRounding:
    native(torch.bfloat16)  # or skip
    return NativeRounding(torch.bfloat16)


def weights(dtype: torch.dtype) -> torch.Tensor:
    """Weights of several distributions, with a number of rows that fills no vector."""
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(150, WIDTH, generator=generator)
    uniform = torch.rand(20, WIDTH, generator=generator)
    kinds = (normal[:60] * 0.02, normal[60:80] ** 3, normal[80:100] * 0.01 + 3, uniform, normal[100:] * 1e-4)
    same = torch.tensor([0.0, 1.0, -3.0, 1e-7, 65504.0]).unsqueeze(1).expand(5, WIDTH)
    return torch.cat((*kinds, same)).to(dtype)


def importance() -> torch.Tensor:
    """Importance of columns, a few of which count much more than the others."""
    drawn = torch.randn(WIDTH, generator=torch.Generator().manual_seed(8)).mul_(2).exp_()
    return drawn.clamp_(min=0.1)


def made_of(weight: torch.Tensor, type: str, how: Rounding, counts: torch.Tensor | None = None) -> QuantisedWeight:
    into = QuantisedWeight.empty(type, len(weight), Span(0, weight.shape[1]), torch.float32, CPU)
    how(weight, into, counts)
    return into


def parts(matrix: QuantisedWeight) -> list[torch.Tensor]:
    return [part for part in (matrix.values, matrix.scales, matrix.lowest) if part is not None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("type", "counts"),
    [*((type, None) for type in KINDS), *((type, importance()) for type in KINDS if ALL_SCHEMES[type].bits == 4)],
    ids=lambda it: it if isinstance(it, str) else "alike" if it is None else "by importance",
)
def test_rounding_loses_no_more_than_torch(
    ours: NativeRounding, type: str, dtype: torch.dtype, counts: torch.Tensor | None
) -> None:
    """Sums are added up in another order, so numbers halfway between two steps, and scales between two halves, may go
    either way, and with them what is found best for a group; on the whole nothing is lost by it."""
    weight = weights(dtype)
    here, there = (made_of(weight, type, how, counts) for how in (ours, round_into))
    for got, want in zip(parts(here), parts(there), strict=True):
        assert (got == want).float().mean() > 0.97
    each = torch.ones(WIDTH) if counts is None else counts
    off, most = (made.dequantise().sub_(weight).square_().mul_(each).sum(1) for made in (here, there))
    assert (off <= most * 1.05 + 1e-12).all()  # of a row
    assert off.sum() <= most.sum() * 1.002


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("type", ["Q8_0", "INT8", "INT4_128"])
def test_without_sums_it_is_the_same(ours: NativeRounding, type: str, dtype: torch.dtype) -> None:
    here, there = (made_of(weights(dtype), type, how) for how in (ours, round_into))
    for got, want in zip(parts(here), parts(there), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("type", ["Q4_0", "Q4_1"])
def test_important_columns_lose_less(ours: NativeRounding, type: str) -> None:
    """In columns that count ten times as much as half of their group errors are smaller, in others somewhat larger."""
    weight, counts = weights(torch.float32)[:60], importance()
    much = counts > 10 * counts.view(-1, 32).median(dim=1, keepdim=True).values.expand(-1, 32).flatten()
    off, usual = (made_of(weight, type, ours, each).dequantise().sub_(weight).square_() for each in (counts, None))
    assert off[:, much].sum() < {"Q4_0": 0.8, "Q4_1": 0.6}[type] * usual[:, much].sum()
    assert off[:, ~much].sum() < 1.5 * usual[:, ~much].sum()


@pytest.mark.parametrize("how", ["alike", "by importance"])
def test_weights_on_a_grid_are_found_again(ours: NativeRounding, how: str) -> None:
    torch.manual_seed(5)
    q = torch.randint(0, 16, (50, 8, 32)).float()
    q[..., 0], q[..., 1] = 0, 15
    scale, low = (torch.rand(50, 8, 1) + 0.1).half().float(), torch.randn(50, 8, 1).half().float()
    counts = importance()[:256] if how == "by importance" else None
    for made_by in (ours, round_into):
        found = made_of((q * scale + low).flatten(1), "Q4_1", made_by, counts)
        assert torch.equal(found.numbers().float(), q.flatten(1))


@pytest.mark.parametrize("type", KINDS)
def test_a_cut_has_the_same_numbers(ours: NativeRounding, type: str) -> None:
    weight = weights(torch.bfloat16)

    def read(rows: Span, cols: Span, out: torch.Tensor) -> None:
        out.copy_(weight[rows.start : rows.stop, cols.start : cols.stop])

    whole = made_of(weight, type, ours).dequantise()
    for cols in (Span(0, 192), Span(192, 384), Span(384, WIDTH), Span(32, 64)):
        into = QuantisedWeight.empty(type, 100, cols, torch.float32, CPU)
        quantise(read, Span(20, 120), cols, WIDTH, 4, into, torch.bfloat16, ours)
        assert torch.equal(into.dequantise(), whole[20:120, cols.start : cols.stop])


# --- on a GPU ---


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Rounding:
    """The kernel in Triton's interpreter, which takes as long for a small tile as for a large one."""
    pytest.importorskip("triton", reason="needs triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    from weft.ranks.kernels.triton import rounding as kernel

    monkeypatch.setattr(kernel, "TILE", 1 << 14)
    return kernel.round_on_gpu


@pytest.mark.parametrize(
    ("type", "counted"),
    [("Q4_1", False), ("Q4_1", True), ("Q4_0", True), ("Q8_0", False), ("INT8", False), ("Q4_16_MIN", False)],
    ids=str,
)
def test_a_gpu_loses_no_more_than_torch(gpus: Rounding, type: str, counted: bool) -> None:
    weight, counts = weights(torch.bfloat16)[55:115], importance() if counted else None
    here, there = (made_of(weight, type, how, counts) for how in (gpus, round_into))
    for got, want in zip(parts(here), parts(there), strict=True):
        assert (got == want).float().mean() > 0.99
    each = torch.ones(WIDTH) if counts is None else counts
    off, most = (made.dequantise().sub_(weight).square_().mul_(each).sum(1) for made in (here, there))
    assert (off <= most * 1.05 + 1e-12).all()
    assert off.sum() <= most.sum() * 1.002


@pytest.mark.parametrize("type", ["Q4_1", "INT8", "INT8_ROW_SYM"])
def test_a_cut_has_the_same_numbers_on_a_gpu(gpus: Rounding, type: str) -> None:
    weight = weights(torch.bfloat16)

    def read(rows: Span, cols: Span, out: torch.Tensor) -> None:
        out.copy_(weight[rows.start : rows.stop, cols.start : cols.stop])

    whole = made_of(weight[50:90], type, gpus).dequantise()
    for cols in (Span(0, 192), Span(384, WIDTH), Span(32, 64)):
        into = QuantisedWeight.empty(type, 40, cols, torch.float32, CPU)
        quantise(read, Span(50, 90), cols, WIDTH, 4, into, torch.bfloat16, gpus)
        assert torch.equal(into.dequantise(), whole[:, cols.start : cols.stop])


@torch.inference_mode()
def test_threads_that_load_launch_on_their_card(card: Card, tmp_path: Path) -> None:
    """A thread launches Triton on the first GPU until it has made another one current."""
    plan = plan_for(checkpoints.make("llama-biased", tmp_path), "whole", quantization="int4", max_model_len=64)
    made = []
    for device, backend in ((CPU, "torch"), (CUDA, "triton")):
        targets = allocate_parameters(plan, plan.places[0], device)
        load_weights(plan, plan.places[0], targets, create_rounding(backend, device, SHAPE))
        made.append({name: parts(it) for name, it in targets.items() if isinstance(it, QuantisedWeight)})
    here, there = made
    assert here.keys() == there.keys() and len(here) >= 8
    assert all(torch.equal(a, b.cpu()) for name in here for a, b in zip(here[name], there[name], strict=True))


@torch.inference_mode()
def test_an_8b_is_rounded_on_a_card_in_few_launches(
    card: Card, gpus: Rounding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama-3.1-8B: the launches of a band, and the bands of all matrices. A card takes some 5 us for each."""
    shape = find("Llama-3.1-8B").shape
    how = create_rounding("auto", CUDA, SHAPE)
    seen: dict[str, int] = {}
    host = torch.randn(8, 256).bfloat16()

    def read(rows: Span, cols: Span, out: torch.Tensor) -> None:
        out.copy_(host)

    for type in ("Q4_1", "Q8_0"):
        into, before = QuantisedWeight.empty(type, 8, Span(0, 256), torch.bfloat16, CUDA), card.launches
        quantise(read, Span(0, 8), Span(0, 256), 256, 4, into, torch.bfloat16, how)
        seen[type] = card.launches - before
    place = cut(shape, [0]).places[0]
    pieces = [
        len([*row_bands(fill.rows, len(fill.cols), fill.unit, CUDA)]) for fill in rank_fills(shape, place) if fill.cols
    ]
    assert sum(pieces) > 32 * 7 and max(seen.values()) * sum(pieces) <= 2000


# --- where it is used ---


def test_without_a_compiler_torch_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise FileNotFoundError("no C++ compiler was found")

    monkeypatch.setattr("weft.machine.native.build.load_library", nothing)
    weight = weights(torch.float32)
    found, want = made_of(weight, "Q4_1", NativeRounding(torch.bfloat16)), made_of(weight, "Q4_1", round_into)
    for got, part in zip(parts(found), parts(want), strict=True):
        assert torch.equal(got, part)


def test_the_choice_of_rounding() -> None:
    assert isinstance(create_rounding("auto", CPU, SHAPE), NativeRounding)
    assert create_rounding("torch", CPU, SHAPE) is round_into
    assert create_rounding("auto", CPU, replace(SHAPE, dtype=torch.float16)) is round_into
    assert supports_scheme(SCHEMES["INT8"]) and not supports_scheme(Scheme(bits=4, group=256, lowest="zero"))
