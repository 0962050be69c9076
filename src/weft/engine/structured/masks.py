"""MaskMaker: computes masks of allowed tokens, and keeps masks that other answers are likely to need."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from weft.engine.structured.matcher import GuidedMatcher

if TYPE_CHECKING:
    from llguidance import LLExecutor

THREADS = 4  # that compute masks of several rows; more do not pay, as others need the cores
WORD_BYTES = 4
KEPT_BYTES = 32 * 2**20  # of masks

Row = tuple[GuidedMatcher, Sequence[int]]  # a matcher, and the valid draft tokens after it


class MaskMaker:
    """Computes the masks of a vocabulary of `vocab` tokens. For one thread."""

    def __init__(self, vocab: int) -> None:
        self._mask_bytes = -(-vocab // (8 * WORD_BYTES)) * WORD_BYTES
        self._kept: OrderedDict[Hashable, bytes] = OrderedDict()

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(min(THREADS, os.cpu_count() or 1))

    def masks(self, rows: Sequence[Row]) -> list[bytes]:
        """For each row the masks of its 1 + len(drafts) tokens; see `engine.core.grammar.Grammars.masks`."""
        states = [None if drafts else matcher.state_key() for matcher, drafts in rows]
        # A row whose state has no key shares its masks with no other.
        keys = [number if state is None else state for number, state in enumerate(states)]
        masks = self._find({state for state in states if state is not None})
        missing = {key: row for key, row in zip(keys, rows, strict=True) if key not in masks}
        if missing:
            computed = dict(zip(missing, self._compute(list(missing.values())), strict=True))
            masks |= computed
            for state in states:
                if state in computed and missing[state][0].error is None:
                    self._keep(state, computed[state])
        return [self._own_mask(key, row, masks[key], missing.get(key)) for key, row in zip(keys, rows, strict=True)]

    def _own_mask(self, key: Hashable, row: Row, mask: bytes, computed: Row | None) -> bytes:
        """The mask of a row; `mask` unless it was computed for another row, whose matcher then could not go on."""
        if computed is None or computed is row or computed[0].error is None:
            return mask
        return self._compute([row])[0]

    def _find(self, states: set[Hashable]) -> dict[Hashable, bytes]:
        kept = {state: self._kept[state] for state in states if state in self._kept}
        for state in kept:
            self._kept.move_to_end(state)
        return kept

    def _keep(self, state: Hashable, mask: bytes) -> None:
        self._kept[state] = mask
        while len(self._kept) * self._mask_bytes > KEPT_BYTES:
            self._kept.popitem(last=False)

    def _compute(self, rows: Sequence[Row]) -> list[bytes]:
        counts = [1 + len(drafts) for _, drafts in rows]
        words = np.zeros((sum(counts), self._mask_bytes // WORD_BYTES), dtype="<i4")
        starts = np.cumsum([0, *counts[:-1]]).tolist()
        placed = list(zip(rows, starts, strict=True))
        plain = [(matcher.inner, at) for (matcher, drafts), at in placed if not drafts]
        drafted = [(matcher.inner, at, list(drafts)) for (matcher, drafts), at in placed if drafts]
        where = words.ctypes.data, self._mask_bytes, len(words)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        for matcher, _ in rows:
            if matcher.inner.is_error():
                matcher.note_error()
        return [words[at : at + count].tobytes() for at, count in zip(starts, counts, strict=True)]
