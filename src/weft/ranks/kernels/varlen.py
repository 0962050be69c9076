"""torch's varlen attention for prefill: FlashAttention 2, or FlashAttention 3 if flash-attn-3 is installed and the GPU
is a Hopper. Used if --attention-backend names it, or if it is the fastest where the engine runs (contest.py).

FlashAttention 3 reads keys and values in their blocks. FlashAttention 2 needs them contiguous: the contexts of a step's
prompts are gathered into memory that is allocated once. Triton attends to steps whose contexts do not fit there, and to
the batch's decode rows. torch has varlen attention with windows since 2.11, and with block tables since 2.12
(`torch.nn.attention.varlen`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from weft.ranks.kernels import triton
from weft.ranks.kernels.attention import AttentionShape, KVCache, apply_sinks
from weft.ranks.kernels.batch import Batch, ragged_index
from weft.ranks.kernels.usable import UnusableError
from weft.ranks.kernels.warm import KernelLaunch

logger = logging.getLogger("weft")

HOPPER = 9  # major compute capability that FlashAttention 3 is written for
MAX_GATHERED_TOKENS = 1 << 16  # tokens gathered at once: 268 MB of keys and values of 8 heads of 128


@cache
def varlen_function() -> tuple[Any, frozenset[str]] | None:
    """torch's varlen attention and the names of its parameters, or None if there is none with windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = frozenset(inspect.signature(varlen_attn).parameters)
    return (varlen_attn, names) if {"window_size", "scale"} <= names else None


def lse_request() -> Any:
    """The argument `return_aux` with which torch's varlen attention returns the logarithms [heads, T] as well."""
    from torch.nn.attention.varlen import AuxRequest

    return AuxRequest(lse=True)


def create_attention(device: torch.device, shape: AttentionShape) -> VarlenAttention:
    """torch's varlen attention. Raises UnusableError if this torch has none."""
    if varlen_function() is None:
        raise UnusableError(f"torch {torch.__version__} has no varlen attention with windows, which came with 2.11")
    return VarlenAttention(device, shape, paged=activate_flash3(device, shape))


def activate_flash3(device: torch.device, shape: AttentionShape) -> bool:
    """Have torch use FlashAttention 3, which reads blocks, in the whole process from now on.

    Return False if it is not available.
    """
    function = varlen_function()
    if function is None or "block_table" not in function[1] or device.type != "cuda":
        return False
    if torch.cuda.get_device_capability(device)[0] != HOPPER or find_spec("flash_attn_interface") is None:
        return False
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        logger.warning("flash-attn-3 is installed but cannot be used (%s); FlashAttention 2 is used", error)
        return False
    return True


@dataclass(frozen=True)
class Prompts:
    """A batch's prefill rows, for all layers.

    `starts` [R+1] int32: index of each row's first query. `most_queries` and `most_keys`: of one row. If the keys are
    gathered, `places` [K] int64 are their slots in each KV group, and `key_starts` [R+1] int32 the index of each row's
    first one.
    """

    starts: torch.Tensor
    most_queries: int
    most_keys: int
    key_starts: torch.Tensor | None = None
    places: tuple[torch.Tensor, ...] = ()


class VarlenAttention:
    """`PagedAttention` by torch for prefill, and by Triton for decode rows and for prompts whose contexts do not fit.

    `paged`: keys and values are read in their blocks.
    """

    name = "varlen"
    capturable = True

    def __init__(self, device: torch.device, shape: AttentionShape, *, paged: bool) -> None:
        function = varlen_function()
        assert function is not None
        self._varlen, names = function
        self._gqa_argument = {"enable_gqa": shape.group > 1} if "enable_gqa" in names else {}
        self._paged, self._block_size = paged, shape.block_size
        self._triton = triton.create_attention(device, shape)
        self._prompts: Prompts | None = None
        most = 0 if paged else min(MAX_GATHERED_TOKENS, max(shape.tokens, shape.length))
        self._gathered = [
            torch.empty(most, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=device) for _ in range(2)
        ]

    def prepare(self, batch: Batch) -> None:
        self._prompts, first = None, batch.decodes
        lengths = batch.lengths() if first < batch.rows else None
        if lengths is None:
            return
        contexts, starts = lengths.context[first:], lengths.row_starts[first:]
        total = int(contexts.sum())
        if not self._paged and total > len(self._gathered[0]):
            return
        prompts = Prompts(
            starts=batch.row_starts[first:] - first,  # row_starts[first] is first: decode rows have one token
            most_queries=int((starts[1:] - starts[:-1]).max()),
            most_keys=int(contexts.max()),
        )
        if not self._paged:
            key_starts = F.pad(batch.context[first:].cumsum(0), (1, 0)).int()
            places = tuple(self._places(part, total) for part in batch.groups)
            prompts = replace(prompts, key_starts=key_starts, places=places)
        self._prompts = prompts

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
        prompts, first = self._prompts, batch.decodes
        if prompts is None:
            return self._triton.attend(q, cache, batch, scale, window, lse, sinks)
        if not prompts.places:
            keys, values = cache.keys, cache.values
            layout: dict[str, Any] = {"seqused_k": batch.context[first:], "block_table": batch.tables[first:]}
        else:
            places = prompts.places[batch.group]
            keys, values = (
                torch.index_select(source.flatten(0, 1), 0, places, out=held[: len(places)])
                for source, held in zip((cache.keys, cache.values), self._gathered, strict=True)
            )
            layout = {}
        if lse is not None or sinks is not None:
            layout["return_aux"] = lse_request()
        result = self._varlen(
            q[first:],
            keys,
            values,
            prompts.starts,
            prompts.key_starts,
            prompts.most_queries,
            prompts.most_keys,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),  # keys before a query's own, and after it
            **self._gqa_argument,
            **layout,
        )
        result, sums = result if "return_aux" in layout else (result, torch.empty(0))
        prefill_out = result.flatten(1)
        if lse is not None:
            lse[first:] = sums.T
        if sinks is not None:
            prefill_out = apply_sinks(prefill_out, sums.T, sinks)
        if not first:
            return prefill_out
        out = torch.empty_like(q).flatten(1)
        self._triton.decode(q, cache, batch, scale, window, out, lse, sinks)
        out[first:] = prefill_out
        return out

    def launches(self, shape: AttentionShape, device: torch.device) -> Sequence[Sequence[KernelLaunch]]:
        return self._triton.launches(shape, device)

    def _places(self, batch: Batch, total: int) -> torch.Tensor:
        """Slots of the prompts' contexts: [total] int64."""
        rows, positions = ragged_index(batch.context[batch.decodes :], total)
        blocks = batch.tables[batch.decodes + rows, positions // self._block_size].long()
        return blocks * self._block_size + positions % self._block_size
