"""Sampler: one token per row from logits, as each request's SamplingParams ask. Only the output rank has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.core.step import Admission, TokenLogprobs
from weft.kernels.streams import NOT_FINITE
from weft.worker.chooser import Chooser, TorchChooser
from weft.worker.chunks import pick
from weft.worker.device import ToHost
from weft.worker.logprobs import Scorer, score, unpack
from weft.worker.shaping import Edits, Shaping, Wishes, shape
from weft.worker.staging import sent

NO_LOGPROBS = -1
Result = tuple[list[int], list[TokenLogprobs | None]]


@dataclass(frozen=True)
class Order:
    """Rows that are to be sampled: row r is of slot `slots[r]`, and its token will stand at `positions[r]`, the number
    of tokens of prompt and output so far; [R] int64 each. `arrays` have to come to the device: these two first."""

    slots: np.ndarray
    positions: np.ndarray
    wishes: list[Wishes | None]  # whose figures its token changes
    scored: np.ndarray  # rows whose logprobs are wanted
    arrays: list[np.ndarray]
    edits: int  # of the arrays, after the first three


@dataclass(frozen=True)
class Sampled:
    """What was sampled: `tokens` [R] int64 on the device, at once, ids in any case; `result` waits for it to reach the
    host, with NOT_FINITE in place of the token of a row whose logits were not finite."""

    tokens: torch.Tensor
    result: Callable[[], Result]


class Sampler:
    """Keeps what sampling needs of the request in each of `slots` slots, over `vocab` token ids.

    `stop_ids` are the model's own end tokens (`ModelShape.eos`), which min_tokens holds back together with a
    request's stop_token_ids. Greedy takes the lowest of equally likely ids (as argmax promises), and so does a
    top_k of 1. A row whose greatest logit is NaN or infinite gives NOT_FINITE, and its logprobs mean nothing; other
    rows are as they would be without it. `chooser` has as many slots.
    """

    def __init__(
        self,
        vocab: int,
        slots: int,
        stop_ids: Iterable[int] = (),
        chooser: Chooser | None = None,
        scorer: Scorer = score,
    ) -> None:
        self.vocab = vocab
        self._shaping = Shaping(vocab, stop_ids)
        self._chooser = chooser or TorchChooser(slots)
        self._scorer = scorer
        self._tops = np.full(slots, NO_LOGPROBS, dtype=np.int64)

    def admit(self, admission: Admission) -> None:
        """A request takes a slot, with the output that it had before a preemption, if any."""
        slot, params = admission.slot, admission.params
        self._tops[slot] = NO_LOGPROBS if params.logprobs is None else min(params.logprobs, self.vocab)
        self._chooser.admit(slot, params, admission.key)
        self._shaping.admit(admission)

    def release(self, slot: int) -> None:
        """The slot is free."""
        self._shaping.release(slot)

    def order(self, slots: Sequence[int], positions: Sequence[int]) -> Order:
        """What is to be sampled next. A row with penalties or bad words has to have its last token's result taken
        before it is ordered again, and what is ordered has to be sampled: the device hears of an admission once."""
        slots_, positions_ = np.array(slots, dtype=np.int64), np.array(positions, dtype=np.int64)
        edits = self._shaping.edits(slots, positions)
        scored = np.flatnonzero(self._tops[slots_] != NO_LOGPROBS)
        return Order(
            slots=slots_,
            positions=positions_,
            wishes=self._shaping.of(slots) if edits else [],
            scored=scored,
            arrays=[slots_, positions_, scored, *(edits or ()), *self._chooser.arrays()],
            edits=len(edits or ()),
        )

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, order: Order, there: Sequence[torch.Tensor]) -> Sampled:
        """One token per row, and its logprobs where the request wants them; its result is (tokens, logprobs).

        `logits` [R, vocab] of any float type may be changed; `there` are the order's arrays on the device. The random
        numbers of a token depend only on its request's key and its position.
        """
        slots, positions, scored, *rest = there
        edits, rest = rest[: order.edits], rest[order.edits :]
        raw = None
        if order.scored.size:
            # Logprobs are the model's own: from before anything is changed.
            raw = pick(logits, order.scored, scored)
        # Requests may wish for nothing at this position: such logits stay as they are, and as narrow.
        if any(map(len, edits)):
            if raw is not None and logits.dtype == torch.float32:
                raw = raw.clone()
            logits = logits.float().contiguous()
            shape(logits, Edits(*edits))
        chosen = self._chooser.choose(logits, order.slots, order.positions, [slots, positions, *rest])
        tops = self._tops[order.slots[order.scored]]
        # The next step and the scorer take ids alone, and what is broken ends on the host.
        ids, figures = chosen.clamp(min=0), chosen
        if raw is not None:
            scores = self._scorer(raw, pick(ids, order.scored, scored), int(tops.max()))
            # In one tensor, to be brought to the host together.
            figures = torch.cat([chosen.double(), scores.flatten()])
        arrival = ToHost(figures)

        def result() -> Result:
            values = arrival.values()
            tokens = [int(token) for token in values[: len(order.slots)]]
            for wishes, token in zip(order.wishes, tokens, strict=False):
                if wishes and token != NOT_FINITE:
                    wishes.note(token)
            return tokens, unpacked(values, len(tokens), order.scored.tolist(), tops.tolist())

        return Sampled(ids, result)

    @torch.inference_mode()
    def prompt_logprobs(self, logits: torch.Tensor, targets: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Of tokens that are given: row t of `logits` [T, vocab] foresaw `targets[t]`."""
        if not targets:
            return []
        top = min(top, self.vocab)
        wanted = sent(np.array(targets, dtype=np.int64), logits.device)
        return [unpack(row, top) for row in self._scorer(logits, wanted, top).tolist()]


def unpacked(figures: list[float], count: int, rows: list[int], tops: list[int]) -> list[TokenLogprobs | None]:
    """Logprobs of `count` rows, from the figures of all, and then of those of `rows`."""
    logprobs: list[TokenLogprobs | None] = [None] * count
    if rows:
        width = (len(figures) - count) // len(rows)
        for r, begin, top in zip(rows, range(count, len(figures), width), tops, strict=True):
            logprobs[r] = unpack(figures[begin : begin + width], top)
    return logprobs
