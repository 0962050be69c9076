"""Trace: torch's profiler over the steps of a rank, written as a file that chrome://tracing and Perfetto open.

Besides the profiler's events the file has Weft's own: the parts of each step, and the phases of the layers that C++
computes in one call, which the profiler does not see.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from weft.errors import error_reason
from weft.ranks.comm.times import ExchangeTimes

logger = logging.getLogger("weft")

CATEGORY = "weft"  # category of Weft's own events
ROW = 1 << 30  # thread numbers of Weft's own rows begin here: the system's are smaller

# Torch traces a process at most once at a time; with two profilers it crashes. Ranks may be threads of one process.
_joining = threading.Condition()
PATIENCE_S = 10.0  # seconds for the other ranks of this process to leave the trace before, and for torch to write it
HEAD_BYTES, COPIED_BYTES = 2**16, 2**20  # of torch's file: in which its list of events begins, and copied at once
_running: list[Trace] = []  # at most one
_spans: list[dict[str, Any]] = []  # of all ranks of this process, in the trace that runs
_writers: list[threading.Thread] = []  # of traces that have ended


class Trace:
    """A trace of this process in the file `path`, which exists once all of its `users` have left.

    `engine` tells the ranks of one engine, which may be threads of one process, from other engines' ranks; `number`
    counts the traces of the engine.
    """

    def __init__(self, path: str, engine: int, number: int) -> None:
        self.path, self.engine, self.number, self.users = path, engine, number, 1
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # all ranks of an inline executor
        self._profiler = profile(activities=activities, experimental_config=threads)
        _spans.clear()
        self._profiler.start()

    def leave(self) -> None:
        """Leave the trace; the last one to do so stops it, and a thread writes it, which may take minutes."""
        with _joining:
            self.users -= 1
            if self.users:
                return
            try:
                self._profiler.stop()
            except Exception:
                logger.exception("cannot end the trace %s", self.path)
                self._forget()
                return
        writer = threading.Thread(target=self._write_spans, args=([*_spans],), name="weft-trace")
        _writers.append(writer)
        writer.start()

    def _forget(self) -> None:
        """Let the next trace begin. To be called with the lock."""
        _running.clear()
        _spans.clear()
        _joining.notify_all()

    def _write_spans(self, spans: list[dict[str, Any]]) -> None:
        """Write the file. One that cannot be written is logged."""
        exported, partial = Path(f"{self.path}.exported"), Path(f"{self.path}.partial")
        try:
            try:
                self._profiler.export_chrome_trace(str(exported))
            finally:
                with _joining:
                    self._forget()
            pack_trace(exported, partial, spans)
            os.replace(partial, self.path)
        except Exception as error:  # whatever it is, the engine goes on
            logger.error("cannot write the trace %s: %s", self.path, error_reason(error))
        finally:
            for path in (exported, partial):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            _writers.remove(threading.current_thread())


def finish_writing() -> None:
    """Wait until all traces that have ended are written."""
    for writer in [*_writers]:
        writer.join()


def pack_trace(exported: Path, packed: Path, spans: list[dict[str, Any]]) -> None:
    """Copy a trace as torch has written it, with Weft's spans before its own events, compressed.

    Its events are never parsed: with hundreds of megabytes that would keep all threads of the process waiting. Raises
    OSError, and ValueError for another kind of file.
    """
    with exported.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
        head = source.read(HEAD_BYTES)
        events = head.find(b'"traceEvents": [')
        if events < 0:
            raise ValueError("torch's trace has no list of events at its beginning")
        base = re.search(rb'"baseTimeNanoseconds": (\d+)', head)
        behind = head.index(b"[", events) + 1
        target.write(head[:behind])
        target.writelines(json.dumps(event).encode() + b"," for event in own_events(spans, int(base[1]) if base else 0))
        target.write(head[behind:])
        shutil.copyfileobj(source, target, COPIED_BYTES)


class RankTrace:
    """One rank's part in a trace: `left` steps are still to come.

    `path` is the path of the file for the rank that has begun it, else "".
    """

    def __init__(
        self, steps: int, rank: int, directory: str, exchanges: ExchangeTimes, *, engine: int, number: int
    ) -> None:
        self.left, self._wanted, self._rank, self._before = steps, steps, rank, exchanges
        self._file, begun = join_trace(directory, rank, engine, number)
        self.path = self._file.path if self._file and begun else ""

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self._wanted - self.left

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Log a part of a step."""
        began_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._log(name, began_ns, time.monotonic_ns(), {})

    def log_phase(self, layer: int, phase: str, began_ns: int, ended_ns: int) -> None:
        """Log a phase of a layer; see `ranks.kernels.fused.PhaseTimes`."""
        self._log(phase, began_ns, ended_ns, {"layer": layer})

    def end(self, exchanges: ExchangeTimes) -> str:
        """Log the time in exchanges since the beginning; leave the trace, and return its path, or "" without one."""
        now = time.monotonic_ns()
        spent_s = exchanges.spent_s - self._before.spent_s
        waited_s = exchanges.waited_s - self._before.waited_s
        self._log("exchanges", now, now, {"communication_s": spent_s - waited_s, "waiting_s": waited_s})
        if self._file is not None:
            self._file.leave()
        return self.path

    def _log(self, name: str, began_ns: int, ended_ns: int, details: dict[str, Any]) -> None:
        if self._file is not None:
            span = {"name": name, "began_ns": began_ns, "ended_ns": ended_ns, "rank": self._rank}
            _spans.append(span | details)


def own_events(spans: list[dict[str, Any]], base_ns: int) -> list[dict[str, Any]]:
    """Weft's spans as events of a Chrome trace, whose times are microseconds after `base_ns` since 1970."""
    offset_ns = time.time_ns() - time.monotonic_ns() - base_ns
    process = os.getpid()
    events: list[dict[str, Any]] = []
    for span in spans:
        details = {name: value for name, value in span.items() if name not in ("name", "began_ns", "ended_ns")}
        # Phases and parts of a step overlap: each kind has a row of its own.
        row = ROW + 2 * span["rank"] + ("layer" in span)
        events.append(
            {
                "ph": "X",
                "cat": CATEGORY,
                "name": span["name"],
                "pid": process,
                "tid": row,
                "ts": (span["began_ns"] + offset_ns) / 1000,
                "dur": (span["ended_ns"] - span["began_ns"]) / 1000,
                "args": details,
            }
        )
    ranks = sorted({span["rank"] for span in spans})
    for rank in ranks:
        for part, name in enumerate(("steps", "layers")):
            row_name = {"name": f"rank {rank}: {name}"}
            row = ROW + 2 * rank + part
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": row_name})
    return events


def join_trace(directory: str, rank: int, engine: int, number: int) -> tuple[Trace | None, bool]:
    """The trace of this process, and True if it begins now; None if one of another engine runs, or is still written.

    The other ranks of this engine leave its trace before as they come here. Raises OSError and RuntimeError.
    """
    with _joining:
        _joining.wait_for(lambda: not _running or _running[0].engine != engine or _joinable(number), PATIENCE_S)
        if _running:
            if _running[0].engine != engine or not _joinable(number):
                return None, False
            _running[0].users += 1
            return _running[0], False
        Path(directory).mkdir(parents=True, exist_ok=True)
        name = f"rank{rank}-{os.getpid()}-{time.time_ns()}.json.gz"
        _running.append(Trace(str(Path(directory).absolute() / name), engine, number))
        return _running[0], True


def _joinable(number: int) -> bool:
    """True if the trace of this number runs, and is not being written."""
    return _running[0].number == number and _running[0].users > 0
