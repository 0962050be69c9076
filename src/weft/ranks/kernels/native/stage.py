"""All layers of a pipeline stage in one call into the C++ kernels."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeGuard

import torch

from weft.machine.native.entries import Entries
from weft.machine.native.structures import (
    PANEL,
    PHASES,
    WORKSPACE_ALIGNMENT,
    ExchangeDescriptor,
    LatentDescriptor,
    LayerDescriptor,
    MatrixDescriptor,
    MixtureDescriptor,
    PhaseEntry,
    PhaseLogDescriptor,
    SharedDescriptor,
    StepDescriptor,
    SumCallback,
)
from weft.plan import memory as plan_memory
from weft.ranks.comm import Group
from weft.ranks.comm.shared import HEAD_BYTES, SharedMemoryGroup
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.fused import ExchangeRanks, FusedLatent, FusedLayer, FusedMixture, PhaseTimes
from weft.ranks.kernels.matrices import FusedMLP
from weft.ranks.kernels.native.experts import NativeExperts, describe_routing
from weft.ranks.kernels.native.latents import NativeLatentProducts
from weft.ranks.kernels.native.matrix import NativeMatrix

NEVER_EXPANDED = 1 << 31  # tokens of a row


class NativeStage:
    """A `FusedStage` in C++. Its workspace grows to the largest step so far, and is kept."""

    def __init__(self, entries: Entries, layers: Sequence[FusedLayer], comm: Group) -> None:
        self._entries, self._comm = entries, comm
        self._kept = layers
        self._layers = (LayerDescriptor * len(layers))(*map(describe_layer, layers))
        if entries.fixed_order:
            keep_absorbed(self._layers)
        self._caches: Sequence[KVCache] | None = None
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._capacity = 0, 0  # tokens, and routed tokens
        self._part = torch.empty(0)
        self._error: BaseException | None = None
        self._shared = describe_shared(comm) if shares_memory(comm) else None
        self._calls_back = comm.size > 1 and self._shared is None
        self._sum = SumCallback(self._sum_part) if self._calls_back else SumCallback()
        self._phases: PhaseBuffer | None = None
        self._exchange = next((StageExchange(ranks) for ranks in map(exchange_ranks, layers) if ranks), None)

    def __call__(
        self, residual: torch.Tensor, rope: torch.Tensor, caches: Sequence[KVCache], batch: Batch
    ) -> torch.Tensor:
        tokens = len(residual)
        exchange = self._exchange and self._exchange.describe_step(batch.group_tokens)
        self._grow_workspace(tokens, self._exchange.tokens if self._exchange else tokens)
        if caches is not self._caches:
            self._set_caches(caches)
        if self._calls_back:
            # C++ leaves what is to be summed at the beginning of the workspace.
            self._part = self._workspace[: residual.nbytes].view(residual.dtype).view(residual.shape)
        step = StepDescriptor(
            residual.data_ptr(),
            rope.data_ptr(),
            batch.angle_rows.data_ptr(),
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
            exchange,
            self._phases and ctypes.addressof(self._phases.descriptor),
            self._entries.fixed_order,
        )
        self._entries.stage(self._layers, len(self._layers), ctypes.byref(step), self._workspace.data_ptr())
        if self._phases is not None:
            self._phases.pass_on()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return residual

    def serve_others(self, group_tokens: Sequence[int]) -> None:
        if self._exchange is None:
            return
        step = StepDescriptor(exchange=self._exchange.describe_step(group_tokens))
        self._grow_workspace(0, self._exchange.tokens)
        self._entries.stage(self._layers, len(self._layers), ctypes.byref(step), self._workspace.data_ptr())

    def trace(self, log: PhaseTimes | None) -> None:
        self._phases = PhaseBuffer(len(self._layers), log) if log else None

    def forget_caches(self) -> None:
        self._caches = None  # the next call sets the addresses again

    def _grow_workspace(self, tokens: int, routed: int) -> None:
        """Have room for a step of `tokens`, of which `routed`, with tokens of other groups, go through the experts."""
        had, room = self._capacity, (max(tokens, self._capacity[0]), max(routed, self._capacity[1]))
        if room == had:
            return
        self._capacity = room
        size = self._entries.workspace_bytes(self._layers, len(self._layers), *room, self._exchange is not None)
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


class PhaseBuffer:
    """Memory in which C++ logs the phases of one call, and the function that they are passed on to."""

    def __init__(self, layers: int, log: PhaseTimes) -> None:
        self._log = log
        # Norms and sums come twice in a layer, and norms once before the first one.
        room = 2 * len(PHASES) * layers + 1
        self._entries = (PhaseEntry * room)()
        self.descriptor = PhaseLogDescriptor(entries=self._entries, room=room)

    def pass_on(self) -> None:
        """Pass the phases of a call on, and forget them."""
        began_ns = self.descriptor.began_ns
        for entry in self._entries[: self.descriptor.count]:
            self._log(entry.layer, PHASES[entry.phase], began_ns, entry.ended_ns)
            began_ns = entry.ended_ns
        self.descriptor.count = 0


class StageExchange:
    """The exchange of tokens in the steps of a stage, as C++ reads it. `tokens` are the tokens of all ranks in the last
    step."""

    def __init__(self, ranks: ExchangeRanks) -> None:
        assert isinstance(ranks.group, SharedMemoryGroup), ranks.group
        self._ranks, self.tokens = ranks, 0
        self._begins = (ctypes.c_int64 * (ranks.group.size + 1))()
        self._descriptor = ExchangeDescriptor(
            shared=describe_shared(ranks.group), begins=ctypes.addressof(self._begins), complete=ranks.complete
        )

    def describe_step(self, group_tokens: Sequence[int]) -> int:
        """Address of the description of a step, in which each attention group has these numbers of tokens."""
        self._begins[:] = list(accumulate(self._ranks.counts(group_tokens), initial=0))
        self._descriptor.first = self._begins[self._ranks.first_rank]
        self.tokens = self._begins[-1]
        return ctypes.addressof(self._descriptor)


def can_fuse(layers: Sequence[FusedLayer], comm: Group) -> bool:
    """Return True if C++ computes the layers on all ranks of the stage, which all call this: they sum and exchange in
    C++ or in Python, but together."""
    ours = all(map(is_known, layers))
    exchange = next(filter(None, map(exchange_ranks, layers)), None)
    for group in (comm, exchange.group) if exchange else (comm,):
        ours = group.size == int(group.sum(torch.tensor([ours], dtype=torch.int32)))
    return ours


def is_known(layer: FusedLayer) -> bool:
    """Return True if C++ computes the layer: its experts, if it has any, are packed for it, the up projection of shared
    experts begins with a panel, and tokens are exchanged through shared memory."""
    if isinstance(layer.ffn, FusedMLP):
        return True
    shared, exchange = layer.ffn.shared, layer.ffn.exchange
    whole = shared is None or matrix_descriptor(shared.gate_up).rows % (2 * PANEL) == 0
    reached = exchange is None or shares_memory(exchange.group)
    return whole and reached and isinstance(layer.ffn.experts, NativeExperts)


def exchange_ranks(layer: FusedLayer) -> ExchangeRanks | None:
    """The ranks with which a layer exchanges tokens; None if it does not."""
    return layer.ffn.exchange if isinstance(layer.ffn, FusedMixture) else None


def shares_memory(comm: Group) -> TypeGuard[SharedMemoryGroup]:
    """Return True if C++ reaches the other ranks by itself."""
    return isinstance(comm, SharedMemoryGroup) and sys.platform == "linux"


def describe_shared(comm: SharedMemoryGroup) -> SharedDescriptor:
    """The shared memory of the ranks of one host, in which C++ sums and exchanges by itself."""
    times = ctypes.addressof(comm.times.native)  # which lives as long as the group
    return SharedDescriptor(comm.memory.data_ptr(), comm.rank, comm.size, HEAD_BYTES, comm.slot_bytes, times)


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
        sinks=None if layer.sinks is None else layer.sinks.data_ptr(),
        latent=ctypes.pointer(describe_latent(layer.latent)) if layer.latent else None,
        scale=layer.scale,
        head_eps=norm.eps if norm else 0.0,
        eps=layer.eps,
    )


def keep_absorbed(layers: Iterable[LayerDescriptor]) -> None:
    """Have the absorbed form of latent attention computed for rows of any number of tokens: the expanded form sums in
    another order."""
    for layer in layers:
        if layer.latent:
            layer.latent.contents.expands_from = NEVER_EXPANDED


def describe_latent(latent: FusedLatent) -> LatentDescriptor:
    """Latent attention as C++ reads it."""
    assert isinstance(latent.products, NativeLatentProducts), latent
    descriptor = LatentDescriptor(
        projection=latent.products.descriptor,
        kv_down=matrix_descriptor(latent.kv_down),
        kv_norm=latent.kv_norm.weight.data_ptr(),
        interleaved=latent.interleaved,
        expands_from=max(2, latent.products.dims.expands_from),
        expanded_bytes=plan_memory.EXPANDED_BYTES,
        kv_eps=latent.kv_norm.eps,
    )
    if latent.q_down is not None and latent.q_norm is not None:
        descriptor.q_down = matrix_descriptor(latent.q_down)
        descriptor.q_norm, descriptor.q_eps = latent.q_norm.weight.data_ptr(), latent.q_norm.eps
    return descriptor


def describe_mixture(mixture: FusedMixture) -> MixtureDescriptor:
    """A mixture of experts as C++ reads it."""
    assert isinstance(mixture.experts, NativeExperts), mixture
    descriptor = MixtureDescriptor(
        router=matrix_descriptor(mixture.router),
        routing=describe_routing(mixture.spec, mixture.correction),
        experts=mixture.experts.descriptor,
    )
    if mixture.shared is not None:
        descriptor.shared.gate_up = matrix_descriptor(mixture.shared.gate_up)
        descriptor.shared.down = matrix_descriptor(mixture.shared.down)
    if mixture.weigher is not None:
        descriptor.shared.weigher = matrix_descriptor(mixture.weigher)
    return descriptor


def matrix_descriptor(matrix: object) -> MatrixDescriptor:
    assert isinstance(matrix, NativeMatrix), matrix
    return matrix.descriptor
