"""Executor: the protocol by which the core reaches its ranks, be they threads or processes."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from weft.engine.core.commands import RankCommand, Replies
from weft.engine.core.step import EngineStep
from weft.errors import Cause
from weft.plan.memory import Capacity
from weft.plan.plan import Plan


class StartResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a start: the number of KV blocks on every rank, and what each rank reported."""

    num_blocks: int
    ranks: list[Capacity]


class Executor(Protocol):
    """Starts the ranks of a plan and runs steps on them.

    `start` returns once every rank has loaded, measured, allocated and warmed up; it raises EngineError with the first
    root cause. `submit` returns at once. A step of several attention groups is a LockStep, and its result a
    LockStepResult. Several steps may be in flight, and results come in the order of submission. `call` returns at once,
    too: every rank executes the command after the steps submitted before. The first failing rank fails every future
    with EngineError, and resolves `failure` even if nothing is in flight. `close` may be called twice and at any time,
    and leaves no thread and no process behind.
    """

    @property
    def failure(self) -> Future[Cause]: ...

    def start(self, plan: Plan) -> StartResult: ...

    def submit(self, step: EngineStep) -> Future[Any]: ...

    def call(self, command: RankCommand) -> Future[Replies]: ...

    def close(self) -> None: ...
