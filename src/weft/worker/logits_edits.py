"""LogitsEdits: what changes a request's logits before a token is chosen: bias, penalties, masks.

Each of them names its tokens, so what is kept and touched are those, a few hundred, and never a row of the
vocabulary: requests that ask for none of it pay nothing. The figures lie on the host, where they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from weft.core.params import SamplingParams
from weft.core.step import Admission

LEAST = torch.finfo(torch.float32).min
FIRST = np.zeros(1, dtype=np.int64)
NO_IDS = np.zeros(0, dtype=np.int64)

Array = TypeVar("Array", np.ndarray, torch.Tensor)


class EditArrays(NamedTuple, Generic[Array]):
    """What is to be done to a step's logits, in this order. What ends in `at` is places in all of them, laid row after
    row."""

    biased_at: Array
    bias: Array
    seen_at: Array
    repetition: Array
    cost: Array
    limited_at: Array  # that some rows are limited to
    limited: Array  # those rows
    forbidden_at: Array
    saved_at: Array  # one of each row with masks: where nothing else is left it comes, less likely than any other


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
class RequestEdits:
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


def joined(arrays: list[np.ndarray]) -> np.ndarray:
    """float32, also where there are none."""
    return np.concatenate([np.zeros(0, dtype=np.float32), *arrays])


def shape(logits: torch.Tensor, edits: EditArrays[torch.Tensor]) -> None:
    """Change `logits` [R, V] float32, contiguous, in place: bias, penalties (repetition, then frequency and presence),
    masks.

    Masks come last, where vLLM has them first: nothing before them can undo them, and so nothing does.
    """
    flat = logits.view(-1)
    if len(edits.biased_at):
        flat.index_add_(0, edits.biased_at, edits.bias)
    if len(edits.seen_at):
        values = flat.index_select(0, edits.seen_at)
        values = torch.where(values > 0, values / edits.repetition, values * edits.repetition)
        flat.index_copy_(0, edits.seen_at, values - edits.cost)
    if len(edits.limited):
        kept = flat.index_select(0, edits.limited_at)
        logits.index_fill_(0, edits.limited, -torch.inf)
        flat.index_copy_(0, edits.limited_at, kept)
    if len(edits.forbidden_at):
        flat.index_fill_(0, edits.forbidden_at, -torch.inf)
    if len(edits.saved_at):
        flat.index_copy_(0, edits.saved_at, flat.index_select(0, edits.saved_at).clamp(min=LEAST))


class LogitsEdits:
    """The wishes of every slot. `stop_ids` are the model's own end tokens, which min_tokens holds back too,
    unless ignore_eos takes their meaning away. Ids outside the vocabulary are left out: the client refuses
    them by name, and here they would be another row's."""

    def __init__(self, vocab: int, stop_ids: Iterable[int]) -> None:
        self.vocab, self.stop_ids = vocab, tuple(stop_ids)
        self._wishes: dict[int, RequestEdits] = {}

    def admit(self, admission: Admission) -> None:
        self.release(admission.slot)
        params = admission.params
        masked = params.allowed_token_ids is not None or params.bad_word_ids or params.min_tokens
        if not (params.penalised or masked or params.logit_bias):
            return
        bias = {token: value for token, value in (params.logit_bias or {}).items() if token < self.vocab}
        words = [word for word in params.bad_word_ids if word and word[-1] < self.vocab]
        ends = params.stop_token_ids + (() if params.ignore_eos else self.stop_ids)
        self._wishes[admission.slot] = RequestEdits(
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

    def edits(self, slots: Sequence[int], positions: Sequence[int]) -> EditArrays[np.ndarray] | None:
        """What these rows wish, None where they have no wishes."""
        if self._wishes.keys().isdisjoint(slots):
            return None
        rows = [(r, wishes) for r, slot in enumerate(slots) if (wishes := self._wishes.get(slot))]
        biased = [(r, wishes) for r, wishes in rows if len(wishes.bias)]
        seen = [(r, wishes.seen) for r, wishes in rows if wishes.seen]
        limited = [(r, wishes.allowed) for r, wishes in rows if wishes.allowed is not None]
        forbidden = {r: ids for r, wishes in rows if len(ids := wishes.forbidden(positions[r]))}
        # The first allowed token, or id 0.
        saved = [
            (r, FIRST if wishes.allowed is None else wishes.allowed[:1])
            for r, wishes in rows
            if wishes.allowed is not None or r in forbidden
        ]
        return EditArrays(
            biased_at=self._places([(r, wishes.bias_ids) for r, wishes in biased]),
            bias=joined([wishes.bias for _, wishes in biased]),
            seen_at=self._places([(r, it.ids) for r, it in seen]),
            repetition=joined([np.full(len(it.ids), it.repetition, dtype=np.float32) for _, it in seen]),
            cost=joined([it.cost for _, it in seen]),
            limited_at=self._places(limited),
            limited=np.array([r for r, _ in limited], dtype=np.int64),
            forbidden_at=self._places([*forbidden.items()]),
            saved_at=self._places(saved),
        )

    def of(self, slots: Sequence[int]) -> list[RequestEdits | None]:
        """Whose tokens are sampled: a slot may be another request's by the time that they are known."""
        return [self._wishes.get(slot) for slot in slots]

    def _places(self, rows: list[tuple[int, np.ndarray]]) -> np.ndarray:
        """Where each row's ids lie in the flat logits."""
        return np.concatenate([NO_IDS, *(r * self.vocab + ids for r, ids in rows)])

    def _ids(self, ids: Iterable[int]) -> np.ndarray:
        return np.array([token for token in ids if token < self.vocab], dtype=np.int64)
