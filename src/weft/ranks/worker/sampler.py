"""The sampler of the output rank: one token per row of logits, as each request's SamplingParams ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.engine.core.params import SamplingParams
from weft.engine.core.step import Admission, SlotFailure, TokenLogprobs
from weft.ranks.kernels.plain import PlainSampling
from weft.ranks.kernels.rows import copy_to_device, pick_rows
from weft.ranks.kernels.sampling import Sampling, SamplingSettings
from weft.ranks.kernels.streams import NOT_FINITE
from weft.ranks.worker.device import ToHost
from weft.ranks.worker.logits_edits import LogitsEdits, RequestEdits, apply_edits
from weft.ranks.worker.sample_arrays import SampleArrays, int64_array, mask_arrays

NO_LOGPROBS = -1
PLAIN = PlainSampling()
NO_MASKS: Mapping[int, bytes] = {}
NONE_ALLOWED = SlotFailure(
    "no-allowed-token",
    "none of the tokens that the request's constraint allows can be sampled: bad_words, min_tokens or "
    "allowed_token_ids forbid them, or their logits are not finite",
)
Result = tuple[list[int], list[TokenLogprobs | None]]


@dataclass(frozen=True)
class SampleBatch:
    """R tokens to sample: their `arrays` on the host, and the requests that learn of their tokens.

    `edited` has one entry per row, or none if no row's request has edits.
    """

    arrays: SampleArrays[np.ndarray]
    edited: list[RequestEdits | None]

    def failures(self, tokens: Sequence[int], rank: int) -> dict[int, SlotFailure]:
        """By slot, the reason that no token could be sampled for rows whose token is NOT_FINITE, on rank `rank`."""
        not_finite = SlotFailure(
            "nan-logits", f"rank {rank}: the model produced NaN or infinite logits, from which nothing can be sampled"
        )
        masks, slots = self.arrays.masks, self.arrays.slots.tolist()
        masked = [] if masks is None else masks.rows.tolist()
        return {
            slots[row]: NONE_ALLOWED if row in masked else not_finite
            for row, token in enumerate(tokens)
            if token == NOT_FINITE
        }


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens: `tokens` [R] int64 on the device at once, each a valid id, and a function that waits for them.

    `result` returns (tokens, logprobs), with NOT_FINITE as the token of a row whose logits were not finite.
    """

    tokens: torch.Tensor
    result: Callable[[], Result]


class Sampler:
    """Sampler of the requests in `slots` slots, over `vocab` token ids.

    `stop_ids` are the model's own end tokens (`ModelShape.eos`), which min_tokens holds back together with a
    request's stop_token_ids. Greedy sampling takes the lowest of equally likely ids, as argmax does, and so does a
    top_k of 1. A row whose greatest logit is NaN or infinite gives NOT_FINITE, its logprobs mean nothing; other rows
    are as they would be without it.
    """

    def __init__(
        self,
        vocab: int,
        slots: int,
        stop_ids: Iterable[int] = (),
        sampling: Sampling = PLAIN,
    ) -> None:
        self.vocab = vocab
        self._edits = LogitsEdits(vocab, stop_ids)
        self._token_sampler = sampling.create_token_sampler(slots)
        self._sampling = sampling
        self._tops = np.full(slots, NO_LOGPROBS, dtype=np.int64)

    def admit(self, admission: Admission) -> None:
        """Give a slot to a request, with the output that it had before a preemption, if any."""
        slot, params = admission.slot, admission.params
        self._tops[slot] = NO_LOGPROBS if params.logprobs is None else min(params.logprobs, self.vocab)
        self._token_sampler.admit(slot, sampling_settings(params), admission.key)
        self._edits.admit(admission)

    def release(self, slot: int) -> None:
        """Free a slot."""
        self._edits.release(slot)

    def prepare_batch(
        self,
        picks: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        masks: Mapping[int, bytes] = NO_MASKS,
    ) -> SampleBatch:
        """Prepare the tokens that are sampled next; the lists are the fields of SampleArrays, `masks` is StepPlan's.

        The batch has to be sampled, since the device gets the settings of an admission once. Before a row with
        penalties or bad words is prepared again, the result of its last token has to be taken.
        """
        slots_ = int64_array(slots)
        scored = np.flatnonzero(self._tops[slots_] != NO_LOGPROBS)
        edits = self._edits.edit_arrays(slots, positions, masks)
        arrays = SampleArrays(
            picks=int64_array(picks),
            slots=slots_,
            positions=int64_array(positions),
            scored=scored if scored.size else None,
            edits=edits,
            settings=self._token_sampler.take_settings_update(),
            masks=mask_arrays(slots, masks, self.vocab) if masks else None,
        )
        return SampleBatch(arrays, self._edits.requests_in(slots) if edits else [])

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, batch: SampleBatch, tensors: SampleArrays[torch.Tensor]) -> SampledTokens:
        """Sample one token per row, with its logprobs if the request wants them.

        `logits` [R, vocab] of any float type may be changed; `tensors` are the batch's arrays on the device. The random
        numbers of a token depend only on its request's key and its position.
        """
        arrays = batch.arrays
        raw = None
        if arrays.scored is not None:
            # Logprobs are the model's own: from before anything is changed.
            raw = pick_rows(logits, arrays.scored, tensors.scored)
        # Requests with edits may have none at this position: then logits stay as they are, and in their dtype.
        edits = tensors.edits if tensors.edits is not None and any(map(len, tensors.edits)) else None
        if raw is not None and (tensors.masks is not None or (edits is not None and logits.dtype == torch.float32)):
            raw = raw.clone()
        if edits is not None:
            logits = logits.float().contiguous()
            apply_edits(logits, edits)
        if tensors.masks is not None:
            # Last: no bias brings back a token that a mask does not allow.
            logits = logits.contiguous()
            self._sampling.apply_masks(logits, *tensors.masks)
        tokens = self._token_sampler.sample_tokens(logits, arrays, tensors)
        # The next step and the scorer need valid ids; NOT_FINITE goes to the host alone.
        ids = tokens.clamp(min=0)
        if raw is None or arrays.scored is None:
            return SampledTokens(ids, self._result(batch, tokens, [], []))
        tops = self._tops[arrays.slots[arrays.scored]]
        scores = self._sampling.score(raw, pick_rows(ids, arrays.scored, tensors.scored), int(tops.max()))
        # In one tensor, to be copied to the host together.
        values = torch.cat([tokens.double(), scores.flatten()])
        return SampledTokens(ids, self._result(batch, values, arrays.scored.tolist(), tops.tolist()))

    @staticmethod
    def _result(batch: SampleBatch, values: torch.Tensor, scored: list[int], tops: list[int]) -> Callable[[], Result]:
        """Start to copy tokens and scores to the host; the returned function waits for them, and notes the tokens.

        `values` are the tokens of all rows and then the scores of the rows `scored`, which want `tops` alternatives.
        """
        arrival, count = ToHost(values), len(batch.arrays.slots)

        def result() -> Result:
            arrived = arrival.values()
            tokens = [int(token) for token in arrived[:count]]
            for request, token in zip(batch.edited, tokens, strict=False):
                if request and token != NOT_FINITE:
                    request.note(token)
            return tokens, split_logprobs(arrived, count, scored, tops)

        return result

    @torch.inference_mode()
    def prompt_logprobs(self, logits: torch.Tensor, targets: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Logprobs of the given `targets`, with `top` alternatives; row t of `logits` [T, vocab] predicts
        `targets[t]`."""
        if not targets:
            return []
        top = min(top, self.vocab)
        ids = copy_to_device(int64_array(targets), logits.device)
        return [unpack_logprobs(row, top) for row in self._sampling.score(logits, ids, top).tolist()]


def sampling_settings(params: SamplingParams) -> SamplingSettings:
    """The settings that a request's tokens are drawn with."""
    return SamplingSettings(*[getattr(params, name) for name in SamplingSettings._fields])


def split_logprobs(
    values: list[float], count: int, rows: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprobs | None]:
    """Logprobs of `count` rows, None except for `rows`, whose scores follow the first `count` of the `values`."""
    logprobs: list[TokenLogprobs | None] = [None] * count
    if rows:
        width = (len(values) - count) // len(rows)
        for row, begin, top in zip(rows, range(count, len(values), width), tops, strict=True):
            logprobs[row] = unpack_logprobs(values[begin : begin + width], top)
    return logprobs


def unpack_logprobs(row: list[float], top: int) -> TokenLogprobs:
    """Convert one row of the figures, with its first `top` alternatives."""
    width = len(row) // 2 - 1
    ids, logprobs = row[2 : 2 + top], row[2 + width : 2 + width + top]
    return TokenLogprobs(row[0], int(row[1]), [int(token) for token in ids], logprobs)
