"""Token samplers of the kernels, Triton's in its interpreter and the CPU's in C++, against torch's and a reference."""

from __future__ import annotations

import math
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu.draws import PARAMS, chi_square, chosen, far_apart, key_of, sampling_of
from tests.cpu.reference_sampler import EOS, FILTERS, check_logprobs, expected, grid, row_of, sampled
from weft.engine.core.params import SamplingParams
from weft.ranks.kernels.random import SAMPLING_BLOCK, race
from weft.ranks.kernels.streams import NOT_FINITE
from weft.ranks.worker.sample_arrays import SampleArrays
from weft.ranks.worker.sampler import Sampler, sampling_settings

# Masked logits over a low temperature are beyond float32: -inf is right, and numpy says so all the same.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
no_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
KINDS = ["native", pytest.param("triton", marks=no_triton)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "vocab", "spread", "dtype"),
    [
        (16, 7, 2.0, torch.float32),
        (16, SAMPLING_BLOCK, 3.0, torch.bfloat16),
        (40, 3 * SAMPLING_BLOCK - 1, 0.5, torch.float32),
        (16, 20_011, 4.0, torch.bfloat16),
        (1, 20_000, 1.0, torch.float32),
    ],
    ids=str,
)
def test_its_tokens_are_those_of_torch(kind: str, rows: int, vocab: int, spread: float, dtype: torch.dtype) -> None:
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread).to(dtype)
    positions = np.arange(rows) * 3 + 1
    got, want = chosen(logits, PARAMS, positions, kind=kind)
    assert far_apart(got, want, logits, PARAMS, positions) == []
    assert (got != want).sum() <= 1
    assert len(set(got.tolist())) > min(rows, vocab) // 4


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_no_distribution(kind: str) -> None:
    vocab = 2 * SAMPLING_BLOCK + 40
    plain = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 3
    rows = [plain.clone() for _ in range(6)]
    rows[1][300] = math.nan
    rows[2][:] = -math.inf
    rows[3][[17, 400]] = math.inf
    rows[4][[500, 301]] = math.nan
    rows[4][2] = math.inf
    rows[5][:] = math.nan
    logits = torch.stack(rows)
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0.3, top_p=0.5, top_k=7, min_p=0.01),
        SamplingParams(temperature=0),
    ):
        got, torchs = chosen(logits, [params], np.arange(6), kind=kind)
        assert got[1:].tolist() == [NOT_FINITE] * 5 and got[0] >= 0
        assert torch.equal(got, torchs)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_takes_the_lowest_id_among_equals(kind: str) -> None:
    logits = torch.full((2, 1000), -0.0)
    logits[0, [700, 270, 999]] = 3.0
    logits[1, 3:] = 0.0
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=1)):
        assert chosen(logits.bfloat16(), [params], np.arange(2), kind=kind)[0].tolist() == [270, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_filters_cannot_take_the_last_token_away(kind: str) -> None:
    logits = torch.full((3, 600), -math.inf)
    logits[:, 555] = torch.tensor([3.0, -1e30, torch.finfo(torch.float32).min])
    strict = SamplingParams(temperature=1e-4, top_k=2, top_p=1e-9, min_p=1.0)
    assert chosen(logits, [strict], np.arange(3), kind=kind)[0].tolist() == [555] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_logits_may_lie_apart(kind: str) -> None:
    wide = torch.randn(3, 700, generator=torch.Generator().manual_seed(2))
    positions = np.arange(3)
    for view in (wide[:, :600], wide.T.contiguous().T):
        assert torch.equal(*chosen(view, PARAMS, positions, kind=kind))
        assert torch.equal(
            chosen(view, PARAMS, positions, kind=kind)[0], chosen(view.contiguous(), PARAMS, positions, kind=kind)[0]
        )


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_the_distribution(kind: str) -> None:
    draws = 120
    logits = torch.full((draws, 300), -math.inf)
    logits[:, [3, 100, 255, 256, 299]] = torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15]).log()
    counts = np.bincount(chosen(logits, [SamplingParams()], np.arange(draws), kind=kind)[0].numpy(), minlength=300)
    assert abs(chi_square(counts, logits[0].double().exp().numpy())) < 4


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), vocab=st.sampled_from([7, SAMPLING_BLOCK, 2 * SAMPLING_BLOCK + 3]), seed=st.integers(0, 10**6))
@settings(max_examples=15)
def test_a_sampler_gives_the_tokens_of_the_reference(kind: str, data: st.DataObject, vocab: int, seed: int) -> None:
    """All that can be asked for, and new requests in slots that had others."""
    sampler = Sampler(vocab, 3, (EOS,), sampling_of(kind))
    for step in range(2):
        rows = data.draw(st.lists(row_of(vocab), min_size=1, max_size=3))
        slots = data.draw(st.permutations(range(3)))[: len(rows)]
        for slot, row in zip(slots, rows, strict=True):
            sampler.release(slot)
            sampler.admit(row.admission(slot))
        logits = grid(vocab, len(rows), seed + step)
        late = sampled(sampler, logits, slots, [row.position for row in rows])
        for row, values, token, logprobs in zip(rows, logits.tolist(), *late.result(), strict=True):
            assert token == expected(row, values)
            if row.params.logprobs is not None:
                check_logprobs(logprobs, values, token, min(row.params.logprobs, vocab))


@pytest.mark.parametrize("kind", KINDS)
def test_race_of_one_block(kind: str) -> None:
    """A vocabulary of one token has one answer."""
    assert chosen(torch.zeros(2, 1), [SamplingParams()], np.arange(2), kind=kind)[0].tolist() == [0, 0]
    assert race(torch.ones(2, 1), torch.tensor([1, 2])).tolist() == [0, 0]


@given(
    vocab=st.sampled_from([7, SAMPLING_BLOCK, 5 * SAMPLING_BLOCK + 3, 90 * SAMPLING_BLOCK + 1]),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    **FILTERS,
)
@settings(max_examples=150)
def test_any_filters_leave_what_torchs_leave(
    vocab: int, seed: int, temperature: float, min_p: float, top_k: int, top_p: float, dtype: torch.dtype
) -> None:
    """Logits are multiples of an eighth: ties everywhere, and all of them kept or none."""
    logits = grid(vocab, 12, seed)
    logits[2, 1 :: 1 + seed % 3] = -math.inf
    params = [SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)]
    positions = np.arange(12) + seed
    got, want = chosen(logits.to(dtype), params, positions, kind="native")
    assert far_apart(got, want, logits, params, positions) == []
    assert (got != want).sum() <= 1


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_a_nucleus_of_any_size_is_found(spread: float) -> None:
    logits = torch.randn(20, 50_000, generator=torch.Generator().manual_seed(1)) * spread
    positions = np.arange(20)
    for top_p in (0.1, 0.5, 0.95, 0.9999):
        params = [SamplingParams(top_p=top_p), SamplingParams(top_p=top_p, top_k=5000)]
        got, want = chosen(logits, params, positions, kind="native")
        assert far_apart(got, want, logits, params, positions) == []
        assert (got != want).sum() <= 1


def test_a_row_is_chosen_for_as_it_is_alone() -> None:
    logits = torch.randn(9, 3000, generator=torch.Generator().manual_seed(3)).bfloat16()
    positions = np.arange(9)
    together = chosen(logits, PARAMS[:1], positions, kind="native")[0]
    token_sampler = sampling_of("native", torch.bfloat16).create_token_sampler(9)
    for row in range(9):
        token_sampler.admit(row, sampling_settings(PARAMS[0]), key_of(row))
        arrays = SampleArrays(np.array([0]), np.array([row]), positions[row : row + 1])
        tensors = arrays.with_tensors(map(torch.from_numpy, arrays.flatten()))
        alone = token_sampler.sample_tokens(logits[row : row + 1], arrays, tensors)
        assert alone.item() == together[row]
