"""The weight loader: it reads a rank's own ranges of a checkpoint into the rank's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Protocol

import msgspec
import torch

from weft.architectures.axes import owned
from weft.architectures.parameters import parameter_dims, rank_parameters
from weft.architectures.place import Place, Span
from weft.formats.checkpoint import expected_tensors, locate_tensors
from weft.plan.fills import Fill, checkpoint_scheme, rank_fills
from weft.plan.plan import Plan
from weft.quant.quantised import QuantisedWeight
from weft.quant.rounding import Rounding, round_into
from weft.weights.dummy import DummyWeights
from weft.weights.packed import PackedWeights
from weft.weights.quantised import quantise
from weft.weights.stored import StoredWeights

# Fields of a Fill that the loader knows. With any other field set it would load the wrong numbers in silence.
KNOWN_FIELDS = frozenset({"param", "source", "rows", "cols", "at"})


class WeightSource(Protocol):
    """The tensors of a checkpoint, under Hugging Face's names, read by ranges."""

    def dtype(self, source: str) -> torch.dtype:
        """The smallest dtype that `read_range` fills without loss."""
        ...

    def read_range(self, source: str, rows: Span, cols: Span | None, into: torch.Tensor) -> None:
        """Fill `into` with source[rows, cols], converted to its dtype, on its device; cols is None for a vector."""
        ...

    def holds(self, source: str, scheme: str) -> bool:
        """Return True if the tensor is stored in a scheme, named as in `formats.schemes`, or in a type that the scheme
        can represent."""
        ...

    def read_blocks(self, source: str, rows: Span, cols: Span, into: QuantisedWeight) -> bool:
        """Fill `into` with source[rows, cols] and return True if `holds` says so for its scheme, else return False."""
        ...


def allocate_parameters(plan: Plan, place: Place, device: torch.device) -> dict[str, torch.Tensor | QuantisedWeight]:
    """Allocate every parameter of a rank, by name, without values."""
    shape, dtype = plan.shape, getattr(torch, plan.dtype)
    targets: dict[str, torch.Tensor | QuantisedWeight] = {}
    for name, parameter, layer in rank_parameters(shape, place):
        dims, cols = parameter_dims(shape, place, parameter), parameter.parts[0].cols
        scheme = checkpoint_scheme(parameter, layer, plan.schemes) if cols else None
        if scheme is None or cols is None:
            targets[name] = torch.empty(dims, dtype=dtype, device=device)
        else:
            targets[name] = QuantisedWeight.empty(scheme, dims[0], owned(shape, place, cols), dtype, device)
    return targets


def open_source(plan: Plan) -> WeightSource:
    """Open the plan's checkpoint. Raises ModelError if it is not the checkpoint that the plan was made from."""
    if plan.load_format == "dummy":
        return DummyWeights(dict(expected_tensors(plan.shape)), plan.seed)
    infos = locate_tensors(plan.checkpoint, plan.load_format, plan.shape)
    return PackedWeights(infos) if plan.shape.published else StoredWeights(infos)


def load_weights(
    plan: Plan,
    place: Place,
    targets: Mapping[str, torch.Tensor | QuantisedWeight],
    rounding: Rounding = round_into,
    importance: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Fill `targets`, one for each parameter of this rank as `architectures.parameters.rank_parameters` lists them.

    Targets are allocated already, on any device and of any float dtype or scheme. What the checkpoint does not hold in
    the target's scheme is made by `rounding`, in several threads, with the `importance` of the parameter's columns if
    it is known. Raises ModelError.
    """
    source, widths = open_source(plan), dict(expected_tensors(plan.shape))

    @torch.inference_mode()
    def load_fill(fill: Fill) -> None:
        check_fill(fill)
        into = targets[fill.param].narrow(0, fill.at, len(fill.rows))
        if isinstance(into, torch.Tensor):
            source.read_range(fill.source, fill.rows, fill.cols, into)
        elif fill.cols is not None and not source.read_blocks(fill.source, fill.rows, fill.cols, into):
            read_range, width = partial(source.read_range, fill.source), widths[fill.source][-1]
            stored = source.dtype(fill.source)
            columns = importance.get(fill.param)
            quantise(read_range, fill.rows, fill.cols, width, plan.shape.head_dim, into, stored, rounding, columns)

    with reader_threads() as pool:
        for job in [pool.submit(load_fill, fill) for fill in rank_fills(plan.shape, place)]:
            job.result()


def check_fill(fill: Fill) -> None:
    """Assert that `fill` sets no field outside KNOWN_FIELDS."""
    ignored = [
        field.name
        for field in msgspec.structs.fields(fill)
        if field.name not in KNOWN_FIELDS and getattr(fill, field.name) != field.default
    ]
    assert not ignored, f"the loader ignores {', '.join(ignored)} of {fill}"


@contextmanager
def reader_threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that read weights, one per core.

    Each thread takes whole tensors: no barrier after every small step, and several reads in flight. Torch uses one
    core for the caller meanwhile, as for each of these threads.
    """
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, "weft-load", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            torch.set_num_threads(1)
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)
            # A thread that has set no number of its own takes the last number that any thread set.
            torch.set_num_threads(threads)
