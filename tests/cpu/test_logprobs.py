"""Logprobs: torch's scorer and that of the CPU's kernels, in C++, say the same of any logits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cpu import tiny
from tests.cpu.draws import sampling_of
from tests.cpu.reference_sampler import check_logprobs, grid
from weft import LLM, SamplingParams
from weft.engine.core.step import Admission
from weft.engine.core.token_ids import TokenIds
from weft.ranks.kernels.native.sampling import NativeSampling
from weft.ranks.kernels.plain.sampling import score
from weft.ranks.worker.request_slots import RequestSlots
from weft.ranks.worker.sampler import unpack_logprobs

KINDS = ["native", "torch"]
DTYPES = [torch.bfloat16, torch.float32]
SPAN = 256  # tokens that the native one goes through at once


def random(rows: int, vocab: int, spread: float = 4.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread


def targets_of(logits: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.randint(logits.shape[1], (len(logits),), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    vocab=st.sampled_from([1, 7, 17, SPAN - 1, SPAN, SPAN + 1, 5 * SPAN + 3, 20 * SPAN]),
    top=st.sampled_from([0, 1, 2, 5, 20, 21, 300, 10**6]),
    holes=st.sampled_from([0, 1, 2, 3, 400]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60)
def test_native_says_what_torch_says(dtype: torch.dtype, vocab: int, top: int, holes: int, seed: int) -> None:
    """Logits are multiples of an eighth: ties everywhere, and at the border of the likeliest too."""
    logits = grid(vocab, 5, seed)
    if holes:
        logits[1:, seed % vocab :: holes] = -math.inf
    logits, targets, top = logits.to(dtype), targets_of(logits, seed), min(top, vocab)
    got, want = sampling_of("native", dtype).score(logits, targets, top), score(logits, targets, top)
    assert torch.equal(got[:, 1 : 2 + top], want[:, 1 : 2 + top])  # ranks and ids
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0.0, -500.0, 3e4])
@pytest.mark.parametrize("spread", [0.01, 4.0, 80.0])
def test_logprobs_are_as_exact_as_sums_in_float32_can_be(spread: float, shift: float, dtype: torch.dtype) -> None:
    logits = (random(4, 10_007, spread) + shift).to(dtype)
    targets = targets_of(logits)
    got = sampling_of("native", dtype).score(logits, targets, 20)
    true = logits.double().log_softmax(-1)
    ids = got[:, 2:22].long()
    for found, token in ((got[:, :1], targets[:, None]), (got[:, 22:], ids)):
        torch.testing.assert_close(found, true.gather(1, token), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_lower_id_comes_first_among_equals(kind: str) -> None:
    logits = torch.full((3, 1000), -0.0)
    logits[0, [700, 270, 999, 3]] = torch.tensor([3.0, 3.0, 4.0, 3.0])
    logits[1, 3::2] = 0.0
    logits[2] = -math.inf
    logits[2, [999, 600]] = -7.0
    for dtype in DTYPES:
        got = sampling_of(kind, dtype).score(logits.to(dtype), torch.tensor([270, 1, 5]), 6)
        assert got[:, 1].tolist() == [2, 1, 3]
        assert got[:, 2:8].tolist() == [[999, 3, 270, 700, 0, 1], [0, 1, 2, 3, 4, 5], [600, 999, 0, 1, 2, 3]]
        assert got[2, 8:].tolist() == pytest.approx([-math.log(2)] * 2 + [-math.inf] * 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_no_distribution(kind: str, dtype: torch.dtype) -> None:
    vocab = 2 * SPAN + 40
    logits = random(6, vocab)
    logits[1, 300] = math.nan
    logits[2] = -math.inf
    logits[3, [17, 400]] = math.inf
    logits[4] = -math.nan
    logits = logits.to(dtype)
    targets = torch.tensor([7, 300, 5, 400, 0, 9])
    figures = sampling_of(kind, dtype).score(logits, targets, 3)
    found = [unpack_logprobs(row, 3) for row in figures.tolist()]
    for row in (0, 5):
        check_logprobs(found[row], logits[row].tolist(), int(targets[row]), 3)
    for row in (1, 2, 4):
        assert all(map(math.isnan, [found[row].logprob, *found[row].top_logprobs]))
    assert found[2].rank == 1 and found[2].top_ids == [0, 1, 2]
    # As likely as it gets, so that what is beside them is impossible.
    assert found[3].rank == 1 and found[3].top_ids[:2] == [17, 400] and found[3].top_logprobs[2] == -math.inf
    assert all(0 <= token < vocab for it in found for token in it.top_ids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_may_lie_apart_and_stay_as_they_are(dtype: torch.dtype) -> None:
    native, wide = sampling_of("native", dtype).score, random(9, 700).to(dtype)
    for view in (wide[:, :600], wide[::2, 1:], wide.T.contiguous().T):
        before, targets = view.clone(), targets_of(view)
        assert torch.equal(native(view, targets, 5), native(before, targets, 5))
        assert torch.equal(view, before)


def test_a_row_is_scored_as_it_is_alone_by_any_number_of_threads() -> None:
    native, logits = sampling_of("native").score, random(9, 3000)
    targets = targets_of(logits)
    alone = torch.cat([native(logits[row : row + 1], targets[row : row + 1], 5) for row in range(9)])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(native(logits, targets, 5), alone)
    finally:
        torch.set_num_threads(before)


def test_native_makes_nothing_of_the_logits_width() -> None:
    """The planner counts the logits that a step holds, and no copies of them for logprobs."""
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            made.append(out.nbytes)
            return out

    logits = random(8, 5000).bfloat16()
    native, targets = sampling_of("native", torch.bfloat16).score, targets_of(logits)
    with Watch():
        native(logits, targets, 20)
    assert made == [8 * 42 * 8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_engine_scores_natively_the_rows_that_ask_for_it(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, scored = sampling_of("native", dtype).score, []

    def spy(sampling: NativeSampling, logits: torch.Tensor, targets: torch.Tensor, top: int) -> torch.Tensor:
        scored.append(len(logits))
        return native(logits, targets, top)

    monkeypatch.setattr(NativeSampling, "score", spy)
    params = [
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logit_bias={9: 5.0}, **wishes)  # type: ignore[arg-type]
        for wishes in ({"logprobs": 3}, {}, {"prompt_logprobs": 2}, {"logprobs": 0})
    ]
    common: dict[str, Any] = {"load_format": "dummy", "kv_cache_memory_bytes": 2**20, "executor": "inline"}
    common |= {"max_model_len": 64, "dtype": str(dtype).removeprefix("torch.")}
    found, calls = [], []
    for backend in ("cpu", "torch"):
        with LLM(tiny.write(tmp_path / backend), attention_backend=backend, **common) as llm:
            scored.clear()
            answers = llm.generate([[3, 4, 5], [6, 7], [8, 9, 10, 11], [12]], params)
        calls.append(sorted(scored))
        entries = [
            entry
            for answer in answers
            for position in (*(answer.outputs[0].logprobs or ()), *(answer.prompt_logprobs or (None,))[1:])
            for entry in list((position or {}).values())[:1]
        ]
        found.append([entry.logprob for entry in entries])
    # In each of four steps two rows, and once a prompt's tokens after its first.
    assert calls == [[2, 2, 2, 2, 3], []]
    assert found[0] == pytest.approx(found[1], abs=0.05)


@pytest.mark.parametrize(("output", "scores"), [([], True), ([7], False)])
def test_a_prompt_is_not_scored_again_once_the_answer_has_begun(output: list[int], scores: bool) -> None:
    """After a preemption, a sleep or a hand-over: its logprobs have come with the first token."""
    slots = RequestSlots(2, 64, 4, torch.device("cpu"))
    slots.admit(Admission(1, 0, SamplingParams(prompt_logprobs=0), TokenIds.pack([3, 4, 5]), output))
    assert (1 in slots.prompt_logprobs) is scores
