"""Sleep and wake, several times: seconds, what is held asleep, and whether anything stays behind."""

from __future__ import annotations

import time
from collections.abc import Iterator

from scripts.gpu.work import Figure, Options
from scripts.gpu.work.bench import started
from weft import LLM
from weft.bench.measure import run_batch
from weft.bench.workload import random_requests

TURNS = 5
LEAK_BYTES = 4 << 20  # between two turns, above which something is left behind: a workspace of cuBLAS is 32 MiB


def sleep(options: Options) -> Iterator[Figure]:
    """Each turn: sleep, wake, a request. The driver's bytes are those of the card, other processes' included."""
    turns, tokens = (2, 2) if options["rehearse"] else (TURNS, 8)
    name = str(options["model"])
    with started(options) as (llm, shape):
        asks = random_requests(1, vocab=shape.vocab, count=1, input_len=(5, 5), output_len=tokens)
        run_batch(llm, asks)
        asleep, awake, slept, woken = [], [], [], []
        for _ in range(turns):
            began = time.monotonic()
            llm.sleep()
            slept.append(time.monotonic() - began)
            asleep.append(memory(llm))
            began = time.monotonic()
            llm.wake_up()
            woken.append(time.monotonic() - began)
            run_batch(llm, asks)
            awake.append(memory(llm))
    for turn, (down, up) in enumerate(zip(asleep, awake, strict=True)):
        note = f"reserved {down[0] / 1e9:.3f} GB asleep, {up[0] / 1e9:.3f} GB awake"
        yield Figure(f"{name}: sleep {turn + 1}, the driver's bytes asleep", round(down[1] / 1e9, 3), "GB", note=note)
        yield Figure(f"{name}: sleep {turn + 1}, the driver's bytes awake", round(up[1] / 1e9, 3), "GB")
    yield Figure(f"{name}: wake, median", round(sorted(woken)[turns // 2], 3), "s", note=f"{shown(woken)} s")
    yield Figure(f"{name}: sleep, median", round(sorted(slept)[turns // 2], 3), "s", note=f"{shown(slept)} s")
    leak = max(last[1] - first[1] for first, last in ((asleep[1], asleep[-1]), (awake[1], awake[-1])))
    each = leak / max(1, turns - 2)
    yield Figure(f"{name}: bytes left behind by each turn", round(each / 1e6, 1), "MB", ok=each < LEAK_BYTES)


def memory(llm: LLM) -> tuple[int, int]:
    """Bytes that torch holds of the card, and that the driver counts."""
    (row,) = llm.layout()
    return int(row["reserved_bytes"]), int(row["driver_bytes"])


def shown(seconds: list[float]) -> str:
    return ", ".join(f"{each:.2f}" for each in seconds)
