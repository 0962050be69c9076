"""Process that measures the attention kernels' sizes: `python -m weft.ranks.probes.tuner FD LIFELINE`.

It is started by `study.measure.tuning`.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import replace

from weft.engine.processes.launch import Parent
from weft.errors import ConfigError, WeftError
from weft.plan.backends import ATTENTION_BACKENDS
from weft.study.measure.links import ExaminerEnded
from weft.study.measure.tuning import RaceResult, TunedSizes, TuneRequest


def main(descriptor: int, lifeline: int) -> None:
    """Run the request that the parent sends, and report each result."""
    # Before torch is imported: from here on this process ends with its parent.
    parent: Parent[TuneRequest] = Parent(descriptor, TuneRequest, lifeline)
    task = parent.inbox.get()
    try:
        measure_sizes(task, parent)
        parent.send(ExaminerEnded(""))
    except (RuntimeError, ImportError, OSError, WeftError) as error:
        parent.send(ExaminerEnded((str(error).strip().splitlines() or [type(error).__name__])[0]))
    while True:  # the parent ends this process
        signal.pause()


def measure_sizes(task: TuneRequest, parent: Parent[TuneRequest]) -> None:
    """Run the races for each number of ranks; report each race, and then the sizes for that number."""
    from weft.ranks.kernels import attention_obstacle
    from weft.ranks.kernels.attention import AttentionShape
    from weft.ranks.worker import device as devices

    device = devices.prepare_device(task.plan, 0)
    whole = AttentionShape.from_plan(task.plan, 0)
    if reason := attention_obstacle("triton", device, whole):
        kernels = ATTENTION_BACKENDS["triton"].kernels
        raise ConfigError(f"{kernels} cannot be measured: {reason}", code="attention-backend-not-usable")
    from weft.ranks.kernels.triton import saved_tunings
    from weft.ranks.probes import trials

    for ranks in task.ranks:
        shape = replace(whole, q_heads=whole.q_heads // ranks, kv_heads=whole.kv_heads // ranks)
        heads = f"{shape.q_heads} query and {shape.kv_heads} KV heads, "

        def report(title: str, times: trials.Times, obstacles: trials.Obstacles, heads: str = heads) -> None:
            seconds = {str(name): took for name, took in times.items()}
            parent.send(RaceResult(heads + title, seconds, {str(name): why for name, why in obstacles.items()}))

        tunings = trials.measure_tunings(shape, device, report=report)
        path = lost = ""
        if task.keep:
            try:
                path = str(saved_tunings.save_tunings(device, shape, tunings))
            except (OSError, RuntimeError, WeftError) as error:
                lost = str(error)
        parent.send(
            TunedSizes(
                q_heads=shape.q_heads,
                kv_heads=shape.kv_heads,
                decode={rows: str(tuning) for rows, tuning in tunings.decode.items()},
                prefill=str(tunings.prefill),
                path=path,
                lost=lost,
            )
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
