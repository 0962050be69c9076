"""Links: whether the GPUs of this machine reach each other as their driver says, and how fast; in a child, for a link
that is broken may hang whoever uses it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from itertools import combinations
from queue import Empty, SimpleQueue

import msgspec

from weft.errors import ConfigError
from weft.executors.framing import FrameError
from weft.executors.launch import Child, end_children
from weft.hardware import cuda
from weft.hardware.host import Host
from weft.probes.speeds import GpuSpeed, PairSpeed, Verdict

logger = logging.getLogger("weft")

EXAMINER = "weft.probes.on_gpu.examiner"
START_S = 90.0  # to import torch and make a CUDA context
TASK_S = 15.0  # for one GPU, or one pair
MOST_FAULTS = 4  # hung or died; what is left then stays unknown

Task = tuple[int, ...]  # one GPU, or two, by their index


class Examine(msgspec.Struct, frozen=True, tag=True):
    """To the child: what to measure, one after the other."""

    tasks: tuple[Task, ...]


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The child goes on to this task."""

    task: Task


class GpuResult(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Bytes per second, as in `GpuSpeed`."""

    index: int
    copy_Bps: float
    from_host_Bps: float
    to_host_Bps: float


class PairResult(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """As in `PairSpeed`; `detail` is empty where it works."""

    first: int
    second: int
    peer: bool
    Bps: float
    detail: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The child's last word: what went wrong, "" where all is done. After an error of CUDA nothing works there."""

    reason: str


FromExaminer = Begun | GpuResult | PairResult | Ended


class Fault(msgspec.Struct, frozen=True):
    """How a task ended a child: `task` None where it did not even begin."""

    task: Task | None
    verdict: Verdict
    reason: str


def measure(
    host: Host, examiner: str = EXAMINER, start_s: float = START_S, task_s: float = TASK_S
) -> tuple[tuple[GpuSpeed, ...], tuple[PairSpeed, ...]]:
    """Every GPU, and every two, but for what faults prevent. Raises ConfigError where no measurement can even begin."""
    uuids = [gpu.uuid for gpu in host.gpus]
    numbers = [gpu.index for gpu in host.gpus]
    left: list[Task] = [(number,) for number in numbers] + list(combinations(numbers, 2))
    gpus: list[GpuSpeed] = []
    pairs: list[PairSpeed] = []
    for _ in range(MOST_FAULTS):
        fault = None
        for news in _examined(left, examiner, start_s, task_s):
            match news:
                case GpuResult(index=index):
                    left.remove((index,))
                    gpus.append(
                        GpuSpeed(
                            gpu=uuids[index],
                            copy_Bps=news.copy_Bps,
                            from_host_Bps=news.from_host_Bps,
                            to_host_Bps=news.to_host_Bps,
                        )
                    )
                case PairResult(first=first, second=second, detail=detail):
                    left.remove((first, second))
                    verdict: Verdict = "broken" if detail else "works"
                    pairs.append(_pair(uuids, (first, second), verdict, detail, news.peer, news.Bps))
                case Fault():
                    fault = news
        if fault is None:
            break
        if fault.task is None:
            raise ConfigError(f"cannot measure the GPUs of {host.hostname}: {fault.reason}")
        if len(fault.task) == 2:
            left.remove(fault.task)
            pairs.append(_pair(uuids, fault.task, fault.verdict, fault.reason))
        else:
            # Its memory may be full, or it is another's alone: that says nothing of its links.
            (number,) = fault.task
            left = [task for task in left if number not in task]
            logger.warning("GPU %d cannot be measured, nor its links: %s", number, fault.reason)
    return tuple(gpus), tuple(pairs)


def _pair(
    uuids: list[str], task: Task, verdict: Verdict, detail: str, peer: bool = False, Bps: float = 0.0
) -> PairSpeed:
    first, second = (uuids[index] for index in task)
    return PairSpeed(
        first=first, second=second, verdict=verdict, peer=peer, Bps=Bps if verdict == "works" else 0.0, detail=detail
    )


def _examined(
    tasks: list[Task], examiner: str, start_s: float, task_s: float
) -> Iterator[GpuResult | PairResult | Fault]:
    """What one child finds, and last the fault that ended it, if one did."""
    child: Child[FromExaminer] = Child(examiner, FromExaminer, env=cuda.order(os.environ))
    inbox: SimpleQueue[FromExaminer | None] = SimpleQueue()
    listener = threading.Thread(target=_listen, args=(child, inbox), name="weft-links", daemon=True)
    listener.start()
    try:
        child.send(Examine(tuple(tasks)))
        task: Task | None = None
        while True:
            try:
                news = inbox.get(timeout=start_s if task is None else task_s)
            except Empty:
                seconds = start_s if task is None else task_s
                yield Fault(task, "hung", f"nothing happened for {seconds:.0f} s")
                return
            match news:
                case Begun():
                    task = news.task
                case GpuResult() | PairResult():
                    yield news
                case Ended(reason=reason):
                    if reason:
                        yield Fault(task, "broken", reason)
                    return
                case None:
                    yield Fault(task, "broken", child.describe_exit()[0])
                    return
    finally:
        end_children([child])
        listener.join()
        child.close()


def _listen(child: Child[FromExaminer], inbox: SimpleQueue[FromExaminer | None]) -> None:
    with contextlib.suppress(FrameError):
        for message in child.channel:
            inbox.put(message)
    inbox.put(None)
