"""Routers on GPUs, in Triton's interpreter, against those in torch."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace as changed

from tests.cpu.kernels import triton_kernels
from weft.checkpoint.architectures.shape import Experts
from weft.ranks.kernels.experts import choose_experts
from weft.ranks.quant.dense import RouterProduct

pytest.importorskip("triton", reason="needs triton")

from weft.ranks.kernels.triton.router import FEW, TritonRouter

QWEN = Experts(count=20, top_k=4, width=32)
V3 = Experts(
    count=24, top_k=5, width=32, scoring="sigmoid", correction=True, scaling=2.5, groups=4, top_groups=2,
    group_score="top2",
)  # fmt: skip
SPECS = {
    "softmax": QWEN,
    "as they are": changed(QWEN, normalised=False),
    "37 experts": changed(QWEN, count=37, top_k=6),
    "biased": changed(QWEN, bias=True),
    "groups": changed(QWEN, groups=5, top_groups=2, scaling=1.5, normalised=False),
    "uneven groups": changed(V3, count=36, groups=3, top_groups=2),
    "V3": V3,
}
DTYPES = [torch.float32, torch.float16]
HIDDEN = 576  # two parts of the columns of unlike size, each in several passes


def random_router(spec: Experts, dtype: torch.dtype, hidden: int = HIDDEN) -> tuple[TritonRouter, RouterProduct]:
    """A router in Triton and in torch. Its weights are multiples of 1/8, and so are tokens: scores are exact."""
    generator = torch.Generator().manual_seed(spec.count)
    weight = torch.randint(-8, 9, (spec.count, hidden), generator=generator).to(dtype) / 8
    bias = torch.randint(-8, 9, (spec.count,), generator=generator).to(dtype) if spec.bias else None
    return triton_kernels().matrices.router(weight, bias), RouterProduct(weight, bias)


def random_tokens(tokens: int, dtype: torch.dtype, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randint(-8, 9, (tokens, hidden), generator=torch.Generator().manual_seed(tokens)).to(dtype) / 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 18, FEW, FEW + 9])
@pytest.mark.parametrize("name", SPECS)
def test_experts_are_chosen_as_in_torch(name: str, tokens: int, dtype: torch.dtype) -> None:
    """By scores that are the same numbers: ties, which numbers so coarse have, are broken alike."""
    spec = SPECS[name]
    fast, plain = random_router(spec, dtype)
    x, slots = random_tokens(tokens, dtype), torch.arange(tokens) - int(tokens > 1)  # the first row is padding
    correction = torch.linspace(-0.5, 0.5, spec.count) if spec.correction else None
    got = fast.choose_experts(x, spec, slots, correction)
    want = choose_experts(plain(x), spec, slots, correction)
    assert torch.equal(got[0], want[0]) and (tokens == 1 or got[0][0].eq(-1).all())
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 18, FEW + 9])
@pytest.mark.parametrize("hidden", [HIDDEN, 200], ids=["columns divided", "all columns"])
@pytest.mark.parametrize("count", [1, 20])
def test_scores(count: int, hidden: int, tokens: int, dtype: torch.dtype) -> None:
    fast, plain = random_router(Experts(count=count, top_k=1, width=8, bias=count == 20), dtype, hidden)
    x = random_tokens(tokens, dtype, hidden)
    got = fast(x)
    assert got.dtype == torch.float32 and torch.equal(got, plain(x))


def test_scores_are_those_of_the_weights_in_their_dtype_added_in_float32() -> None:
    """1 + 2^-11 is no float16, and 4096 times 2^-12 is lost where a sum near 2048 is rounded to it."""
    weight, x = torch.full((2, 4097), 2.0**-12).half(), torch.ones(1, 4097).half()
    weight[:, 0] = 2048
    fast = triton_kernels().matrices.router(weight, None)
    assert fast(x).tolist() == [[2049.0, 2049.0]]
    assert fast.weight.dtype == torch.float16


@pytest.mark.parametrize("spec", [QWEN, V3], ids=["Qwen", "V3"])
def test_a_token_s_choice_does_not_depend_on_the_others(spec: Experts) -> None:
    """To the last bit, and again: the counters are ready for the next product."""
    generator = torch.Generator().manual_seed(3)
    fast = triton_kernels().matrices.router(torch.randn(spec.count, HIDDEN, generator=generator), None)
    x, correction = torch.randn(37, HIDDEN, generator=generator), torch.zeros(spec.count)
    correction = correction if spec.correction else None
    together = fast.choose_experts(x, spec, None, correction)
    for token in (0, 15, 16, 36):
        alone = fast.choose_experts(x[token : token + 1], spec, None, correction)
        assert all(torch.equal(one[0], many[token]) for one, many in zip(alone, together, strict=True))
    assert fast.through.eq(0).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_token_that_is_no_number_leaves_the_others_as_they_are() -> None:
    fast, _ = random_router(QWEN, torch.float32)
    x = random_tokens(3, torch.float32)
    want = fast.choose_experts(x, QWEN, None, None)
    x[1, 7] = torch.nan
    got = fast.choose_experts(x, QWEN, None, None)
    assert ((got[0] >= 0) & (got[0] < QWEN.count)).all()
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one[[0, 2]], other[[0, 2]])


def test_a_router_takes_other_weights_in_place() -> None:
    fast, _ = random_router(QWEN, torch.float16)
    weight, place = torch.randn(QWEN.count, HIDDEN).half(), fast.weight.data_ptr()
    fast.replace(weight)
    assert torch.equal(fast.weight, weight) and fast.weight.data_ptr() == place


def test_every_variant_is_launched_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, _ = random_router(QWEN, torch.float32)
    seen: list[tuple[int, object]] = []
    monkeypatch.setattr(TritonRouter, "__call__", lambda self, x: seen.append((len(x), None)))
    monkeypatch.setattr(TritonRouter, "choose_experts", lambda self, x, spec, *_: seen.append((len(x), spec)))
    # Programs of many tokens read all columns once there are 114 blocks of 64 tokens.
    for most, sizes in ((1, [1]), (FEW, [1, 2, 5]), (FEW + 1, [1, 2, 5, FEW + 1]), (8000, [1, 2, 5, FEW + 1, 7233])):
        seen.clear()
        for launch in fast.launches(most, [QWEN, V3]):
            launch()
        assert seen == [(size, spec) for spec in (None, QWEN) for size in sizes]
