"""Sampler: one token per row from logits, as each request's SamplingParams ask. Only the output rank has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.core.step import Admission, TokenLogprobs
from weft.worker.chunks import chunks, pick
from weft.worker.device import ToHost
from weft.worker.filters import NEUTRAL, weigh
from weft.worker.logprobs import score, unpack
from weft.worker.random import race, seeds
from weft.worker.shaping import Shaping

NO_LOGPROBS = -1
Result = tuple[list[int], list[TokenLogprobs | None]]


@dataclass(frozen=True)
class Sampled:
    """What was sampled: `tokens` [R] int64 on the device, at once; `result` waits for it to reach the host."""

    tokens: torch.Tensor
    result: Callable[[], Result]


class Sampler:
    """Keeps what sampling needs of the request in each of `slots` slots, over `vocab` token ids.

    `stop_ids` are the model's own end tokens (`ModelShape.eos`), which min_tokens holds back together with a
    request's stop_token_ids. Greedy takes the lowest of equally likely ids (as argmax promises), and so does a
    top_k of 1. A NaN among the logits is no error here: greedy takes it for the greatest, a draw gives id 0,
    logprobs are NaN; other rows are as they would be without it.
    """

    def __init__(self, vocab: int, slots: int, device: torch.device, stop_ids: Iterable[int] = ()) -> None:
        self.vocab, self.device = vocab, device
        self._shaping = Shaping(vocab, device, stop_ids)
        self._greedy = np.ones(slots, dtype=bool)
        self._settings = np.tile(np.array(NEUTRAL, dtype=np.float64), (slots, 1))
        self._keys = np.zeros(slots, dtype=np.uint64)
        self._tops = np.full(slots, NO_LOGPROBS, dtype=np.int64)

    def admit(self, admission: Admission) -> None:
        """A request takes a slot, with the output that it had before a preemption, if any."""
        slot, params = admission.slot, admission.params
        self._greedy[slot] = params.greedy or params.top_k == 1
        self._settings[slot] = params.temperature, params.min_p, params.top_k, params.top_p
        self._keys[slot] = admission.key
        self._tops[slot] = NO_LOGPROBS if params.logprobs is None else min(params.logprobs, self.vocab)
        self._shaping.admit(admission)

    def release(self, slot: int) -> None:
        """The slot is free."""
        self._shaping.release(slot)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, slots: Sequence[int], positions: Sequence[int]) -> Sampled:
        """One token per row, and its logprobs where the request wants them; its result is (tokens, logprobs).

        `logits` [R, vocab] float32 may be changed; row r is of slot `slots[r]`, and its token will stand at
        `positions[r]`, the number of tokens of prompt and output so far. The random numbers of a token depend
        only on its request's key and its position. A row with penalties or bad words has to have its last token's
        result taken before its next is sampled.
        """
        index = np.asarray(slots, dtype=np.int64)
        shaped = self._shaping.of(slots) if self._shaping.any(slots) else []
        scored = np.flatnonzero(self._tops[index] != NO_LOGPROBS)
        raw = None
        if scored.size:
            # Logprobs are the model's own: from before anything is changed.
            raw = pick(logits, scored)
            raw = raw.clone() if shaped else raw
        if shaped:
            logits = logits.contiguous()
            self._shaping.apply(logits, slots, positions)
        chosen = self._choose(logits, index, np.asarray(positions))
        tops = self._tops[index[scored]]
        figures = chosen if raw is None else self._figures(raw, chosen, scored, tops)
        arrival = ToHost(figures)

        def result() -> Result:
            values = arrival.values()
            tokens = [int(token) for token in values[: len(slots)]]
            for wishes, token in zip(shaped, tokens, strict=False):
                if wishes:
                    wishes.note(token)
            return tokens, unpacked(values, len(slots), scored.tolist(), tops.tolist())

        return Sampled(chosen, result)

    @torch.inference_mode()
    def prompt_logprobs(self, logits: torch.Tensor, targets: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Of tokens that are given: row t of `logits` [T, vocab] float32 foresaw `targets[t]`."""
        top = min(top, self.vocab)
        wanted = torch.tensor(targets, dtype=torch.int64).to(self.device, non_blocking=True)
        return [unpack(row, top) for row in score(logits, wanted, top).tolist()] if targets else []

    def _choose(self, logits: torch.Tensor, index: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Token ids [R] int64, on the device."""
        rows = np.flatnonzero(~self._greedy[index])
        if not rows.size:
            return logits.argmax(-1)
        slots = index[rows]
        streams = torch.from_numpy(seeds(self._keys[slots], positions[rows])).to(self.device, non_blocking=True)
        drawn = torch.cat(
            [
                race(weigh(pick(logits, rows[part]), self._settings[slots[part]]), streams[part])
                for part in chunks(len(rows), logits)
            ]
        )
        if len(rows) == len(index):
            return drawn
        return logits.argmax(-1).index_copy_(0, torch.from_numpy(rows).to(self.device, non_blocking=True), drawn)

    def _figures(self, raw: torch.Tensor, chosen: torch.Tensor, rows: np.ndarray, tops: np.ndarray) -> torch.Tensor:
        """Tokens and the logprobs of some rows in one tensor, to be brought to the host together."""
        scores = score(raw, pick(chosen, rows), int(tops.max()))
        return torch.cat([chosen.double(), scores.flatten()])


def unpacked(figures: list[float], count: int, rows: list[int], tops: list[int]) -> list[TokenLogprobs | None]:
    """Logprobs of `count` rows, from what `_figures` made of those of `rows`."""
    logprobs: list[TokenLogprobs | None] = [None] * count
    if rows:
        width = (len(figures) - count) // len(rows)
        for r, begin, top in zip(rows, range(count, len(figures), width), tops, strict=True):
            logprobs[r] = unpack(figures[begin : begin + width], top)
    return logprobs
