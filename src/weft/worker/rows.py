"""Rows: what every rank keeps of the requests that hold a slot, and how a StepPlan becomes a Batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.core.step import UNKNOWN, Admission, StepPlan
from weft.kernels.batch import Batch, Lengths
from weft.worker.staging import Staging


@dataclass(frozen=True)
class PromptWish:
    """A request that wants the logprobs of its prompt, with `top` alternatives each."""

    prompt: list[int]
    top: int


class Rows:
    """Block tables by slot: [slots, blocks per sequence] int32 on the host, and the same on a GPU, which hears of new
    blocks only."""

    def __init__(self, slots: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.tables = np.zeros((slots, -(-max_model_len // block_size)), dtype=np.int32)
        self.lengths = [0] * slots
        self.wishes: dict[int, PromptWish] = {}
        self._staging = Staging(device)
        self._mirror = (
            torch.zeros(self.tables.shape, dtype=torch.int32, device=device) if device.type != "cpu" else None
        )

    def admit(self, admission: Admission) -> None:
        self.lengths[admission.slot] = 0
        top = admission.params.prompt_logprobs
        if top is not None:
            self.wishes[admission.slot] = PromptWish(admission.prompt, top)

    def reach(self, slot: int) -> int:
        """Tokens that the slot's blocks hold."""
        return self.lengths[slot] * self.block_size

    def release(self, slot: int) -> None:
        self.wishes.pop(slot, None)

    def batch(
        self,
        step: StepPlan,
        last: torch.Tensor | None = None,
        more: Sequence[np.ndarray] = (),
        *,
        singly: bool = False,
    ) -> tuple[Batch, list[torch.Tensor]]:
        """Take the step's new blocks into the tables, and lay its tokens out; those that are UNKNOWN come from `last`,
        [slots] int32, the token that each slot sampled last. `more` arrays travel with it. Laid out `singly`, every
        token is a row of its own, which attends to what stands before it: what comes out is the same."""
        fresh = self._grow(step)
        slots, starts, counts = (np.array(x, dtype=np.int64) for x in (step.slots, step.starts, step.counts))
        context = starts + counts
        row_starts = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=row_starts[1:])
        # A token's position is its index in the step, moved by where its row starts here and there.
        positions = np.arange(row_starts[-1]) + np.repeat(starts - row_starts[:-1], counts)
        block, offset = np.divmod(positions, self.block_size)
        token_slots = np.repeat(slots, counts)
        places = self.tables[token_slots, block] * np.int64(self.block_size) + offset
        width = -(-int(context.max()) // self.block_size)
        if singly:
            slots, context, row_starts = token_slots, positions + 1, np.arange(len(positions) + 1)
            counts = np.ones_like(positions)
        tokens = np.array(step.tokens, dtype=np.int32)
        unknown = np.flatnonzero(tokens == UNKNOWN) if last is not None else slots[:0]
        narrow = (array.astype(np.int32) for array in (positions, row_starts, context))
        arrays = [places, unknown, token_slots[unknown], tokens, *narrow]
        if self._mirror is None:
            arrays.append(self.tables[slots, :width])
        else:
            new = np.array(fresh, dtype=np.int64)
            arrays += [slots, new, self.tables.reshape(-1)[new]]
        there = self._staging.put([*more, *arrays])
        more_, arrays_ = there[: len(more)], there[len(more) :]
        places_, unknown_, unknown_slots, tokens_, positions_, row_starts_, context_, *rest = arrays_
        if len(unknown):
            assert last is not None
            tokens_ = tokens_.index_copy(0, unknown_, last[unknown_slots])
        batch = Batch(
            tokens=tokens_,
            positions=positions_,
            slots=places_,
            row_starts=row_starts_,
            context=context_,
            tables=rest[0] if self._mirror is None else self._mirrored(width, *rest),
            decodes=int(np.argmax(counts > 1)) if counts.max() > 1 else len(counts),
            host=Lengths(row_starts, context),
        )
        return batch, more_

    def _mirrored(self, width: int, slots: torch.Tensor, new: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """The tables of these slots on the device, where `blocks` have come to the places `new`."""
        assert self._mirror is not None
        if len(new):
            self._mirror.view(-1).index_copy_(0, new, blocks)
        return self._mirror[:, :width].index_select(0, slots)

    def _grow(self, step: StepPlan) -> list[int]:
        """Append the step's new blocks to their tables; where they lie in all tables, one after the other."""
        places: list[int] = []
        width = self.tables.shape[1]
        for slot, blocks in zip(step.slots, step.blocks, strict=True):
            if blocks:
                used = self.lengths[slot]
                self.lengths[slot] = end = used + len(blocks)
                self.tables[slot, used:end] = blocks
                places += range(slot * width + used, slot * width + end)
        return places
