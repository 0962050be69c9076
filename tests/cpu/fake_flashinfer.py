"""FlashInfer as far as it is used: its wrappers' arguments, what they check, and their numbers in plain torch.

Where theirs would read or write a device's memory later than the call, so do these: a plan lies in the wrapper's
workspace, and `run` reads the rows from where they are then.
"""

from __future__ import annotations

import itertools
import math
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch

_numbers = itertools.count(1)


class _Paged:
    _fixed: int | None = None

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD" and backend in ("auto", "fa2", "fa3")
        self.reset_workspace_buffer(float_workspace_buffer, torch.zeros(8 << 10, dtype=torch.uint8))
        self._rows: tuple[torch.Tensor, ...] = ()

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        self._float, self._int = float_workspace_buffer, int_workspace_buffer

    def _planned(
        self,
        heads: tuple[int, int, int, int],
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *,
        window_left: int = -1,
        sm_scale: float | None = None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert all(it.dtype == torch.int32 and it.dim() == 1 for it in (indptr, indices, last_page_len))
        # On the host, or the plan waits for the device.
        assert indptr.device.type == last_page_len.device.type == "cpu"
        assert len(indptr) == len(last_page_len) + 1 and indptr[0] == 0 and int(indptr[-1]) == len(indices)
        assert (indptr.diff() >= 1).all() and (last_page_len >= 1).all() and (last_page_len <= heads[3]).all()
        assert heads[0] % heads[1] == 0
        self._heads, self._window, self._scale = heads, window_left, sm_scale
        self._dtypes = (q_data_type, kv_data_type or q_data_type)
        self._plan = next(_numbers)
        self._int[:8].view(torch.int64).fill_(self._plan)

    def _mixed(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None,
        return_lse: bool,
        starts: list[int],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        q_heads, kv_heads, head_dim, page_size = self._heads
        keys, values = paged_kv_cache
        assert int(self._int[:8].view(torch.int64)) == self._plan, "another plan lies there"
        assert q.shape == (starts[-1], q_heads, head_dim) and (q.dtype, keys.dtype) == self._dtypes
        assert keys.shape[1:] == values.shape[1:] == (page_size, kv_heads, head_dim)
        assert out.shape == q.shape and out.dtype == q.dtype and return_lse == (lse is not None)
        assert lse is None or (lse.shape == q.shape[:2] and lse.dtype == torch.float32)
        indptr, indices, last_page_len = self._rows
        scale = head_dim**-0.5 if self._scale is None else self._scale
        for row in range(len(starts) - 1):
            pages = indices[int(indptr[row]) : int(indptr[row + 1])].long()
            length = (len(pages) - 1) * page_size + int(last_page_len[row])
            key, value = (
                it[pages].flatten(0, 1)[:length].float().repeat_interleave(q_heads // kv_heads, 1)
                for it in (keys, values)
            )
            query = q[starts[row] : starts[row + 1]].float()
            position = torch.arange(length - len(query), length)[:, None]
            seen = torch.arange(length) <= position
            if self._window >= 0:
                seen &= torch.arange(length) >= position - self._window
            scores = torch.einsum("qhd,khd->hqk", query, key) * scale
            scores.masked_fill_(~seen, float("-inf"))
            out[starts[row] : starts[row + 1]] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
            if lse is not None:
                lse[starts[row] : starts[row + 1]] = scores.logsumexp(-1).T / math.log(2)
        return out if lse is None else (out, lse)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self.cores = use_tensor_cores
        if use_cuda_graph:
            buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            assert all(isinstance(it, torch.Tensor) for it in buffers)
            self._rows = buffers  # type: ignore[assignment]
            self._fixed = len(buffers[2])  # type: ignore[arg-type]
            assert len(buffers[0]) == self._fixed + 1  # type: ignore[arg-type]

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **others: Any,
    ) -> None:
        assert self.cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8)
        self._planned((num_qo_heads, num_kv_heads, head_dim, page_size), indptr, indices, last_page_len, **others)
        if self._fixed is None:
            self._rows = (indptr, indices, last_page_len)
            return
        assert len(last_page_len) == self._fixed and len(indices) <= len(self._rows[1])
        for buffer, given in zip(self._rows, (indptr, indices, last_page_len), strict=True):
            buffer[: len(given)].copy_(given)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return self._mixed(q, paged_kv_cache, out, lse, return_lse, list(range(len(self._rows[2]) + 1)))


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        **others: Any,
    ) -> None:
        assert causal, "a row of several tokens would see what comes after it"
        assert qo_indptr.dtype == torch.int32 and qo_indptr.device.type == "cpu" and qo_indptr[0] == 0
        rows = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert len(qo_indptr) == len(paged_kv_indptr)
        self._planned((num_qo_heads, num_kv_heads, head_dim_qk, page_size), *rows, **others)
        self._rows, self._starts = rows, qo_indptr.tolist()

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return self._mixed(q, paged_kv_cache, out, lse, return_lse, self._starts)


def module() -> types.ModuleType:
    """The module that `import flashinfer` returns."""
    made = types.ModuleType("flashinfer")
    made.__spec__ = ModuleSpec("flashinfer", None)
    made.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    made.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    return made
