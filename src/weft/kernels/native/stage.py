"""All layers of a stage as one call into the C++ kernels."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch

from weft.comm import Comm
from weft.comm.shared import HEAD_BYTES, SharedComm
from weft.kernels.base import DenseLayer, KVCache
from weft.kernels.batch import Batch
from weft.kernels.native.entries import Entries
from weft.kernels.native.matrix import NativeMatrix
from weft.native.library import POINTER, REAL, SIZE, Matrix

ALIGNMENT = 64  # bytes, as Workspace in stage.h wants it
SUM = ctypes.CFUNCTYPE(ctypes.c_int32)


class LayerDescriptor(ctypes.Structure):
    """struct Layer of stage.h."""

    _fields_ = (
        *((name, POINTER) for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm", "keys", "values")),
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, SIZE) for name in ("q_heads", "kv_heads", "head_dim", "window")),
        *((name, REAL) for name in ("scale", "head_eps", "eps")),
    )


class StepDescriptor(ctypes.Structure):
    """struct Step of stage.h."""

    _fields_ = (
        *((name, POINTER) for name in ("residual", "angles", "positions", "slots", "row_starts", "context", "tables")),
        *((name, SIZE) for name in ("tokens", "rows", "table_width", "block_size")),
        ("shared", POINTER),
        ("sum", SUM),
    )


class SharedDescriptor(ctypes.Structure):
    """struct Shared of sum.h."""

    _fields_ = (("memory", POINTER), *((name, SIZE) for name in ("rank", "size", "head", "slot_bytes")))


class NativeStage:
    """See `FusedStage` in kernels/base.py. Its memory grows with the steps that it meets, and stays."""

    def __init__(self, entries: Entries, layers: Sequence[DenseLayer], comm: Comm) -> None:
        self._entries, self._comm = entries, comm
        self._kept = layers
        self._layers = (LayerDescriptor * len(layers))(*map(describe, layers))
        self._caches: Sequence[KVCache] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._room = 0
        self._part = torch.empty(0)
        self._error: BaseException | None = None
        self._shared = share(comm) if isinstance(comm, SharedComm) and sys.platform == "linux" else None
        self._calls_back = comm.size > 1 and self._shared is None
        self._sum = SUM(self._add_up) if self._calls_back else SUM()

    def __call__(
        self, residual: torch.Tensor, rope: torch.Tensor, caches: Sequence[KVCache], batch: Batch
    ) -> torch.Tensor:
        tokens = len(residual)
        if tokens > self._room:
            self._take_memory(tokens)
        if caches is not self._caches:
            self._take_caches(caches)
        if self._calls_back:
            # Where the C++ leaves what is to be summed: at the beginning of its memory.
            self._part = self._memory[: residual.nbytes].view(residual.dtype).view(residual.shape)
        step = StepDescriptor(
            residual.data_ptr(),
            rope.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            batch.row_starts.data_ptr(),
            batch.context.data_ptr(),
            batch.tables.data_ptr(),
            tokens,
            batch.rows,
            batch.tables.shape[1],
            caches[0].block_size,
            ctypes.addressof(self._shared) if self._shared else None,
            self._sum,
        )
        self._entries.stage(self._layers, len(self._layers), ctypes.byref(step), self._memory.data_ptr())
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return residual

    def _take_memory(self, tokens: int) -> None:
        self._room = tokens
        size = self._entries.workspace_bytes(self._layers, len(self._layers), tokens)
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        self._memory = memory[-memory.data_ptr() % ALIGNMENT :]

    def _take_caches(self, caches: Sequence[KVCache]) -> None:
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.keys, layer.values = cache.keys.data_ptr(), cache.values.data_ptr()
            layer.kv_heads, layer.head_dim = cache.keys.shape[2:]
        self._caches = caches

    def _add_up(self) -> int:
        """Called from C++, in the thread that called it. An exception cannot pass through there."""
        try:
            total = self._comm.sum(self._part)
            if total.data_ptr() != self._part.data_ptr():
                self._part.copy_(total)
        except BaseException as error:
            self._error = error
            return 1
        return 0


def share(comm: SharedComm) -> SharedDescriptor:
    return SharedDescriptor(comm.memory.data_ptr(), comm.rank, comm.size, HEAD_BYTES, comm.slot_bytes)


def describe(layer: DenseLayer) -> LayerDescriptor:
    norm = layer.head_norm
    return LayerDescriptor(
        attention_norm=layer.attention_norm.data_ptr(),
        q_norm=norm and norm.query.data_ptr(),
        k_norm=norm and norm.key.data_ptr(),
        mlp_norm=layer.mlp_norm.data_ptr(),
        **{name: descriptor_of(getattr(layer, name)) for name in ("qkv", "out", "gate_up", "down")},
        q_heads=layer.q_heads,
        window=layer.window or 0,
        scale=layer.scale,
        head_eps=norm.eps if norm else 0.0,
        eps=layer.eps,
    )


def descriptor_of(matrix: object) -> Matrix:
    assert isinstance(matrix, NativeMatrix), matrix
    return matrix.descriptor
