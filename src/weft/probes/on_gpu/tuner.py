"""The process that measures the attention kernels' sizes: `python -m weft.probes.on_gpu.tuner FD LIFELINE`, started by
`probes.tuning`."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace

from weft.errors import WeftError
from weft.executors.launch import Parent
from weft.probes.links import Ended
from weft.probes.tuning import Raced, Tune, Tuned


def main(descriptor: int, lifeline: int) -> None:
    # Before torch is imported: from here on this process ends with its parent.
    parent: Parent[Tune] = Parent(descriptor, Tune, lifeline)
    task = parent.inbox.get()
    try:
        measure(task, parent)
        parent.send(Ended(""))
    except (RuntimeError, ImportError, OSError, WeftError) as error:
        parent.send(Ended((str(error).strip().splitlines() or [type(error).__name__])[0]))
    while True:  # to end this process is the parent's to do
        signal.pause()


def measure(task: Tune, parent: Parent[Tune]) -> None:
    """Race after race, and for each number of ranks what came of them."""
    from weft.kernels import triton
    from weft.kernels.base import AttentionShape
    from weft.worker import device as devices

    device = devices.prepare(task.plan, 0)
    whole = AttentionShape.from_plan(task.plan, 0)
    triton.triton_available(device, whole.head_dim, required=True)
    from weft.kernels.triton import saved_tunings
    from weft.probes.on_gpu import trials

    for ranks in task.ranks:
        shape = replace(whole, q_heads=whole.q_heads // ranks, kv_heads=whole.kv_heads // ranks)
        heads = f"{shape.q_heads} query and {shape.kv_heads} KV heads, "

        def tell(what: str, times: trials.Times, obstacles: trials.Obstacles, heads: str = heads) -> None:
            seconds = {str(name): took for name, took in times.items()}
            parent.send(Raced(heads + what, seconds, {str(name): why for name, why in obstacles.items()}))

        found = trials.measured(shape, device, tell=tell)
        path = lost = ""
        if task.keep:
            try:
                path = str(saved_tunings.save_tunings(device, shape, found))
            except (OSError, RuntimeError, WeftError) as error:
                lost = str(error)
        parent.send(
            Tuned(
                q_heads=shape.q_heads,
                kv_heads=shape.kv_heads,
                decode={rows: str(it) for rows, it in found.decode.items()},
                prefill=str(found.prefill),
                path=path,
                lost=lost,
            )
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
