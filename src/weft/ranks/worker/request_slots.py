"""State of the requests that hold a slot, on every rank, and the way of a StepPlan to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple

import numpy as np
import torch

from weft.engine.core.step import UNKNOWN, Admission, StepPlan
from weft.ranks.kernels.batch import Lengths, StepForms, table_columns
from weft.ranks.kernels.sampling import Array
from weft.ranks.kernels.staged import StagedStep
from weft.ranks.worker.pooling import PooledPrompt
from weft.ranks.worker.prompt_logprobs import PromptLogprobsRequest
from weft.ranks.worker.sample_arrays import SampleArrays

ALIGNMENT = 16  # bytes: Triton compiles another kernel for a tensor that begins anywhere else
BUFFERS = 3  # one that is filled, and two steps in flight; with more of them `put` waits for the oldest copy


class StepArrays(NamedTuple, Generic[Array]):
    """Arrays of a step of T tokens in R rows, as `StagedStep` describes them: int32, except `kv_slots` [G, T] int64.

    `kv_slots` are its `places`: block * block_size + offset of each token in the KV cache. `slots` are request slots.
    """

    kv_slots: Array
    tokens: Array
    positions: Array
    row_starts: Array
    context: Array
    order: Array
    slots: Array
    growth: Array
    blocks: Array


class RequestSlots:
    """State by request slot.

    `tables` [KV groups, slots, blocks per sequence] int32 are the block tables, on the host; a copy on the device gets
    the new blocks of each step. `lengths` [slots] int32 are the numbers of blocks in them. `last` [slots] int64 on the
    device is the token that each slot sampled last. `prompt_logprobs` has the requests that want logprobs of their
    prompt, `pooled` the requests that want its hidden state or logits instead of an answer.
    """

    def __init__(
        self, slots: int, max_model_len: int, block_size: int, device: torch.device, *, groups: int = 1
    ) -> None:
        self.block_size = block_size
        columns = table_columns(-(-max_model_len // block_size))
        self.tables = np.zeros((groups, slots, columns), dtype=np.int32)
        self.lengths = np.zeros(slots, dtype=np.int32)
        self.prompt_logprobs: dict[int, PromptLogprobsRequest] = {}
        self.pooled: dict[int, PooledPrompt] = {}
        self.last = torch.zeros(slots, dtype=torch.int64, device=device)
        self._staging = Staging(device)
        self._device_tables = torch.zeros(self.tables.shape, dtype=torch.int32, device=device)

    def admit(self, admission: Admission) -> None:
        """Give a slot to a request, which has no blocks yet."""
        self.lengths[admission.slot] = 0
        top = admission.params.prompt_logprobs
        if top is not None and not admission.output:  # an answer that has begun has brought them
            self.prompt_logprobs[admission.slot] = PromptLogprobsRequest(list(admission.prompt), top)
        if admission.pooling is not None:
            self.pooled[admission.slot] = PooledPrompt(len(admission.prompt), admission.pooling)

    def capacity(self, slot: int) -> int:
        """Number of tokens that the slot's blocks hold."""
        return int(self.lengths[slot]) * self.block_size

    def release(self, slot: int) -> None:
        """Free a slot."""
        self.prompt_logprobs.pop(slot, None)
        self.pooled.pop(slot, None)

    def stage(
        self,
        step: StepPlan,
        samples: SampleArrays[np.ndarray] | None = None,
        *,
        singly: bool = False,
        expands_from: int | None = None,
    ) -> tuple[StagedStep, SampleArrays[torch.Tensor] | None]:
        """Take the step's new blocks into the tables, and copy its arrays and `samples` to the device.

        With `singly`, every token is a row of its own that attends to the tokens before it, which gives the same
        result. Latent attention expands rows of `expands_from` tokens or more.
        """
        # `row_slots` and `token_slots` are request slots; `kv_slots` are places in the KV cache.
        row_slots, starts, counts = (np.array(x, dtype=np.int64) for x in (step.slots, step.starts, step.counts))
        growth, blocks = self._append_blocks(step, row_slots)
        context = starts + counts
        row_starts = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=row_starts[1:])
        # A token's position is its index in the step, moved by where its row starts in the text and in the step.
        positions = np.arange(row_starts[-1]) + np.repeat(starts - row_starts[:-1], counts)
        token_slots = np.repeat(row_slots, counts)
        block, offset = np.divmod(positions, self.block_size)
        # Contiguous by group, which indexing leaves open: C++ finds a group's slots after the previous group's.
        kv_slots = np.ascontiguousarray(self.tables[:, token_slots, block] * np.int64(self.block_size) + offset)
        tokens = np.array(step.tokens, dtype=np.int64)
        tokens = np.where(tokens == UNKNOWN, ~token_slots, tokens)
        if singly:
            growth = np.repeat(growth, counts, axis=1)
            row_slots, context, row_starts = token_slots, positions + 1, np.arange(len(positions) + 1)
            counts = np.ones_like(positions)
        decodes = int(np.argmax(counts > 1)) if counts.max() > 1 else len(counts)
        order = np.argsort(-context[:decodes], kind="stable")
        arrays = StepArrays(
            kv_slots=kv_slots,
            tokens=tokens.astype(np.int32),
            positions=positions.astype(np.int32),
            row_starts=row_starts.astype(np.int32),
            context=context.astype(np.int32),
            order=order.astype(np.int32),
            slots=row_slots.astype(np.int32),
            growth=growth.astype(np.int32),
            blocks=blocks,
        )
        host = Lengths(row_starts, context)
        forms = StepForms.of(host, decodes, expands_from) if expands_from else None
        divided = forms.absorbed if forms else ()
        tensors = self._staging.put([*arrays, *divided, *(samples.flatten() if samples else ())])
        on_device, rest = StepArrays(*tensors[: len(arrays)]), tensors[len(arrays) :]
        staged = StagedStep(
            tokens=on_device.tokens,
            positions=on_device.positions,
            places=on_device.kv_slots,
            row_starts=on_device.row_starts,
            context=on_device.context,
            order=on_device.order,
            slots=on_device.slots,
            growth=on_device.growth,
            blocks=on_device.blocks,
            last=self.last,
            tables=self._device_tables,
            decodes=decodes,
            width=table_columns(int(growth[1].max())),
            host=host,
            group_tokens=tuple(step.group_tokens),
            graph_rows=step.graph_rows,
            forms=forms.with_tensors(rest[: len(divided)]) if forms else None,
        )
        return staged, samples.with_tensors(rest[len(divided) :]) if samples else None

    def _append_blocks(self, step: StepPlan, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Append the step's new blocks to the tables of `slots`; return `growth` and `blocks` of StagedStep."""
        # All groups get equally many.
        added = np.array([len(blocks) for blocks in step.blocks[0]], dtype=np.int32)
        before = self.lengths[slots]
        after = before + added
        for table, rows in zip(self.tables, step.blocks, strict=True):
            for slot, begin, end, blocks in zip(step.slots, before, after, rows, strict=True):
                if blocks:
                    table[slot, begin:end] = blocks
        self.lengths[slots] = after
        new = [[block for blocks in rows for block in blocks] for rows in step.blocks]
        return np.stack((before, after, np.cumsum(added) - added)), np.array(new, dtype=np.int32)


class Staging:
    """Copies the arrays of each step to the device.

    On a GPU they pass through pinned memory that is allocated once, and the host does not wait for the copy. On a CPU
    they stay where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._turn = 0

    def put(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Copy the arrays to the device, as tensors of the same dtypes and dims.

        On a CPU the tensors share the arrays' memory. To be called once per step: each call takes the next buffer, and
        waits for that buffer's last copy.
        """
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
        buffer, copied = self._next_buffer(ends[-1])
        bytes_ = buffer.numpy()
        begins = [0, *ends[:-1]]
        for array, begin in zip(arrays, begins, strict=True):
            bytes_[begin : begin + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        on_device = buffer[: ends[-1]].to(self._device, non_blocking=True)
        copied.record()
        return [
            on_device[begin : begin + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for array, begin in zip(arrays, begins, strict=True)
        ]

    def _next_buffer(self, size: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Pinned memory of `size` bytes at least that no copy reads any more, and the event for its next copy."""
        self._turn = (self._turn + 1) % BUFFERS
        if len(self._buffers) <= self._turn:
            self._buffers += [self._allocate(size) for _ in range(BUFFERS)]
        buffer, copied = self._buffers[self._turn]
        copied.synchronize()
        if buffer.numel() < size:
            self._buffers[self._turn] = buffer, copied = self._allocate(2 * size)
        return buffer, copied

    def _allocate(self, size: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()
