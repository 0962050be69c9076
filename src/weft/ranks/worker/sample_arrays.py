"""The tokens that a step samples, and the arrays that sampling needs on the device.

Arrays have the same names on both sides: numpy arrays on the host, tensors once they are staged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Generic, NamedTuple

import numpy as np
import torch

from weft.engine.core.step import StepPlan
from weft.ranks.kernels.sampling import Array, SettingsUpdate, mask_words


class EditArrays(NamedTuple, Generic[Array]):
    """Edits to the logits [R, vocab] of a step, in the order in which they are applied.

    Fields that end in `at` are int64 indices into the flattened logits; their values are float32.
    """

    biased_at: Array
    bias: Array
    penalised_at: Array
    repetition: Array
    penalty: Array  # frequency and presence together, to be subtracted
    allowed_at: Array  # the only tokens of the limited rows
    limited_rows: Array
    forbidden_at: Array
    fallback_at: Array  # one token of each row with forbidden ones and without a grammar: sampled if no other is left


class MaskArrays(NamedTuple, Generic[Array]):
    """Masks of tokens, see `Sampling.apply_masks`."""

    rows: Array  # [M] int64: rows of the logits that have a mask
    masks: Array  # [M, words] int32


class SampleArrays(NamedTuple, Generic[Array]):
    """R tokens to sample after a step. Fields from `scored` on are set on the output rank alone, and only if needed."""

    picks: Array  # [R] int64: index in the step of the token before
    slots: Array  # [R] int64: request slot
    positions: Array  # [R] int64: position in the request's text, that is, its number of tokens so far
    scored: Array | None = None  # int64: indices of the tokens whose logprobs are wanted
    edits: EditArrays[Array] | None = None
    settings: SettingsUpdate[Array] | None = None
    masks: MaskArrays[Array] | None = None

    def flatten(self) -> list[Array]:
        """List the arrays that are set, in the order of the fields."""
        arrays = [self.picks, self.slots, self.positions]
        if self.scored is not None:
            arrays.append(self.scored)
        if self.edits is not None:
            arrays.extend(self.edits)
        if self.settings is not None:
            arrays.extend(self.settings)
        if self.masks is not None:
            arrays.extend(self.masks)
        return arrays

    def with_tensors(self, tensors: Iterable[torch.Tensor]) -> SampleArrays[torch.Tensor]:
        """Return the same fields as `tensors`, which are in the order of `flatten`."""
        left = iter(tensors)
        return SampleArrays(
            picks=next(left),
            slots=next(left),
            positions=next(left),
            scored=None if self.scored is None else next(left),
            edits=None if self.edits is None else EditArrays(*islice(left, len(self.edits))),
            settings=None if self.settings is None else SettingsUpdate(*islice(left, len(self.settings))),
            masks=None if self.masks is None else MaskArrays(*islice(left, len(self.masks))),
        )


def mask_arrays(slots: Sequence[int], masks: Mapping[int, bytes], vocab: int) -> MaskArrays[np.ndarray] | None:
    """Masks of the tokens that are sampled for `slots`, given the `masks` of a StepPlan; None if there are none."""
    rows = [row for row, slot in enumerate(slots) if slot in masks]
    if not rows:
        return None
    masked_slots = dict.fromkeys(slots[row] for row in rows)
    words = np.concatenate([np.frombuffer(masks[slot], dtype="<i4") for slot in masked_slots])
    return MaskArrays(int64_array(rows), words.reshape(len(rows), mask_words(vocab)))


def int64_array(numbers: Sequence[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def sampled_positions(step: StepPlan) -> tuple[list[int], list[int], list[int]]:
    """`picks`, `slots` and `positions` of all tokens that a step samples, as in SampleArrays."""
    picks, slots, positions, end = [], [], [], 0
    for slot, start, count, samples, drafts in zip(
        step.slots, step.starts, step.counts, step.samples, step.draft_counts, strict=True
    ):
        end += count
        if samples:
            for back in range(drafts, -1, -1):
                picks.append(end - 1 - back)
                slots.append(slot)
                positions.append(start + count - back)
    return picks, slots, positions
