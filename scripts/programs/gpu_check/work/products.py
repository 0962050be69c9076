"""Products with quantised weights: bytes of weights per second, beside bfloat16's, over copies that no cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from scripts.programs.gpu_check.work import Figure, Options, is_wanted
from weft.checkpoint.architectures.place import Span
from weft.ranks.kernels.capture import capture_graph
from weft.ranks.kernels.triton.kernels import TritonMatrices
from weft.ranks.kernels.usable import multiprocessor_count
from weft.ranks.kernels.warm import warm_kernels
from weft.ranks.quant.quantised import QuantisedWeight

CUDA = torch.device("cuda", 0)
TYPES = (None, "Q4_0", "Q4_1", "INT4_128", "Q8_0", "INT8", "FP8_128")
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # rows, columns: of an 8B
TOKENS = (1, 4, 16, 32, 64, 256, 2048)
SOME_TYPES, SOME_SHAPES, SOME_TOKENS = ("Q4_1", "INT4_128", "FP8_128"), SHAPES[1:3], (1, 16, 64, 256)
REPLAYS = 10
COLD_BYTES = 2**29  # of copies that are read in turn


def products(options: Options) -> Iterator[Figure]:
    """With `short`, those of SOME_TYPES and SOME_SHAPES."""
    rehearse, short = options["rehearse"], options.get("short", False)
    shapes: Sequence[tuple[int, int]] = SOME_SHAPES if short else SHAPES
    tokens: Sequence[int] = SOME_TOKENS if short else TOKENS
    if rehearse:
        shapes, tokens = ((16, 128),), (1, 2)
    dtype = torch.float32 if rehearse else torch.bfloat16
    matrices = TritonMatrices(multiprocessor_count(CUDA))
    for rows, cols in shapes:
        for kind in SOME_TYPES if short else TYPES:
            title = f"[{rows}, {cols}] {kind or str(dtype).removeprefix('torch.')}"
            if not is_wanted(options, title):
                continue
            weight = (
                torch.randn(rows, cols, device=CUDA).to(dtype) if kind is None else made_up(kind, rows, cols, dtype)
            )
            count = 2 if rehearse else COLD_BYTES // weight.nbytes + 1
            copies = [matrices.matrix(weight if at == 0 else copied(weight), None) for at in range(count)]
            warm(matrices, max(tokens), options)
            for batch in tokens:
                name = f"{title}, {batch} tokens"
                if not is_wanted(options, name):
                    continue
                x = torch.randn(batch, cols, device=CUDA).to(dtype)
                seconds = timed([partial(product, x) for product in copies], 1 if rehearse else REPLAYS)
                yield Figure(
                    name,
                    round(weight.nbytes / seconds / 1e9, 1),
                    "GB/s",
                    round(options["copy_Bps"] / 1e9, 1) if batch <= 16 else None,  # more are bound by arithmetic
                    note=f"{seconds * 1e6:.1f} us",
                )


def warm(matrices: TritonMatrices, tokens: int, options: Options) -> None:
    """Compile the kernels in threads; not for a single figure, whose first launches a profiler counts."""
    if not options["rehearse"] and "only" not in options:
        warm_kernels(matrices.launches(tokens), CUDA)


def made_up(kind: str, rows: int, cols: int, dtype: torch.dtype) -> QuantisedWeight:
    """Numbers that are quickly made; none are negative where they need not be."""
    return filled(QuantisedWeight.empty(kind, rows, Span(0, cols), dtype, CUDA))


def filled(weight: QuantisedWeight) -> QuantisedWeight:
    """`weight` with random numbers, none of them infinite or NaN."""
    weight.values.random_(0, 120 if weight.type.startswith("FP8") else 256)
    weight.scales.fill_(120 if weight.scales.dtype == torch.uint8 else 0.01)
    if weight.lowest is not None:
        weight.lowest.fill_(0)
    return weight


def copied(weight: torch.Tensor | QuantisedWeight) -> torch.Tensor | QuantisedWeight:
    if isinstance(weight, torch.Tensor):
        return weight.clone()
    lowest = None if weight.lowest is None else weight.lowest.clone()
    return replace(weight, values=weight.values.clone(), scales=weight.scales.clone(), lowest=lowest)


def timed(calls: Sequence[Callable[[], torch.Tensor]], replays: int) -> float:
    """Seconds of one of them, in a captured graph of all, as the engine decodes."""
    for call in calls[:3]:
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph = capture_graph(lambda: [call() for call in calls], torch.cuda.Stream())
    graph.replay()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) / 1e3 / replays / len(calls))
