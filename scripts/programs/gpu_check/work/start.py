"""Seconds that the start of an engine takes longer with weights quantised at load than without."""

from __future__ import annotations

import time
from collections.abc import Iterator

from scripts.programs.gpu_check.work import Figure, Options
from scripts.programs.gpu_check.work.bench import started


def start(options: Options) -> Iterator[Figure]:
    """The first start is not counted: it compiles kernels."""
    seconds: dict[str | None, float] = {}
    starts = (options["quantization"], options["quantization"], None)
    for quantization in starts[1:] if options["rehearse"] else starts:
        engine = {"quantization": quantization} if quantization else {}
        began = time.monotonic()
        with started({**options, "engine": engine}):
            seconds[quantization] = time.monotonic() - began
    longer = seconds[options["quantization"]] - seconds[None]
    name = f"{options['model']} {options['quantization']}: start beside bfloat16"
    yield Figure(name, round(longer, 2), "s", note=f"{seconds[None]:.1f} s without")
