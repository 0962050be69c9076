"""Importance: what each column of a matrix is multiplied with, so that 4 bits are spent where errors count.

An error in a weight is an error in the product as large as what the weight is multiplied with; and in a transformer a
few columns meet numbers that are a hundred times as large as their neighbours'. Which ones is a property of the model,
hardly of the text: tokens drawn at random tell it. So the model runs one short step before its weights are rounded,
with the weights of the checkpoint, each matrix read as its turn comes; weighted least squares do the rest
(quant/rounding.py). What it brings is in docs/benchmarks.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor

import torch
import torch.nn.functional as F

from weft.architectures.place import Span
from weft.comm import Links
from weft.formats.schemes import ALL, UNIT
from weft.kernels.base import EmbeddingTable, KVCache, Product
from weft.kernels.batch import Batch, Lengths
from weft.kernels.plain import PlainKernels
from weft.layers import rope
from weft.models.decoder import Decoder
from weft.plan.fills import Fill, fills
from weft.plan.plan import Plan
from weft.quant.quantised import QuantisedWeight
from weft.weights.load import Source, loading, open_source
from weft.weights.quantised import bands

TOKENS = 64
# Of a group's mean: below it, chance in so few tokens would decide between columns.
LEAST = 0.1


@torch.inference_mode()
def importance(
    plan: Plan, rank: int, links: Links, targets: Mapping[str, torch.Tensor | QuantisedWeight], device: torch.device
) -> dict[str, torch.Tensor]:
    """The importance [cols] float32 of the columns of this rank's matrices that are to be rounded to 4 bits, by
    parameter: the mean square of what each is multiplied with, beside that of its group. Empty where nothing is.

    All ranks of the plan call it before they load, for they run a step together. It fills those of `targets` that are
    no matrices. Raises ModelError.
    """
    source = open_source(plan)
    if plan.load_format == "dummy" or not is_rounded(plan, source):
        return {}
    place, shape = plan.places[rank], plan.shape
    dtype = getattr(torch, plan.dtype)
    tokens = min(TOKENS, plan.max_num_batched_tokens, plan.max_model_len)
    angles = rope.table(shape.rope, shape.head_dim, shape.max_positions, plan.max_model_len, tokens).to(device)
    dims = (1, tokens, len(place.kv_heads), shape.head_dim)
    # One layer after the other: all have the same.
    cache = KVCache(torch.empty(dims, dtype=dtype, device=device), torch.empty(dims, dtype=dtype, device=device))
    incoming = None if place.first else links.pipeline.recv((tokens, shape.hidden), dtype, place.stage - 1)
    with loading() as pool:
        reading = Reading(source, targets, fills(shape, place), shape.head_dim, pool)
        model = Decoder(shape, plan.places, rank, dict(targets), links.tensor, reading)
        hidden = model.hidden(incoming, angles, [cache] * len(place.layers), drawn(shape.vocab, tokens, device))
    if not place.last:
        links.pipeline.send(hidden, place.stage + 1)
    return reading.importance


def is_rounded(plan: Plan, source: Source) -> bool:
    """Whether any matrix of the model is to be rounded to 4 bits."""
    return any(ALL[type].bits == 4 and not source.holds(name, type) for name, type in plan.schemes.items())


def drawn(vocab: int, tokens: int, device: torch.device) -> Batch:
    """One text of random tokens, in the first block; the same ones on every rank."""
    ids = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    there = torch.arange(tokens, dtype=torch.int32)
    ends, context = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    return Batch(
        tokens=ids.to(device),
        positions=there.to(device),
        slots=there.long().to(device),
        row_starts=ends.to(device),
        context=context.to(device),
        tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
        order=context[:0].to(device),
        decodes=0,
        host=Lengths(ends.long().numpy(), context.long().numpy()),
    )


class Reading(PlainKernels):
    """Kernels whose products read their matrix when they are called, and keep nothing but how large x was."""

    def __init__(
        self,
        source: Source,
        targets: Mapping[str, torch.Tensor | QuantisedWeight],
        todo: Iterable[Fill],
        head_dim: int,
        pool: Executor,
    ) -> None:
        self.importance: dict[str, torch.Tensor] = {}
        self._source, self._head_dim, self._pool = source, head_dim, pool
        self._names = {id(target): name for name, target in targets.items()}
        self._fills = defaultdict[str, list[Fill]](list)
        for fill in todo:
            self._fills[fill.param].append(fill)
            vector = targets[fill.param]
            if isinstance(vector, torch.Tensor) and fill.cols is None:
                source.read(fill.source, fill.rows, None, vector.narrow(0, fill.at, len(fill.rows)))

    def matrix(self, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None) -> Product:
        name = self._names[id(weight)]
        wanted = isinstance(weight, QuantisedWeight) and weight.scheme.bits == 4 and UNIT % weight.scheme.group == 0

        def product(x: torch.Tensor) -> torch.Tensor:
            if wanted:
                self.importance[name] = evened(x.float().square().mean(dim=0))
            y = x.new_empty(len(x), weight.shape[0])
            parts = [
                (fill, some)
                for fill in self._fills[name]
                for some in bands(fill.rows, x.shape[1], self._head_dim, x.device)
            ]
            if x.device.type == "cpu":
                for job in [self._pool.submit(self._multiply, x, *part, y) for part in parts]:
                    job.result()
            else:
                # On a card by this thread alone: for each that calls cuBLAS it sets a workspace aside, of up to 32 MiB
                # and for good. And a band at a time: there may be no room for a matrix in 16 bits.
                for part, band in [(part, self._pool.submit(self._read, *part, x.dtype)) for part in parts]:
                    self._columns(y, *part).copy_(F.linear(x, band.result().to(x.device)))
            return y if bias is None else y.add_(bias)

        return product

    def embedding_table(self, weight: torch.Tensor | QuantisedWeight) -> EmbeddingTable:
        (fill,) = self._fills[self._names[id(weight)]]
        return ReadTable(self._source, fill, weight, self.matrix(weight, None))

    @torch.inference_mode()
    def _multiply(self, x: torch.Tensor, fill: Fill, rows: Span, y: torch.Tensor) -> None:
        """x times some rows of a fill, to their columns of y."""
        self._columns(y, fill, rows).copy_(F.linear(x, self._read(fill, rows, x.dtype)))

    @torch.inference_mode()
    def _read(self, fill: Fill, rows: Span, dtype: torch.dtype) -> torch.Tensor:
        """Some rows of a fill, in the host's memory."""
        assert fill.cols is not None
        weight = torch.empty(len(rows), len(fill.cols), dtype=dtype)
        self._source.read(fill.source, rows, fill.cols, weight)
        return weight

    @staticmethod
    def _columns(y: torch.Tensor, fill: Fill, rows: Span) -> torch.Tensor:
        """Those of y that some rows of a fill become."""
        at = fill.at + rows.start - fill.rows.start
        return y[:, at : at + len(rows)]


class ReadTable:
    """An embedding whose rows are read when they are asked for."""

    def __init__(self, source: Source, fill: Fill, weight: torch.Tensor | QuantisedWeight, product: Product) -> None:
        self._source, self._fill, self._product = source, fill, product
        self._dtype, self._device, self._width = weight.dtype, weight.device, weight.shape[1]

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(numbers), self._width, dtype=self._dtype, device=self._device)
        for at, number in enumerate(numbers.tolist()):
            row = self._fill.rows.start + number
            self._source.read(self._fill.source, Span(row, row + 1), self._fill.cols, out[at : at + 1])
        return out

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x)


def evened(squares: torch.Tensor) -> torch.Tensor:
    """Means of squares [cols], in groups of UNIT, as shares of the group's own, from LEAST on."""
    groups = squares.nan_to_num(0, 0, 0).view(-1, UNIT)
    mean = groups.mean(dim=1, keepdim=True)
    return torch.where(mean > 0, groups / mean, 1).clamp_(min=LEAST).flatten()
