"""Trace: torch's profiler over the steps of a rank, written as a file that chrome://tracing and Perfetto open."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger("weft")

# Torch traces a process at most once at a time; with two profilers it crashes. Ranks may be threads of one process.
_tracing = threading.Lock()


class Trace:
    """A trace of the next `steps` steps of this process, in the file `path`, which exists once `end` was called."""

    def __init__(self, steps: int, path: str) -> None:
        self.path = path
        self.left = steps
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # all ranks of an inline executor
        self._profiler = profile(activities=activities, experimental_config=threads)
        self._profiler.start()

    def end(self) -> None:
        """Stop tracing and write the file. A file that cannot be written is logged."""
        try:
            self._profiler.stop()
            self._profiler.export_chrome_trace(self.path)
        except (OSError, RuntimeError) as error:
            logger.error("cannot write the trace %s: %s", self.path, error)
        finally:
            _tracing.release()


def begin_trace(steps: int, directory: str, rank: int) -> Trace | None:
    """Begin a trace of this process; None if there is one already, as of another rank that is a thread of it."""
    if not _tracing.acquire(blocking=False):
        return None
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        return Trace(steps, str(Path(directory).absolute() / f"rank{rank}-{os.getpid()}-{time.time_ns()}.json.gz"))
    except BaseException:
        _tracing.release()
        raise
