"""The Triton implementations of the kernels' parts, except attention, for GPUs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain

import numpy as np
import torch

from weft.checkpoint.architectures.shape import Experts
from weft.plan.backends import against_fused_experts
from weft.ranks.comm import Group
from weft.ranks.comm.symmetric import SymmetricGroup
from weft.ranks.kernels.attention import HeadNorm, KVCache
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.held import HeldMatrices
from weft.ranks.kernels.matrices import EmbeddingTable, ExpertProducts, ExpertStack, FusedMLP, Product
from weft.ranks.kernels.plain.sampling import score
from weft.ranks.kernels.sampling import SampledRows, SamplingSettings, SettingsUpdate, SlotSettings
from weft.ranks.kernels.staged import StagedStep
from weft.ranks.kernels.triton import pointwise, sampling
from weft.ranks.kernels.triton.experts import TritonExperts, TritonMixture, create_mixture, pack_stack
from weft.ranks.kernels.triton.fp8 import ScaledMatrix, takes_scaled_product
from weft.ranks.kernels.triton.products import QuantisedMatrix, create_quantised_matrix
from weft.ranks.kernels.triton.router import TritonRouter, create_router
from weft.ranks.kernels.triton.routing import choose_experts
from weft.ranks.kernels.triton.staged import fill_batch
from weft.ranks.kernels.warm import KernelLaunch
from weft.ranks.quant.dense import create_product
from weft.ranks.quant.dense_embedding import DenseEmbedding
from weft.ranks.quant.quantised import QuantisedWeight


class TritonPointwise:
    """The Triton implementation of `Pointwise`."""

    def fill_batch(self, staged: StagedStep, batch: Batch) -> None:
        fill_batch(staged, batch)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return pointwise.norm(x, None, weight, eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return pointwise.norm(x, residual, weight, eps)

    def sum_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, comm: Group
    ) -> torch.Tensor:
        parts = comm.publish_part(x) if isinstance(comm, SymmetricGroup) else None
        if parts is None:
            return self.add_norm(comm.sum(x), residual, weight, eps)
        return pointwise.sum_add_norm(parts, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return pointwise.silu_mul(gate_up)

    def choose_experts(
        self,
        scores: torch.Tensor,
        spec: Experts,
        slots: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return choose_experts(scores, spec, slots, correction)

    def rotate_and_store(
        self, qkv: torch.Tensor, q_heads: int, rope: torch.Tensor, cache: KVCache, batch: Batch, norm: HeadNorm | None
    ) -> torch.Tensor:
        return pointwise.rotate_and_store(qkv, q_heads, rope, cache, batch, norm)


class TritonMatrices(HeldMatrices):
    """The Triton implementation of `Matrices` for quantised weights and experts; torch multiplies with the others.

    Work is spread over `processors`, the number of the device's multiprocessors. With `fp8_units` the device multiplies
    FP8 matrices.
    """

    multiplies_quantised = True

    def __init__(self, processors: int, *, fp8_units: bool = False) -> None:
        super().__init__()
        self._processors, self._fp8_units = processors, fp8_units
        # One product of each kind: others launch the same kernels.
        self._quantised: dict[Hashable, QuantisedMatrix] = {}
        self._routers: dict[Hashable, TritonRouter] = {}
        self._experts: dict[Hashable, TritonExperts] = {}
        self._mixtures: dict[Hashable, TritonMixture] = {}

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, name: str = "") -> Product:
        if isinstance(weight, QuantisedWeight):
            return self._hold(name, self._quantised_matrix(weight, bias))
        return self._hold(name, create_product(weight, bias))

    def router(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, name: str = "") -> TritonRouter:
        router = self._hold(name, create_router(weight, bias))
        self._routers.setdefault(router.kind, router)
        return router

    def embedding_table(self, weight: torch.Tensor | QuantisedWeight, name: str = "") -> EmbeddingTable:
        if isinstance(weight, QuantisedWeight):
            return self._hold(name, self._quantised_matrix(weight, None))
        return self._hold(name, DenseEmbedding(weight))

    def _quantised_matrix(self, weight: QuantisedWeight, bias: torch.Tensor | None) -> QuantisedMatrix:
        scaled = self._fp8_units and takes_scaled_product(weight.scheme, *weight.shape, weight.dtype)
        product = ScaledMatrix if scaled else QuantisedMatrix
        matrix = create_quantised_matrix(weight, bias, self._processors, product)
        self._quantised.setdefault(matrix.kind, matrix)
        return matrix

    def experts(self, spec: Experts, gate_up: ExpertStack, down: ExpertStack, first: int) -> ExpertProducts:
        if against_fused_experts("triton", spec):
            return super().experts(spec, gate_up, down, first)
        stacks = [self._hold(stack.name, pack_stack(stack)) for stack in (gate_up, down)]
        experts = TritonExperts(spec=spec, gate_up=stacks[0], down=stacks[1], first=first, processors=self._processors)
        self._experts.setdefault(experts.kind, experts)
        return experts

    def mixture(self, experts: ExpertProducts, shared: FusedMLP) -> TritonMixture | None:
        if not isinstance(experts, TritonExperts):
            return None
        mixture = create_mixture(experts, shared.gate_up, shared.down)
        if mixture:
            self._mixtures.setdefault(mixture.kind, mixture)
        return mixture

    def launches(self, tokens: int) -> Sequence[Sequence[KernelLaunch]]:
        specs = {experts.spec for experts in self._experts.values()}
        routers = chain(*(router.launches(tokens, specs) for router in self._routers.values()))
        parts = self._quantised.values(), self._experts.values(), self._mixtures.values()
        return [list(routers), *(list(chain(*(product.launches(tokens) for product in part))) for part in parts)]


class TritonSampling:
    """The Triton implementation of `Sampling`, on a device. torch computes logprobs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def create_token_sampler(self, slots: int) -> TritonTokenSampler:
        return TritonTokenSampler(slots, self._device)

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> torch.Tensor:
        return score(logits, targets, top)

    def apply_masks(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        sampling.apply_masks(logits, rows, masks)


class TritonTokenSampler:
    """The Triton implementation of `TokenSampler`. The GPU keeps the settings, and gets a slot's settings when they
    change."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._settings = SlotSettings(slots)
        self._filtered = np.zeros(slots, dtype=bool)
        self._changed: set[int] = set()
        self._columns = torch.zeros(self._settings.columns.shape, dtype=torch.float64, device=device)
        self._keys = torch.zeros(slots, dtype=torch.int64, device=device)

    def admit(self, slot: int, settings: SamplingSettings, key: int) -> None:
        self._settings.admit(slot, settings, key)
        self._filtered[slot] = settings.filters
        self._changed.add(slot)

    def take_settings_update(self) -> SettingsUpdate[np.ndarray] | None:
        if not self._changed:
            return None
        slots = np.array([*self._changed], dtype=np.int64)
        self._changed.clear()
        return SettingsUpdate(slots, self._settings.columns[slots], self._settings.keys[slots].view(np.int64))

    def sample_tokens(
        self, logits: torch.Tensor, arrays: SampledRows[np.ndarray], tensors: SampledRows[torch.Tensor]
    ) -> torch.Tensor:
        if tensors.settings is not None:
            self._columns.index_copy_(0, tensors.settings.slots, tensors.settings.columns)
            self._keys.index_copy_(0, tensors.settings.slots, tensors.settings.keys)
        filtered = bool(self._filtered[arrays.slots].any())
        return sampling.sample_tokens(
            logits, tensors.slots, tensors.positions, self._columns, self._keys, filtered=filtered
        )
