"""Limits of a child process on CPU time, memory, stack and files."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import time
from pathlib import Path

import msgspec

PAGE = os.sysconf("SC_PAGE_SIZE")
FILES = 64  # descriptors of a child, which opens none but what its libraries read


class Limits(msgspec.Struct, frozen=True):
    """Limits of a child on one job.

    `memory` is in bytes of address space, beyond that of the process from which it is forked. `wall_s` ends what does
    not use the CPU either. `stack` is in bytes; a job that passes in a smaller stack passes in a larger one too. `nice`
    is added to the priority's number.
    """

    cpu_s: int
    wall_s: float
    memory: int
    stack: int = 8 << 20
    nice: int = 0


def confine(limits: Limits) -> None:
    """Put this process under limits, for as long as it lives. It writes no file and leaves no core dump."""
    _lower(resource.RLIMIT_AS, _address_space() + limits.memory)
    _lower(resource.RLIMIT_STACK, limits.stack)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_NOFILE, FILES)
    if limits.nice:
        os.nice(limits.nice)


def grant_cpu(seconds: int) -> None:
    """Have the system end this process once it has used this many seconds of CPU time more."""
    used = math.ceil(time.process_time())
    _lower(resource.RLIMIT_CPU, used + seconds)


def _address_space() -> int:
    """Bytes of address space of this process; 0 if the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    except OSError:
        return 0


def _lower(limit: int, value: int) -> None:
    """Set a soft limit, which may not be above the hard one."""
    _, hard = resource.getrlimit(limit)
    within = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with contextlib.suppress(OSError, ValueError):  # macOS has no limit on the address space
        resource.setrlimit(limit, (within, hard))
