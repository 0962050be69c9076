"""Latent attention by each kind of kernels, against its published form in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.cpu.attention import ragged, with_turns
from tests.cpu.kernels import native
from tests.cpu.latents import PUBLISHED, SMALL, attend_absorbed_by_loop, attend_as_published, random_latents
from tests.pure.shapes import dense_shape
from weft.checkpoint.architectures.place import whole
from weft.checkpoint.architectures.shape import LatentAttention, ModelShape
from weft.plan.memory import step_bytes
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.latents import LatentDims, LatentNorm, attend_by_latents
from weft.ranks.kernels.plain import create_plain_kernels

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16]

CASES = [
    # dims, counts, contexts, block_size
    (SMALL, [1], [1], 16),
    (SMALL, [1, 1, 1], [5, 70, 300], 4),
    (SMALL, [1, 1, 40, 7, 50], [130, 9, 40, 90, 75], 16),
    (LatentDims(20, 24, 6, 10, 7), [1, 1, 30], [33, 2, 64], 16),  # no whole vectors
    (LatentDims(40, 64, 16, 32, 32), [1, 3, 60], [700, 90, 60], 32),
    (PUBLISHED, [1, 1, 3], [600, 20, 40], 16),
]
CASE_NAMES = [f"{dims.heads}x{dims.rank}-{counts}" for dims, counts, _, _ in CASES]


def kernels_of(kind: str, dtype: torch.dtype) -> Kernels:
    return native(dtype) if kind == "native" else create_plain_kernels()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
@pytest.mark.parametrize("kind", ["native", "plain"])
def test_absorbed_attention_is_exact(kind: str, case: tuple, dtype: torch.dtype) -> None:
    dims, counts, contexts, block_size = case
    kernels = kernels_of(kind, dtype)
    q, weight, cache, batch = random_latents(dims, counts, contexts, dtype, block_size)
    absorbed = kernels.matrices.latent_products(weight, dims).absorb(q)
    scale = (dims.nope_dim + dims.rope_dim) ** -0.5
    lse = torch.full((len(q), dims.heads), torch.nan)
    got = kernels.latents.attend(absorbed, cache, batch, scale, lse)
    want, want_lse = attend_absorbed_by_loop(absorbed, cache, batch, scale, dims.rank)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), want_lse, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(kernels.latents.attend(absorbed, cache, batch, scale), got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
@pytest.mark.parametrize("kind", ["native", "plain"])
def test_either_form_is_the_published_one(kind: str, case: tuple, dtype: torch.dtype) -> None:
    dims, counts, contexts, block_size = case
    kernels = kernels_of(kind, dtype)
    q, weight, cache, batch = random_latents(dims, counts, contexts, dtype, block_size)
    scale = (dims.nope_dim + dims.rope_dim) ** -0.5
    want = attend_as_published(q, weight, dims, cache, batch, scale)
    got = attend_by_latents(kernels.latents, kernels.matrices.latent_products(weight, dims), q, cache, batch, scale)
    # Absorbed queries and mixed latents are rounded once more.
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def test_rows_of_many_tokens_are_expanded_a_few_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    dims, counts, contexts = SMALL, [1, 40, 5, 60], [30, 40, 50, 200]
    kernels = create_plain_kernels()
    q, weight, cache, batch = random_latents(dims, counts, contexts, torch.float32)
    products = kernels.matrices.latent_products(weight, dims)
    want = attend_by_latents(kernels.latents, products, q, cache, batch, 0.2)
    expanded, expand = list[tuple[int, slice]](), type(products).expand

    def record(self: object, latents: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        expanded.append((len(latents), heads))
        return expand(self, latents, heads)

    monkeypatch.setattr(type(products), "expand", record)
    monkeypatch.setattr("weft.plan.memory.EXPANDED_BYTES", 2 * 200 * (16 + 8 + 12) * 4)
    got = attend_by_latents(kernels.latents, products, q, cache, batch, 0.2)
    torch.testing.assert_close(got, want)
    assert dims.expands_from in range(6, 41)
    assert expanded == [(40, slice(0, 3)), (200, slice(0, 2)), (200, slice(2, 3))]


@pytest.mark.parametrize(
    ("dims", "tokens"),
    [(PUBLISHED, 171), (LatentDims(2, 8, 4, 8, 8), 1 << 31)],
    ids=["published", "small rank"],
)
def test_the_expanded_form_begins_with_the_fewest_multiply_adds(dims: LatentDims, tokens: int) -> None:
    def absorbed(count: int) -> int:
        return count * (2 * dims.rank + dims.rope_dim)

    def expanded(count: int) -> int:
        once = dims.rank * (dims.nope_dim + dims.value_dim)
        return once + count * (dims.nope_dim + dims.rope_dim + dims.value_dim)

    assert dims.expands_from == tokens
    assert expanded(tokens - 1) >= absorbed(tokens - 1)
    assert tokens == 1 << 31 or expanded(tokens) < absorbed(tokens)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["native", "plain"])
def test_latents_are_normalised_rotated_and_stored(kind: str, interleaved: bool, dtype: torch.dtype) -> None:
    heads, rank, rope_dim, nope_dim, tokens = 3, 24, 8, 10, 9
    kernels = kernels_of(kind, dtype)
    batch, blocks = ragged([1, 8], [20, 12], 4, seed=1)
    batch = with_turns(batch, 32) if interleaved else batch
    torch.manual_seed(2)
    q, latents = (
        torch.randn(tokens, heads, nope_dim + rope_dim).to(dtype),
        torch.randn(tokens, rank + rope_dim).to(dtype),
    )
    angle = torch.rand(32, rope_dim // 2)
    rope = torch.cat((angle.cos(), angle.sin()), dim=1)
    norm = LatentNorm(torch.rand(rank).to(dtype) + 0.5, 1e-6)
    cache = KVCache.of_latents(torch.zeros(blocks, 4, 1, rank + rope_dim, dtype=dtype), rank)
    want_q, want = q.double(), latents.double()
    want[:, :rank] *= (want[:, :rank].square().mean(1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    want[:, rank:] = rotate_pairs(want[:, rank:], angle[batch.angle_rows].double(), interleaved)
    want_q[..., nope_dim:] = rotate_pairs(
        want_q[..., nope_dim:], angle[batch.angle_rows].double()[:, None], interleaved
    )
    kernels.latents.rotate_and_store(q, latents, rope, cache, batch, norm, interleaved=interleaved)
    torch.testing.assert_close(q.double(), want_q, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    stored = cache.keys.flatten(0, 2)
    torch.testing.assert_close(stored[batch.slots].double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    untouched = torch.ones(len(stored), dtype=torch.bool)
    untouched[batch.slots] = False
    assert not stored[untouched].any()


def rotate_pairs(x: torch.Tensor, angle: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Complex rotation of x [..., rope_dim] by angles [..., rope_dim / 2], real parts before imaginary ones."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., 0::2], x[..., 1::2]) if interleaved else torch.complex(x[..., :half], x[..., half:])
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("kind", ["native", "plain"])
def test_a_projection_of_latents_takes_other_values(kind: str) -> None:
    kernels = kernels_of(kind, torch.float32)
    q, weight, cache, batch = random_latents(SMALL, [1, 50], [40, 60], torch.float32)
    products = kernels.matrices.latent_products(torch.zeros_like(weight), SMALL, "kv_b.weight")
    kernels.matrices.replace("kv_b.weight", weight)
    got = attend_by_latents(kernels.latents, products, q, cache, batch, 0.2)
    want = attend_as_published(q, weight, SMALL, cache, batch, 0.2)
    torch.testing.assert_close(got.double(), want, atol=4e-5, rtol=4e-5)


@pytest.mark.parametrize("kind", ["native", "plain"])
def test_values_longer_than_keys(kind: str) -> None:
    kernels, dims = kernels_of(kind, torch.float32), LatentDims(3, 32, 8, 16, 30)
    q, weight, cache, batch = random_latents(dims, [1, 120], [40, 130], torch.float32)
    assert dims.expands_from < 120
    products = kernels.matrices.latent_products(weight, dims, "kv_b.weight")
    got = attend_by_latents(kernels.latents, products, q, cache, batch, 0.2)
    want = attend_as_published(q, weight, dims, cache, batch, 0.2)
    torch.testing.assert_close(got.double(), want, atol=4e-5, rtol=4e-5)


def latent_shape(dims: LatentDims) -> ModelShape:
    """A model whose attention has these dims on one rank."""
    lengths = {"nope_dim": dims.nope_dim, "rope_dim": dims.rope_dim, "v_dim": dims.value_dim}
    mixer = LatentAttention(heads=dims.heads, kv_lora_rank=dims.rank, q_lora_rank=None, scale=0.2, **lengths)
    plain = dense_shape(
        architecture="DeepseekV2ForCausalLM",
        layers=1,
        hidden=64,
        q_heads=dims.heads,
        kv_heads=dims.heads,
        head_dim=dims.nope_dim + dims.rope_dim,
        ffn=32,
        vocab=64,
        max_positions=4096,
    )
    return replace(plain, layers=tuple(replace(layer, mixer=mixer) for layer in plain.layers))


def test_the_memory_of_an_expanded_context_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, dims = create_plain_kernels(), LatentDims(4, 32, 8, 16, 12)
    q, weight, cache, batch = random_latents(dims, [60], [2000], torch.float32)
    products = kernels.matrices.latent_products(weight, dims)
    taken = list[int]()
    expand, attend = type(products).expand, type(kernels.attention).attend

    def watched_expand(self: object, latents: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = expand(self, latents, heads)
        taken.append(latents.nbytes + keys.untyped_storage().nbytes() + values.untyped_storage().nbytes())
        return keys, values

    def watched_attend(self: object, own: torch.Tensor, expanded: KVCache, *rest: Any) -> torch.Tensor:
        taken[-1] += expanded.values.nbytes
        return attend(self, own, expanded, *rest)

    monkeypatch.setattr(type(products), "expand", watched_expand)
    monkeypatch.setattr(type(kernels.attention), "attend", watched_attend)
    shape = latent_shape(dims)
    for most in (1 << 30, 2 * 2000 * (24 + 12) * 4):
        taken.clear()
        monkeypatch.setattr("weft.plan.memory.EXPANDED_BYTES", most)
        attend_by_latents(kernels.latents, products, q, cache, batch, 0.2)
        assert len(taken) == (1 if most == 1 << 30 else 2)
        counted = step_bytes(shape, whole(shape), 60, 1, 4, context=2000) - step_bytes(shape, whole(shape), 60, 1, 4)
        assert max(taken) <= counted <= 2 * max(taken)
