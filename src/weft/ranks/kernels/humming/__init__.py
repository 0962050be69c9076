"""Products with quantised weights by the library humming-kernels, where it is installed and right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.machine.hardware.nvml import driver_version
from weft.ranks.kernels.attention import AttentionShape
from weft.ranks.kernels.usable import multiprocessor_count

if TYPE_CHECKING:
    from weft.checkpoint.architectures.shape import Experts
    from weft.ranks.kernels.humming.matrices import HummingMatrices
    from weft.ranks.kernels.humming.products import HummingExperts, HummingMatrix, RepackedWeight
    from weft.ranks.kernels.matrices import ExpertStack
    from weft.ranks.quant.quantised import QuantisedWeight


def create_matrices(device: torch.device, shape: AttentionShape, *, races: bool) -> HummingMatrices:
    """Products besides the other Triton kernels. With `races`, the library multiplies the shapes for which it is the
    faster one."""
    from weft.ranks.kernels.humming.matrices import HummingMatrices
    from weft.ranks.kernels.humming.race import ProductRaces
    from weft.ranks.kernels.triton.fp8 import has_fp8_units

    return HummingMatrices(
        device,
        multiprocessor_count(device),
        shape.tokens,
        fp8_units=has_fp8_units(device),
        races=ProductRaces(device, driver_version()) if races else None,
    )


def create_matrix(weight: QuantisedWeight, bias: torch.Tensor | None = None, *, rows: int = 1024) -> HummingMatrix:
    """The library's product with a weight [out, in] for up to `rows` rows of x, to be compared with Weft's own of the
    same weight. Nothing is compared.

    Raises UnusableError if the library cannot be imported or does not take the weight.
    """
    from weft.ranks.kernels.humming.library import load_library
    from weft.ranks.kernels.humming.products import HummingMatrix, create_locks, repack

    return HummingMatrix(repack(load_library(), weight, bias, create_locks(weight.device), rows))


def create_experts(
    spec: Experts, gate_up: ExpertStack, down: ExpertStack, first: int = 0, *, tokens: int = 1024
) -> HummingExperts:
    """The same for the experts of a rank, of quantised stacks, and up to `tokens` tokens."""
    from weft.ranks.kernels.humming.library import load_library
    from weft.ranks.kernels.humming.products import create_locks, repack, repack_experts

    library, locks = load_library(), create_locks(gate_up.weight.device)

    def repack_stack(weight: QuantisedWeight, bias: torch.Tensor | None) -> RepackedWeight:
        return repack(library, weight, bias, locks, tokens * spec.top_k)

    return repack_experts(repack_stack, spec, gate_up, down, first)
