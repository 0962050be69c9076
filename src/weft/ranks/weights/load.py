"""The weight loader: it reads a rank's own ranges of a checkpoint into the rank's parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from math import prod
from types import MappingProxyType
from typing import Protocol

import msgspec
import torch

from weft.checkpoint.architectures.parameters import parameter_dims, rank_parameters
from weft.checkpoint.architectures.place import Place, Span
from weft.checkpoint.tensor_index import expected_tensors, locate_tensors
from weft.plan.fills import Fill, checkpoint_scheme, rank_fills
from weft.plan.plan import Plan
from weft.ranks.comm.current_device import enter_device
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.quant.rounding import Rounding, round_into
from weft.ranks.weights.derive import derive_parameters
from weft.ranks.weights.dummy import DummyWeights
from weft.ranks.weights.finite import NotFiniteError
from weft.ranks.weights.published import PublishedWeights
from weft.ranks.weights.quantised import quantise
from weft.ranks.weights.sharded import read_shard
from weft.ranks.weights.stored import StoredWeights

# Fields of a Fill that the loader knows. With any other field set it would load the wrong numbers in silence.
KNOWN_FIELDS = frozenset({"param", "source", "rows", "cols", "at", "expert", "unit"})
REPORT_S = 0.1  # least seconds between two reports of the bytes that are read


class WeightSource(Protocol):
    """The tensors of a checkpoint, under Hugging Face's names, read by ranges."""

    def nbytes(self, source: str) -> int:
        """Bytes of the whole tensor in its file; 0 if it lies in none."""
        ...

    def dtype(self, source: str) -> torch.dtype:
        """The smallest dtype that `read_range` fills without loss."""
        ...

    def read_range(self, source: str, rows: Span, cols: Span | None, into: torch.Tensor) -> None:
        """Fill `into` with source[rows, cols], converted to its dtype, on its device; cols is None for a vector."""
        ...

    def holds(self, source: str, scheme: str) -> bool:
        """Return True if the tensor is stored in a scheme, named as in `checkpoint.quantised.schemes`, or in a type
        that the scheme can represent."""
        ...

    def read_blocks(self, source: str, rows: Span, cols: Span, into: QuantisedWeight) -> bool:
        """Fill `into` with source[rows, cols] and return True if `holds` says so for its scheme, else return False."""
        ...


def parameter_groups(plan: Plan, place: Place) -> list[list[str]]:
    """Names of a rank's parameters, each layer's together."""
    groups = groupby(rank_parameters(plan.shape, place), key=lambda parameter: parameter[2])
    return [[name for name, _, _ in group] for _, group in groups]


def allocate_parameters(
    plan: Plan,
    place: Place,
    device: torch.device,
    *,
    matrices: torch.device | None = None,
    names: Collection[str] | None = None,
) -> dict[str, torch.Tensor | QuantisedWeight]:
    """Allocate the parameters of a rank, by name, without values.

    Matrices of products are allocated on the device `matrices` if it is given. Only the parameters in `names` are
    allocated, if given.
    """
    shape, dtype = plan.shape, getattr(torch, plan.dtype)
    targets: dict[str, torch.Tensor | QuantisedWeight] = {}
    for name, parameter, layer in rank_parameters(shape, place):
        if names is not None and name not in names:
            continue
        dims, cols = parameter_dims(place, parameter), parameter.parts[0].cols
        scheme = checkpoint_scheme(parameter, layer, plan.schemes) if cols else None
        if scheme is None or cols is None:
            where = device if parameter.is_read_directly else matrices or device
            targets[name] = torch.empty(dims, dtype=getattr(torch, parameter.dtype or plan.dtype), device=where)
        else:
            *experts, rows, _ = dims
            targets[name] = QuantisedWeight.empty(
                scheme, rows, cols.owned(place), dtype, matrices or device, tuple(experts)
            )
    return targets


def open_source(plan: Plan) -> WeightSource:
    """Open the plan's checkpoint. Raises ModelError if it is not the checkpoint that the plan was made from."""
    if plan.load_format == "dummy":
        return DummyWeights(dict(expected_tensors(plan.shape)), plan.seed)
    infos = locate_tensors(plan.checkpoint, plan.load_format, plan.shape)
    return StoredWeights(infos) if plan.shape.published is None else PublishedWeights(infos)


def load_weights(
    plan: Plan,
    place: Place,
    targets: Mapping[str, torch.Tensor | QuantisedWeight],
    rounding: Rounding = round_into,
    importance: Mapping[str, torch.Tensor] = MappingProxyType({}),
    report_read: Callable[[int, int], None] | None = None,
    source: WeightSource | None = None,
) -> None:
    """Fill `targets`: all parameters of a rank, or some, as `checkpoint.architectures.parameters.rank_parameters`
    lists them.

    Targets are allocated already, on any one device and of any float dtype or scheme. Parameters that the checkpoint
    does not hold in the target's scheme are made by `rounding`, in several threads, with the `importance` of the
    parameter's columns if it is known. `report_read` gets the bytes of the files that are read so far, and the bytes of
    all targets. `source` is the plan's checkpoint if it is open already. Raises ModelError.
    """
    if plan.load_format == "sharded_state":
        read_shard(plan, place.rank, targets, report_read)
        return
    source, dims = source or open_source(plan), dict(expected_tensors(plan.shape))

    def load_fill(fill: Fill) -> None:
        try:
            read_fill(fill)
        except NotFiniteError:
            raise NotFiniteError(fill.source) from None

    @torch.inference_mode()
    def read_fill(fill: Fill) -> None:
        check_fill(fill)
        into = fill_target(targets, fill)
        if isinstance(into, torch.Tensor):
            source.read_range(fill.source, fill.rows, fill.cols, into)
        elif fill.cols is not None and not source.read_blocks(fill.source, fill.rows, fill.cols, into):
            quantise(
                partial(source.read_range, fill.source),
                fill.rows,
                fill.cols,
                width=dims[fill.source][-1],
                unit=fill.unit,
                into=into,
                dtype=source.dtype(fill.source),
                rounding=rounding,
                importance=importance.get(fill.weight),
            )

    with reader_threads(next(iter(targets.values())).device) as pool:
        fills = [fill for fill in rank_fills(plan.shape, place) if fill.param in targets]
        sizes = [stored_bytes(source, fill, dims[fill.source]) for fill in fills]
        report = ReadReport(sum(sizes), report_read)
        for job, size in [(pool.submit(load_fill, fill), size) for fill, size in zip(fills, sizes, strict=True)]:
            job.result()
            report.add(size)
    derive_parameters(plan.shape, targets)


def stored_bytes(source: WeightSource, fill: Fill, dims: tuple[int, ...]) -> int:
    """Bytes of a file that hold a fill's part of a tensor of these dims."""
    numbers = len(fill.rows) * (1 if fill.cols is None else len(fill.cols))
    return source.nbytes(fill.source) * numbers // prod(dims)


class ReadReport:
    """Reports the bytes that are read of `total`: every REPORT_S seconds, and when all are."""

    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self._total, self._report = total, report
        self._done, self._reported_s = 0, time.monotonic()

    def add(self, nbytes: int) -> None:
        """Add bytes that were read."""
        self._done += nbytes
        now = time.monotonic()
        if self._report and nbytes and (self._done == self._total or now - self._reported_s >= REPORT_S):
            self._reported_s = now
            self._report(self._done, self._total)


def fill_target(targets: Mapping[str, torch.Tensor | QuantisedWeight], fill: Fill) -> torch.Tensor | QuantisedWeight:
    """The rows of a parameter that a fill is copied to, in its expert's block if it has several."""
    target = targets[fill.param]
    if fill.expert is not None:
        target = target.select(0, fill.expert)
    return target.narrow(0, fill.at, len(fill.rows))


def check_fill(fill: Fill) -> None:
    """Assert that `fill` sets no field outside KNOWN_FIELDS."""
    ignored = [
        field.name
        for field in msgspec.structs.fields(fill)
        if field.name not in KNOWN_FIELDS and getattr(fill, field.name) != field.default
    ]
    assert not ignored, f"the loader ignores {', '.join(ignored)} of {fill}"


@contextmanager
def reader_threads(device: torch.device) -> Iterator[ThreadPoolExecutor]:
    """Threads that read weights of a rank on `device`, one per core.

    Each thread takes whole tensors: no barrier after every small step, and several reads in flight. Torch uses one more
    core for the caller, as for each of these threads.
    """
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, "weft-load", initializer=_begin_reading, initargs=(device,)) as pool:
        try:
            torch.set_num_threads(1)
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)
            # A thread that has set no number of its own takes the last number that any thread set.
            torch.set_num_threads(threads)


def _begin_reading(device: torch.device) -> None:
    torch.set_num_threads(1)
    enter_device(device)
