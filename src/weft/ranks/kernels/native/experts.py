"""The experts of a rank in C++, in stacks of matrices that are packed once."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weft.checkpoint.architectures.shape import Experts
from weft.machine.native.entries import Entries
from weft.machine.native.structures import PANEL, ExpertsDescriptor, MatrixDescriptor, RoutingDescriptor
from weft.ranks.kernels.matrices import ExpertStack
from weft.ranks.kernels.native.matrix import allocate_packed, describe_matrix, pack_weight
from weft.ranks.quant.quantised import QuantisedWeight, stack_size


@dataclass(frozen=True)
class NativeStack:
    """Packed matrices of all experts of a rank, one after the other in each of `tensors`.

    `order` [rows] are the rows of a matrix in the order in which they are packed; None: as they are. The descriptor is
    the first matrix's. `bias` [experts, rows] is a copy of `own_bias` in that order, if there is one.
    """

    entries: Entries
    descriptor: MatrixDescriptor
    tensors: tuple[torch.Tensor, ...]
    own_bias: torch.Tensor | None
    bias: torch.Tensor | None
    order: torch.Tensor | None

    def refresh_bias(self) -> None:
        """Take the values that `own_bias` has now."""
        if self.own_bias is not None and self.bias is not None and self.order is not None:
            self.bias.copy_(self.own_bias[:, self.order])

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        """Take the values of another stack, of the same dims and scheme."""
        for expert in range(stack_size(weight)):
            matrix = reorder_rows(weight.select(0, expert), self.order)
            pack_weight(self.entries, matrix, [tensor[expert] for tensor in self.tensors])


@dataclass(frozen=True)
class NativeExperts:
    """`ExpertProducts` in C++. The descriptor points into `stacks` and `routed`."""

    entries: Entries
    descriptor: ExpertsDescriptor
    stacks: Sequence[NativeStack]
    routed: torch.Tensor

    capturable = False

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        chosen, shares, out = chosen.contiguous(), shares.contiguous(), torch.empty_like(x)
        tokens, top_k = chosen.shape
        self.entries.experts(
            ctypes.byref(self.descriptor),
            x.data_ptr(),
            chosen.data_ptr(),
            shares.data_ptr(),
            tokens,
            top_k,
            out.data_ptr(),
        )
        return out


def create_experts(
    entries: Entries, spec: Experts, gate_up: NativeStack, down: NativeStack, first: int
) -> NativeExperts:
    """The experts of a rank, the first of which has the number `first`. `gate_up` is from `pack_gate_up`."""
    routed = torch.zeros(len(down.tensors[0]), dtype=torch.int64)
    descriptor = ExpertsDescriptor(
        gate_up=gate_up.descriptor,
        down=down.descriptor,
        first=first,
        count=len(down.tensors[0]),
        gain=spec.gain,
        limit=math.inf if spec.limit is None else spec.limit,
        up_offset=spec.up_offset,
        routed=routed.data_ptr(),
    )
    return NativeExperts(entries, descriptor, (gate_up, down), routed)


def describe_routing(spec: Experts, correction: torch.Tensor | None) -> RoutingDescriptor:
    """The choice of a token's experts as C++ reads it. `correction` [experts] float32 is read where it is."""
    assert correction is None or correction.dtype == torch.float32, correction
    best, size = 2 if spec.group_score == "top2" else 1, spec.count // spec.groups
    # C++ reads the best of each group, and the experts of the open groups, without a look at their number.
    assert spec.count == size * spec.groups and best <= size, spec
    assert spec.top_groups <= spec.groups and spec.top_k <= spec.top_groups * size, spec
    return RoutingDescriptor(
        top_k=spec.top_k,
        normalised=spec.normalised,
        sigmoid=spec.scoring == "sigmoid",
        groups=spec.groups,
        top_groups=spec.top_groups,
        group_best=best,
        correction=None if correction is None else correction.data_ptr(),
        scaling=spec.scaling,
    )


def pack_stack(entries: Entries, stack: ExpertStack, order: torch.Tensor | None = None) -> NativeStack:
    """Pack the matrices of a stack, and order their biases alike."""
    first = reorder_rows(stack.weight.select(0, 0), order)
    tensors = allocate_packed(entries, first, (stack_size(stack.weight),))
    bias = stack.bias if stack.bias is None or order is None else stack.bias[:, order].contiguous()
    descriptor = describe_matrix(entries, first, first.shape[0], tensors, bias)
    packed = NativeStack(entries, descriptor, tensors, stack.bias, bias, order)
    packed.replace(stack.weight)
    return packed


def pack_gate_up(entries: Entries, stack: ExpertStack) -> NativeStack:
    """Pack matrices whose rows are the gate's and then the up projection's: panels of both in turns."""
    width = stack.weight.select(0, 0).shape[0] // 2
    # Incomplete panels repeat the last row, whose products are not read.
    rows = torch.arange(-(-width // PANEL) * PANEL).clamp(max=width - 1).view(-1, PANEL)
    return pack_stack(entries, stack, torch.stack((rows, rows + width), dim=1).flatten())


def reorder_rows(weight: torch.Tensor | QuantisedWeight, order: torch.Tensor | None) -> torch.Tensor | QuantisedWeight:
    """Rows `order` of a matrix, or all of them as they are."""
    if order is None:
        return weight
    if isinstance(weight, torch.Tensor):
        return weight[order]
    lowest = None if weight.lowest is None else weight.lowest[order]
    return replace(weight, values=weight.values[order], scales=weight.scales[order], lowest=lowest)
