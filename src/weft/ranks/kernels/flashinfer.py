"""FlashInfer's attention: it plans a step once, on the host, and every layer runs by that plan.

The interface is flashinfer-python's, versions 0.5 to 0.7: `plan` and `run` of its wrappers for decode and prefill over
paged KV, with keys and values in our cache's layout (NHD in its words, any block size). The package comes with the
extra `weft-llm[cuda]`. It compiles a model's kernels when they are first used, unless flashinfer-jit-cache has them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from weft.machine.hardware.host import kernel_packages
from weft.plan.backends import FLASHINFER
from weft.ranks.kernels.attention import AttentionShape, KVCache, apply_sinks
from weft.ranks.kernels.attention_inputs import in_all_groups
from weft.ranks.kernels.batch import Batch, Lengths, ragged_index
from weft.ranks.kernels.usable import UnusableError, multiprocessor_count
from weft.ranks.kernels.warm import KernelLaunch

logger = logging.getLogger("weft")

# The workspace holds partial results of contexts that are split among programs, two of which run on each
# multiprocessor. Rows of their tiles are queries times heads of a group (its scheduler.cuh, PrefillPlan).
WORKSPACE_BYTES, TILE_ROWS, TILES_PER_PROCESSOR = 128 << 20, (16, 64, 128), 2
PLAN_BYTES = 8 << 20  # bytes of a plan on the device, as much as its wrappers allocate by themselves
DECODE, PREFILL = "decode", "prefill"


def create_attention(device: torch.device, shape: AttentionShape) -> FlashInferAttention:
    """FlashInfer's attention, with its kernels compiled. Raises UnusableError if they cannot be built."""
    logger.info(
        "FlashInfer %s compiles the kernels that it does not have yet, which takes a minute",
        kernel_packages().get(FLASHINFER),
    )
    try:
        attention = FlashInferAttention(device, shape)
        attention.compile()
    except Exception as error:
        # No compiler, no CUDA toolkit (only the driver), a package for another torch: a start goes on without it.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        cause = next((line for line in lines if "error" in line.lower() or "not found" in line), lines[-1])
        raise UnusableError(f"they cannot be built ({cause.strip()[:200]})") from error
    return attention


class FlashInferAttention:
    """FlashInfer's implementation of `PagedAttention`.

    Blocks and a window are part of a plan, so there is one plan for each window of a KV group. A CUDA graph fixes the
    address of a plan. Decode batches of each size that has a graph therefore have a wrapper of their own, which plans
    outside of the graph. All other batches share one wrapper.
    """

    name = "flashinfer"
    capturable = True

    def __init__(self, device: torch.device, shape: AttentionShape) -> None:
        import flashinfer

        self._decoder = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        self._prefiller = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._device, self._shape = device, shape
        self._workspace = torch.zeros(
            workspace_bytes(shape, multiprocessor_count(device)), dtype=torch.uint8, device=device
        )
        # By kind, KV group and window; wrappers by the size of a graph as well.
        self._wrappers: dict[tuple[str, int, int | None, int | None], Any] = {}
        self._plans: dict[tuple[str, int, int | None], torch.Tensor] = {}
        # Arrays that the wrappers of all graphs read: rows and their blocks do not depend on size or window.
        rows, blocks = shape.rows, -(-shape.length // shape.block_size)
        self._indptr, self._last_page_len = (
            torch.zeros(count, dtype=torch.int32, device=device) for count in (rows + 1, rows)
        )
        self._indices = {
            group: torch.zeros(rows * blocks, dtype=torch.int32, device=device) for group, _ in shape.group_windows
        }
        # A plan is copied from pinned memory of its wrapper, which the next plan may not overwrite before.
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def compile(self) -> None:
        """Build all kernels, by planning a decode row and a prompt."""
        counts, tables = np.array([1, 2]), torch.zeros(2, 1, dtype=torch.int32, device=self._device)
        host = Lengths(np.array([0, 1, 3]), counts)
        context = torch.from_numpy(counts.astype(np.int32)).to(self._device)
        none = context[:0]
        batch = Batch(none, none, none, none, context, tables, none, decodes=1, host=host)
        self.prepare(in_all_groups(batch, self._shape))

    def prepare(self, batch: Batch) -> None:
        lengths, page = batch.lengths(), self._shape.block_size
        # Padding rows of a graph have no context: they get one token of any block, and their results are not read.
        context = np.maximum(lengths.context, 1)
        pages = -(-context // page)
        indptr = np.concatenate(([0], np.cumsum(pages)))
        last_page_len = context - (pages - 1) * page
        if self._copied is not None:
            self._copied.synchronize()
        first = batch.decodes  # the first prefill row
        for group, window in self._shape.group_windows:
            part = batch.of_group(group)
            indices = used_blocks(part.tables, part.context, page, int(indptr[-1]))
            if first:
                self._plan(DECODE, part, window, indptr[: first + 1], indices[: indptr[first]], last_page_len[:first])
            if first < batch.rows:
                starts, begins = (figures[first:] - figures[first] for figures in (lengths.row_starts, indptr))
                rows = (starts, begins, indices[indptr[first] :], last_page_len[first:])
                self._plan(PREFILL, part, window, *rows, causal=True)
        if self._copied is not None:
            self._copied.record()

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: Batch,
        scale: float,
        window: int | None,
        lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert scale == self._shape.scale
        if lse is None and sinks is not None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out, pages, first = torch.empty_like(q), (cache.keys, cache.values), batch.decodes

        def attend_part(kind: str, part: slice) -> None:
            wrapper, sums = self._wrapper(kind, window, batch), None if lse is None else lse[part]
            wrapper.run(q[part], pages, out=out[part], lse=sums, return_lse=sums is not None)

        if first:
            attend_part(DECODE, slice(first))
        if first < batch.rows:
            attend_part(PREFILL, slice(first, None))
        if lse is not None:
            lse.mul_(math.log(2))  # its logarithms are to base 2
        return out.flatten(1) if lse is None or sinks is None else apply_sinks(out.flatten(1), lse, sinks)

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        return ()  # `compile` built them

    def _plan(
        self, kind: str, batch: Batch, window: int | None, *figures: np.ndarray | torch.Tensor, **options: bool
    ) -> None:
        """Plan rows of a batch for a window of its KV group, by the `figures` that the wrapper's `plan` takes."""
        shape = self._shape
        self._wrapper(kind, window, batch).plan(
            *(self._as_tensor(part) for part in figures),
            shape.q_heads,
            shape.kv_heads,
            shape.head_dim,
            shape.block_size,
            window_left=-1 if window is None else window - 1,  # keys before a query's own
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.cache_dtype,
            **options,
        )

    def _wrapper(self, kind: str, window: int | None, batch: Batch) -> Any:
        size = batch.rows if batch.fixed else None
        rows = (kind, batch.group, window)
        key = (*rows, size)
        if key not in self._wrappers:
            self._wrappers[key] = wrapper = self._create_wrapper(kind, batch.group, size)
            # Plans for the same rows share memory on the device: only the last of them is still needed.
            if rows not in self._plans:
                self._plans[rows] = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=self._device)
            wrapper.reset_workspace_buffer(self._workspace, self._plans[rows])
        return self._wrappers[key]

    def _create_wrapper(self, kind: str, group: int, size: int | None) -> Any:
        if kind == PREFILL:
            # Its kernels for Hopper do not combine an FP8 cache with 16-bit queries.
            backend = "auto" if self._shape.cache_dtype == self._shape.dtype else "fa2"
            return self._prefiller(self._workspace, "NHD", backend=backend)
        # Nor do those split a context. Its kernel for tensor cores takes any number of query heads per KV head; its
        # other kernel for decode takes only some.
        return self._decoder(self._workspace, "NHD", use_tensor_cores=True, backend="fa2", **self._buffers(group, size))

    def _buffers(self, group: int, size: int | None) -> dict[str, Any]:
        """Arguments that have a wrapper read the arrays of graphs of `size` rows; none outside of graphs."""
        if size is None:
            return {}
        return {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": self._indptr[: size + 1],
            "paged_kv_indices_buffer": self._indices[group],
            "paged_kv_last_page_len_buffer": self._last_page_len[:size],
        }

    def _as_tensor(self, figures: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Figures for the host, which plans with them, in pinned memory if there is a GPU, which copies them."""
        if isinstance(figures, torch.Tensor):
            return figures
        tensor = torch.from_numpy(figures.astype(np.int32))
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


def workspace_bytes(shape: AttentionShape, processors: int) -> int:
    """Bytes of FlashInfer's workspace: the larger of what prefill and what decode can need.

    Prefill: what FlashInfer recommends, and partial results of a prompt's tiles. Decode in a graph: a whole tile and a
    part of a tile for each row, which up to version 0.7.0 counts all query heads.
    """
    programs, group = TILES_PER_PROCESSOR * processors, shape.group
    tile = next((rows for rows in TILE_ROWS if group <= rows), TILE_ROWS[-1])
    row_bytes = (shape.head_dim + 1) * torch.float32.itemsize  # a result and the logarithm of its weights' sum
    prompts = programs * group * TILE_ROWS[-1] * row_bytes
    decodes = max(programs // shape.kv_heads, -(-shape.rows * group // tile) + shape.rows) * tile
    return max(WORKSPACE_BYTES + prompts, decodes * shape.q_heads * row_bytes)


def used_blocks(tables: torch.Tensor, context: torch.Tensor, block_size: int, total: int) -> torch.Tensor:
    """Blocks that the rows' contexts fill, at least one each, row after row: [total] int32.

    The caller knows `total`, so that nothing waits for the device.
    """
    rows, blocks = ragged_index((context.clamp(min=1) + block_size - 1) // block_size, total)
    return tables[rows, blocks]
