"""Edits to a request's logits before a token is sampled: bias, penalties, masks.

Edits are sparse: only the listed token ids, a few hundred, are stored and changed, never a whole row of logits.
Requests that ask for none cost nothing. The values lie on the host, where they change.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from weft.engine.core.params import SamplingParams
from weft.engine.core.step import Admission
from weft.ranks.worker.sample_arrays import EditArrays

MIN_LOGIT = torch.finfo(torch.float32).min
FIRST_ID = np.zeros(1, dtype=np.int64)
NO_IDS = np.zeros(0, dtype=np.int64)
NO_VALUES = np.zeros(0, dtype=np.float32)


class PenalisedTokens:
    """The tokens that a request's penalties act on: its output, and its prompt too for the repetition penalty."""

    def __init__(self, params: SamplingParams, prompt: Iterable[int], output: Sequence[int]) -> None:
        self.repetition = params.repetition_penalty
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        ids = dict.fromkeys(prompt) if self.repetition != 1.0 else {}
        self._index = {token: index for index, token in enumerate(ids)}
        self._ids = np.array([*ids], dtype=np.int64)
        self._counts = np.zeros(len(ids), dtype=np.float32)
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """Count one more token of the output."""
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            room = max(16, index)
            self._ids = np.append(self._ids, np.zeros(room, dtype=np.int64))
            self._counts = np.append(self._counts, np.zeros(room, dtype=np.float32))
        self._ids[index] = token
        self._counts[index] += 1

    @property
    def ids(self) -> np.ndarray:
        """Ids of the tokens, each once: int64."""
        return self._ids[: len(self._index)]

    @property
    def penalty(self) -> np.ndarray:
        """Amount that presence and frequency penalties subtract from each token's logit: float32."""
        counts = self._counts[: len(self._index)]
        return counts * np.float32(self.frequency) + (counts > 0) * np.float32(self.presence)


@dataclass
class RequestEdits:
    """Edits that one request asks for, with token ids as int64 arrays."""

    bias: np.ndarray
    bias_ids: np.ndarray
    allowed: np.ndarray | None  # the only ids that may be sampled; None allows all
    never: np.ndarray  # ids that may not be sampled
    phrases: list[tuple[list[int], int]]  # a prefix of the output, and the token that may not follow it
    stop_ids: np.ndarray  # ids that may not be sampled before position `min_position`
    min_position: int
    penalised: PenalisedTokens | None
    output: list[int] = field(default_factory=list)

    def forbidden(self, position: int) -> np.ndarray:
        """Ids that may not be sampled at `position`."""
        ids = self.never
        if position < self.min_position:
            ids = np.concatenate([ids, self.stop_ids])
        last = [token for prefix, token in self.phrases if self.output[-len(prefix) :] == prefix]
        return np.concatenate([ids, last]).astype(np.int64) if last else ids

    def fallback(self, has_forbidden: bool) -> np.ndarray:
        """The id that is sampled if these edits leave no other: the first allowed id, or 0. Empty if all are left."""
        if self.allowed is not None:
            return self.allowed[:1]
        return FIRST_ID if has_forbidden else NO_IDS

    def note(self, token: int) -> None:
        """Append a sampled token to the output."""
        if self.penalised:
            self.penalised.add(token)
        if self.phrases:
            self.output.append(token)


class EditLists:
    """Edits of several requests, row by row, on their way to EditArrays."""

    def __init__(self) -> None:
        self._biased_at, self._bias = [NO_IDS], [NO_VALUES]
        self._penalised_at, self._repetition, self._penalty = [NO_IDS], [NO_VALUES], [NO_VALUES]
        self._allowed_at, self._limited_rows = [NO_IDS], list[int]()
        self._forbidden_at, self._fallback_at = [NO_IDS], [NO_IDS]

    def add(self, request: RequestEdits, row: int, vocab: int, position: int, constrained: bool) -> None:
        """Add the edits of a request to row `row` of the logits, for a token at `position`.

        A constrained row, which gets a mask of its grammar too, has no fallback: a forbidden token that the grammar
        allows would be answered.
        """
        begin = row * vocab
        self._biased_at.append(begin + request.bias_ids)
        self._bias.append(request.bias)
        penalised = request.penalised
        if penalised:
            self._penalised_at.append(begin + penalised.ids)
            self._repetition.append(np.full(len(penalised.ids), penalised.repetition, dtype=np.float32))
            self._penalty.append(penalised.penalty)
        if request.allowed is not None:
            self._allowed_at.append(begin + request.allowed)
            self._limited_rows.append(row)
        forbidden = request.forbidden(position)
        self._forbidden_at.append(begin + forbidden)
        if not constrained:
            self._fallback_at.append(begin + request.fallback(len(forbidden) > 0))

    def edit_arrays(self) -> EditArrays[np.ndarray]:
        return EditArrays(
            biased_at=np.concatenate(self._biased_at),
            bias=np.concatenate(self._bias),
            penalised_at=np.concatenate(self._penalised_at),
            repetition=np.concatenate(self._repetition),
            penalty=np.concatenate(self._penalty),
            allowed_at=np.concatenate(self._allowed_at),
            limited_rows=np.array(self._limited_rows, dtype=np.int64),
            forbidden_at=np.concatenate(self._forbidden_at),
            fallback_at=np.concatenate(self._fallback_at),
        )


def apply_edits(logits: torch.Tensor, edits: EditArrays[torch.Tensor]) -> None:
    """Change `logits` [R, V] float32, contiguous, in place: bias, penalties (repetition, then frequency and presence),
    masks.

    Masks come last, where vLLM has them first: nothing before them can undo them, and so nothing does.
    """
    flat = logits.view(-1)
    if len(edits.biased_at):
        flat.index_add_(0, edits.biased_at, edits.bias)
    if len(edits.penalised_at):
        values = flat.index_select(0, edits.penalised_at)
        values = torch.where(values > 0, values / edits.repetition, values * edits.repetition)
        flat.index_copy_(0, edits.penalised_at, values - edits.penalty)
    if len(edits.limited_rows):
        kept = flat.index_select(0, edits.allowed_at)
        logits.index_fill_(0, edits.limited_rows, -torch.inf)
        flat.index_copy_(0, edits.allowed_at, kept)
    if len(edits.forbidden_at):
        flat.index_fill_(0, edits.forbidden_at, -torch.inf)
    if len(edits.fallback_at):
        flat.index_copy_(0, edits.fallback_at, flat.index_select(0, edits.fallback_at).clamp(min=MIN_LOGIT))


class LogitsEdits:
    """Edits of the requests in all slots.

    `stop_ids` are the model's own end tokens, which min_tokens holds back too, unless ignore_eos takes their meaning
    away. Ids outside the vocabulary are left out: the client refuses them by name, and here they would be another
    row's.
    """

    def __init__(self, vocab: int, stop_ids: Iterable[int]) -> None:
        self.vocab, self.stop_ids = vocab, tuple(stop_ids)
        self._requests: dict[int, RequestEdits] = {}

    def admit(self, admission: Admission) -> None:
        """Give a slot to a request, with the output that it had before a preemption, if any."""
        self.release(admission.slot)
        if _wants_edits(admission.params):
            self._requests[admission.slot] = self._request_edits(admission)

    def release(self, slot: int) -> None:
        """Free a slot."""
        self._requests.pop(slot, None)

    def edit_arrays(
        self, slots: Sequence[int], positions: Sequence[int], constrained: Container[int]
    ) -> EditArrays[np.ndarray] | None:
        """Edits for tokens at `positions` of the requests in `slots`, None if none of these requests has edits.

        `constrained` are the slots whose tokens get a mask of a grammar afterwards.
        """
        if self._requests.keys().isdisjoint(slots):
            return None
        lists = EditLists()
        for row, slot in enumerate(slots):
            request = self._requests.get(slot)
            if request is not None:
                lists.add(request, row, self.vocab, positions[row], slot in constrained)
        return lists.edit_arrays()

    def requests_in(self, slots: Sequence[int]) -> list[RequestEdits | None]:
        """The requests that hold these slots now: a slot may be another request's when its sampled token is known."""
        return [self._requests.get(slot) for slot in slots]

    def _request_edits(self, admission: Admission) -> RequestEdits:
        params = admission.params
        bias = {token: value for token, value in (params.logit_bias or {}).items() if token < self.vocab}
        never, phrases = self._split_bad_words(params.bad_word_ids)
        model_stop_ids = () if params.ignore_eos else self.stop_ids
        return RequestEdits(
            bias=np.array([*bias.values()], dtype=np.float32),
            bias_ids=np.array([*bias], dtype=np.int64),
            allowed=None if params.allowed_token_ids is None else self._known_ids(params.allowed_token_ids),
            never=self._known_ids(never),
            phrases=phrases,
            stop_ids=self._known_ids(params.stop_token_ids + model_stop_ids),
            min_position=len(admission.prompt) + params.min_tokens,
            penalised=PenalisedTokens(params, admission.prompt, admission.output) if params.penalised else None,
            output=[*admission.output],
        )

    def _split_bad_words(self, words: Iterable[Sequence[int]]) -> tuple[list[int], list[tuple[list[int], int]]]:
        """Divide bad words into single ids and phrases of several tokens, see RequestEdits."""
        words = [word for word in words if word and word[-1] < self.vocab]
        never = [word[0] for word in words if len(word) == 1]
        phrases = [([*word[:-1]], word[-1]) for word in words if len(word) > 1]
        return never, phrases

    def _known_ids(self, ids: Iterable[int]) -> np.ndarray:
        """Ids that are in the vocabulary: int64."""
        return np.array([token for token in ids if token < self.vocab], dtype=np.int64)


def _wants_edits(params: SamplingParams) -> bool:
    masked = params.allowed_token_ids is not None or params.bad_word_ids or params.min_tokens
    return bool(params.penalised or masked or params.logit_bias)
