"""Load: from a checkpoint into a rank's parameters, its own ranges only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch

from weft.architectures.axes import owned
from weft.architectures.parameters import parameter_dims, rank_parameters
from weft.architectures.place import Place, Span
from weft.formats.checkpoint import sources, tensors
from weft.plan.fills import Fill, fills, scheme_of
from weft.plan.plan import Plan
from weft.quant.quantised import QuantisedWeight
from weft.quant.rounding import Rounding, round_into
from weft.weights.dummy import Dummy
from weft.weights.packed import PackedTensors
from weft.weights.quantised import quantise
from weft.weights.stored import Stored


class Source(Protocol):
    """Where a rank's weights come from, under Hugging Face's names."""

    def dtype(self, source: str) -> torch.dtype:
        """The smallest that `read` loses nothing in."""
        ...

    def read(self, source: str, rows: Span, cols: Span | None, into: torch.Tensor) -> None:
        """Fill `into` with source[rows, cols], converted to its dtype, on its device; cols None for a vector."""
        ...

    def holds(self, source: str, type: str) -> bool:
        """Whether it is stored in a scheme of `formats.schemes`, or in what that has room for."""
        ...

    def read_blocks(self, source: str, rows: Span, cols: Span, into: QuantisedWeight) -> bool:
        """Fill `into` with source[rows, cols] where that is stored in its scheme; False where it is not."""
        ...


def allocate(plan: Plan, place: Place, device: torch.device) -> dict[str, torch.Tensor | QuantisedWeight]:
    """Room for every parameter of a rank, by name."""
    shape, dtype, room = plan.shape, getattr(torch, plan.dtype), dict[str, torch.Tensor | QuantisedWeight]()
    for name, parameter, layer in rank_parameters(shape, place):
        dims, cols = parameter_dims(shape, place, parameter), parameter.parts[0].cols
        scheme = scheme_of(parameter, layer, plan.schemes) if cols else None
        if scheme is None or cols is None:
            room[name] = torch.empty(dims, dtype=dtype, device=device)
        else:
            room[name] = QuantisedWeight.empty(scheme, dims[0], owned(shape, place, cols), dtype, device)
    return room


def open_source(plan: Plan) -> Source:
    """The plan's checkpoint. Raises ModelError where it is not what the plan was made from."""
    if plan.load_format == "dummy":
        return Dummy(dict(sources(plan.shape)), plan.seed)
    found = tensors(plan.checkpoint, plan.load_format, plan.shape)
    return PackedTensors(found) if plan.shape.published else Stored(found)


def load(
    plan: Plan,
    place: Place,
    targets: Mapping[str, torch.Tensor | QuantisedWeight],
    rounding: Rounding = round_into,
    importance: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Fill `targets`, one for each parameter of this rank as `architectures.parameters.rank_parameters` lists them.

    They are allocated already, on any device and of any float dtype or scheme; what the checkpoint does not hold in
    their scheme is made by `rounding`, in several threads, with the `importance` of a parameter's columns where it is
    known. Raises ModelError.
    """
    source, widths = open_source(plan), dict(sources(plan.shape))

    @torch.inference_mode()
    def run(fill: Fill) -> None:
        into = targets[fill.param].narrow(0, fill.at, len(fill.rows))
        if isinstance(into, torch.Tensor):
            source.read(fill.source, fill.rows, fill.cols, into)
        elif fill.cols is not None and not source.read_blocks(fill.source, fill.rows, fill.cols, into):
            read, width = partial(source.read, fill.source), widths[fill.source][-1]
            stored = source.dtype(fill.source)
            each = importance.get(fill.param)
            quantise(read, fill.rows, fill.cols, width, plan.shape.head_dim, into, stored, rounding, each)

    with loading() as pool:
        for job in [pool.submit(run, fill) for fill in fills(plan.shape, place)]:
            job.result()


@contextmanager
def loading() -> Iterator[ThreadPoolExecutor]:
    """Threads for what is read. Each core takes tensors of its own: no barrier after every small step, and several
    reads in flight. The caller has one core meanwhile, as each of them."""
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, "weft-load", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            torch.set_num_threads(1)
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)
            # Threads that have no number of their own yet take the last one that was set.
            torch.set_num_threads(threads)
