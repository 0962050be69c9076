"""Sleep and wake, several times: seconds, what is held asleep, and whether anything stays behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

from scripts.programs.gpu_check.work import Figure, Options
from scripts.programs.gpu_check.work.bench import captures_counted, started, wait_for_captures
from weft import LLM
from weft.study.bench.measure import run_batch
from weft.study.bench.workload import random_requests

TURNS = 5
LEAK_BYTES = 4 << 20  # between two turns, above which something is left behind: a workspace of cuBLAS is 32 MiB


def sleep(options: Options) -> Iterator[Figure]:
    """Each turn: sleep, wake, a request, and the captures that follow. The driver's bytes are those of the card, other
    processes' included."""
    turns, tokens = (2, 2) if options["rehearse"] else (TURNS, 8)
    name = str(options["model"])
    asleep, awake, slept, woken = [], [], [], []
    with started(options) as (llm, shape), captures_counted() as captured:
        asks = random_requests(1, vocab=shape.vocab, count=1, input_len=(5, 5), output_len=tokens)
        run_batch(llm, asks)
        for turn in range(1, turns + 1):
            began = time.monotonic()
            llm.sleep()
            slept.append(time.monotonic() - began)
            asleep.append(memory(llm))
            yield held(f"{name}: sleep {turn}, the driver's bytes asleep", asleep[-1])
            began = time.monotonic()
            llm.wake_up()
            woken.append(time.monotonic() - began)
            run_batch(llm, asks)
            wait_for_captures(captured)
            awake.append(memory(llm))
            yield held(f"{name}: sleep {turn}, the driver's bytes awake", awake[-1])
            yield Figure(f"{name}: sleep {turn}, wake", round(woken[-1], 3), "s", note=f"asleep in {slept[-1]:.2f} s")
    leak = max(last[1] - first[1] for first, last in ((asleep[1], asleep[-1]), (awake[1], awake[-1])))
    each = leak / max(1, turns - 2)
    yield Figure(f"{name}: bytes left behind by each turn", round(each / 1e6, 1), "MB", ok=each < LEAK_BYTES)
    yield Figure(f"{name}: wake, median", round(median(woken), 3), "s")


def held(title: str, found: tuple[int, int]) -> Figure:
    reserved, driver = found
    return Figure(title, round(driver / 1e9, 3), "GB", note=f"{reserved / 1e9:.3f} GB reserved by torch")


def memory(llm: LLM) -> tuple[int, int]:
    """Bytes that torch holds of the card, and that the driver counts."""
    (row,) = llm.layout()
    return int(row["reserved_bytes"]), int(row["driver_bytes"])
