"""Experts as compiled for the card, bfloat16 and CUDA graphs included, against those in torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed

from tests.cpu.matrices import KINDS, MXFP4, random_stacks
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.shape import Experts
from weft.ranks.kernels.experts import choose_experts
from weft.ranks.kernels.matrices import ExpertStack, FusedMLP
from weft.ranks.kernels.plain import create_plain_kernels
from weft.ranks.kernels.triton import routing
from weft.ranks.kernels.triton.experts import MAX_SHARED_TOKENS, TritonExperts
from weft.ranks.kernels.triton.kernels import TritonMatrices
from weft.ranks.kernels.triton.pointwise import silu_mul
from weft.ranks.kernels.triton.router import create_router
from weft.ranks.kernels.usable import multiprocessor_count
from weft.ranks.quant.dense import RouterProduct
from weft.ranks.quant.quantised import QuantisedWeight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")

CUDA = torch.device("cuda")
# Of the largest number of a result: weights, activated rows and parts are rounded.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 4e-2}
SMALL = Experts(count=7, top_k=3, width=96)
GPT_OSS = changed(SMALL, bias=True, limit=1.0, gain=1.702, up_offset=1.0)
WIDE = Experts(count=64, top_k=8, width=320)
V3 = Experts(
    count=256,
    top_k=8,
    width=8,
    scoring="sigmoid",
    correction=True,
    scaling=2.5,
    groups=8,
    top_groups=4,
    group_score="top2",
)
Stacks = tuple[ExpertStack, ExpertStack]


def there(stacks: Stacks) -> Stacks:
    def moved(stack: ExpertStack) -> ExpertStack:
        weight, bias = stack.weight, None if stack.bias is None else stack.bias.to(CUDA)
        if isinstance(weight, torch.Tensor):
            return ExpertStack(stack.name, weight.to(CUDA), bias)
        lowest = None if weight.lowest is None else weight.lowest.to(CUDA)
        values, scales = weight.values.to(CUDA), weight.scales.to(CUDA)
        return ExpertStack(stack.name, replace(weight, values=values, scales=scales, lowest=lowest), bias)

    return moved(stacks[0]), moved(stacks[1])


def create(spec: Experts, stacks: Stacks, first: int = 0) -> TritonExperts:
    experts = TritonMatrices(multiprocessor_count(CUDA)).experts(spec, *stacks, first)
    assert isinstance(experts, TritonExperts)
    return experts


def random_step(spec: Experts, tokens: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Tokens, the experts that they choose, and their shares."""
    scores = torch.randn(tokens, spec.count, device=CUDA)
    return (torch.randn(tokens, hidden, device=CUDA).to(dtype), *choose_experts(scores, spec))


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert (got.double() - want.double()).abs().max() <= TOLERANCE[dtype] * want.double().abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("type", [None, *KINDS, MXFP4])
@pytest.mark.parametrize(
    ("spec", "hidden", "columns"),
    [(SMALL, 96, None), (SMALL, 96, Span(32, 96)), (GPT_OSS, 96, None), (WIDE, 512, None)],
    ids=["small", "some columns", "biases and limits", "wide"],
)
def test_experts(type: str | None, dtype: torch.dtype, spec: Experts, hidden: int, columns: Span | None) -> None:
    stacks = there(random_stacks(spec, hidden, dtype, type, columns))
    fast, plain = create(spec, stacks), create_plain_kernels().matrices.experts(spec, *stacks, 0)
    for tokens in (1, 2, 17, 100, 600, 3000):
        step = random_step(spec, tokens, hidden, dtype)
        got = fast(*step)
        assert_close(got, plain(*step), dtype)
        for _ in range(5):  # in whatever order the programs come to their ends
            assert torch.equal(fast(*step), got), "equal batches give equal bits"


@pytest.mark.parametrize("columns", [Span(0, 39), Span(39, 64)], ids=["39 columns", "25 columns"])
def test_columns_that_fill_no_unit(columns: Span) -> None:
    spec, dtype = Experts(count=5, top_k=2, width=64), torch.bfloat16
    stacks = there(random_stacks(spec, 96, dtype, columns=columns))
    fast, plain = create(spec, stacks), create_plain_kernels().matrices.experts(spec, *stacks, 0)
    step = random_step(spec, 40, 96, dtype)
    assert_close(fast(*step), plain(*step), dtype)


@pytest.mark.parametrize("tokens", [1, 200])
def test_experts_of_other_ranks_and_padding_add_nothing(tokens: int) -> None:
    dtype, whole = torch.float32, there(random_stacks(WIDE, 96, torch.float32))
    x, chosen, shares = random_step(WIDE, tokens, 96, dtype)
    total = torch.zeros_like(x)
    for held in (Span(0, 21), Span(21, 22), Span(22, 64)):
        part = tuple(stack._replace(weight=stack.weight[held.start : held.stop].clone()) for stack in whole)
        total += create(WIDE, (part[0], part[1]), held.start)(x, chosen, shares)
    everything = create(WIDE, whole)
    assert_close(total, everything(x, chosen, shares), dtype)
    padded = torch.cat((x, torch.full_like(x[:1], torch.nan)))
    chosen, shares = torch.cat((chosen, torch.full_like(chosen[:1], -1))), torch.cat((shares, shares[:1]))
    got = everything(padded, chosen, shares)
    assert got[-1].eq(0).all() and got.isfinite().all()


@pytest.mark.parametrize("type", [None, "Q4_1", MXFP4])
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_a_mixture_is_captured(type: str | None, tokens: int) -> None:
    """A graph takes whatever the tokens choose when it is replayed."""
    dtype = torch.bfloat16
    experts = create(WIDE, there(random_stacks(WIDE, 512, dtype, type)))
    x, chosen, shares = random_step(WIDE, tokens, 512, dtype)
    experts(x, chosen, shares)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, chosen, shares)
    others = [random_step(WIDE, tokens, 512, dtype) for _ in range(3)]
    others.append((others[0][0], torch.full_like(chosen, 5), shares))
    others.append((others[0][0], torch.full_like(chosen, -1), shares))
    for step in others:
        for held, values in zip((x, chosen, shares), step, strict=True):
            held.copy_(values)
        graph.replay()
        torch.testing.assert_close(out, experts(*step), rtol=0, atol=0)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("count", "top_k"), [(8, 2), (32, 4), (60, 4), (128, 8)])
def test_choice(count: int, top_k: int, normalised: bool) -> None:
    spec = Experts(count=count, top_k=top_k, width=8, normalised=normalised)
    scores = torch.randn(5000, count, device=CUDA) * 3
    slots = torch.arange(5000, device=CUDA) % 10 - 1
    got, want = routing.choose_experts(scores, spec, slots), choose_experts(scores, spec, slots)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


@pytest.mark.parametrize(
    "fields",
    [
        {"count": 160, "top_k": 6, "groups": 8, "top_groups": 3, "scaling": 16.0, "normalised": False},
        {"count": 256, "groups": 8, "top_groups": 4, "group_score": "top2", "scoring": "sigmoid", "correction": True},
        {"count": 384, "scoring": "sigmoid", "correction": True, "scaling": 2.827},
        {"count": 64, "top_k": 6, "normalised": False},
    ],
    ids=["DeepSeek-V2", "DeepSeek-V3", "Kimi-K2", "DeepSeek-V2-Lite"],
)
def test_choice_as_deepseek_has_it(fields: dict[str, Any]) -> None:
    spec = Experts(**{"top_k": 8, "width": 8, **fields})
    scores, slots = torch.randn(5000, spec.count, device=CUDA) * 3, torch.arange(5000, device=CUDA) % 10 - 1
    correction = torch.randn(spec.count, device=CUDA) if spec.correction else None
    got, want = (choose(scores, spec, slots, correction) for choose in (routing.choose_experts, choose_experts))
    # Weights that differ in the last bit may change places.
    assert (got[0] == want[0]).all(dim=1).float().mean() > 0.999
    torch.testing.assert_close(got[1].sort().values, want[1].sort().values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "hidden"),
    [
        (Experts(count=128, top_k=8, width=8), 2048),
        (Experts(count=32, top_k=4, width=8, bias=True), 2880),
        (V3, 7168),
    ],
    ids=["Qwen3-30B-A3B", "gpt-oss", "DeepSeek-V3"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routers(spec: Experts, hidden: int, dtype: torch.dtype) -> None:
    """Captured too, for other tokens at each replay: the scores that torch has in float32, and its choice by them."""
    weight = (torch.randn(spec.count, hidden, device=CUDA) / hidden**0.5).to(dtype)
    bias = torch.randn(spec.count, device=CUDA).to(dtype) if spec.bias else None
    correction = torch.randn(spec.count, device=CUDA) if spec.correction else None
    ours, theirs = create_router(weight, bias), RouterProduct(weight, bias)
    for tokens in (1, 3, 16, 64, 65, 256, 2048):
        x, slots = torch.randn(tokens, hidden, device=CUDA).to(dtype), torch.arange(tokens, device=CUDA) % 10 - 1
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
        ours.choose_experts(x, spec, slots, correction)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ours.choose_experts(x, spec, slots, correction)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            got, want = [part.clone() for part in out], choose_experts(theirs(x), spec, slots, correction)
            assert all(
                torch.equal(*both) for both in zip(got, ours.choose_experts(x, spec, slots, correction), strict=True)
            )
            # Scores that differ in the last bits may change places.
            assert (got[0] == want[0]).all(dim=1).float().mean() > 0.99
            torch.testing.assert_close(got[1].sort().values, want[1].sort().values, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 16, MAX_SHARED_TOKENS])
@pytest.mark.parametrize("type", [None, "Q4_1", MXFP4])
def test_shared_experts_beside_the_routed_ones(type: str | None, tokens: int, gated: bool) -> None:
    """Captured too: in one pass, what both give apart."""
    dtype, spec = torch.bfloat16, WIDE
    matrices = TritonMatrices(multiprocessor_count(CUDA))
    experts = matrices.experts(spec, *there(random_stacks(spec, 512, dtype, type)), 0)
    one = there(random_stacks(changed(spec, count=1, width=640), 512, dtype, type))
    gate_up, down = (matrices.matrix(stack.weight.select(0, 0), None, f"shared {stack.name}") for stack in one)
    mixture = matrices.mixture(experts, FusedMLP(gate_up, down))
    assert mixture
    step, gate = random_step(spec, tokens, 512, dtype), torch.randn(tokens, 1, device=CUDA) if gated else None
    apart = down(silu_mul(gate_up(step[0]))).float() * (1.0 if gate is None else gate.sigmoid())
    assert_close(mixture(*step, gate), experts(*step).float() + apart, dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixture(*step, gate)
    graph.replay()
    torch.testing.assert_close(out, mixture(*step, gate), rtol=0, atol=0)


@pytest.mark.parametrize(("tokens", "count", "size"), [(1, 128, 16), (300, 60, 32), (8192, 128, 128)])
def test_rows_are_sorted_by_expert(tokens: int, count: int, size: int) -> None:
    chosen = choose_experts(torch.randn(tokens, count, device=CUDA), Experts(count=count, top_k=4, width=8))[0]
    routed = torch.zeros(count, dtype=torch.int64, device=CUDA)
    members, owners = (part.cpu() for part in routing.sort_rows(chosen.contiguous(), 0, routed, size))
    used = owners >= 0
    assert torch.equal(owners[used], owners[used].sort().values), "blocks lie in the order of experts"
    rows = members[used].flatten()
    flat = chosen.flatten().cpu()
    assert torch.equal(rows[rows >= 0].long(), flat.argsort(stable=True))
    assert torch.equal(routed.cpu(), flat.bincount(minlength=count))
    assert owners[used].long().repeat_interleave(size)[rows >= 0].equal(flat.sort().values)


def test_mxfp4_scales_of_any_size() -> None:
    """The smallest and the largest powers that a bfloat16 holds."""
    spec = Experts(count=2, top_k=1, width=32)
    for byte in (20, 127, 200):
        weight = QuantisedWeight.empty(MXFP4, 64, Span(0, 32), torch.float32, CUDA, (2,))
        down = QuantisedWeight.empty(MXFP4, 32, Span(0, 32), torch.float32, CUDA, (2,))
        for stack, scale in ((weight, 127), (down, byte)):
            stack.values.random_(0, 256)
            stack.scales.fill_(scale)
        stacks = ExpertStack("gate_up", weight, None), ExpertStack("down", down, None)
        fast, plain = create(spec, stacks), create_plain_kernels().matrices.experts(spec, *stacks, 0)
        step = random_step(spec, 9, 32, torch.float32)
        assert_close(fast(*step), plain(*step), torch.float32)
