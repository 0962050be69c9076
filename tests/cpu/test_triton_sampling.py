"""The sampler's Triton kernels, in Triton's interpreter, against the ones in torch and the reference of one row."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu import checkpoints
from tests.cpu.draws import MASK, sampling_of
from tests.cpu.reference_sampler import EOS, FILTERS, Row, grid
from weft import LLM
from weft.engine.core.params import SamplingParams
from weft.ranks.kernels import rows
from weft.ranks.kernels.plain import sampling as plain_sampling
from weft.ranks.kernels.plain.sampling import weigh
from weft.ranks.kernels.random import SAMPLING_BLOCK, block_sums, exponentials, seeds
from weft.ranks.worker.request_slots import RequestSlots, Staging
from weft.ranks.worker.sampler import Sampler

pytest.importorskip("triton", reason="needs triton")

import triton
import triton.language as tl

from weft.ranks.kernels.triton import sampling

# Masked logits over a low temperature are beyond float32: -inf is right, and numpy says so all the same.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@triton.jit
def _first_times(keys, positions, out, COUNT: tl.constexpr):
    row = tl.program_id(0)
    index = tl.arange(0, COUNT)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    stream = sampling._mix(sampling._mix(key) + tl.load(positions + row).to(tl.uint64) * sampling.STEP)
    tl.store(out + row * COUNT + index, sampling._times(stream, index))


def test_its_random_numbers_are_those_of_torch() -> None:
    keys = np.array([0, 1, 7, 2**63, MASK, 0x9E3779B97F4A7C15], dtype=np.uint64)
    positions = np.array([0, 1, 2**31, 5, 17, 10**6])
    out = torch.empty(len(keys), 1024, dtype=torch.float64)
    _first_times[(len(keys),)](torch.from_numpy(keys.view(np.int64)), torch.from_numpy(positions), out, COUNT=1024)
    torch.testing.assert_close(out, exponentials(torch.from_numpy(seeds(keys, positions)), 1024), rtol=1e-13, atol=0)


def test_floats_have_places() -> None:
    """-inf, negatives, zeros, positives, inf, NaN: in this order, and back."""

    @triton.jit
    def _there_and_back(x, places, numbers, COUNT: tl.constexpr):
        index = tl.arange(0, COUNT)
        place = sampling._order_bits(tl.load(x + index))
        tl.store(places + index, place)
        tl.store(numbers + index, sampling._number(place))

    tiny, big = 1e-45, 3.4e38
    x = torch.tensor([-math.inf, -big, -1.0, -tiny, -0.0, 0.0, tiny, 1.0, 1.5, 2.0, 7.0, 1e10, big, 3.4e38, math.inf])
    x = torch.cat([x, torch.tensor([math.nan])])
    places, numbers = torch.empty(16, dtype=torch.int32), torch.empty(16)
    _there_and_back[(1,)](x, places, numbers, COUNT=16)
    assert (places.diff() >= 0).all() and places[4] == places[5] and places[3] < places[4] < places[6]
    assert places[15] == 2**31 - 1 > places[14]
    assert torch.equal(numbers[:15], x[:15]) and numbers[15].isnan()


@given(
    vocab=st.sampled_from([7, SAMPLING_BLOCK, 5 * SAMPLING_BLOCK + 3, 40 * SAMPLING_BLOCK + 1]),
    seed=st.integers(0, 10**6),
    **FILTERS,
)
@settings(max_examples=12)
def test_filters_leave_the_same_tokens_as_torch_s(
    vocab: int, seed: int, temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    """Logits are multiples of an eighth: ties everywhere, and all of them kept or none."""
    logits = grid(vocab, 3, seed)
    logits[2, 1 :: 1 + seed % 3] = -math.inf
    columns = np.array([[temperature, math.log(min_p) if min_p else -math.inf, top_k, top_p]])
    tops, sums, floors = sampling.survey(
        logits, torch.zeros(3, dtype=torch.int64), torch.from_numpy(columns), filtered=True
    )
    best = logits.amax(-1, keepdim=True)
    weights = weigh(logits, columns.repeat(3, 0))
    # What is less likely than any float32 is left by the one and 0 for the other.
    possible = (logits - best) / temperature > -80
    assert torch.equal((logits >= floors[:, None]) & possible, (weights > 0) & possible)
    peaks = (tops ^ ((tops >> 31) & 0x7FFFFFFF)).view(torch.float32)
    mass = sums * ((peaks - best) / temperature).exp()
    want = block_sums(weights / weights.sum(-1, keepdim=True))
    torch.testing.assert_close(mass / mass.sum(-1, keepdim=True), want)


def test_a_steady_step_tells_the_device_of_nothing_but_slots_and_positions() -> None:
    sampler = Sampler(50, 4, (EOS,), sampling_of("triton"))
    for slot in range(4):
        sampler.admit(Row(slot, SamplingParams(top_p=0.5), [1], []).admission(slot))
    sizes = []
    for position in (1, 2, 3):
        if position == 3:
            sampler.admit(Row(9, SamplingParams(), [1], []).admission(2))
        batch = sampler.prepare_batch([], [0, 1, 2, 3], [position] * 4)
        arrays = batch.arrays.flatten()
        sampler.sample(grid(50, 4, 0), batch, batch.arrays.with_tensors(map(torch.from_numpy, arrays)))
        sizes.append(sum(array.nbytes for array in arrays))
    assert sizes == [2 * 32 + 4 * 48, 2 * 32, 2 * 32 + 48]


def test_a_step_has_one_copy_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its rows ask for: what is not in it would come from memory that a GPU makes the host wait for."""
    calls: Counter[str] = Counter()

    def counted(owner: type, name: str) -> None:
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **how: (calls.update([name]), call(*given, **how))[1])

    def alone(*given: object) -> NoReturn:
        raise AssertionError("an array goes to the device on its own")

    counted(Staging, "put")
    counted(RequestSlots, "stage")
    for module in (plain_sampling, rows):
        monkeypatch.setattr(module, "copy_to_device", alone)
    path = checkpoints.make("llama", tmp_path)
    wishes = [{"logprobs": 2}, {"temperature": 0.0}, {"top_p": 0.9, "logprobs": 0}, {"repetition_penalty": 1.2}]
    params = [SamplingParams(max_tokens=2 + i % 2, ignore_eos=True, **it) for i, it in enumerate(wishes)]
    common = {"skip_tokenizer_init": True, "executor": "inline", "dtype": "float32", "kv_cache_memory_bytes": 10**6}
    with LLM(str(path), attention_backend="triton", **common) as llm:
        llm.generate([[3, 4], [5], [6], [7]], params)
    assert calls["put"] == calls["stage"] >= 4
