"""Mixtures of experts: the C++ kernels against those in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from msgspec.structs import replace as changed

from tests.cpu.attention import ragged, with_turns
from tests.cpu.kernels import native
from tests.cpu.matrices import KINDS, MXFP4, random, random_stacks
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.shape import Experts
from weft.ranks.comm import Solo
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.experts import choose_experts
from weft.ranks.kernels.fused import FusedLayer, FusedMixture
from weft.ranks.kernels.matrices import ExpertProducts, ExpertStack, FusedMLP
from weft.ranks.kernels.plain import create_plain_kernels
from weft.ranks.quant.quantised import QuantisedWeight

HIDDEN = 96
FIVE, SEVEN = Experts(count=5, top_k=2, width=64), Experts(count=7, top_k=3, width=96)
BOTH = torch.float32, torch.bfloat16


def both(
    spec: Experts, stacks: tuple[ExpertStack, ExpertStack], dtype: torch.dtype, first: int = 0
) -> tuple[ExpertProducts, ExpertProducts]:
    """The experts in C++ and in torch."""
    return native(dtype).matrices.experts(spec, *stacks, first), create_plain_kernels().matrices.experts(
        spec, *stacks, first
    )


def random_choice(spec: Experts, tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return choose_experts(torch.randn(tokens, spec.count, generator=generator), spec)


def random_tokens(tokens: int, dtype: torch.dtype, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, quantised: bool = False) -> None:
    """Equal but for rounding: of activations to 8 bits if weights are quantised, else to their dtype."""
    size = float(want.float().abs().mean())
    error = (got.float() - want.float()).abs()
    largest, usual = (0.3, 0.03) if quantised else (0.1, 0.01) if dtype == torch.bfloat16 else (1e-4, 1e-5)
    assert float(error.max()) <= largest * size and float(error.mean()) <= usual * size


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("tokens", [1, 2, 9, 150])
@pytest.mark.parametrize("spec", [FIVE, SEVEN], ids=["5 experts", "7 experts"])
@pytest.mark.parametrize("columns", [None, Span(0, 39), Span(39, 64)], ids=["all columns", "39 columns", "25 columns"])
def test_experts(spec: Experts, dtype: torch.dtype, tokens: int, columns: Span | None) -> None:
    fast, plain = both(spec, random_stacks(spec, HIDDEN, dtype, columns=columns), dtype)
    x, choice = random_tokens(tokens, dtype), random_choice(spec, tokens)
    assert_close(fast(x, *choice), plain(x, *choice), dtype)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("type", [*KINDS, MXFP4])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("columns", [None, Span(32, 96)], ids=["all columns", "64 columns"])
def test_quantised_experts(type: str, tokens: int, columns: Span | None, dtype: torch.dtype) -> None:
    fast, plain = both(SEVEN, random_stacks(SEVEN, HIDDEN, dtype, type, columns), dtype)
    x, choice = random_tokens(tokens, dtype), random_choice(SEVEN, tokens)
    assert_close(fast(x, *choice), plain(x, *choice), dtype, quantised=True)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("type", [None, "Q4_1"])
def test_biases_a_limit_and_an_offset(dtype: torch.dtype, type: str | None) -> None:
    spec = changed(SEVEN, bias=True, limit=1.0, gain=1.702, up_offset=1.0)
    fast, plain = both(spec, random_stacks(spec, HIDDEN, dtype, type), dtype)
    x, choice = random_tokens(11, dtype), random_choice(spec, 11)
    assert_close(fast(x, *choice), plain(x, *choice), dtype, quantised=type is not None)


def test_tokens_of_each_expert_are_counted() -> None:
    """Over several calls, and of this rank's experts only; a token without experts counts nowhere."""
    stacks = random_stacks(SEVEN, HIDDEN, torch.float32)
    held = tuple(stack._replace(weight=stack.weight[2:6]) for stack in stacks)
    chosen = [random_choice(SEVEN, tokens, seed=tokens) for tokens in (1, 30, 9)]
    chosen[1][0][4] = -1
    all_chosen = torch.cat([one[0].flatten() for one in chosen]).tolist()
    for experts in both(SEVEN, (held[0], held[1]), torch.float32, first=2):
        for one in chosen:
            experts(random_tokens(len(one[0]), torch.float32), *one)
        assert experts.routed.tolist() == [all_chosen.count(number) for number in range(2, 6)]


@pytest.mark.parametrize("tokens", [1, 30])
def test_all_tokens_choose_one_expert(tokens: int) -> None:
    spec = changed(FIVE, top_k=1)
    fast, plain = both(spec, random_stacks(spec, HIDDEN, torch.float32), torch.float32)
    x = random_tokens(tokens, torch.float32)
    choice = torch.full((tokens, 1), 3), torch.rand(tokens, 1)
    assert_close(fast(x, *choice), plain(x, *choice), torch.float32)


@pytest.mark.parametrize("tokens", [1, 30])
def test_experts_of_other_ranks_add_nothing(tokens: int) -> None:
    """The parts of all ranks add up to the whole, and tokens whose experts are all elsewhere get zeros."""
    whole = random_stacks(SEVEN, HIDDEN, torch.float32)
    x, choice = random_tokens(tokens, torch.float32), random_choice(SEVEN, tokens)
    total = torch.zeros_like(x)
    for held in (Span(0, 3), Span(3, 4), Span(4, 7)):
        stacks = tuple(stack._replace(weight=stack.weight[held.start : held.stop]) for stack in whole)
        fast, plain = both(SEVEN, (stacks[0], stacks[1]), torch.float32, held.start)
        part = fast(x, *choice)
        here = ((choice[0] >= held.start) & (choice[0] < held.stop)).any(dim=1)
        assert part[~here].eq(0).all()
        assert torch.allclose(part, plain(x, *choice), atol=1e-5)
        total += part
    fast, _ = both(SEVEN, whole, torch.float32)
    assert torch.allclose(total, fast(x, *choice), atol=1e-5)


def test_more_rows_than_are_computed_at_once() -> None:
    spec = Experts(count=5, top_k=4, width=8)
    fast, plain = both(spec, random_stacks(spec, 32, torch.float32), torch.float32)
    x, choice = random_tokens(2500, torch.float32, 32), random_choice(spec, 2500)
    assert_close(fast(x, *choice), plain(x, *choice), torch.float32)


@pytest.mark.parametrize("type", [None, "Q4_0"])
def test_a_token_s_result_does_not_depend_on_the_others(type: str | None) -> None:
    dtype = torch.float32
    fast, _ = both(SEVEN, random_stacks(SEVEN, HIDDEN, dtype, type), dtype)
    x, (chosen, shares) = random_tokens(70, dtype), random_choice(SEVEN, 70)
    together = fast(x, chosen, shares)
    for token in (0, 31, 69):
        alone = fast(x[token : token + 1], chosen[token : token + 1], shares[token : token + 1])
        torch.testing.assert_close(alone[0], together[token], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("type", [None, "Q8_0"])
@pytest.mark.parametrize("tokens", [1, 20, 200])
def test_any_number_of_threads_gives_the_same_bits(type: str | None, tokens: int) -> None:
    spec, dtype = Experts(count=6, top_k=4, width=224), torch.bfloat16
    fast, _ = both(spec, random_stacks(spec, 256, dtype, type), dtype)
    x, choice = random_tokens(tokens, dtype, 256), random_choice(spec, tokens)
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        results.append(fast(x, *choice))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("type", [None, "Q4_1"])
@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("tokens", [1, 70])
def test_a_fused_layer_with_shared_experts(type: str | None, weighed: bool, tokens: int) -> None:
    """The result of its parts one by one, with routed and shared experts in different schemes."""
    dtype, width, kernels = torch.float32, 160, native(torch.float32)
    torch.manual_seed(4)
    stacks = random_stacks(SEVEN, HIDDEN, dtype, None if type else "Q8_0")
    matrix = kernels.matrices.matrix

    def weight(rows: int, cols: int) -> torch.Tensor | QuantisedWeight:
        return torch.randn(rows, cols) / cols**0.5 if type is None else random(type, rows, Span(0, cols), cols)

    layer = FusedLayer(
        attention_norm=torch.rand(HIDDEN),
        qkv=matrix(torch.randn(4 * 32, HIDDEN), None),
        head_norm=None,
        out=matrix(torch.randn(HIDDEN, 64) / 8, None),
        ffn_norm=torch.rand(HIDDEN),
        ffn=FusedMixture(
            SEVEN,
            kernels.matrices.router(torch.randn(SEVEN.count, HIDDEN), None),
            kernels.matrices.experts(SEVEN, *stacks, 0),
            FusedMLP(matrix(weight(2 * width, HIDDEN), None), matrix(weight(HIDDEN, width), None)),
            kernels.matrices.router(torch.randn(1, HIDDEN), None) if weighed else None,
        ),
        q_heads=2,
        window=None,
        scale=32**-0.5,
        sinks=None,
        eps=1e-5,
    )
    batch, blocks = ragged([tokens], [tokens], 16, seed=7)
    batch = with_turns(batch, 128)
    residual, angles = torch.randn(tokens, HIDDEN), torch.rand(128, 32)
    caches = [KVCache(*torch.zeros(2, blocks, 16, 1, 32)) for _ in range(2)]
    stage = kernels.fuse_layers([layer], Solo())
    assert stage is not None
    got = stage(residual.clone(), angles, caches[:1], batch)
    assert_close(got, layer_by_parts(layer, kernels, residual, angles, caches[1], batch), dtype, quantised=True)


def layer_by_parts(
    layer: FusedLayer, kernels: Kernels, residual: torch.Tensor, angles: torch.Tensor, cache: KVCache, batch: Batch
) -> torch.Tensor:
    pointwise, mixture = kernels.pointwise, layer.ffn
    assert isinstance(mixture, FusedMixture) and mixture.shared is not None
    qkv = layer.qkv(pointwise.norm(residual, layer.attention_norm, layer.eps))
    q = pointwise.rotate_and_store(qkv, layer.q_heads, angles, cache, batch, None)
    residual = residual + layer.out(kernels.attention.attend(q, cache, batch, layer.scale, None))
    x = pointwise.norm(residual, layer.ffn_norm, layer.eps)
    routed = mixture.experts(x, *pointwise.choose_experts(mixture.router(x), mixture.spec))
    shared = mixture.shared.down(pointwise.silu_mul(mixture.shared.gate_up(x)))
    if mixture.weigher is not None:
        shared = shared * mixture.weigher(x).sigmoid()
    return residual + routed + shared


@pytest.mark.parametrize("normalised", [True, False])
def test_choice(normalised: bool) -> None:
    spec = Experts(count=37, top_k=5, width=8, normalised=normalised)
    scores = torch.randn(200, spec.count, generator=torch.Generator().manual_seed(5)) * 3
    scores[:50] = scores[:50].round()  # equal scores: the lower number comes first
    got, want = native(torch.float32).pointwise.choose_experts(scores, spec), choose_experts(scores, spec)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {"scaling": 2.5},
        {"groups": 6, "top_groups": 2, "scaling": 16.0},
        {"scoring": "sigmoid", "correction": True, "groups": 4, "top_groups": 2, "group_score": "top2"},
        {"scoring": "sigmoid", "correction": True},
    ],
    ids=["scaled", "V2", "V3", "no groups"],
)
def test_choice_as_deepseek_has_it(fields: dict, normalised: bool) -> None:
    spec = Experts(count=36, top_k=5, width=8, normalised=normalised, **fields)
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(200, spec.count, generator=generator) * 3
    scores[:50] = scores[:50].round()  # equal scores: the lower number comes first
    correction = torch.randn(spec.count, generator=generator) if spec.correction else None
    got = native(torch.float32).pointwise.choose_experts(scores, spec, None, correction)
    want = choose_experts(scores, spec, None, correction)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


def test_choice_among_scores_that_are_not_finite() -> None:
    """Some experts, all different, so that nothing is read that is not there."""
    spec = Experts(count=6, top_k=4, width=8)
    scores = torch.full((3, 6), torch.nan)
    scores[1, 2:4] = 1.0
    scores[2] = -torch.inf
    chosen, _ = native(torch.float32).pointwise.choose_experts(scores, spec)
    assert all(len({*row}) == 4 and {*row} <= {*range(6)} for row in chosen.tolist())


@pytest.mark.parametrize("dtype", BOTH)
def test_scores_are_float32(dtype: torch.dtype) -> None:
    weight, x = torch.randn(5, HIDDEN).to(dtype), random_tokens(4, dtype)
    for kernels in (native(dtype), create_plain_kernels()):
        scores = kernels.matrices.router(weight, None)(x)
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores, x.float() @ weight.float().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("type", [None, "Q4_16_MIN"])
def test_weights_are_replaced(type: str | None) -> None:
    stacks = random_stacks(FIVE, HIDDEN, torch.float32, type)
    x, choice = random_tokens(4, torch.float32), random_choice(FIVE, 4)
    for matrices in (native(torch.float32).matrices, create_plain_kernels().matrices):
        experts = matrices.experts(FIVE, *stacks, 0)
        before = experts(x, *choice)
        for stack in stacks:
            matrices.replace(stack.name, flipped(stack.weight))
        assert torch.allclose(experts(x, 4 - choice[0], choice[1]), before, atol=1e-5)


def flipped(stack: torch.Tensor | QuantisedWeight) -> torch.Tensor | QuantisedWeight:
    """The matrices of a stack in reverse order."""
    if isinstance(stack, torch.Tensor):
        return stack.flip(0)
    assert stack.lowest is not None
    return replace(stack, values=stack.values.flip(0), scales=stack.scales.flip(0), lowest=stack.lowest.flip(0))
