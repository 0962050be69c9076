"""Rows: what every rank keeps of the requests that hold a slot, and how a StepPlan becomes a Batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.core.step import UNKNOWN, Admission, StepPlan
from weft.kernels.batch import Batch


@dataclass(frozen=True)
class PromptWish:
    """A request that wants the logprobs of its prompt, with `top` alternatives each."""

    prompt: list[int]
    top: int


class Rows:
    """Block tables by slot: [slots, blocks per sequence] int32 on the host."""

    def __init__(self, slots: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.tables = np.zeros((slots, -(-max_model_len // block_size)), dtype=np.int32)
        self.lengths = [0] * slots
        self.wishes: dict[int, PromptWish] = {}

    def admit(self, admission: Admission) -> None:
        self.lengths[admission.slot] = 0
        top = admission.params.prompt_logprobs
        if top is not None:
            self.wishes[admission.slot] = PromptWish(admission.prompt, top)

    def release(self, slot: int) -> None:
        self.wishes.pop(slot, None)

    def batch(self, step: StepPlan, device: torch.device, last: torch.Tensor | None = None) -> Batch:
        """Take the step's new blocks into the tables, and lay its tokens out; those that are UNKNOWN come from `last`,
        [slots] int32, the token that each slot sampled last."""
        for slot, blocks in zip(step.slots, step.blocks, strict=True):
            if blocks:
                used = self.lengths[slot]
                self.lengths[slot] = used + len(blocks)
                self.tables[slot, used : used + len(blocks)] = blocks
        slots, starts, counts = (np.array(x, dtype=np.int64) for x in (step.slots, step.starts, step.counts))
        context = starts + counts
        row_starts = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=row_starts[1:])
        # A token's position is its index in the step, moved by where its row starts here and there.
        positions = np.arange(row_starts[-1]) + np.repeat(starts - row_starts[:-1], counts)
        block, offset = np.divmod(positions, self.block_size)
        places = self.tables[np.repeat(slots, counts), block] * np.int64(self.block_size) + offset
        reach = int(context.max())

        def put(values: np.ndarray | Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)

        tokens = put(step.tokens)
        if last is not None and UNKNOWN in step.tokens:
            unknown = np.flatnonzero(np.equal(step.tokens, UNKNOWN))
            found = last[put(np.repeat(slots, counts)[unknown], torch.int64)]
            tokens = tokens.index_copy(0, put(unknown, torch.int64), found)
        return Batch(
            tokens=tokens,
            positions=put(positions),
            slots=put(places, torch.int64),
            row_starts=put(row_starts),
            context=put(context),
            tables=put(self.tables[slots, : -(-reach // self.block_size)]),
        )
