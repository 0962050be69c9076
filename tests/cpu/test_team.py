"""The threads of the compiled CPU kernels: their team, and that it makes no difference how many it has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cpu.attention import ragged
from tests.cpu.kernels import native
from tests.cpu.matrices import random, random_stacks
from tests.cpu.programs import passes
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.shape import Experts
from weft.ranks.comm import Solo
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.fused import FusedLayer, FusedMixture
from weft.ranks.kernels.matrices import FusedMLP
from weft.ranks.kernels.native.matrix import NativeMatrix


def test_a_late_thread_is_not_waited_for_and_nothing_is_done_twice(tmp_path: Path) -> None:
    passes("team", tmp_path)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_any_number_of_threads_gives_the_same_bits(tokens: int) -> None:
    kernels = native(torch.bfloat16)
    torch.manual_seed(tokens)
    weight, x = torch.randn(1000, 576).bfloat16(), torch.randn(tokens, 576).bfloat16()
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        product = kernels.matrices.matrix(weight, None)(x)
        results.append((product, kernels.pointwise.silu_mul(product), kernels.pointwise.norm(x, weight[0], 1e-5)))
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("mixed", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("type", [None, "Q4_1"])
@pytest.mark.parametrize(
    ("counts", "contexts"),
    [([1], [40]), ([1, 1, 1], [3, 64, 17]), ([1, 20, 300], [7, 20, 310])],
    ids=["decode", "decodes", "mixed"],
)
def test_all_layers_of_a_stage_give_the_same_bits(
    type: str | None, counts: list[int], contexts: list[int], mixed: bool
) -> None:
    """The work between the products may be little or much, in chunks or at once."""
    hidden, q_heads, kv_heads, head_dim, inner = 256, 8, 2, 32, 416
    kernels, dtype = native(torch.bfloat16), torch.bfloat16
    torch.manual_seed(6)

    def matrix(rows: int, cols: int) -> NativeMatrix:
        weight = torch.randn(rows, cols).to(dtype) if type is None else random(type, rows, Span(0, cols), cols)
        return kernels.matrices.matrix(weight, None)

    def feed_forward() -> FusedMLP | FusedMixture:
        if not mixed:
            return FusedMLP(matrix(2 * inner, hidden), matrix(hidden, inner))
        spec = Experts(count=7, top_k=3, width=inner)
        router = kernels.matrices.router(torch.randn(spec.count, hidden).to(dtype), None)
        return FusedMixture(spec, router, kernels.matrices.experts(spec, *random_stacks(spec, hidden, dtype, type), 0))

    layers = [
        FusedLayer(
            attention_norm=torch.rand(hidden).to(dtype),
            qkv=matrix((q_heads + 2 * kv_heads) * head_dim, hidden),
            head_norm=None,
            out=matrix(hidden, q_heads * head_dim),
            ffn_norm=torch.rand(hidden).to(dtype),
            ffn=feed_forward(),
            q_heads=q_heads,
            window=None,
            scale=head_dim**-0.5,
            sinks=None,
            eps=1e-5,
        )
        for _ in range(2)
    ]
    batch, blocks = ragged(counts, contexts, 16, seed=7)
    residual = torch.randn(sum(counts), hidden).to(dtype)
    angles = torch.rand(512, head_dim)
    stored = torch.randn(2, blocks, 16, kv_heads, head_dim).to(dtype)
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        caches = [KVCache(*stored.clone()) for _ in layers]
        stage = kernels.fuse_layers(layers, Solo())
        assert stage is not None
        results.append((stage(residual.clone(), angles, caches, batch), caches[1].keys, caches[1].values))
    assert results[0][0].isfinite().all() and not torch.equal(results[0][0], residual)
    for others in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], others, strict=True))
