"""An examiner without GPUs: does as WEFT_FAKE_EXAMINER says, "TASK DEED" with commas between, as in "0-1 hang"."""

from __future__ import annotations

import os
import signal
import sys

from weft.engine.processes.launch import Parent
from weft.study.measure.links import Begun, ExaminerEnded, GpuResult, MeasureTasks, PairResult


def main(descriptor: int, lifeline: int) -> None:
    parent: Parent[MeasureTasks] = Parent(descriptor, MeasureTasks, lifeline)
    deeds = dict(deed.split() for deed in os.environ["WEFT_FAKE_EXAMINER"].split(",") if deed)
    examine = parent.inbox.get()
    if deeds.get("start") == "fail":
        parent.send(ExaminerEnded("torch sees no GPU"))
        signal.pause()
    for task in examine.tasks:
        parent.send(Begun(task))
        match deeds.get("-".join(map(str, task))):
            case "hang":
                signal.pause()
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fail":
                parent.send(ExaminerEnded("CUDA error: an illegal memory access was encountered"))
                signal.pause()
            case "garble":
                parent.send(
                    PairResult(first=task[0], second=task[1], peer=True, Bps=0.0, detail="3 bytes arrived wrong")
                )
            case _ if len(task) == 1:
                parent.send(GpuResult(index=task[0], copy_Bps=9e11, from_host_Bps=2e10, to_host_Bps=2.1e10))
            case _:
                parent.send(PairResult(first=task[0], second=task[1], peer=True, Bps=1e10, detail=""))
    parent.send(ExaminerEnded(""))
    while True:
        signal.pause()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
