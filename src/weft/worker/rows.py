"""Rows: what every rank keeps of the requests that hold a slot, and how a StepPlan comes to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.core.step import UNKNOWN, Admission, StepPlan
from weft.kernels.batch import Lengths
from weft.kernels.staged import StagedStep
from weft.worker.staging import Staging


@dataclass(frozen=True)
class PromptWish:
    """A request that wants the logprobs of its prompt, with `top` alternatives each."""

    prompt: list[int]
    top: int


class Rows:
    """What a rank keeps by slot: block tables, [slots, blocks per sequence] int32 on the host and the same on the
    device, which hears of new blocks only, and on the device `last`, [slots] int64, the token that was sampled last."""

    def __init__(self, slots: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.tables = np.zeros((slots, -(-max_model_len // block_size)), dtype=np.int32)
        self.lengths = np.zeros(slots, dtype=np.int32)
        self.wishes: dict[int, PromptWish] = {}
        self.last = torch.zeros(slots, dtype=torch.int64, device=device)
        self._staging = Staging(device)
        self._mirror = torch.zeros(self.tables.shape, dtype=torch.int32, device=device)

    def admit(self, admission: Admission) -> None:
        self.lengths[admission.slot] = 0
        top = admission.params.prompt_logprobs
        if top is not None:
            self.wishes[admission.slot] = PromptWish(admission.prompt, top)

    def reach(self, slot: int) -> int:
        """Tokens that the slot's blocks hold."""
        return int(self.lengths[slot]) * self.block_size

    def release(self, slot: int) -> None:
        self.wishes.pop(slot, None)

    def stage(
        self, step: StepPlan, more: Sequence[np.ndarray] = (), *, singly: bool = False
    ) -> tuple[StagedStep, list[torch.Tensor]]:
        """Take the step's new blocks into the tables, and send its arrays to the device, with `more` of them. Staged
        `singly`, every token is a row of its own, which attends to what stands before it: what comes out is the
        same."""
        slots, starts, counts = (np.array(x, dtype=np.int64) for x in (step.slots, step.starts, step.counts))
        growth, blocks = self._grow(step, slots)
        context = starts + counts
        row_starts = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=row_starts[1:])
        # A token's position is its index in the step, moved by where its row starts here and there.
        positions = np.arange(row_starts[-1]) + np.repeat(starts - row_starts[:-1], counts)
        block, offset = np.divmod(positions, self.block_size)
        token_slots = np.repeat(slots, counts)
        places = self.tables[token_slots, block] * np.int64(self.block_size) + offset
        tokens = np.array(step.tokens, dtype=np.int64)
        tokens = np.where(tokens == UNKNOWN, ~token_slots, tokens)
        if singly:
            growth = np.repeat(growth, counts, axis=1)
            slots, context, row_starts = token_slots, positions + 1, np.arange(len(positions) + 1)
            counts = np.ones_like(positions)
        decodes = int(np.argmax(counts > 1)) if counts.max() > 1 else len(counts)
        order = np.argsort(-context[:decodes], kind="stable")
        wide = (tokens, positions, row_starts, context, order, slots, growth, blocks)
        on_device = self._staging.put([*more, places, *(array.astype(np.int32) for array in wide)])
        places_, tokens_, positions_, row_starts_, context_, order_, slots_, growth_, blocks_ = on_device[len(more) :]
        staged = StagedStep(
            tokens=tokens_,
            positions=positions_,
            places=places_,
            row_starts=row_starts_,
            context=context_,
            order=order_,
            slots=slots_,
            growth=growth_,
            blocks=blocks_,
            last=self.last,
            tables=self._mirror,
            decodes=decodes,
            width=int(growth[1].max()),
            host=Lengths(row_starts, context),
        )
        return staged, on_device[: len(more)]

    def _grow(self, step: StepPlan, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Append the step's new blocks to their tables: `growth` and `blocks` of StagedStep."""
        added = np.array([len(blocks) for blocks in step.blocks], dtype=np.int32)
        had = self.lengths[slots]
        has = had + added
        for slot, used, end, blocks in zip(step.slots, had, has, step.blocks, strict=True):
            if blocks:
                self.tables[slot, used:end] = blocks
        self.lengths[slots] = has
        new = [block for blocks in step.blocks for block in blocks]
        return np.stack((had, has, np.cumsum(added) - added)), np.array(new, dtype=np.int32)
