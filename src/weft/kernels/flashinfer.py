"""FlashInfer's attention: it plans a step once, on the host, and every layer runs by that plan.

The interface is that of flashinfer-python 0.5 to 0.7: `plan` and `run` of its wrappers for decode and for prompts over
paged KV, keys and values as they lie in our cache (its layout NHD, any block size). The package comes with
`pip install weft[cuda]`; it compiles a model's kernels when they are first used, unless flashinfer-jit-cache has them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from weft.hardware.host import kernel_packages
from weft.kernels.base import AttentionShape, KVCache
from weft.kernels.batch import Batch, Lengths, spread
from weft.kernels.usable import no_flash, processors, usable
from weft.kernels.warm import Launch
from weft.plan import backends

logger = logging.getLogger("weft")

# Partial results of contexts that are split among programs, of which two run on each multiprocessor, and the rows of
# their tiles, queries times heads of a group (its scheduler.cuh, PrefillPlan).
WORKSPACE_BYTES, TILE_ROWS, TILES_PER_PROCESSOR = 128 << 20, (16, 64, 128), 2
PLAN_BYTES = 8 << 20  # of a plan on the device, as its wrappers take by themselves
DECODE, PREFILL = "decode", "prefill"


def installed() -> str | None:
    """The version that is here."""
    return kernel_packages().get(backends.FLASHINFER)


def obstacle(device: torch.device, shape: AttentionShape) -> str | None:
    """Why it cannot be used there."""
    return backends.no_flashinfer(installed(), shape.head_dim) or no_flash(device, shape.dtype)


def made(device: torch.device, shape: AttentionShape, *, required: bool) -> FlashInferAttention | None:
    """FlashInfer's attention, its kernels compiled. None where it cannot be had, which is a ConfigError if it is
    `required`, and else a line of the log where the package is there."""
    if installed() is None and not required:
        return None
    what, instead = backends.KERNELS["flashinfer"], "Triton's take their place"
    if not usable(what, obstacle(device, shape), required=required, instead=instead):
        return None
    logger.info("FlashInfer %s: what it has no kernels of yet it compiles now, which takes a minute", installed())
    try:
        attention = FlashInferAttention(device, shape)
        attention.compile()
    except Exception as error:
        # No compiler, no CUDA toolkit beside the driver, a package for another torch: nothing that a start ends with.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        telling = next((line for line in lines if "error" in line.lower() or "not found" in line), lines[-1])
        usable(what, f"they cannot be built ({telling.strip()[:200]})", required=required, instead=instead)
        return None
    return attention


class FlashInferAttention:
    """See `Attention`.

    A window is part of a plan, so there is one for each. A graph bakes in where a plan lies, so decode batches of each
    size that has a graph have a wrapper of their own, which plans outside of it; the others share one, however large.
    """

    name = "flashinfer"

    def __init__(self, device: torch.device, shape: AttentionShape) -> None:
        import flashinfer

        self._decoder = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        self._prefiller = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._device, self._shape = device, shape
        self._workspace = torch.zeros(workspace_bytes(shape, processors(device)), dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[str, int | None, int | None], Any] = {}
        self._plans: dict[tuple[str, int | None], torch.Tensor] = {}
        # What the wrappers of graphs read, whatever their size and window: rows and their blocks are the same.
        rows, blocks = shape.rows, -(-shape.length // shape.block_size)
        self._indptr, self._last_page_len, self._indices = (
            torch.zeros(count, dtype=torch.int32, device=device) for count in (rows + 1, rows, rows * blocks)
        )
        # A plan passes through pinned memory of its wrapper: the next one may not be written there before it is gone.
        self._gone = torch.cuda.Event() if device.type == "cuda" else None

    def compile(self) -> None:
        """Have all kernels built, by planning a decode row and a prompt."""
        counts, tables = np.array([1, 2]), torch.zeros(2, 1, dtype=torch.int32, device=self._device)
        host = Lengths(np.array([0, 1, 3]), counts)
        context = torch.from_numpy(counts.astype(np.int32)).to(self._device)
        none = context[:0]
        self.prepare(Batch(none, none, none, none, context, tables, none, decodes=1, host=host))

    def prepare(self, batch: Batch) -> None:
        lengths, page = batch.lengths(), self._shape.block_size
        # Rows that fill a graph up have no context: it is one token of whatever block, and nobody reads the result.
        context = np.maximum(lengths.context, 1)
        pages = -(-context // page)
        indptr = np.concatenate(([0], np.cumsum(pages)))
        indices = used_blocks(batch.tables, batch.context, page, int(indptr[-1]))
        last_page_len = context - (pages - 1) * page
        if self._gone is not None:
            self._gone.synchronize()
        first = batch.decodes  # row that is a prompt's
        if first:
            self._plan(DECODE, batch, indptr[: first + 1], indices[: indptr[first]], last_page_len[:first])
        if first < batch.rows:
            starts, begins = (figures[first:] - figures[first] for figures in (lengths.row_starts, indptr))
            rows = (starts, begins, indices[indptr[first] :], last_page_len[first:])
            self._plan(PREFILL, batch, *rows, causal=True)
        if self._gone is not None:
            self._gone.record()

    def attend(self, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float, window: int | None) -> torch.Tensor:
        assert scale == self._shape.scale
        out, kept, first = torch.empty_like(q), (cache.keys, cache.values), batch.decodes
        if first:
            self._wrapper(DECODE, window, batch).run(q[:first], kept, out=out[:first])
        if first < batch.rows:
            self._wrapper(PREFILL, window, batch).run(q[first:], kept, out=out[first:])
        return out.flatten(1)

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[Launch]]:
        return ()  # `compile` had them built

    def _plan(self, kind: str, batch: Batch, *rows: np.ndarray | torch.Tensor, **more: bool) -> None:
        """Plan these rows of a batch for every window, with the figures that the wrapper's `plan` takes of them."""
        shape, there = self._shape, [it if isinstance(it, torch.Tensor) else self._pinned(it) for it in rows]
        for window in shape.windows:
            self._wrapper(kind, window, batch).plan(
                *there,
                shape.q_heads,
                shape.kv_heads,
                shape.head_dim,
                shape.block_size,
                window_left=-1 if window is None else window - 1,  # keys before a query's own
                sm_scale=shape.scale,
                q_data_type=shape.dtype,
                kv_data_type=shape.kept,
                **more,
            )

    def _wrapper(self, kind: str, window: int | None, batch: Batch) -> Any:
        size = batch.rows if batch.fixed else None
        key = (kind, window, size)
        if key not in self._wrappers:
            self._wrappers[key] = wrapper = self._made(kind, size)
            # Of plans for the same rows only the last is still wanted: they share their place on the device.
            if (kind, window) not in self._plans:
                self._plans[kind, window] = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=self._device)
            wrapper.reset_workspace_buffer(self._workspace, self._plans[kind, window])
        return self._wrappers[key]

    def _made(self, kind: str, size: int | None) -> Any:
        if kind == PREFILL:
            # Its kernels for Hopper read no FP8 beside queries of 16 bits.
            backend = "auto" if self._shape.kept == self._shape.dtype else "fa2"
            return self._prefiller(self._workspace, "NHD", backend=backend)
        # Those do not split a context either. Tensor cores take any number of query heads per KV head; its other kernel
        # for decode takes some.
        return self._decoder(self._workspace, "NHD", use_tensor_cores=True, backend="fa2", **self._buffers(size))

    def _buffers(self, size: int | None) -> dict[str, Any]:
        """Where a wrapper for graphs of `size` rows reads them."""
        if size is None:
            return {}
        return {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": self._indptr[: size + 1],
            "paged_kv_indices_buffer": self._indices,
            "paged_kv_last_page_len_buffer": self._last_page_len[:size],
        }

    def _pinned(self, figures: np.ndarray) -> torch.Tensor:
        """On the host, which plans with them, where a GPU fetches them by itself."""
        tensor = torch.from_numpy(figures.astype(np.int32))
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


def workspace_bytes(shape: AttentionShape, processors: int) -> int:
    """What it recommends beside what a prompt's tiles can need; or what it sets aside for decode rows of a graph, each
    with a tile and a part of one, up to version 0.7.0 for all query heads: where they are many, more than that."""
    programs, group = TILES_PER_PROCESSOR * processors, shape.group
    tile = next((rows for rows in TILE_ROWS if group <= rows), TILE_ROWS[-1])
    of_row = (shape.head_dim + 1) * torch.float32.itemsize  # a result and the logarithm of its weights' sum
    prompts = programs * group * TILE_ROWS[-1] * of_row
    decodes = max(programs // shape.kv_heads, -(-shape.rows * group // tile) + shape.rows) * tile
    return max(WORKSPACE_BYTES + prompts, decodes * shape.q_heads * of_row)


def used_blocks(tables: torch.Tensor, context: torch.Tensor, block_size: int, total: int) -> torch.Tensor:
    """[total] int32: every row's blocks, as many as its context fills, at least one, row after row. `total` is known,
    so that nobody waits."""
    rows, blocks = spread((context.clamp(min=1) + block_size - 1) // block_size, total)
    return tables[rows, blocks]
