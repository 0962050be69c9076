"""Importance of a matrix's columns: the size of the numbers they are multiplied with, for rounding to 4 bits.

An error in a weight is an error in the product as large as the number that the weight is multiplied with. In a
transformer a few columns meet numbers that are a hundred times as large as their neighbours'. The choice of these
columns is a property of the model, hardly of the text: tokens drawn at random show it. So the model runs one short step
before its weights are rounded, with the weights of the checkpoint, each matrix read when its turn comes. Weighted least
squares do the rest (ranks/quant/rounding.py). docs/benchmarks.md has the gain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import replace

import torch
import torch.nn.functional as F

from weft.checkpoint.architectures.parameters import rank_parameters
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.quantised.schemes import ALL_SCHEMES, UNIT
from weft.plan.fills import Fill, rank_fills
from weft.plan.plan import Plan
from weft.ranks.comm import Links
from weft.ranks.kernels.batch import Batch, Lengths
from weft.ranks.kernels.matrices import EmbeddingTable, Product
from weft.ranks.kernels.plain import PlainMatrices, create_plain_kernels
from weft.ranks.layers.exchange import create_exchange
from weft.ranks.models.create import create_model
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.weights.derive import derive_parameters
from weft.ranks.weights.load import WeightSource, check_fill, fill_target, open_source, reader_threads
from weft.ranks.weights.quantised import row_bands
from weft.ranks.worker.device import allocate_cache

TOKENS = 64
# Least importance, as a share of the group's mean: below it, chance in so few tokens would decide between columns.
MIN_IMPORTANCE = 0.1


@torch.inference_mode()
def measure_importance(
    plan: Plan, rank: int, links: Links, targets: Mapping[str, torch.Tensor | QuantisedWeight], device: torch.device
) -> dict[str, torch.Tensor]:
    """Measure the importance [cols] float32 of this rank's matrices that are to be rounded to 4 bits, by parameter.

    The importance of a column is the mean square of the numbers that it is multiplied with, relative to its group. The
    result is empty if no matrix is rounded. All ranks of the plan call this before they load, since they run a step
    together. It fills the tensors in `targets` that are no matrices. Raises ModelError.
    """
    if plan.load_format in ("dummy", "sharded_state"):
        return {}
    source = open_source(plan)
    if not needs_importance(plan, source):
        return {}
    place, shape = plan.places[rank], plan.shape
    dtype = getattr(torch, plan.dtype)
    # By the model alone: engines with other limits have the same weights.
    tokens = min(TOKENS, shape.longest)
    # One cache for all layers with equal mixers, which run one after the other.
    mixers = [shape.layers[layer].mixer for layer in range(place.layers.start, place.layers.stop)]
    caches = {mixer: allocate_cache(mixer, place, dtype, device, (1, tokens)) for mixer in dict.fromkeys(mixers)}
    incoming = None if place.first else links.stage.recv((tokens, shape.hidden), dtype)
    with reader_threads(device) as pool:
        whole = {name for name, parameter, _ in rank_parameters(shape, place) if parameter.is_read_directly}
        matrices = StreamedMatrices(source, targets, rank_fills(shape, place), pool, whole)
        derive_parameters(shape, targets)
        kernels = replace(create_plain_kernels(), matrices=matrices)
        exchange = create_exchange(plan.exchange, links, plan.places, rank, device)
        model = create_model(shape, plan.places, rank, dict(targets), links.tensor, kernels, exchange=exchange)
        model.fill_ropes(tokens, shape.max_positions, device)
        batch = replace(random_batch(shape.vocab, tokens, device), group_tokens=(tokens,) * plan.data_parallel)
        hidden = model.hidden(incoming, [caches[mixer] for mixer in mixers], batch)
    if not place.last:
        links.stage.send(hidden)
    return matrices.importance


def rounds_by_importance(plan: Plan) -> bool:
    """Return True if `measure_importance` has all ranks of the plan run a step. Raises ModelError."""
    return plan.load_format not in ("dummy", "sharded_state") and needs_importance(plan, open_source(plan))


def needs_importance(plan: Plan, source: WeightSource) -> bool:
    """Return True if any matrix of the model is to be rounded to 4 bits."""
    return any(ALL_SCHEMES[type].bits == 4 and not source.holds(name, type) for name, type in plan.schemes.items())


def random_batch(vocab: int, tokens: int, device: torch.device) -> Batch:
    """One row of random tokens, in the first block; the same ones on every rank."""
    ids = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    positions = torch.arange(tokens, dtype=torch.int32)
    row_starts, context = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    return Batch(
        tokens=ids.to(device),
        positions=positions.to(device),
        slots=positions.long().to(device),
        row_starts=row_starts.to(device),
        context=context.to(device),
        tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
        order=context[:0].to(device),
        decodes=0,
        host=Lengths(row_starts.long().numpy(), context.long().numpy()),
    )


class StreamedMatrices(PlainMatrices):
    """Matrices whose products read theirs from the checkpoint at each call, and record their columns' importance.

    `targets` are the rank's parameters and `fills` the ranges that they are filled with. The parameters `whole` are
    filled at once.
    """

    def __init__(
        self,
        source: WeightSource,
        targets: Mapping[str, torch.Tensor | QuantisedWeight],
        fills: Iterable[Fill],
        pool: Executor,
        whole: Collection[str],
    ) -> None:
        super().__init__()
        self.importance: dict[str, torch.Tensor] = {}
        self._source, self._pool = source, pool
        self._fills = defaultdict[str, list[Fill]](list)
        for fill in fills:
            check_fill(fill)
            self._fills[fill.weight].append(fill)
            if fill.param in whole:
                target = fill_target(targets, fill)
                assert isinstance(target, torch.Tensor), fill
                source.read_range(fill.source, fill.rows, fill.cols, target)

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, name: str = "") -> Product:
        is_rounded = isinstance(weight, QuantisedWeight) and weight.scheme.bits == 4 and UNIT % weight.scheme.group == 0

        def product(x: torch.Tensor) -> torch.Tensor:
            if is_rounded:
                self.importance[name] = relative_importance(x.float().square().mean(dim=0))
            y = x.new_empty(len(x), weight.shape[0])
            bands = [
                (fill, rows)
                for fill in self._fills[name]
                for rows in row_bands(fill.rows, x.shape[1], fill.unit, x.device)
            ]
            if x.device.type == "cpu":
                for multiplication in [self._pool.submit(self._multiply, x, *band, y) for band in bands]:
                    multiplication.result()
            else:
                # On a GPU by this thread alone: cuBLAS sets a workspace aside for each thread that calls it, of up to
                # 32 MiB and for good. And a band at a time: there may be no room for a matrix in 16 bits.
                reads = [self._pool.submit(self._read_rows, *band, x.dtype) for band in bands]
                for band, weight_rows in zip(bands, reads, strict=True):
                    self._output_columns(y, *band).copy_(F.linear(x, weight_rows.result().to(x.device)))
            return y if bias is None else y.add_(bias)

        return product

    def router(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None, name: str = "") -> Product:
        return self.matrix(weight, bias, name)

    def embedding_table(self, weight: torch.Tensor | QuantisedWeight, name: str = "") -> EmbeddingTable:
        (fill,) = self._fills[name]
        return StreamedTable(self._source, fill, weight, self.matrix(weight, None, name))

    @torch.inference_mode()
    def _multiply(self, x: torch.Tensor, fill: Fill, rows: Span, y: torch.Tensor) -> None:
        """Multiply `x` with some rows of a fill, into their columns of `y`."""
        self._output_columns(y, fill, rows).copy_(F.linear(x, self._read_rows(fill, rows, x.dtype)))

    @torch.inference_mode()
    def _read_rows(self, fill: Fill, rows: Span, dtype: torch.dtype) -> torch.Tensor:
        """Read some rows of a fill into the host's memory."""
        assert fill.cols is not None
        weight = torch.empty(len(rows), len(fill.cols), dtype=dtype)
        self._source.read_range(fill.source, rows, fill.cols, weight)
        return weight

    @staticmethod
    def _output_columns(y: torch.Tensor, fill: Fill, rows: Span) -> torch.Tensor:
        """Columns of `y` that some rows of a fill produce."""
        at = fill.at + rows.start - fill.rows.start
        return y[:, at : at + len(rows)]


class StreamedTable:
    """An embedding whose rows are read from the checkpoint when they are looked up."""

    def __init__(
        self, source: WeightSource, fill: Fill, weight: torch.Tensor | QuantisedWeight, product: Product
    ) -> None:
        self._source, self._fill, self._product = source, fill, product
        self._dtype, self._width = weight.dtype, weight.shape[1]

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(numbers), self._width, dtype=self._dtype, device=numbers.device)
        for at, number in enumerate(numbers.tolist()):
            row = self._fill.rows.start + number
            self._source.read_range(self._fill.source, Span(row, row + 1), self._fill.cols, out[at : at + 1])
        return out

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x)


def relative_importance(squares: torch.Tensor) -> torch.Tensor:
    """Mean squares [cols], relative to the mean of their group of UNIT columns, MIN_IMPORTANCE at least."""
    groups = squares.nan_to_num(0, 0, 0).view(-1, UNIT)
    mean = groups.mean(dim=1, keepdim=True)
    return torch.where(mean > 0, groups / mean, 1).clamp_(min=MIN_IMPORTANCE).flatten()
