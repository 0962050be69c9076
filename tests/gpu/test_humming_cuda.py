"""Products by humming-kernels as it compiles them for the card: the weights' own, eagerly and in graphs."""

from __future__ import annotations

import logging

import pytest
import torch
from msgspec.structs import replace as changed

from tests.cpu.matrices import random, random_stacks
from tests.gpu.test_products_cuda import there
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.shape import Experts
from weft.ranks.kernels.capture import capture_graph
from weft.ranks.kernels.experts import choose_experts
from weft.ranks.kernels.matrices import ExpertStack
from weft.ranks.kernels.usable import multiprocessor_count
from weft.ranks.quant.quantised import QuantisedWeight

pytest.importorskip("humming", reason="needs humming-kernels")

from weft.ranks.kernels.humming import check
from weft.ranks.kernels.humming.matrices import HummingMatrices
from weft.ranks.kernels.humming.products import HummingExperts, HummingMatrix

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")

CUDA = torch.device("cuda")
KINDS = ("Q4_0", "Q4_1", "Q4_16", "INT4_128", "INT8_ROW_SYM", "INT8", "Q8_0", "MXFP4", "FP8_128")
SMALL = Experts(count=8, top_k=2, width=128)
GPT_OSS = changed(SMALL, bias=True, limit=7.0, gain=1.702, up_offset=1.0)


def library(tokens: int) -> HummingMatrices:
    return HummingMatrices(CUDA, multiprocessor_count(CUDA), tokens)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("type", KINDS)
def test_a_matrix(type: str, biased: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "weft"):
        for rows, cols in ((1536, 2048), (264, 1152)):
            weight = there(random(type, rows, Span(0, cols), cols))
            bias = torch.randn(rows, device=CUDA).to(torch.bfloat16) if biased else None
            product = library(700).matrix(weight, bias, "m")
            assert isinstance(product, HummingMatrix), caplog.text
            for tokens in (1, 2, 8, 9, 33, 100, 256, 700):
                x = torch.randn(tokens, cols, device=CUDA).to(torch.bfloat16)
                want = check.multiply_exactly(x, weight, bias)
                assert check.difference(product(x), want, bias) < check.TOLERANCE, (rows, tokens)
    assert not caplog.records


@pytest.mark.parametrize("spec", [SMALL, GPT_OSS], ids=["plain", "gpt-oss"])
@pytest.mark.parametrize("type", ["MXFP4", "Q4_1", "Q4_0"])
def test_experts_in_a_graph(type: str, spec: Experts, caplog: pytest.LogCaptureFixture) -> None:
    """Tokens choose other experts at each replay."""
    with caplog.at_level(logging.WARNING, "weft"):
        stacks = of(spec, type)
        experts = library(64).experts(spec, *stacks, 0)
    assert isinstance(experts, HummingExperts), caplog.text
    assert not caplog.records
    for tokens in (1, 7, 64):
        replayed(experts, spec, stacks, tokens)


def replayed(experts: HummingExperts, spec: Experts, stacks: list[ExpertStack], tokens: int) -> None:
    """Compare three replays of a graph of so many tokens."""
    x = torch.randn(tokens, 256, device=CUDA).to(torch.bfloat16)
    chosen, shares = (part.to(CUDA) for part in choose_experts(torch.randn(tokens, spec.count), spec))
    experts(x, chosen, shares)
    out: list[torch.Tensor] = []
    graph = capture_graph(lambda: out.append(experts(x, chosen, shares)), torch.cuda.Stream())
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        choice = choose_experts(torch.randn(tokens, spec.count), spec)
        for target, source in zip((chosen, shares), choice, strict=True):
            target.copy_(source)
        graph.replay()
        want = torch.zeros(x.shape, device=CUDA)
        for expert in range(spec.count):
            share = (shares * (chosen == expert)).sum(1, keepdim=True)
            want += share * check.expert_exactly(x, spec, *stacks, expert)
        assert check.difference(out[0], want) < check.TOLERANCE, (tokens, seed)


def of(spec: Experts, type: str) -> list[ExpertStack]:
    """Random stacks on the card."""
    stacks = []
    for stack in random_stacks(spec, 256, torch.bfloat16, type):
        assert isinstance(stack.weight, QuantisedWeight)
        bias = None if stack.bias is None else stack.bias.to(CUDA)
        stacks.append(stack._replace(weight=there(stack.weight), bias=bias))
    return stacks
