"""Process that measures copies between GPUs: `python -m weft.ranks.probes.examiner FD LIFELINE`.

It is started by `study.measure.links`.
"""

from __future__ import annotations

import signal
import sys

from weft.engine.processes.launch import Parent
from weft.study.measure.links import Begun, ExaminerEnded, MeasureTasks


def main(descriptor: int, lifeline: int) -> None:
    """Measure the tasks that the parent sends, and report each result."""
    # Before torch is imported: from here on this process ends with its parent.
    parent: Parent[MeasureTasks] = Parent(descriptor, MeasureTasks, lifeline)
    examine = parent.inbox.get()
    try:
        from weft.ranks.probes import copies

        copies.check_devices(1 + max(index for task in examine.tasks for index in task))
        for task in examine.tasks:
            parent.send(Begun(task))
            parent.send(copies.measure_gpu(*task) if len(task) == 1 else copies.measure_pair(*task))
    except (RuntimeError, ImportError, OSError) as error:
        parent.send(ExaminerEnded((str(error).strip().splitlines() or [type(error).__name__])[0]))
    else:
        parent.send(ExaminerEnded(""))
    while True:  # the parent ends this process
        signal.pause()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
