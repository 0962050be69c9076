"""Load: from a checkpoint into a rank's parameters, its own ranges only."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from weft.facts.checkpoint import sources, tensors
from weft.planner.fills import Fill, fills
from weft.planner.place import Place, Span
from weft.planner.plan import Plan
from weft.weights.dummy import Dummy
from weft.weights.stored import Stored


class Source(Protocol):
    """Where a rank's weights come from, under Hugging Face's names."""

    def read(self, source: str, rows: Span, cols: Span | None, into: torch.Tensor) -> None:
        """Fill `into` with source[rows, cols], converted to its dtype, on its device; cols None for a vector."""
        ...


def open_source(plan: Plan) -> Source:
    """The plan's checkpoint. Raises ModelError where it is not what the plan was made from."""
    if plan.load_format == "dummy":
        return Dummy(dict(sources(plan.shape)), plan.seed)
    return Stored(tensors(plan.checkpoint, plan.load_format, plan.shape))


def load(plan: Plan, place: Place, targets: Mapping[str, torch.Tensor]) -> None:
    """Fill `targets`, one tensor per parameter of this rank as `planner.fills.rank_parameters` lists them.

    They are allocated already, on any device and of any float dtype. Raises ModelError.
    """
    source, threads = open_source(plan), torch.get_num_threads()

    @torch.inference_mode()
    def run(fill: Fill) -> None:
        source.read(fill.source, fill.rows, fill.cols, targets[fill.param].narrow(0, fill.at, len(fill.rows)))

    # Each core takes tensors of its own: no barrier after every small step, and several reads in flight.
    with ThreadPoolExecutor(threads, "weft-load", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        jobs = [pool.submit(run, fill) for fill in fills(plan.shape, place)]
        try:
            for job in jobs:
                job.result()
        finally:
            pool.shutdown(cancel_futures=True)
            # Threads that have no number of their own yet take the last one that was set.
            torch.set_num_threads(threads)
