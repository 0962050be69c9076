"""Products with quantised weights by humming-kernels, which does not run here: against a copy of its layouts and checks
that computes in plain torch from what was repacked (fake_humming.py). tests/gpu has the real one."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed

from tests.cpu import fake_humming, tiny
from tests.cpu.fake_cuda import CUDA, Card, CardError, OnCard, host_with_card, the_card  # noqa: F401
from tests.cpu.matrices import CPU, random, random_stacks
from tests.log_events import logged
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.shape import Experts
from weft.checkpoint.quantised.schemes import ALL_SCHEMES
from weft.plan.products import LOCKS, VERSION, against_scheme, format_of
from weft.ranks.kernels.experts import GroupedExperts, choose_experts
from weft.ranks.kernels.matrices import ExpertStack
from weft.ranks.kernels.plain import create_plain_kernels
from weft.ranks.kernels.usable import UnusableError
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.worker.swap import SwapRefusedError, WeightSwap

pytest.importorskip("triton", reason="needs triton, whose kernels do the rest")

from weft.ranks.kernels import contest, humming
from weft.ranks.kernels.capture import capture_graph
from weft.ranks.kernels.humming import check, matrices, race
from weft.ranks.kernels.humming import products as humming_products
from weft.ranks.kernels.humming.layout import schema_fields
from weft.ranks.kernels.humming.library import load_library
from weft.ranks.kernels.humming.products import ANY_ROWS, HummingExperts, HummingMatrix, choose_tiles, repack
from weft.ranks.kernels.triton.experts import TritonExperts
from weft.ranks.kernels.triton.products import QuantisedMatrix

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

BF16, FP16 = torch.bfloat16, torch.float16
SUPPORTED = [
    (name, dtype)
    for name, scheme in ALL_SCHEMES.items()
    for dtype in (BF16, FP16)
    if against_scheme(scheme, str(dtype).removeprefix("torch.")) is None and scheme.group <= 128
] + [("INT4_ROW", BF16), ("INT4_ROW_SYM", BF16), ("INT8_ROW_SYM", FP16), ("INT4_512", BF16), ("SIGNED8_ROW", BF16)]
SMALL = Experts(count=5, top_k=2, width=64)
GPT_OSS = changed(SMALL, bias=True, limit=1.0, gain=1.702, up_offset=1.0)
HIDDEN = 96
SPEC_TOLERANCE = {"rtol": 3e-2, "atol": 3e-2}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The library is here, and so is a cache of our own."""
    for name, module in fake_humming.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fake_humming, "calls", fake_humming.Calls())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield


def made(tokens: int = 100, **how: Any) -> matrices.HummingMatrices:
    return matrices.HummingMatrices(CPU, 1, tokens, **how)


def a_weight(type: str, dtype: torch.dtype, rows: int = 200, cols: int = 512) -> QuantisedWeight:
    """A random matrix, of which a rank has all columns. With zero points as published ones have them, in 4 bits."""
    scheme = ALL_SCHEMES[type]
    if scheme.lowest in ("middle", "minimum") or scheme.lowest == "zero":
        weight = QuantisedWeight.empty(type, rows, Span(0, cols), dtype, CPU)
        generator = torch.Generator().manual_seed(4)
        weight.values.random_(0, 256, generator=generator)
        weight.scales.copy_(torch.rand(weight.scales.shape, generator=generator) * 0.01 + 0.002)
        if scheme.lowest == "zero":
            weight.lowest.random_(0, 1 << scheme.bits, generator=generator)  # type: ignore[union-attr]
        elif scheme.lowest == "minimum":
            weight.lowest.copy_(-8 * weight.scales + torch.rand(weight.scales.shape, generator=generator) / 100)  # type: ignore[union-attr]
        return weight
    return random(type, rows, Span(0, cols), cols, dtype=dtype)


# --- layouts ---


@pytest.mark.parametrize(("type", "dtype"), SUPPORTED, ids=lambda value: str(value).removeprefix("torch."))
def test_what_is_repacked_is_the_weight(type: str, dtype: torch.dtype) -> None:
    """Every number is right, beside what the library's kernels round: scale, minimum, difference, product."""
    weight = a_weight(type, dtype)
    library = load_library()
    packed = repack(library, weight, None, torch.zeros(LOCKS, dtype=torch.int32), 8)
    got = fake_humming.dequantise(packed.config, packed.held)[: weight.shape[0]].float()
    want = weight.dequantise()
    step = 2.0**-8 if dtype == BF16 else 2.0**-11
    assert got.shape == want.shape
    error = (got - want).abs()
    allowed = 2 * step * want.abs()
    if weight.scheme.lowest == "minimum":  # which is a multiple of the scale, rounded
        assert weight.lowest is not None
        allowed = allowed + 2 * step * weight.lowest.float().abs().repeat_interleave(weight.scheme.group, 1)
    assert (error <= allowed + 1e-6).all(), float((error - allowed).max())
    if weight.scheme.lowest == "mxfp4":
        assert torch.equal(got, want), "powers of two lose nothing"


# SHA-256, its first 16 digits, of each tensor that the library's own transform_humming_tensors (0.1.20) makes of the
# weights of `drawn`, with weight_repack_nk of its process.cuh compiled for a CPU.
DIGESTS = {
    ("Q4_0", BF16): {"weight": "ec7bb1a0b88e7138", "weight_scale": "608bab62f506f303", "bias": "d27e855ff0f90574"},
    ("Q4_1", BF16): {
        "weight": "ec7bb1a0b88e7138",
        "weight_scale": "608bab62f506f303",
        "zero_point": "f533a77014813ab5",
        "bias": "d27e855ff0f90574",
    },
    ("INT4_128", BF16): {
        "weight": "ec7bb1a0b88e7138",
        "weight_scale": "7cba8f77a6e4acf5",
        "zero_point": "5b578e2ca5a98ac8",
        "bias": "d27e855ff0f90574",
    },
    ("INT8_128", BF16): {
        "weight": "7f11d8093ada3e60",
        "weight_scale": "7cba8f77a6e4acf5",
        "zero_point": "37157d11c9d839ca",
        "bias": "d27e855ff0f90574",
    },
    ("INT8_128", FP16): {
        "weight": "5aa86121a9a4c64e",
        "weight_scale": "66f58f523d845408",
        "zero_point": "37157d11c9d839ca",
        "bias": "78ace1cd4da89ce5",
    },
    ("INT4_ROW_SYM", BF16): {
        "weight": "ec7bb1a0b88e7138",
        "weight_scale": "b289c3fd0306622e",
        "bias": "d27e855ff0f90574",
    },
    ("MXFP4", BF16): {"weight": "ec7bb1a0b88e7138", "weight_scale": "9baac03907e70a81", "bias": "d27e855ff0f90574"},
    ("FP8_128", BF16): {"weight": "81a897968d89e224", "weight_scale": "7cba8f77a6e4acf5", "bias": "d27e855ff0f90574"},
}


def sequence(like: torch.Tensor, low: int, high: int) -> torch.Tensor:
    count = torch.arange(like.numel())
    return (count * 2654435761 % 1000003 % (high - low) + low).view(like.shape)


def drawn(type: str, dtype: torch.dtype) -> QuantisedWeight:
    weight = QuantisedWeight.empty(type, 200, Span(0, 384), dtype, CPU)
    scheme = weight.scheme
    weight.values.copy_(sequence(weight.values, 0, 126 if scheme.lowest == "fp8" else 256))
    if scheme.lowest == "mxfp4":
        weight.scales.copy_(sequence(weight.scales, 118, 126))
    else:
        weight.scales.copy_(sequence(weight.scales, 1, 64) / 4096)
    if weight.lowest is not None:
        zeros = sequence(weight.lowest, 0, 1 << scheme.bits if scheme.lowest == "zero" else 64)
        weight.lowest.copy_(zeros if scheme.lowest == "zero" else -zeros.float() / 1024)
    return weight


@pytest.mark.parametrize(("type", "dtype"), DIGESTS)
def test_the_copy_repacks_as_the_library_does(type: str, dtype: torch.dtype) -> None:
    weight, bias = drawn(type, dtype), torch.arange(200).to(dtype)
    packed = repack(load_library(), weight, bias, torch.zeros(LOCKS, dtype=torch.int32), 8)
    found = {
        name: hashlib.sha256(part.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, part in packed.held.items()
    }
    assert found == DIGESTS[type, dtype]


def test_the_copy_takes_what_the_library_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in fake_humming.modules():
        monkeypatch.delitem(sys.modules, name)
    real = pytest.importorskip("humming", reason="needs humming-kernels")
    assert real.__version__ == VERSION
    for module, function in (
        ("transform", "prepare_layer_config"),
        ("transform", "transform_humming_tensors"),
        ("transform", "transform_humming_bias"),
        ("tune", "get_heuristics_config"),
        ("forward", "humming_forward"),
    ):
        theirs = getattr(importlib.import_module(f"humming.{module}"), function)
        assert fake_humming.parameters(getattr(fake_humming, function)) == fake_humming.parameters(theirs)


def test_a_group_without_a_scale_is_its_minimum() -> None:
    weight = a_weight("Q4_1", BF16)
    assert weight.lowest is not None
    weight.scales[3, 2], weight.lowest[3, 2] = 0.0, -0.25
    weight.scales[7, 1], weight.lowest[7, 1] = 2.0**-24, 16.0  # its numbers are nothing beside the minimum
    weight.scales[9, 0] = weight.lowest[9, 0] = 0.0
    packed = repack(load_library(), weight, None, torch.zeros(LOCKS, dtype=torch.int32), 8)
    got = fake_humming.dequantise(packed.config, packed.held)
    for row, group, value in ((3, 2, -0.25), (7, 1, 16.0), (9, 0, 0.0)):
        assert (got[row, group * 32 : group * 32 + 32] == value).all()
    assert got.isfinite().all()


def test_a_tile_for_each_number_of_rows() -> None:
    tiles = choose_tiles(lambda rows: {"block_shape": (rows + 1, 64, 64)}, 100)
    assert tiles.limits == (1, 2, 4, 8, 16, 32, 64, ANY_ROWS)
    assert [tiles.height(rows) for rows in (1, 2, 3, 64, 65, 5000)] == [2, 3, 5, 65, 129, 129]
    for rows in (1, 3, 64, 65, 5000):
        assert fake_humming.tile_height(tiles.configs, rows) == tiles.height(rows)
    assert choose_tiles(lambda rows: {"block_shape": (8,)}, 1).limits == (ANY_ROWS,)


# --- products ---


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "INT4_128", "INT8_128", "MXFP4", "FP8_128"])
def test_a_matrix(type: str, biased: bool) -> None:
    weight = a_weight(type, BF16)
    bias = torch.randn(200).to(BF16) if biased else None
    product = made().matrix(weight, bias, "m")
    assert isinstance(product, HummingMatrix)
    for rows in (1, 17, 100):  # tiles of three heights
        x = torch.randn(rows, 512).to(BF16)
        want = check.multiply_exactly(x, weight, bias)
        got = product(x)
        assert got.shape == want.shape and got.dtype == BF16 and check.difference(got, want, bias) < 0.01
    assert product(x[:0]).shape == (0, 200)


@pytest.mark.parametrize("spec", [SMALL, GPT_OSS], ids=["plain", "gpt-oss"])
@pytest.mark.parametrize("type", ["MXFP4", "Q4_1", "INT4_32"])
def test_experts(type: str, spec: Experts) -> None:
    stacks = random_stacks(spec, HIDDEN, BF16, "Q4_0" if type == "INT4_32" else type)
    if type == "INT4_32":
        stacks = tuple(as_published(stack) for stack in stacks)  # type: ignore[assignment]
    experts = made(40).experts(spec, *stacks, 0)
    assert isinstance(experts, HummingExperts)
    plain = create_plain_kernels().matrices.experts(spec, *stacks, 0)
    total = torch.zeros(spec.count, dtype=torch.int64)
    for tokens in (1, 7, 40):  # rows in one sorted list for both products, and in two
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, HIDDEN, generator=generator).to(BF16)
        chosen, shares = choose_experts(torch.randn(tokens, spec.count, generator=generator), spec)
        got, want = experts(x, chosen, shares), plain(x, chosen, shares)
        torch.testing.assert_close(got, want, **SPEC_TOLERANCE)
        total += chosen.flatten().bincount(minlength=spec.count)
    assert torch.equal(experts.routed, total), "rows that are sorted twice are counted once"
    assert experts(x[:0], chosen[:0], shares[:0]).shape == (0, HIDDEN)


def as_published(stack: ExpertStack) -> ExpertStack:
    """The same weights with zero points."""
    weight = stack.weight
    assert isinstance(weight, QuantisedWeight)
    zeros = torch.full(weight.scales.shape, 8, dtype=torch.uint8)
    return stack._replace(weight=replace(weight, type="INT4_32", lowest=zeros))


def test_products_to_be_measured_beside_weft_s() -> None:
    weight = a_weight("Q4_1", BF16)
    x = torch.randn(17, 512).to(BF16)
    product = humming.create_matrix(weight, rows=17)
    assert check.difference(product(x), check.multiply_exactly(x, weight, None)) < 0.01
    stacks = random_stacks(SMALL, HIDDEN, BF16, "MXFP4")
    experts = humming.create_experts(SMALL, *stacks, tokens=7)
    x, choice = torch.randn(7, HIDDEN).to(BF16), choose_experts(torch.randn(7, 5), SMALL)
    want = create_plain_kernels().matrices.experts(SMALL, *stacks, 0)(x, *choice)
    assert check.difference(experts(x, *choice), want.float()) < 0.02
    with pytest.raises(UnusableError, match="6 bits"):
        humming.create_matrix(random("Q4_K", 8, Span(0, 256), 256))


def test_experts_of_other_ranks_and_padding_add_nothing() -> None:
    spec = changed(SMALL, count=9)
    stacks = random_stacks(SMALL, HIDDEN, BF16, "MXFP4")
    experts = made(6).experts(spec, *stacks, 3)
    assert isinstance(experts, HummingExperts)
    own = create_plain_kernels().matrices.experts(SMALL, *stacks, 0)
    assert isinstance(own, GroupedExperts)
    x, shares = torch.randn(6, HIDDEN).to(BF16), torch.rand(6, 2)
    chosen = torch.tensor([[3, 0], [7, 4], [-1, -1], [8, 2], [5, 3], [6, 8]])
    here = (chosen >= 3) & (chosen < 8)
    want = own(x, torch.where(here, chosen - 3, -1), shares)
    assert check.difference(experts(x, chosen, shares), want.float()) < 0.02


def test_weights_and_biases_are_replaced_in_place() -> None:
    some = made(5)
    first, second = a_weight("INT4_128", BF16), drawn_like("INT4_128")
    bias = torch.randn(200).to(BF16)
    product = some.matrix(first, bias, "m")
    places = [part.data_ptr() for part in some.tensors()]
    some.replace("m", second)
    bias.copy_(torch.randn(200))
    some.refresh_biases()
    x = torch.randn(5, 512).to(BF16)
    assert check.difference(product(x), check.multiply_exactly(x, second, bias), bias) < 0.01
    assert [part.data_ptr() for part in some.tensors()] == places
    # A stack, whose biases are copied too.
    stacks = random_stacks(GPT_OSS, HIDDEN, BF16, "MXFP4")
    experts = some.experts(GPT_OSS, *stacks, 0)
    others = [replace(stack.weight, values=stack.weight.values.flip(0)) for stack in stacks]  # type: ignore[type-var, union-attr]
    for stack, other in zip(stacks, others, strict=True):
        some.replace(stack.name, other)
        stack.bias.add_(1.0)  # type: ignore[union-attr]
    some.refresh_biases()
    changed_stacks = [stack._replace(weight=other) for stack, other in zip(stacks, others, strict=True)]
    plain = create_plain_kernels().matrices.experts(GPT_OSS, *changed_stacks, 0)
    x = torch.randn(4, HIDDEN).to(BF16)
    choice = choose_experts(torch.randn(4, 5), GPT_OSS)
    torch.testing.assert_close(experts(x, *choice), plain(x, *choice), **SPEC_TOLERANCE)


def drawn_like(type: str) -> QuantisedWeight:
    weight = a_weight(type, BF16)
    return replace(weight, values=weight.values.flip(0))


def test_a_checkpoint_that_the_library_cannot_hold_is_refused() -> None:
    """Before any weight of the model is another one."""
    some = made()
    weight = a_weight("INT4_128", BF16)
    some.matrix(weight, None, "m")
    some.matrix(random("Q4_K", 8, Span(0, 256), 256), None, "weft's")
    other = a_weight("INT4_128", BF16)
    assert some.against_replacing("m", other) is None and some.against_replacing("weft's", other) is None
    other.lowest[5, 1] = 16  # type: ignore[index]
    assert some.against_replacing("weft's", other) is None
    reason = some.against_replacing("m", other)
    assert reason and all(word in reason for word in ("16", "--product-backend own"))
    swap = WeightSwap.__new__(WeightSwap)
    swap._staged = {"m": other}
    model: Any = type("Model", (), {"kernels": type("Kernels", (), {"matrices": some})()})()
    with refuses(SwapRefusedError, "weights-not-replaceable", "zero points"):
        swap.check_kernels(model)
    assert not swap._staged


def test_weights_are_repacked_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a large matrix, some at a time, also from the host's memory to a card's."""
    bias = torch.randn(776).to(BF16)
    for type in ("Q4_1", "INT8", "MXFP4", "INT4_ROW"):
        weight = a_weight(type, BF16, rows=776)
        whole = repack(load_library(), weight, bias, torch.zeros(LOCKS, dtype=torch.int32), 8)
        with monkeypatch.context() as small:
            small.setattr(humming_products, "BAND_BYTES", 1)
            assert humming_products.band_rows(weight) == 256
            bands = repack(load_library(), weight, bias, torch.zeros(LOCKS, dtype=torch.int32), 8)
        assert bands.held.keys() == whole.held.keys()
        for name, part in whole.held.items():
            assert torch.equal(bands.held[name].view(torch.uint8), part.view(torch.uint8)), (type, name)


def test_all_tiles_are_compiled_before_the_first_request() -> None:
    some = made(tokens=100)
    some.matrix(a_weight("Q4_0", BF16), None, "m")
    some.experts(SMALL, *random_stacks(SMALL, HIDDEN, BF16, "MXFP4"), 0)
    fake_humming.calls.tiles.clear()
    for group in some.launches(100):
        for launch in group:
            launch()
    # As fake_humming.TILES has them for up to 100 rows, and twice as many of two choices each.
    heights = {("dense", each) for each in (16, 48, 64)} | {("indexed", each) for each in (8, 48, 32)}
    assert fake_humming.calls.tiles - {("indexed", 16), ("indexed", 24)} == heights


# --- what is left to Weft's kernels ---


@pytest.mark.parametrize(
    ("type", "cols", "rows"),
    [("Q4_K", 512, 200), ("Q8_MIN", 512, 200), ("NF4_64", 512, 200), ("INT4_128", 448, 200), ("Q4_0", 512, 204)],
    ids=["nested", "minima", "table", "cut group", "rows"],
)
def test_what_the_library_does_not_take(type: str, cols: int, rows: int, caplog: pytest.LogCaptureFixture) -> None:
    some = made()
    assert isinstance(some.matrix(random(type, rows, Span(0, cols), cols), None, "m"), QuantisedMatrix)
    assert not caplog.records and not fake_humming.calls.products and not some.uses_library


def test_zero_points_beyond_four_bits_are_weft_s(caplog: pytest.LogCaptureFixture) -> None:
    """GPTQ's first format adds one to what it stores."""
    weight = a_weight("INT4_128", BF16)
    weight.lowest[5, 1] = 16  # type: ignore[index]
    assert isinstance(made().matrix(weight, None, "m"), QuantisedMatrix)
    assert not caplog.records


def broken(*given: object, **more: object) -> None:
    raise RuntimeError("nvcc: not found\nwhere it was looked for")


def import_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming.transform", None)


def transform_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["humming.transform"], "transform_humming_tensors", broken)


def launch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["humming.forward"], "humming_forward", broken)


def numbers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """One column of the 200."""

    def spoil(result: torch.Tensor) -> torch.Tensor:
        result[:, 77] *= -1
        return result

    fake_humming.calls.spoil = spoil


def one_tile_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of many rows alone is wrong, in one of its rows."""

    def spoil(result: torch.Tensor) -> torch.Tensor:
        if len(result) > 48:
            result[-1] = 0
        return result

    fake_humming.calls.spoil = spoil


def are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_humming.calls.spoil = lambda result: result / 0


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (import_fails, ("imported",)),
        (transform_fails, ("nvcc: not found",)),
        (launch_fails, ("nvcc: not found",)),
        (numbers_differ, ("differs", "3%")),
        (one_tile_differs, ("differs", "3%")),
        (are_not_finite, ("differs", "inf%")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_warning_and_weft_s_kernels(
    fault: Callable[[pytest.MonkeyPatch], None],
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fault(monkeypatch)
    with caplog.at_level(logging.WARNING, "weft"):
        some = made()
        products = [some.matrix(a_weight(type, BF16), None, type) for type in ("Q4_0", "Q4_1", "Q4_0")]
        experts = some.experts(SMALL, *random_stacks(SMALL, HIDDEN, BF16, "MXFP4"), 0)
    assert all(isinstance(product, QuantisedMatrix) for product in products) and isinstance(experts, TritonExperts)
    assert not some.uses_library
    [event] = logged(caplog, "products-replaced")
    [record] = caplog.records
    message = record.getMessage()
    assert "\n" not in message and "--product-backend" in message and all(word in message for word in words), message
    assert event.keys() == {"reason"}


def test_wrong_experts_are_found(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Matrices are right, and of the stacks the second one's last expert alone has other numbers."""
    real = fake_humming.multiply
    stacks = random_stacks(SMALL, HIDDEN, BF16, "MXFP4")

    def multiply(config: fake_humming.Config, x: torch.Tensor, parts: dict[str, Any]) -> torch.Tensor:
        result = real(config, x, parts)
        return -result if config.num_experts and torch.equal(parts["weight"], last) else result

    experts = made(4).experts(SMALL, *stacks, 0)
    assert isinstance(experts, HummingExperts)
    last = experts.down.held["weight"][-1].clone()
    monkeypatch.setattr(fake_humming, "multiply", multiply)
    assert isinstance(made(4).experts(SMALL, *stacks, 0), TritonExperts)
    assert len(logged(caplog, "products-replaced")) == 1


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_right_numbers_pass(share: float) -> None:
    """Rounded as badly as its kernels may, also beside a bias a hundred times as large."""
    weight = a_weight("Q4_1", BF16)
    bias = torch.randn(200).to(BF16) * 100 * share
    x = check.draw(40, 512, weight)
    want = check.multiply_exactly(x, weight, bias)
    assert check.difference(want.to(BF16), want, bias) < 0.01
    wrong = check.multiply_exactly(x, drawn_like("Q4_1"), bias)
    assert check.difference(wrong.to(BF16), want, bias) > 10 * check.TOLERANCE


# --- races ---


def races(tmp_path: Path, times: dict[str, float], **how: Any) -> race.ProductRaces:
    """Races that take as long as `times` say of each side. The first that is measured is Weft's."""
    calls: list[str] = []

    def seconds(run: Callable[[], object]) -> float:
        run()
        side = race.OWN if len(calls) % (2 * len(race.ROWS)) < len(race.ROWS) else race.HUMMING
        calls.append(side)
        return times[side]

    found = race.ProductRaces(CPU, how.pop("driver", "580.1"), seconds=seconds, **how)
    found.calls = calls  # type: ignore[attr-defined]
    return found


def test_the_faster_one_multiplies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = a_weight("Q4_1", FP16)
    for times, kind in (({"own": 2.0, "humming": 1.0}, HummingMatrix), ({"own": 1.0, "humming": 2.0}, QuantisedMatrix)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / kind.__name__))
        some = made(races=races(tmp_path, times))
        assert type(some.matrix(weight, None, "m")) is kind
        assert type(some.matrix(weight, None, "again")) is kind
        assert len(some._races.calls) == 2 * len(race.ROWS), "once for each shape"  # type: ignore[union-attr]


def test_experts_race_too(tmp_path: Path) -> None:
    stacks = random_stacks(SMALL, HIDDEN, FP16, "Q4_1")
    some = made(4, races=races(tmp_path, {"own": 1.0, "humming": 2.0}))
    assert isinstance(some.experts(SMALL, *stacks, 0), TritonExperts)


def test_a_winner_is_kept_for_its_card_driver_and_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"own": 2.0, "humming": 1.0}
    contestants = {name: lambda rows: lambda: None for name in times}

    def measured(kind: object, **how: Any) -> bool:
        found = races(tmp_path, times, **how)
        assert found.winner(kind, lambda: contestants) == race.HUMMING
        return bool(found.calls)  # type: ignore[attr-defined]

    assert measured("a") and not measured("a")
    assert measured("b") and measured("a", driver="590.2")
    monkeypatch.setattr(race, "VERSION", "0.1.21")
    assert measured("a")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not measured("a")
    for file in (tmp_path / "weft").glob("product-*"):
        file.write_text("neither")
    assert measured("a")


def test_races_end_with_their_seconds(tmp_path: Path) -> None:
    """A shape that is left over is not recorded: it races at the next start."""
    clock = iter(range(0, 1000, 20))
    contestants = {name: lambda rows: lambda: None for name in (race.OWN, race.HUMMING)}
    times = {"own": 2.0, "humming": 1.0}
    short = races(tmp_path, times, budget_s=30.0, now=lambda: next(clock))
    assert [short.winner(kind, lambda: contestants) for kind in "abcd"] == ["humming", "humming", "own", "own"]
    assert len(short.calls) == 2 * 2 * len(race.ROWS)  # type: ignore[attr-defined]
    again = races(tmp_path, times)
    assert [again.winner(kind, lambda: contestants) for kind in "abcd"] == ["humming"] * 4


def test_a_cold_call_is_measured_without_its_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else weights would come from the second cache, and the faster one there would win."""
    ran: list[str] = []

    def clock(run: Callable[[], object]) -> float:
        ran.clear()
        run()
        return 3.0 if ran else 1.0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"L2_cache_size": 1 << 10})())
    assert race.cold_seconds(lambda: ran.append("product"), CPU, clock) == 2.0


# --- on a card ---


def on_card(weight: QuantisedWeight) -> QuantisedWeight:
    lowest = None if weight.lowest is None else weight.lowest.to(CUDA)
    return replace(weight, values=weight.values.to(CUDA), scales=weight.scales.to(CUDA), lowest=lowest)


def test_a_capture_finds_all_kernels_compiled(card: Card) -> None:
    product = humming.create_matrix(on_card(a_weight("Q4_1", FP16)), rows=20)
    x = torch.randn(20, 512).to(CUDA, FP16)
    with pytest.raises(CardError, match="compiled"):
        capture_graph(lambda: product(x), torch.cuda.Stream())
    for launch in product.launches(20):
        launch()
    out: list[torch.Tensor] = []
    graph = capture_graph(lambda: out.append(product(x)), torch.cuda.Stream())
    x.copy_(torch.randn(20, 512).to(CUDA, FP16))
    graph.replay()
    want = product(x)
    assert isinstance(out[0], OnCard) and isinstance(want, OnCard) and torch.equal(out[0].held, want.held)


def test_races_are_measured_in_graphs(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of the stand-in measure all alike: then Weft's products stay."""
    monkeypatch.setattr(contest, "CALLS", 1)
    monkeypatch.setattr(contest, "REPEATS", 1)
    monkeypatch.setattr(race, "ROWS", (1, 2))
    properties = type("P", (), {"L2_cache_size": 1 << 10})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    some = matrices.HummingMatrices(CUDA, 1, 4, races=race.ProductRaces(CUDA, "580.1"))
    before = card.replays
    assert isinstance(some.matrix(on_card(a_weight("Q4_1", FP16)), None, "m"), QuantisedMatrix)
    assert card.replays - before == 2 * 2 * 2 * 2, "sides, rows, with and without the product, a first one and one more"


def test_an_engine_on_a_card(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in graphs by the library, which compiles nothing inside of a capture and waits for nothing."""
    packages = {"triton": "3.6.0", "humming-kernels": VERSION}
    host = changed(host_with_card(), packages=packages)
    monkeypatch.setattr("weft.engine.llm.probe_host", lambda: host)
    path = tiny.write(tmp_path / "tiny")
    how: dict[str, Any] = {
        "dtype": "float16",
        "quantization": "int4",
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "executor": "inline",
        "max_model_len": 64,
        "kv_cache_memory_bytes": 500_000,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "device": "cuda",
        "attention_backend": "triton",
    }
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    prompts = [[3, 4, 5], [7, 9, 11, 13, 8]]
    found = {}
    for backend in ("humming", "own"):
        with LLM(str(path), **how, product_backend=backend) as llm:
            fake_humming.calls.products = 0
            before = card.waits.copy(), card.replays
            found[backend] = [
                [
                    step[token].logprob
                    for token, step in zip(it.outputs[0].token_ids, it.outputs[0].logprobs, strict=True)
                ]
                for it in llm.generate(prompts, params, use_tqdm=False)
            ]
            assert card.waits == before[0] and card.replays > before[1]
        assert (fake_humming.calls.products > 0) == (backend == "humming")
    for mine, theirs in zip(found["humming"], found["own"], strict=True):
        assert mine[0] == pytest.approx(theirs[0], abs=0.02)


def test_formats_are_those_that_are_tested() -> None:
    assert {format_of(ALL_SCHEMES[name]) for name, _ in SUPPORTED} == {
        "integers",
        "zero points",
        "minima",
        "MXFP4",
        "FP8",
    }
    assert schema_fields(ALL_SCHEMES["MXFP4"])["bs_dtype"] == "float8e8m0"
