"""A reference of the sampler: one row, plain numbers, nothing clever; and the rows that it is compared on."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from tests.cpu.draws import MASK
from weft.engine.core.params import SamplingParams
from weft.engine.core.step import Admission
from weft.engine.core.token_ids import TokenIds
from weft.machine.native.structures import MASK_BITS
from weft.ranks.kernels.sampling import mask_words
from weft.ranks.kernels.streams import NOT_FINITE, SAMPLING_BLOCK
from weft.ranks.worker.sampler import SampledTokens, Sampler

EOS = 1
FILTERS = {
    "temperature": st.sampled_from([1e-3, 0.3, 1.0, 50.0]),
    "min_p": st.sampled_from([0.0, 0.0173, 0.211, 1.0]),
    "top_k": st.sampled_from([0, 2, 5, 50, 1300, 10**6]),
    "top_p": st.sampled_from([1.0, 0.99713, 0.9371, 0.513, 1e-9]),
}


@dataclass(frozen=True)
class Row:
    """A request with what it has generated so far."""

    key: int
    params: SamplingParams
    prompt: list[int]
    output: list[int]

    def admission(self, slot: int) -> Admission:
        return Admission(slot, self.key, self.params, TokenIds.pack(self.prompt), [*self.output])

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)

    def then(self, token: int) -> Row:
        return replace(self, output=[*self.output, token])


def shaped(row: Row, logits: list[float], *, fallback: bool) -> list[float]:
    """Logits after bias, penalties and masks, in float32; with `fallback`, some token is always left."""
    params, f32 = row.params, np.float32
    forbidden = set()
    for word in params.bad_word_ids:
        if row.output[len(row.output) - len(word) + 1 :] == list(word[:-1]) or len(word) == 1:
            forbidden.add(word[-1])
    if len(row.output) < params.min_tokens:
        forbidden |= {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
    result = []
    for token, logit in enumerate(logits):
        x = f32(logit) + f32((params.logit_bias or {}).get(token, 0.0))
        if token in row.prompt or token in row.output:
            penalty = f32(params.repetition_penalty)
            x = x / penalty if x > 0 else x * penalty
        count = row.output.count(token)
        x = x - (f32(count) * f32(params.frequency_penalty) + f32(count > 0) * f32(params.presence_penalty))
        allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        result.append(float(x) if allowed and token not in forbidden else -math.inf)
    if fallback and max(result) == -math.inf:
        result[params.allowed_token_ids[0] if params.allowed_token_ids else 0] = 0.0
    return result


def distribution(row: Row, logits: list[float]) -> list[float]:
    """The weights that the token is drawn with."""
    params = row.params
    best = max(logits)
    weights = [math.exp((x - best) / params.temperature) for x in logits]
    weights = [w if w >= params.min_p * (1 - 1e-9) else 0.0 for w in weights]
    if 0 < params.top_k < len(weights):
        last = sorted(logits)[-params.top_k]
        weights = [w if x >= last else 0.0 for w, x in zip(weights, logits, strict=True)]
    if params.top_p < 1:
        goal, reached = params.top_p * sum(weights), 0.0
        for last in sorted(weights, reverse=True):
            reached += last
            if reached >= goal:
                break
        weights = [w if w >= last * (1 - 1e-9) else 0.0 for w in weights]
    return weights


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def expected(row: Row, logits: list[float], allowed: Collection[int] | None = None) -> int:
    """The token of a row, from its logits in float32. `allowed` are the tokens that its mask allows, if it has one."""
    logits = shaped(row, logits, fallback=allowed is None)
    if allowed is not None:
        logits = [x if token in allowed else -math.inf for token, x in enumerate(logits)]
    if max(logits) == -math.inf:
        return NOT_FINITE
    if row.params.temperature == 0 or row.params.top_k == 1:
        return logits.index(max(logits))
    weights = distribution(row, logits)
    stream = mix((mix(row.key) + row.position * 0x9E3779B97F4A7C15) & MASK)

    def time(i: int) -> float:
        bits = mix((stream + (i + 1) * 0x9E3779B97F4A7C15) & MASK) >> 12
        return -math.log((bits + 0.5) / 2**52)

    blocks = [sum(weights[at : at + SAMPLING_BLOCK]) for at in range(0, len(weights), SAMPLING_BLOCK)]
    block = max(range(len(blocks)), key=lambda i: blocks[i] / time(i))
    members = range(block * SAMPLING_BLOCK, min((block + 1) * SAMPLING_BLOCK, len(weights)))
    return max(members, key=lambda token: weights[token] / time(len(blocks) + token - members.start))


# What a request may be. Logits come in steps of an eighth, so that there are ties, and shares are such that no
# sum of weights meets one exactly.


def tokens(vocab: int) -> st.SearchStrategy[int]:
    return st.integers(0, vocab - 1)


@st.composite
def row_of(draw: st.DrawFn, vocab: int) -> Row:
    some = st.lists(tokens(min(vocab, 20)), max_size=6)
    maybe = st.sampled_from([True, False])
    params: dict[str, object] = {
        "temperature": draw(st.sampled_from([0.0, 1e-4, 0.1, 0.7, 1.0, 1.0, 3.0, 1000.0])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.99713, 0.9371, 0.513, 0.131, 1e-9])),
        "top_k": draw(st.sampled_from([0, 0, 1, 2, 5, 50, vocab, vocab + 1])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.0173, 0.211, 1.0])),
        "logprobs": draw(st.sampled_from([None, None, 0, 3, 20])),
    }
    if draw(maybe):
        params |= {
            "presence_penalty": draw(st.sampled_from([0.0, 0.7, -0.4])),
            "frequency_penalty": draw(st.sampled_from([0.0, 0.3, -1.1])),
            "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.8])),
        }
    if draw(maybe):
        params |= {
            "logit_bias": draw(
                st.dictionaries(tokens(vocab), st.sampled_from([-100.0, -1.5, 2.25, 100.0]), max_size=3)
            ),
            "allowed_token_ids": draw(st.none() | st.lists(tokens(vocab), min_size=1, max_size=9).map(tuple)),
            "bad_word_ids": tuple(draw(st.lists(st.lists(tokens(4), min_size=1, max_size=3).map(tuple), max_size=3))),
            "min_tokens": draw(st.integers(0, 4)),
            "stop_token_ids": tuple(draw(some)),
            "ignore_eos": draw(maybe),
        }
    output = draw(st.lists(tokens(4) | tokens(vocab), max_size=5))
    prompt = draw(st.lists(tokens(vocab), min_size=1, max_size=6))
    return Row(draw(st.integers(0, MASK)), SamplingParams(**params), prompt, output)  # type: ignore[arg-type]


def grid(vocab: int, rows: int, seed: int) -> torch.Tensor:
    """[rows, vocab] logits, multiples of an eighth."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([1.0, 4.0, 16.0, 0.0])[torch.randint(4, (rows, 1), generator=generator)]
    return (torch.randn(rows, vocab, generator=generator) * spread).mul_(8).round_().div_(8)


def sampled(
    sampler: Sampler,
    logits: torch.Tensor,
    slots: list[int],
    positions: list[int],
    masks: Mapping[int, bytes] | None = None,
) -> SampledTokens:
    batch = sampler.prepare_batch([*range(len(slots))], slots, positions, masks or {})
    tensors = (torch.from_numpy(array).to(logits.device) for array in batch.arrays.flatten())
    return sampler.sample(logits.clone(), batch, batch.arrays.with_tensors(tensors))


def mask_of(allowed: Collection[int], vocab: int) -> bytes:
    """The mask of a token of which only these ids may be sampled."""
    bits = np.zeros(mask_words(vocab) * MASK_BITS, dtype=np.uint8)
    bits[[*allowed]] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def check_logprobs(found: object, logits: list[float], token: int, top: int) -> None:
    total = math.log(math.fsum(map(math.exp, logits)))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top]
    assert found is not None
    assert found.logprob == pytest.approx(logits[token] - total, abs=1e-4)  # type: ignore[attr-defined]
    assert found.rank == 1 + sum(x > logits[token] for x in logits)  # type: ignore[attr-defined]
    assert found.top_ids == order  # type: ignore[attr-defined]
    assert found.top_logprobs == pytest.approx([logits[i] - total for i in order], abs=1e-4)  # type: ignore[attr-defined]
