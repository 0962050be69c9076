"""Mixtures of experts on GPUs, in Triton's interpreter, against those in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed

from tests.cpu.kernels import triton_kernels
from tests.cpu.matrices import KINDS, MXFP4, TYPICAL_KINDS, random_stacks
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.shape import Experts
from weft.plan.backends import against_fused_experts
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.experts import choose_experts
from weft.ranks.kernels.matrices import ExpertProducts, ExpertStack, FusedMLP
from weft.ranks.kernels.plain import create_plain_kernels

pytest.importorskip("triton", reason="needs triton")

from weft.ranks.kernels.triton import routing
from weft.ranks.kernels.triton.experts import TritonExperts

HIDDEN = 96
FIVE, SEVEN = Experts(count=5, top_k=2, width=64), Experts(count=7, top_k=3, width=96)
GPT_OSS = changed(SEVEN, bias=True, limit=1.0, gain=1.702, up_offset=1.0)
# Triton's interpreter multiplies bfloat16 matrices wrongly: tests/gpu has that.
CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 1e-2, "atol": 1e-2},
}
# The interpreter computes with numpy.
NOT_FINITE = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
Stacks = tuple[ExpertStack, ExpertStack]


def compare(
    spec: Experts,
    stacks: Stacks,
    dtype: torch.dtype,
    tokens: int,
    *,
    choice: tuple[torch.Tensor, torch.Tensor] | None = None,
    first: int = 0,
    processors: int = 1,
) -> torch.Tensor:
    """The result of the experts in Triton, which is that of the experts in torch."""
    fast = triton_kernels(processors).matrices.experts(spec, *stacks, first)
    assert isinstance(fast, TritonExperts)
    x, (chosen, shares) = random_tokens(tokens, dtype), choice or random_choice(spec, tokens)
    got = fast(x, chosen, shares)
    assert got.dtype == dtype
    plain = create_plain_kernels().matrices.experts(spec, *stacks, first)
    torch.testing.assert_close(got, plain(x, chosen, shares), **CLOSE[dtype])
    return got


def random_choice(spec: Experts, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return choose_experts(torch.randn(tokens, spec.count, generator=generator), spec)


def random_tokens(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(dtype)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("tokens", [1, 50])
@pytest.mark.parametrize("columns", [None, Span(0, 39)], ids=["all columns", "39 columns"])
def test_experts(dtype: torch.dtype, tokens: int, columns: Span | None) -> None:
    compare(SEVEN, random_stacks(SEVEN, HIDDEN, dtype, columns=columns), dtype, tokens, processors=100)


COLUMNS = {"all columns": None, "64 columns": Span(32, 96)}


@pytest.mark.parametrize(
    ("type", "columns"),
    [
        pytest.param(
            kind,
            span,
            marks=[pytest.mark.long] * (kind not in TYPICAL_KINDS and number % 2 != place),
            id=f"{kind}-{name}",
        )
        for number, kind in enumerate([*KINDS, MXFP4])
        for place, (name, span) in enumerate(COLUMNS.items())
    ],
)
def test_quantised_experts(type: str, columns: Span | None) -> None:
    compare(SEVEN, random_stacks(SEVEN, HIDDEN, torch.float32, type, columns), torch.float32, 5)


@pytest.mark.parametrize("type", [None, "Q4_1", MXFP4])
def test_biases_a_limit_and_an_offset(type: str | None) -> None:
    dtype = torch.float16
    compare(GPT_OSS, random_stacks(GPT_OSS, HIDDEN, dtype, type), dtype, 11)


@pytest.mark.parametrize("tokens", [1, 40])
def test_all_tokens_choose_one_expert(tokens: int) -> None:
    spec = changed(FIVE, top_k=1)
    choice = torch.full((tokens, 1), 3), torch.rand(tokens, 1)
    compare(spec, random_stacks(spec, HIDDEN, torch.float32), torch.float32, tokens, choice=choice)


def test_experts_of_other_ranks_add_nothing() -> None:
    """The parts of all ranks add up to the whole, and tokens whose experts are all elsewhere get zeros."""
    whole = random_stacks(SEVEN, HIDDEN, torch.float32)
    choice, total = random_choice(SEVEN, 9), torch.zeros(9, HIDDEN)
    for held in (Span(0, 3), Span(3, 4), Span(4, 7)):
        stacks = tuple(stack._replace(weight=stack.weight[held.start : held.stop]) for stack in whole)
        part = compare(SEVEN, (stacks[0], stacks[1]), torch.float32, 9, choice=choice, first=held.start)
        here = ((choice[0] >= held.start) & (choice[0] < held.stop)).any(dim=1)
        assert not here.all() and part[~here].eq(0).all()
        total += part
    torch.testing.assert_close(total, compare(SEVEN, whole, torch.float32, 9), **CLOSE[torch.float32])


@NOT_FINITE
def test_padding_rows_disturb_nobody() -> None:
    """They choose no expert, whatever they hold, and the others get the same bits as without them."""
    experts = triton_kernels().matrices.experts(SEVEN, *random_stacks(SEVEN, HIDDEN, torch.float32), 0)
    x, scores = random_tokens(4, torch.float32), torch.randn(4, SEVEN.count)
    x[3], scores[3] = torch.nan, torch.nan
    chosen, shares = triton_kernels().pointwise.choose_experts(scores, SEVEN, torch.tensor([7, 0, 3, -1]))
    assert chosen[3].eq(-1).all() and chosen[:3].ge(0).all()
    got = experts(x, chosen, shares)
    assert got[3].eq(0).all() and torch.equal(got[:3], experts(x[:3], chosen[:3], shares[:3]))


@NOT_FINITE
def test_numbers_that_are_not_finite_stay_so_behind_a_limit() -> None:
    experts = triton_kernels().matrices.experts(GPT_OSS, *random_stacks(GPT_OSS, HIDDEN, torch.float32), 0)
    x = random_tokens(2, torch.float32)
    x[1, 5] = torch.nan
    got = experts(x, *random_choice(GPT_OSS, 2))
    assert got[0].isfinite().all() and got[1].isnan().all()


def test_a_token_s_bits_do_not_depend_on_the_others() -> None:
    experts = triton_kernels().matrices.experts(SEVEN, *random_stacks(SEVEN, HIDDEN, torch.float32), 0)
    x, (chosen, shares) = random_tokens(9, torch.float32), random_choice(SEVEN, 9)
    together = experts(x, chosen, shares)
    for token in (0, 8):
        alone = slice(token, token + 1)
        assert torch.equal(experts(x[alone], chosen[alone], shares[alone])[0], together[token])
    assert experts(x[:0], chosen[:0], shares[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("normalised", [True, False])
def test_choice(normalised: bool) -> None:
    spec = Experts(count=37, top_k=5, width=8, normalised=normalised)
    scores = torch.randn(60, spec.count, generator=torch.Generator().manual_seed(5)) * 3
    scores[:20] = scores[:20].round()  # equal scores: the lower number comes first
    got, want = triton_kernels().pointwise.choose_experts(scores, spec), choose_experts(scores, spec)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("type", "tokens"), [(None, 5), (None, 40), ("Q4_16_MIN", 5), (MXFP4, 3)], ids=lambda value: str(value)
)
def test_shared_experts_beside_the_routed_ones(type: str | None, tokens: int, gated: bool) -> None:
    """In one pass, on a rank that has some experts and a share of the columns of the shared ones."""
    dtype = torch.float32
    spec = changed(SEVEN, shared=1, shared_width=64, shared_gate=gated)
    stacks = random_stacks(changed(spec, count=3), HIDDEN, dtype, type)
    two = random_stacks(changed(spec, count=2, width=64), HIDDEN, dtype, type)
    gate = torch.randn(tokens, 1) if gated else None
    x, (chosen, shares) = random_tokens(tokens, dtype), random_choice(spec, tokens)

    def parts(kernels: Kernels) -> tuple[ExpertProducts, FusedMLP]:
        matrices = kernels.matrices
        experts = matrices.experts(spec, *stacks, 2)
        products = [matrices.matrix(stack.weight.select(0, 0), None, f"shared {stack.name}") for stack in two]
        return experts, FusedMLP(*products)

    plain = create_plain_kernels()
    experts, shared = parts(plain)
    factor = 1.0 if gate is None else gate.sigmoid()
    want = experts(x, chosen, shares) + shared.down(plain.pointwise.silu_mul(shared.gate_up(x))) * factor
    kernels = triton_kernels()
    mixture = kernels.matrices.mixture(*parts(kernels))
    assert mixture and mixture.most_tokens >= 40
    torch.testing.assert_close(mixture(x, chosen, shares, gate), want, **CLOSE[dtype])
    kernels.matrices.replace(f"shared {two[0].name}", two[0].weight.select(0, 1))
    assert not torch.allclose(mixture(x, chosen, shares, gate), want, rtol=1e-2), "it reads the product's own memory"


def test_shared_experts_apart() -> None:
    """Weights of another scheme, biases and gates of another form are not multiplied in one launch."""
    matrices = triton_kernels().matrices
    experts = matrices.experts(SEVEN, *random_stacks(SEVEN, HIDDEN, torch.float32), 0)
    gpt_oss = matrices.experts(GPT_OSS, *random_stacks(GPT_OSS, HIDDEN, torch.float32), 0)

    def shared(type: str | None, bias: torch.Tensor | None = None) -> FusedMLP:
        one = random_stacks(changed(SEVEN, count=1), HIDDEN, torch.float32, type)
        return FusedMLP(*(matrices.matrix(stack.weight.select(0, 0), bias, f"{type} {stack.name}") for stack in one))

    assert matrices.mixture(experts, shared(None))
    assert matrices.mixture(experts, shared(MXFP4)) is None
    assert matrices.mixture(experts, shared(None, torch.zeros(HIDDEN))) is None
    assert matrices.mixture(gpt_oss, shared(None)) is None
    assert create_plain_kernels().matrices.mixture(experts, shared(None)) is None


# 36 experts in groups of 6, 9 or 12: none is a power of two. Kimi-K2 has one group, of corrected sigmoids.
DEEPSEEK: dict[str, dict[str, Any]] = {
    "scaled": {"scaling": 2.5},
    "V2": {"groups": 6, "top_groups": 2, "scaling": 16.0},
    "V3": {"scoring": "sigmoid", "correction": True, "groups": 4, "top_groups": 2, "group_score": "top2"},
    "three groups": {"scoring": "sigmoid", "groups": 3, "top_groups": 2, "group_score": "top2"},
    "no groups": {"scoring": "sigmoid", "correction": True},
}


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("name", DEEPSEEK)
def test_choice_as_deepseek_has_it(name: str, normalised: bool) -> None:
    spec = Experts(count=36, top_k=5, width=8, normalised=normalised, **DEEPSEEK[name])
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(60, spec.count, generator=generator) * 3
    scores[:20] = scores[:20].round()  # equal scores: the lower number comes first
    correction = torch.randn(spec.count, generator=generator) if spec.correction else None
    slots = torch.arange(60) - 10
    got = triton_kernels().pointwise.choose_experts(scores, spec, slots, correction)
    want = choose_experts(scores, spec, slots, correction)
    assert torch.equal(got[0], want[0]) and want[0][:10].eq(-1).all()
    torch.testing.assert_close(got[1], want[1])


@NOT_FINITE
@pytest.mark.parametrize("name", ["V2", "V3"])
def test_grouped_choice_among_scores_that_are_not_finite(name: str) -> None:
    spec = Experts(count=36, top_k=5, width=8, **DEEPSEEK[name])
    scores = torch.full((3, 36), torch.nan)
    scores[1, 2:4] = 1.0
    scores[2] = -torch.inf
    correction = torch.zeros(36) if spec.correction else None
    chosen, _ = triton_kernels().pointwise.choose_experts(scores, spec, None, correction)
    assert all(len({*row}) == 5 and {*row} <= {*range(36)} for row in chosen.tolist())


@NOT_FINITE
def test_choice_among_scores_that_are_not_finite() -> None:
    spec = Experts(count=6, top_k=4, width=8)
    scores = torch.full((3, 6), torch.nan)
    scores[1, 2:4] = 1.0
    scores[2] = -torch.inf
    chosen, _ = triton_kernels().pointwise.choose_experts(scores, spec)
    assert all(len({*row}) == 4 and {*row} <= {*range(6)} for row in chosen.tolist())


@pytest.mark.parametrize(("first", "count"), [(0, 7), (2, 3)])
@pytest.mark.parametrize("size", [2, 3, 16])  # 3: other libraries have such blocks
@pytest.mark.parametrize("alone", [64, 38], ids=["one launch", "three launches"])
@pytest.mark.parametrize("even", [True, False], ids=["alike", "one expert"])
def test_rows_are_sorted_by_expert(
    first: int, count: int, size: int, alone: int, even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "PAIRS", 16)
    monkeypatch.setattr(routing, "PAIRS_EACH", 16)
    monkeypatch.setattr(routing, "PLACED", 64)
    monkeypatch.setattr(routing, "ADDED", (2, 4))
    monkeypatch.setattr(routing, "MOST_ALONE", alone)
    chosen = random_choice(SEVEN, 13)[0].contiguous() if even else torch.full((13, 3), 4)
    chosen[5] = -1  # a padding row
    routed = torch.full((count,), 100)
    members, owners = routing.sort_rows(chosen, first, routed, size)
    rows: dict[int, list[int]] = {expert: [] for expert in range(count)}
    for owner, block in zip(owners.tolist(), members.tolist(), strict=True):
        if owner >= 0:
            assert sorted(block, key=lambda row: row < 0) == block, "padding comes last"
            rows[owner] += [row for row in block if row >= 0]
    flat = chosen.flatten().tolist()
    assert rows == {
        expert: [row for row, number in enumerate(flat) if number == first + expert] for expert in range(count)
    }
    assert routed.tolist() == [100 + len(rows[expert]) for expert in range(count)]


@pytest.mark.parametrize("count", [1, 3, 40])
def test_no_choice_needs_more_blocks(count: int) -> None:
    for rows in range(1, 50):
        for size in (1, 4, 16):
            # As many experts as possible have one row more than full blocks.
            single = min(rows, count)
            needed = single + (rows - single) // size
            assert routing.most_blocks(rows, count, size) == needed


@pytest.mark.parametrize("type", [None, "Q4_16_MIN", MXFP4])
def test_weights_are_replaced(type: str | None) -> None:
    dtype = torch.float32
    matrices, stacks = triton_kernels().matrices, random_stacks(FIVE, HIDDEN, dtype, type)
    x, choice = random_tokens(4, dtype), random_choice(FIVE, 4)
    experts = matrices.experts(FIVE, *stacks, 0)
    before = experts(x, *choice)
    for stack in random_stacks(FIVE, HIDDEN, dtype, type):
        matrices.replace(stack.name, stack.weight[[0] * 5] if type is None else stack.weight)
    assert torch.equal(experts(x, *choice), before) == (type is not None)


def test_other_gates_are_computed_one_by_one() -> None:
    spec = changed(FIVE, activation="gelu")
    assert against_fused_experts("triton", spec) and against_fused_experts("torch", FIVE)
    assert against_fused_experts("triton", FIVE) is None
    stacks = random_stacks(spec, HIDDEN, torch.float32)
    assert not triton_kernels().matrices.experts(spec, *stacks, 0).capturable
    assert triton_kernels().matrices.experts(FIVE, *stacks, 0).capturable
