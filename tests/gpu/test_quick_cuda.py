"""The smallest case of each kernel as compiled for the card, in bfloat16, captured and replayed, beside torch's.

What `scripts/gpu_check quarter` runs before it measures anything; the other files have all cases. On a stand-in for a
card these tests run in Triton's interpreter, in float32.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.cpu.attention import ragged, shaped
from tests.cpu.latents import PUBLISHED, SMALL, in_forms, random_latents
from tests.cpu.matrices import MXFP4, random, random_stacks
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.shape import Experts
from weft.ranks.kernels import create_kernels
from weft.ranks.kernels.attention import HeadNorm, KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.capture import capture_graph
from weft.ranks.kernels.latents import LatentNorm, attend_by_latents
from weft.ranks.kernels.matrices import ChoosingProduct, ExpertStack
from weft.ranks.kernels.plain import create_plain_kernels
from weft.ranks.kernels.triton import routing
from weft.ranks.quant.quantised import QuantisedWeight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine")

CUDA = torch.device("cuda", 0)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
TOLERANCE = 1e-3 if INTERPRETED else 4e-2
PLAIN = create_plain_kernels()
KERNELS = create_kernels("triton", CUDA, shaped(DTYPE, 64, 4, 2)) if torch.cuda.is_available() else PLAIN
TYPES = ("Q4_1", "INT4_128", "FP8_128", MXFP4)
MIXTURE, HIDDEN = Experts(count=4, top_k=2, width=32), 128
GROUPED = Experts(count=16, top_k=3, width=32, scoring="sigmoid", groups=4, top_groups=2, group_score="top2")
TOKENS = (1, 3) if INTERPRETED else (1, 20, 300)  # in the interpreter each program takes milliseconds


def captured(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of `run`, eagerly and from a graph: the same bits."""
    want = run().clone()
    kept: list[torch.Tensor] = []
    graph = capture_graph(lambda: kept.append(run()), torch.cuda.Stream())
    for _ in range(2):
        graph.replay()
        assert torch.equal(kept[0], want)
    return want


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within TOLERANCE of the largest number."""
    assert got.shape == want.shape and got.isfinite().all()
    assert (got.cpu().double() - want.cpu().double()).abs().max() <= TOLERANCE * want.double().abs().max()


def there(batch: Batch) -> Batch:
    moved = {name: value.to(CUDA) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return replace(batch, **moved)


def moved(weight: torch.Tensor | QuantisedWeight) -> torch.Tensor | QuantisedWeight:
    if isinstance(weight, torch.Tensor):
        return weight.to(CUDA)
    lowest = None if weight.lowest is None else weight.lowest.to(CUDA)
    return replace(weight, values=weight.values.to(CUDA), scales=weight.scales.to(CUDA), lowest=lowest)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention(window: int | None, with_sinks: bool) -> None:
    """Decode steps and prompts, which are not captured."""
    sinks = torch.randn(4) if with_sinks else None
    for counts, contexts in (([1, 1, 1], [90, 40, 3]), ([1, 30, 7], [50, 40, 9])):
        batch, blocks = ragged(counts, contexts, 16, seed=1)
        cache = KVCache(*(torch.randn(blocks, 16, 2, 64) for _ in range(2)))
        q, on_card = torch.randn(sum(counts), 4, 64), there(batch)
        want = PLAIN.attention.attend(q, cache, batch, 0.125, window, None, sinks)
        card = KVCache(cache.keys.to(CUDA, DTYPE), cache.values.to(CUDA, DTYPE))
        given = q.to(CUDA, DTYPE), card, on_card, 0.125, window, None, None if sinks is None else sinks.to(CUDA)

        def attend() -> torch.Tensor:
            return KERNELS.attention.attend(*given)  # noqa: B023 - called within the loop

        if batch.decodes == batch.rows:
            given = (*given[:2], replace(on_card, fixed=True), *given[3:])
            assert_close(captured(attend), want)
        else:
            assert_close(attend(), want)


def test_an_fp8_cache() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card has no FP8")
    batch, blocks = ragged([1, 1], [60, 7], 16, seed=1)
    cache = KVCache(*(torch.randn(blocks, 16, 2, 64).to(torch.float8_e4m3fn) for _ in range(2)))
    q, filled = torch.randn(2, 4, 64), replace(there(batch), fixed=True)
    want = PLAIN.attention.attend(q, KVCache(cache.keys.float(), cache.values.float()), batch, 0.125, None)
    on_card = KVCache(cache.keys.to(CUDA), cache.values.to(CUDA))
    queries = q.to(CUDA, DTYPE)
    assert_close(captured(lambda: KERNELS.attention.attend(queries, on_card, filled, 0.125, None)), want)


# Heads and rows: of few heads, and of many in wide programs, in parts of a context and in whole ones.
LATENT_ROWS = [(3, 3)] if INTERPRETED else [(16, 3), (64, 40), (128, 40), (128, 140)]


@pytest.mark.parametrize(("heads", "rows"), LATENT_ROWS)
def test_latents(heads: int, rows: int) -> None:
    """Decode steps, then prompts: a short one in the absorbed form, a long one in the expanded form."""
    dims = (SMALL if INTERPRETED else PUBLISHED)._replace(heads=heads)
    steps = [([1] * rows, [30 + 7 * row for row in range(rows)]), ([1, 3, 200], [150, 40, 270])]
    for counts, contexts in steps:
        q, weight, cache, batch = random_latents(dims, counts, contexts, torch.float32)
        want = attend_by_latents(PLAIN.latents, PLAIN.matrices.latent_products(weight, dims), q, cache, batch, 0.07)
        products = KERNELS.matrices.latent_products(weight.to(CUDA, DTYPE), dims)
        card, on_card = KVCache.of_latents(cache.keys.to(CUDA, DTYPE), dims.rank), there(batch)
        queries = q.to(CUDA, DTYPE)
        if batch.decodes < batch.rows:
            divided = in_forms(on_card, dims)
            assert divided.forms is not None and len(divided.forms.expanded) == 1
            assert_close(attend_by_latents(KERNELS.latents, products, queries, card, divided, 0.07), want)
            continue
        filled = replace(on_card, fixed=True)
        assert_close(captured(lambda: attend_by_latents(KERNELS.latents, products, queries, card, filled, 0.07)), want)  # noqa: B023


def test_latents_are_stored() -> None:
    batch, blocks = ragged([1, 1], [20, 12], 16, seed=1)
    norm, rope, rank = torch.rand(32) + 0.5, torch.randn(32, 8), 32
    q, new = torch.randn(2, 3, 24), torch.randn(2, rank + 8)
    here, card = (
        KVCache.of_latents(torch.zeros(blocks, 16, 1, rank + 8, dtype=DTYPE, device=at), rank) for at in ("cpu", CUDA)
    )
    given = new.to(CUDA, DTYPE), rope.to(CUDA), card, there(batch), LatentNorm(norm.to(CUDA, DTYPE), 1e-6)

    def turned() -> torch.Tensor:
        queries = on_card.clone()
        KERNELS.latents.rotate_and_store(queries, *given, interleaved=True)
        return queries

    on_card = q.to(CUDA, DTYPE)
    want = q.to(DTYPE)
    PLAIN.latents.rotate_and_store(
        want, new.to(DTYPE), rope, here, batch, LatentNorm(norm.to(DTYPE), 1e-6), interleaved=True
    )
    assert_close(captured(turned), want)
    assert_close(card.keys, here.keys)


@pytest.mark.parametrize("spec", [MIXTURE, GROUPED], ids=["plain", "in groups"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_routers(spec: Experts, tokens: int) -> None:
    """Product, conversion and choice: in one launch, and in two for more than 64 tokens."""
    weight, x = torch.randn(spec.count, 512).to(DTYPE), torch.randn(tokens, 512).to(DTYPE)
    router, given = KERNELS.matrices.router(weight.to(CUDA), None), x.to(CUDA)
    assert isinstance(router, ChoosingProduct)

    def chosen() -> torch.Tensor:
        numbers, shares = router.choose_experts(given, spec, None, None)
        return torch.cat((numbers.float(), shares), dim=1)

    numbers, shares = PLAIN.pointwise.choose_experts(x.float() @ weight.float().T, spec)
    got = captured(chosen).cpu()
    assert torch.equal(got[:, : spec.top_k], numbers.float())
    torch.testing.assert_close(got[:, spec.top_k :], shares, atol=1e-4, rtol=1e-4)


def test_many_rows_are_sorted() -> None:
    """In three launches, as by one."""
    count, tokens = 8, 5 if INTERPRETED else 3000
    chosen = torch.stack([torch.randperm(count)[:2] for _ in range(tokens)]).to(CUDA)
    alone = routing.sort_rows(chosen, 0, torch.zeros(count, dtype=torch.int64, device=CUDA), 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "MOST_ALONE", 0)
        routed = torch.zeros(count, dtype=torch.int64, device=CUDA)
        together = captured(lambda: torch.cat([part.flatten() for part in routing.sort_rows(chosen, 0, routed, 16)]))
    assert torch.equal(together, torch.cat([part.flatten() for part in alone]))


@pytest.mark.parametrize("type", [None, *TYPES])
@pytest.mark.parametrize("tokens", TOKENS)
def test_experts(type: str | None, tokens: int) -> None:
    stacks = random_stacks(MIXTURE, HIDDEN, DTYPE, type)
    on_card = (ExpertStack(stack.name, moved(stack.weight), None) for stack in stacks)
    fast, plain = KERNELS.matrices.experts(MIXTURE, *on_card, 0), PLAIN.matrices.experts(MIXTURE, *stacks, 0)
    scores, x = torch.randn(tokens, MIXTURE.count), torch.randn(tokens, HIDDEN).to(DTYPE)
    chosen, shares = PLAIN.pointwise.choose_experts(scores, MIXTURE)
    want = plain(x, chosen, shares)
    given = scores.to(CUDA), x.to(CUDA)

    def mix() -> torch.Tensor:
        return fast(given[1], *KERNELS.pointwise.choose_experts(given[0], MIXTURE))

    assert_close(captured(mix), want)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_products(type: str, tokens: int) -> None:
    weight = random(type, 64, Span(0, 256), 256, dtype=DTYPE)
    product, x = KERNELS.matrices.matrix(moved(weight), None), torch.randn(tokens, 256).to(DTYPE)
    given = x.to(CUDA)
    assert_close(captured(lambda: product(given)), x.double() @ weight.dequantise().double().T)


@pytest.mark.skipif(INTERPRETED, reason="torch._scaled_mm is not Triton's")
def test_products_of_fp8_units() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card has no FP8")
    weight = random("FP8_ROW", 64, Span(0, 256), 256, dtype=DTYPE)
    product, x = KERNELS.matrices.matrix(moved(weight), None), torch.randn(400, 256).to(DTYPE)
    given = x.to(CUDA)
    assert_close(captured(lambda: product(given)), x.double() @ weight.dequantise().double().T)


def test_between_the_products() -> None:
    x, residual, weight = torch.randn(5, 256), torch.randn(5, 256), torch.randn(256)
    given = tuple(each.to(CUDA, DTYPE) for each in (x, weight))
    kept = residual.to(CUDA, DTYPE)

    def normed() -> torch.Tensor:
        return KERNELS.pointwise.add_norm(given[0], kept.clone(), given[1], 1e-5)

    assert_close(captured(normed), PLAIN.pointwise.add_norm(x, residual.clone(), weight, 1e-5))
    wide = torch.randn(5, 512)
    on_card = wide.to(CUDA, DTYPE)
    assert_close(captured(lambda: KERNELS.pointwise.silu_mul(on_card)), PLAIN.pointwise.silu_mul(wide))
    batch, blocks = ragged([1, 1, 1], [20, 7, 9], 16, seed=3)
    heads, rope, norm = torch.randn(3, 8 * 64), torch.randn(64, 64), torch.randn(2, 64)
    caches = [
        KVCache(*(torch.zeros(blocks, 16, 2, 64, dtype=DTYPE, device=at) for _ in range(2))) for at in ("cpu", CUDA)
    ]
    want = PLAIN.pointwise.rotate_and_store(heads.to(DTYPE), 4, rope, caches[0], batch, HeadNorm(*norm.to(DTYPE), 1e-6))
    turned = heads.to(CUDA, DTYPE), rope.to(CUDA), there(batch), HeadNorm(*norm.to(CUDA, DTYPE), 1e-6)

    def rotated() -> torch.Tensor:
        return KERNELS.pointwise.rotate_and_store(turned[0], 4, turned[1], caches[1], turned[2], turned[3])

    assert_close(captured(rotated), want)
    assert_close(caches[1].keys, caches[0].keys)
