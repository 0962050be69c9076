"""Fixtures of several tests of the kernels."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import psutil
import pytest
import torch

from tests.cpu.kept_forks import servers_kept
from tests.cpu.shared_threads import threads_share_memory
from weft.engine.processes import forks
from weft.machine.hardware import host
from weft.plan import memory
from weft.ranks.worker import worker

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    from tests.cpu.interpreter import remember_searches

    remember_searches()


@pytest.fixture(scope="session", autouse=True)
def kept_fork_servers() -> Iterator[None]:
    """Ranks of all tests come from a few fork servers, also those that are alone in their engine: 3 s less for each."""
    with servers_kept():
        yield


@pytest.fixture(scope="session", autouse=True)
def frozen_heap() -> Iterator[None]:
    """Heap that stays frozen while an engine sleeps: it was frozen before there were engines, so none is part of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "unfreeze_start", lambda: None)
        yield


MANY_MODULES = 100
_modules = [0]  # imported when the heap was frozen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Have the collector skip what libraries have created that were imported since: it would look through Transformers'
    objects for each engine that sleeps or changes its weights."""
    if len(sys.modules) >= _modules[0] + MANY_MODULES:
        gc.collect()
        gc.freeze()
        _modules[0] = len(sys.modules)


MUCH_MEMORY = 500e6  # bytes


@pytest.fixture(scope="module", autouse=True)
def freed_models() -> Iterator[None]:
    """Models of a file of tests are gone after it.

    Those of Transformers refer to themselves, and have too few Python objects for Python to look for them.
    """
    process = psutil.Process()
    before = process.memory_info().rss
    yield
    if process.memory_info().rss > before + MUCH_MEMORY:
        gc.collect()


@pytest.fixture
def direct_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process is started as a new interpreter."""
    monkeypatch.setattr(forks, "can_fork", lambda environment: False)


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks that are threads exchange through shared memory, in C++ where layers are fused."""
    with threads_share_memory(monkeypatch):
        yield


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV caches of 100 MB: 4 GB are millions of blocks of a tiny model, whose lists take longer than its answers."""
    monkeypatch.setattr(memory, "CPU_KV_BYTES", 100_000_000)


@pytest.fixture
def threads() -> Iterator[None]:
    """A test may set their number."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both cores, though this process may be bound to one."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two cores")
    monkeypatch.setattr(host, "usable_cores", lambda root: (0, 1))
