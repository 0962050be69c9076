"""All layers of a pipeline stage in one call into the C++ kernels."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch

from weft.comm import Group
from weft.comm.shared import HEAD_BYTES, SharedMemoryGroup
from weft.kernels.base import FusedLayer, FusedMixture, FusedMLP, KVCache
from weft.kernels.batch import Batch
from weft.kernels.native.experts import NativeExperts
from weft.kernels.native.matrix import NativeMatrix
from weft.native.entries import Entries
from weft.native.structures import (
    WORKSPACE_ALIGNMENT,
    LayerDescriptor,
    MatrixDescriptor,
    MixtureDescriptor,
    SharedDescriptor,
    StepDescriptor,
    SumCallback,
)


class NativeStage:
    """A `FusedStage` in C++. Its workspace grows to the largest step so far, and is kept."""

    def __init__(self, entries: Entries, layers: Sequence[FusedLayer], comm: Group) -> None:
        self._entries, self._comm = entries, comm
        self._kept = layers
        self._layers = (LayerDescriptor * len(layers))(*map(describe_layer, layers))
        self._caches: Sequence[KVCache] | None = None
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._capacity = 0
        self._part = torch.empty(0)
        self._error: BaseException | None = None
        self._shared = (
            describe_shared(comm) if isinstance(comm, SharedMemoryGroup) and sys.platform == "linux" else None
        )
        self._calls_back = comm.size > 1 and self._shared is None
        self._sum = SumCallback(self._sum_part) if self._calls_back else SumCallback()

    def __call__(
        self, residual: torch.Tensor, rope: torch.Tensor, caches: Sequence[KVCache], batch: Batch
    ) -> torch.Tensor:
        tokens = len(residual)
        if tokens > self._capacity:
            self._grow_workspace(tokens)
        if caches is not self._caches:
            self._set_caches(caches)
        if self._calls_back:
            # C++ leaves what is to be summed at the beginning of the workspace.
            self._part = self._workspace[: residual.nbytes].view(residual.dtype).view(residual.shape)
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
        self._entries.stage(self._layers, len(self._layers), ctypes.byref(step), self._workspace.data_ptr())
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return residual

    def _grow_workspace(self, tokens: int) -> None:
        self._capacity = tokens
        size = self._entries.workspace_bytes(self._layers, len(self._layers), tokens)
        memory = torch.empty(size + WORKSPACE_ALIGNMENT, dtype=torch.uint8)
        self._workspace = memory[-memory.data_ptr() % WORKSPACE_ALIGNMENT :]

    def _set_caches(self, caches: Sequence[KVCache]) -> None:
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.keys, layer.values = cache.keys.data_ptr(), cache.values.data_ptr()
            layer.kv_heads, layer.head_dim = cache.keys.shape[2:]
            layer.group = cache.group
        self._caches = caches

    def _sum_part(self) -> int:
        """Sum `_part` over the ranks; return 0, or 1 if that failed. C++ calls it, in the thread that called C++.

        An exception cannot pass through C++: it is kept for `__call__` to raise.
        """
        try:
            total = self._comm.sum(self._part)
            if total.data_ptr() != self._part.data_ptr():
                self._part.copy_(total)
        except BaseException as error:
            self._error = error
            return 1
        return 0


def describe_shared(comm: SharedMemoryGroup) -> SharedDescriptor:
    """The shared memory of the ranks of one host, in which C++ sums by itself."""
    return SharedDescriptor(comm.memory.data_ptr(), comm.rank, comm.size, HEAD_BYTES, comm.slot_bytes)


def describe_layer(layer: FusedLayer) -> LayerDescriptor:
    """A layer as C++ reads it, without its cache."""
    norm, ffn = layer.head_norm, layer.ffn
    parts: dict[str, object] = {name: matrix_descriptor(getattr(layer, name)) for name in ("qkv", "out")}
    if isinstance(ffn, FusedMLP):
        parts |= {name: matrix_descriptor(getattr(ffn, name)) for name in ("gate_up", "down")}
    else:
        parts["mixture"] = ctypes.pointer(describe_mixture(ffn))
    return LayerDescriptor(
        attention_norm=layer.attention_norm.data_ptr(),
        q_norm=norm and norm.query.data_ptr(),
        k_norm=norm and norm.key.data_ptr(),
        mlp_norm=layer.ffn_norm.data_ptr(),
        **parts,
        q_heads=layer.q_heads,
        window=layer.window or 0,
        scale=layer.scale,
        head_eps=norm.eps if norm else 0.0,
        eps=layer.eps,
    )


def describe_mixture(mixture: FusedMixture) -> MixtureDescriptor:
    """A mixture of experts as C++ reads it."""
    assert isinstance(mixture.experts, NativeExperts), mixture
    return MixtureDescriptor(
        matrix_descriptor(mixture.router),
        mixture.spec.top_k,
        mixture.spec.normalised,
        mixture.experts.descriptor,
    )


def matrix_descriptor(matrix: object) -> MatrixDescriptor:
    assert isinstance(matrix, NativeMatrix), matrix
    return matrix.descriptor
