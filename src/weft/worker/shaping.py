"""Shaping: what changes a request's logits before a token is chosen: bias, penalties, masks.

Each of them names its tokens, so what is kept and touched are those, a few hundred, and never a row of the
vocabulary: requests that ask for none of it pay nothing. The figures lie on the host, where they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from weft.core.params import SamplingParams
from weft.core.step import Admission

LEAST = torch.finfo(torch.float32).min
FIRST = np.zeros(1, dtype=np.int64)


class Seen:
    """The tokens that penalties act on: those of the output, and of the prompt where it counts too."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.repetition = params.repetition_penalty
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        ids = dict.fromkeys(prompt) if self.repetition != 1.0 else {}
        self._place = {token: place for place, token in enumerate(ids)}
        self._ids = np.array([*ids], dtype=np.int64)
        self._counts = np.zeros(len(ids), dtype=np.float32)
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """One more token of the output."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            room = max(16, place)
            self._ids = np.append(self._ids, np.zeros(room, dtype=np.int64))
            self._counts = np.append(self._counts, np.zeros(room, dtype=np.float32))
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._place)]

    @property
    def cost(self) -> np.ndarray:
        """What presence and frequency take from each token's logit: float32."""
        counts = self._counts[: len(self._place)]
        return counts * np.float32(self.frequency) + (counts > 0) * np.float32(self.presence)


@dataclass
class Wishes:
    """One request's, with its token ids as arrays."""

    bias: np.ndarray
    bias_ids: np.ndarray
    allowed: np.ndarray | None
    never: np.ndarray
    phrases: list[tuple[list[int], int]]  # what the output ends in, and the token that must not follow
    not_yet: np.ndarray
    until: int  # position from which `not_yet` may come
    seen: Seen | None
    output: list[int] = field(default_factory=list)

    def forbidden(self, position: int) -> np.ndarray:
        """Ids that may not come at `position`."""
        ids = self.never
        if position < self.until:
            ids = np.concatenate([ids, self.not_yet])
        last = [token for prefix, token in self.phrases if self.output[-len(prefix) :] == prefix]
        return np.concatenate([ids, last]).astype(np.int64) if last else ids

    def note(self, token: int) -> None:
        """It was sampled."""
        if self.seen:
            self.seen.add(token)
        if self.phrases:
            self.output.append(token)


class Shaping:
    """The wishes of every slot. `stop_ids` are the model's own end tokens, which min_tokens holds back too,
    unless ignore_eos takes their meaning away. Ids outside the vocabulary are left out: the client refuses
    them by name, and here they would be another row's."""

    def __init__(self, vocab: int, device: torch.device, stop_ids: Iterable[int]) -> None:
        self.vocab, self.device, self.stop_ids = vocab, device, tuple(stop_ids)
        self._wishes: dict[int, Wishes] = {}

    def admit(self, admission: Admission) -> None:
        self.release(admission.slot)
        params = admission.params
        masked = params.allowed_token_ids is not None or params.bad_word_ids or params.min_tokens
        if not (params.penalised or masked or params.logit_bias):
            return
        bias = {token: value for token, value in (params.logit_bias or {}).items() if token < self.vocab}
        words = [word for word in params.bad_word_ids if word and word[-1] < self.vocab]
        ends = params.stop_token_ids + (() if params.ignore_eos else self.stop_ids)
        self._wishes[admission.slot] = Wishes(
            bias=np.array([*bias.values()], dtype=np.float32),
            bias_ids=np.array([*bias], dtype=np.int64),
            allowed=None if params.allowed_token_ids is None else self._ids(params.allowed_token_ids),
            never=self._ids([word[0] for word in words if len(word) == 1]),
            phrases=[([*word[:-1]], word[-1]) for word in words if len(word) > 1],
            not_yet=self._ids(ends),
            until=len(admission.prompt) + params.min_tokens,
            seen=Seen(params, admission.prompt, admission.output) if params.penalised else None,
            output=[*admission.output],
        )

    def release(self, slot: int) -> None:
        self._wishes.pop(slot, None)

    def any(self, slots: Iterable[int]) -> bool:
        return not self._wishes.keys().isdisjoint(slots)

    def apply(self, logits: torch.Tensor, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Change `logits` [R, V] in place: bias, penalties (repetition, then frequency and presence), masks.

        Masks come last, where vLLM has them first: nothing before them can undo them, and so nothing does.
        """
        rows = [(r, wishes) for r, slot in enumerate(slots) if (wishes := self._wishes.get(slot))]
        flat = logits.view(-1)
        if biased := [(r, wishes) for r, wishes in rows if len(wishes.bias)]:
            where = self._index([(r, wishes.bias_ids) for r, wishes in biased])
            flat.index_add_(0, where, self._put([wishes.bias for _, wishes in biased]))
        if penalised := [(r, wishes.seen) for r, wishes in rows if wishes.seen]:
            self._penalise(flat, penalised)
        masked = [(r, wishes.allowed, wishes.forbidden(positions[r])) for r, wishes in rows]
        if masked := [(r, allowed, never) for r, allowed, never in masked if allowed is not None or len(never)]:
            self._mask(flat, masked)

    def of(self, slots: Sequence[int]) -> list[Wishes | None]:
        """Whose tokens are sampled: a slot may be another request's by the time that they are known."""
        return [self._wishes.get(slot) for slot in slots]

    def _penalise(self, flat: torch.Tensor, rows: list[tuple[int, Seen]]) -> None:
        where = self._index([(r, seen.ids) for r, seen in rows])
        factor = self._put([np.full(len(seen.ids), seen.repetition, dtype=np.float32) for _, seen in rows])
        values = flat.index_select(0, where)
        values = torch.where(values > 0, values / factor, values * factor)
        flat.index_copy_(0, where, values - self._put([seen.cost for _, seen in rows]))

    def _mask(self, flat: torch.Tensor, rows: list[tuple[int, np.ndarray | None, np.ndarray]]) -> None:
        if limited := [(r, allowed) for r, allowed, _ in rows if allowed is not None]:
            where = self._index(limited)
            kept = flat.index_select(0, where)
            flat.view(-1, self.vocab).index_fill_(0, self._put([np.array([r for r, _ in limited])]), -torch.inf)
            flat.index_copy_(0, where, kept)
        flat.index_fill_(0, self._index([(r, never) for r, _, never in rows]), -torch.inf)
        # Where nothing is left, the first allowed token (or id 0) comes: less likely than any other, but there.
        where = self._index([(r, FIRST if allowed is None else allowed[:1]) for r, allowed, _ in rows])
        flat.index_copy_(0, where, flat.index_select(0, where).clamp(min=LEAST))

    def _index(self, rows: list[tuple[int, np.ndarray]]) -> torch.Tensor:
        """Where each row's ids lie in the flat logits."""
        return self._put([r * self.vocab + ids for r, ids in rows])

    def _put(self, arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(self.device, non_blocking=True)

    def _ids(self, ids: Iterable[int]) -> np.ndarray:
        return np.array([token for token in ids if token < self.vocab], dtype=np.int64)
