"""Ranks that are threads of this process and exchange through shared memory, as those that are processes do.

So tests reach what C++ does in that memory without the time that processes take to start.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from weft.engine.executors.rank_processes import open_group_files
from weft.plan.wiring import GroupFiles
from weft.ranks.comm.shared import SharedMemoryGroup
from weft.ranks.comm.threads import Threads


@contextmanager
def threads_share_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Groups of threads are those of shared memory in the block. If a rank fails in it, the others wait for ever."""
    opened: dict[tuple[Threads, tuple[int, ...]], GroupFiles] = {}
    lock = threading.Lock()

    def group(threads: Threads, ranks: Sequence[int], rank: int, device: torch.device) -> SharedMemoryGroup:
        with lock:
            key = threads, tuple(ranks)
            files = opened[key] = opened.get(key) or open_group_files(ranks)
        return SharedMemoryGroup(ranks.index(rank), files.memory, files.pipes)

    with monkeypatch.context() as patch:
        patch.setattr(Threads, "group", group)
        yield
    for files in opened.values():
        for descriptor in (files.memory, *(end for pipe in files.pipes for end in pipe)):
            os.close(descriptor)
