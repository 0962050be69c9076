"""Measurement of the links between this machine's GPUs: correctness and speed of copies.

A child process measures, because a broken link may hang the process that uses it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from itertools import combinations
from queue import Empty, SimpleQueue

import msgspec

from weft.engine.processes.framing import FrameError
from weft.engine.processes.launch import Child, end_children
from weft.errors import ConfigError
from weft.machine.hardware import cuda
from weft.machine.hardware.host import Host
from weft.probes.stored_speeds import GpuSpeed, PairSpeed, Verdict

logger = logging.getLogger("weft")

EXAMINER = "weft.ranks.probes.examiner"
START_S = 90.0  # seconds to import torch and create a CUDA context
TASK_S = 15.0  # seconds for one GPU, or one pair
MAX_FAULTS = 4  # children that hang or die; then the remaining tasks stay unmeasured

Task = tuple[int, ...]  # one GPU or two, by their index


class MeasureTasks(msgspec.Struct, frozen=True, tag="Examine"):
    """To the child: the tasks to measure, one after the other."""

    tasks: tuple[Task, ...]


class Begun(msgspec.Struct, frozen=True, tag=True):
    """From the child: this task begins."""

    task: Task


class GpuResult(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """From the child: bytes per second, as in `GpuSpeed`."""

    index: int
    copy_Bps: float
    from_host_Bps: float
    to_host_Bps: float


class PairResult(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """From the child: a pair of GPUs, as in `PairSpeed`; `detail` is empty if copies work."""

    first: int
    second: int
    peer: bool
    Bps: float
    detail: str


class ExaminerEnded(msgspec.Struct, frozen=True, tag="Ended"):
    """The child's last message: the error, "" if all is done. After an error of CUDA nothing works in that process."""

    reason: str


FromExaminer = Begun | GpuResult | PairResult | ExaminerEnded


class ProbeFault(msgspec.Struct, frozen=True):
    """End of a child before its work was done; `task` is None if no task had begun."""

    task: Task | None
    verdict: Verdict
    reason: str


def measure_links(
    host: Host, examiner: str = EXAMINER, start_s: float = START_S, task_s: float = TASK_S
) -> tuple[tuple[GpuSpeed, ...], tuple[PairSpeed, ...]]:
    """Measure every GPU and every pair, except where faults prevent it. Raises ConfigError if none can begin."""
    measurement = _Measurement(host)
    for _ in range(MAX_FAULTS):
        fault = None
        for result in _examine(measurement.remaining, examiner, start_s, task_s):
            match result:
                case GpuResult():
                    measurement.add_gpu(result)
                case PairResult():
                    measurement.add_pair(result)
                case ProbeFault():
                    fault = result
        if fault is None:
            break
        measurement.add_fault(fault)
    return tuple(measurement.gpus), tuple(measurement.pairs)


class _Measurement:
    """Results so far, and the tasks that remain."""

    def __init__(self, host: Host) -> None:
        self.hostname = host.hostname
        self.uuids = [gpu.uuid for gpu in host.gpus]
        numbers = [gpu.index for gpu in host.gpus]
        self.remaining: list[Task] = [(number,) for number in numbers] + list(combinations(numbers, 2))
        self.gpus: list[GpuSpeed] = []
        self.pairs: list[PairSpeed] = []

    def add_gpu(self, result: GpuResult) -> None:
        self.remaining.remove((result.index,))
        self.gpus.append(
            GpuSpeed(
                gpu=self.uuids[result.index],
                copy_Bps=result.copy_Bps,
                from_host_Bps=result.from_host_Bps,
                to_host_Bps=result.to_host_Bps,
            )
        )

    def add_pair(self, result: PairResult) -> None:
        task = (result.first, result.second)
        self.remaining.remove(task)
        verdict: Verdict = "broken" if result.detail else "works"
        self.pairs.append(self._pair(task, verdict, result.detail, result.peer, result.Bps))

    def add_fault(self, fault: ProbeFault) -> None:
        """Record a pair's fault; give up the links of a GPU whose own measurement failed."""
        if fault.task is None:
            raise ConfigError(f"cannot measure the GPUs of {self.hostname}: {fault.reason}", code="cannot-measure-gpus")
        if len(fault.task) == 2:
            self.remaining.remove(fault.task)
            self.pairs.append(self._pair(fault.task, fault.verdict, fault.reason))
            return
        # The GPU's memory may be full, or another process may own the GPU: that says nothing about its links.
        (number,) = fault.task
        self.remaining = [task for task in self.remaining if number not in task]
        logger.warning("GPU %d and its links cannot be measured: %s", number, fault.reason)

    def _pair(self, task: Task, verdict: Verdict, detail: str, peer: bool = False, Bps: float = 0.0) -> PairSpeed:
        first, second = (self.uuids[index] for index in task)
        Bps = Bps if verdict == "works" else 0.0
        return PairSpeed(first=first, second=second, verdict=verdict, peer=peer, Bps=Bps, detail=detail)


def _examine(
    tasks: list[Task], examiner: str, start_s: float, task_s: float
) -> Iterator[GpuResult | PairResult | ProbeFault]:
    """Yield the results of one child, and last the fault that ended it, if there was one."""
    child: Child[FromExaminer] = Child(examiner, FromExaminer, env=cuda.device_order_variables(os.environ))
    inbox: SimpleQueue[FromExaminer | None] = SimpleQueue()
    listener = threading.Thread(target=_listen, args=(child, inbox), name="weft-links", daemon=True)
    listener.start()
    try:
        child.send(MeasureTasks(tuple(tasks)))
        task: Task | None = None
        while True:
            seconds = start_s if task is None else task_s
            try:
                message = inbox.get(timeout=seconds)
            except Empty:
                yield ProbeFault(task, "hung", f"nothing happened for {seconds:.0f} s")
                return
            match message:
                case Begun():
                    task = message.task
                case GpuResult() | PairResult():
                    yield message
                case ExaminerEnded(reason=reason):
                    if reason:
                        yield ProbeFault(task, "broken", reason)
                    return
                case None:
                    yield ProbeFault(task, "broken", child.describe_exit().cause)
                    return
    finally:
        end_children([child])
        listener.join()
        child.close()


def _listen(child: Child[FromExaminer], inbox: SimpleQueue[FromExaminer | None]) -> None:
    """Pass on the child's messages, and None at its end."""
    with contextlib.suppress(FrameError):
        for message in child.channel:
            inbox.put(message)
    inbox.put(None)
