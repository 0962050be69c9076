"""The Executor protocol: how the core reaches its ranks, whether they are threads or processes."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

import msgspec

from weft.core.step import StepPlan, StepResult
from weft.errors import Cause
from weft.plan.memory import Capacity
from weft.plan.plan import Plan


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """An executor that has started: the KV blocks every rank has, and what each rank reported."""

    num_blocks: int
    ranks: list[Capacity]


class Executor(Protocol):
    """`start` returns once every rank has loaded, measured, allocated and warmed up; it raises EngineError
    with the first root cause. `submit` returns at once; results come in the order of submission; several
    steps may be in flight. The first failing rank fails every future with EngineError, and resolves `failure`
    even when no step is in flight. `close` may be called twice, and at any time, and leaves no thread and no
    process behind."""

    @property
    def failure(self) -> Future[Cause]: ...

    def start(self, plan: Plan) -> Ready: ...

    def submit(self, step: StepPlan) -> Future[StepResult]: ...

    def close(self) -> None: ...
