"""The products of a model in C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from weft.checkpoint.architectures.shape import Experts
from weft.machine.native.entries import Entries
from weft.ranks.kernels.held import HeldMatrices
from weft.ranks.kernels.latents import LatentDims, LatentProducts
from weft.ranks.kernels.matrices import ExpertProducts, ExpertStack
from weft.ranks.kernels.native.experts import NativeStack, create_experts, pack_gate_up, pack_stack
from weft.ranks.kernels.native.latents import pack_latent_products
from weft.ranks.kernels.native.matrix import NativeMatrix, pack_matrix
from weft.ranks.kernels.warm import KernelLaunch
from weft.ranks.quant.dense import dense_weight
from weft.ranks.quant.quantised import QuantisedWeight


class NativeMatrices(HeldMatrices):
    """The C++ implementation of `Matrices`."""

    multiplies_quantised = True

    def __init__(self, entries: Entries) -> None:
        super().__init__()
        self._entries = entries

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, name: str = "") -> NativeMatrix:
        return self._hold(name, pack_matrix(self._entries, weight, bias))

    def router(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, name: str = "") -> NativeMatrix:
        return self._hold(name, replace(pack_matrix(self._entries, dense_weight(weight), bias), wide=True))

    def experts(self, spec: Experts, gate_up: ExpertStack, down: ExpertStack, first: int) -> ExpertProducts:
        if spec.activation != "silu":
            return super().experts(spec, gate_up, down, first)
        stacks = pack_gate_up(self._entries, gate_up), pack_stack(self._entries, down)
        for name, stack in zip((gate_up.name, down.name), stacks, strict=True):
            self._hold(name, stack)
        return create_experts(self._entries, spec, *stacks, first)

    def latent_products(
        self, weight: torch.Tensor | QuantisedWeight, dims: LatentDims, name: str = ""
    ) -> LatentProducts:
        return self._hold(name, pack_latent_products(self._entries, weight, dims))

    def embedding_table(self, weight: torch.Tensor | QuantisedWeight, name: str = "") -> NativeMatrix:
        return self.matrix(weight, None, name)

    def refresh_biases(self) -> None:
        for product in self._products.values():
            if isinstance(product, NativeStack):
                product.refresh_bias()

    def launches(self, tokens: int) -> Sequence[Sequence[KernelLaunch]]:
        return ()
