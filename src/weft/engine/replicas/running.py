"""RunningReplica: an engine that runs, among several of the same model."""

from __future__ import annotations

from typing import NamedTuple

from weft.engine.executors.base import StartResult
from weft.plan.plan import Plan


class RunningReplica(NamedTuple):
    """An engine that runs: its plan with the served length, and its ranks' reports.

    `number` counts the replicas, `first_rank` the ranks of those before it.
    """

    plan: Plan
    ready: StartResult
    number: int = 0
    first_rank: int = 0
