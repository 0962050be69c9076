"""Products with quantised weights, and mixtures of experts, by humming-kernels.

Weights are repacked once, matrix by matrix. Nothing waits for the GPU, and no size depends on what tokens choose, so
that a CUDA graph can hold the launches once the library has compiled its kernels: `launches` does that.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from weft.checkpoint.architectures.shape import Experts
from weft.plan.products import BAND_BYTES, COLUMN_MULTIPLE, LOCKS, ROW_MULTIPLE, round_up
from weft.ranks.kernels.humming.layout import schema_fields, standard_tensors
from weft.ranks.kernels.humming.library import Library
from weft.ranks.kernels.matrices import ExpertStack
from weft.ranks.kernels.triton.grouped import RoutedBlocks, activate, place_rows
from weft.ranks.kernels.triton.routing import sort_rows, sum_parts
from weft.ranks.kernels.warm import KernelLaunch, first_of_variants
from weft.ranks.quant.quantised import QuantisedWeight

ANY_ROWS = 1 << 30  # the limit of the last tile
DENSE, INDEXED = "dense", "indexed"  # the library's names of its kinds of products


@dataclass(frozen=True)
class TileTable:
    """Tiles of the library's kernels by number of rows: the first is for up to `limits[0]` rows, and so on. The last
    one is for any number. `heights` are the rows of a tile."""

    limits: tuple[int, ...]
    heights: tuple[int, ...]
    configs: str

    def place(self, rows: int) -> int:
        """Index of the tile for `rows` rows."""
        return min(bisect_left(self.limits, rows), len(self.limits) - 1)

    def firsts(self, most: int) -> list[int]:
        """The least number of rows of each tile, up to `most`."""
        return [above + 1 for above in (0, *self.limits[:-1]) if above < most]

    def height(self, rows: int) -> int:
        """Rows of the tile for `rows` rows of x."""
        return self.heights[self.place(rows)]


def choose_tiles(tile: Callable[[int], dict[str, Any]], most: int) -> TileTable:
    """The library's own choice for 1, 2, 4, ... rows, up to `most`; for numbers between them, that for the next one.

    Each tile is compiled before the first request, so that the library's choice for every number, of which some tens
    differ for one shape, would be too many.
    """
    limits = [1 << exponent for exponent in range((most - 1).bit_length() + 1)]
    configs = [tile(limit) for limit in limits]
    limits[-1] = ANY_ROWS
    intervals = list(zip([0, *limits], limits, configs, strict=False))
    return TileTable(tuple(limits), tuple(config["block_shape"][0] for config in configs), json.dumps(intervals))


@dataclass(frozen=True, kw_only=True)
class RepackedWeight:
    """A weight [rows, cols], or a stack of `experts` of them, as the library's kernels read it: `held`, by the names of
    its arguments. `bias` [rows] or [experts, rows] is the caller's, of which `held` has a copy in another order.

    `config` is what the kernels are compiled for, `locks` their int32 zeros.
    """

    library: Library
    config: Any
    held: dict[str, torch.Tensor]
    bias: torch.Tensor | None
    tiles: TileTable
    locks: torch.Tensor
    kind: Hashable
    rows: int
    cols: int
    experts: int
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that hold the weight."""
        return tuple(self.held.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the weight, with what it is padded by."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        """Take the values of another weight, of the same dims and scheme, on the same device or the host; some rows of
        one matrix at a time.

        Raises UnusableError for a weight that the library cannot hold, see `obstacle`.
        """
        assert isinstance(weight, QuantisedWeight)
        if not self.experts:
            self._fill(self.held, weight, self.bias)
            return
        for expert in range(self.experts):
            part = {name: tensor[expert] for name, tensor in self.held.items()}
            self._fill(part, weight.select(0, expert), None if self.bias is None else self.bias[expert])

    def refresh_bias(self) -> None:
        """Take the values of a bias that the caller has replaced in place."""
        if self.bias is None:
            return
        padded = F.pad(self.bias.to(self.dtype), (0, self.held["bias"].shape[-1] - self.rows))
        rows = padded.flatten(0, -2) if padded.dim() > 1 else padded[None]
        for target, source in zip(self.held["bias"].view(rows.shape), rows, strict=True):
            target.copy_(self.library.transform_bias(source))

    def _fill(self, held: dict[str, torch.Tensor], weight: QuantisedWeight, bias: torch.Tensor | None) -> None:
        """Repack one matrix into `held`. In each of the library's tensors rows of the weight lie along the last dim."""
        rows, step = self.rows, band_rows(weight)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            made = repack_band(self.library, weight, bias, start, count, self.locks.device)
            for name, part in made.items():
                width = held[name].shape[-1]
                held[name].narrow(-1, width * start // round_up(rows, ROW_MULTIPLE), part.shape[-1]).copy_(part)

    def multiply(self, x: torch.Tensor, gemm_type: str, **routing: Any) -> torch.Tensor:
        """The library's product of x [T, cols]."""
        held = self.held
        return self.library.forward(
            self.config,
            inputs=x,
            weight=held["weight"],
            weight_scale=held["weight_scale"],
            zero_point=held.get("zero_point"),
            bias=held.get("bias"),
            locks=self.locks,
            compute_config=COMPUTE[gemm_type],
            tuning_config=self.tiles.configs,
            **routing,
        )


COMPUTE = {
    kind: json.dumps({"use_f16_accum": False, "use_batch_invariant": False, "gemm_type": kind})
    for kind in (DENSE, INDEXED)
}


def create_locks(device: torch.device) -> torch.Tensor:
    """Locks for all products that are launched one after the other."""
    return torch.zeros(LOCKS, dtype=torch.int32, device=device)


def band_rows(weight: QuantisedWeight) -> int:
    """Rows of a matrix that are repacked at once."""
    row_bytes = weight.shape[1] * weight.scheme.bits // 8
    return max(1, BAND_BYTES // (row_bytes * ROW_MULTIPLE)) * ROW_MULTIPLE


def repack_band(
    library: Library,
    weight: QuantisedWeight,
    bias: torch.Tensor | None,
    start: int,
    count: int,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The library's tensors of some rows of a matrix, padded."""
    band = weight.narrow(0, start, count)
    moved = band.empty_on(device)
    for name, part in moved.parts.items():
        part.copy_(band.parts[name])
    some = None if bias is None else bias[start : start + count]
    return library.transform(layer_config(library, moved, some is not None), standard_tensors(moved, some))


def layer_config(library: Library, weight: QuantisedWeight, has_bias: bool, experts: int = 0) -> Any:
    """The constants of the library's kernels for a weight, or for a stack of `experts` of them."""
    rows, cols = weight.shape
    return library.layer_config(
        rows,
        cols,
        weight_schema=library.weight_schema(**schema_fields(weight.scheme)),
        num_experts=experts,
        has_bias=has_bias,
        pad_n_to_multiple=ROW_MULTIPLE,
        pad_k_to_multiple=COLUMN_MULTIPLE,
        torch_dtype=weight.dtype,
        device=weight.device,
    )


def repack(
    library: Library, weight: QuantisedWeight, bias: torch.Tensor | None, locks: torch.Tensor, most: int
) -> RepackedWeight:
    """Repack a weight or a stack, BAND_BYTES of it at a time, for products of up to `most` rows."""
    experts = weight.values.shape[0] if weight.values.dim() == 3 else 0
    config = layer_config(library, weight, bias is not None, experts)
    gemm_type = INDEXED if experts else DENSE

    def tile(rows: int) -> dict[str, Any]:
        chosen: dict[str, Any] = library.tile(config, rows, gemm_type=gemm_type, device=weight.device)
        return chosen

    first, (rows, cols) = weight.select(0, 0) if experts else weight, weight.shape
    count = min(rows, ROW_MULTIPLE)
    made = repack_band(library, first, bias[0] if experts and bias is not None else bias, 0, count, weight.device)
    lead, bands = (experts,) if experts else (), round_up(rows, ROW_MULTIPLE) // ROW_MULTIPLE
    held = {name: part.new_empty(*lead, *part.shape[:-1], part.shape[-1] * bands) for name, part in made.items()}
    repacked = RepackedWeight(
        library=library,
        config=config,
        held=held,
        bias=bias,
        tiles=choose_tiles(tile, most),
        locks=locks,
        kind=(weight.type, rows, cols, experts, weight.dtype, bias is None),
        rows=rows,
        cols=cols,
        experts=experts,
        dtype=weight.dtype,
    )
    repacked.replace(weight)
    return repacked


@dataclass(frozen=True)
class HummingMatrix:
    """A quantised weight W: x [T, cols] -> x W^T + bias [T, rows]."""

    weight: RepackedWeight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return x.new_empty(0, self.weight.rows)
        return self.weight.multiply(x, DENSE)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.weight.tensors

    @property
    def kind(self) -> Hashable:
        """Key of products that launch the same kernels."""
        return self.weight.kind

    def replace(self, weight: torch.Tensor | QuantisedWeight) -> None:
        self.weight.replace(weight)

    def refresh_bias(self) -> None:
        self.weight.refresh_bias()

    def launches(self, most: int) -> list[KernelLaunch]:
        """Calls that launch each of the library's tiles for up to `most` rows of x."""
        weight = self.weight
        zeros = partial(torch.zeros, dtype=weight.dtype, device=weight.locks.device)
        return [partial(self, zeros(rows, weight.cols)) for rows in weight.tiles.firsts(most)]


@dataclass(frozen=True, kw_only=True)
class HummingExperts:
    """`ExpertProducts` by the library, of the experts from number `first` on.

    The rows of `gate_up` are the gate's and then the up projection's.
    """

    spec: Experts
    gate_up: RepackedWeight
    down: RepackedWeight
    first: int
    routed: torch.Tensor = field(init=False)

    capturable = True

    def __post_init__(self) -> None:
        routed = torch.zeros(self.down.experts, dtype=torch.int64, device=self.down.locks.device)
        object.__setattr__(self, "routed", routed)

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden]."""
        if not len(x):
            return torch.empty_like(x)
        x, chosen, shares, rows = x.contiguous(), chosen.contiguous(), shares.contiguous(), chosen.numel()
        heights = [weight.tiles.height(rows) for weight in (self.gate_up, self.down)]
        blocks = place_rows(sort_rows(chosen, self.first, self.routed, heights[0]), rows)
        inner = activate(self._multiply(self.gate_up, x, blocks, chosen.shape[1]), self.spec)
        if heights[1] != heights[0]:
            blocks = place_rows(sort_rows(chosen, self.first, torch.empty_like(self.routed), heights[1]), rows)
        parts = self._multiply(self.down, inner, blocks, 1)
        return sum_parts(parts, chosen, shares, self.first, self.down.experts)

    def _multiply(self, weight: RepackedWeight, x: torch.Tensor, blocks: RoutedBlocks, choices: int) -> torch.Tensor:
        """Multiply the rows of all blocks with their experts' matrices; row r of the result belongs to row r // choices
        of x. Rows that are in no block are not written."""
        return weight.multiply(
            x,
            INDEXED,
            sorted_ids=blocks.members,
            expert_ids=blocks.owners,
            num_tokens_padded=blocks.count,
            top_k=choices,
        )

    @property
    def kind(self) -> Hashable:
        """Key of experts that launch the same kernels."""
        return self.spec, self.gate_up.kind, self.down.kind

    def launches(self, most: int) -> list[KernelLaunch]:
        """Calls that launch each of the library's tiles for up to `most` tokens."""
        top_k, zeros = self.spec.top_k, partial(torch.zeros, device=self.down.locks.device)

        def launch(tokens: int) -> KernelLaunch:
            choice = zeros(tokens, top_k, dtype=torch.int64), zeros(tokens, top_k)
            return partial(self, zeros(tokens, self.gate_up.cols, dtype=self.gate_up.dtype), *choice)

        return [launch(tokens) for tokens in self.firsts(most)]

    def firsts(self, most: int) -> list[int]:
        """The least number of tokens of each pair of tiles, up to `most`."""

        def variant(tokens: int) -> Hashable:
            return tuple(weight.tiles.place(tokens * self.spec.top_k) for weight in (self.gate_up, self.down))

        return first_of_variants(variant, most)

    def refresh_bias(self) -> None:
        for weight in (self.gate_up, self.down):
            weight.refresh_bias()


def repack_experts(
    repack_stack: Callable[[QuantisedWeight, torch.Tensor | None], RepackedWeight],
    spec: Experts,
    gate_up: ExpertStack,
    down: ExpertStack,
    first: int,
) -> HummingExperts:
    """The experts of a rank, whose two stacks are quantised."""
    stacks = []
    for stack in (gate_up, down):
        assert isinstance(stack.weight, QuantisedWeight)
        stacks.append(repack_stack(stack.weight, stack.bias))
    return HummingExperts(spec=spec, gate_up=stacks[0], down=stacks[1], first=first)
