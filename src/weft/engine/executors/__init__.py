"""Executors: one protocol to the ranks, as threads of this process or as processes of their own."""

from __future__ import annotations

from weft.engine.executors.base import Executor
from weft.engine.executors.node_messages import OtherNodes
from weft.engine.executors.rank import WORKER
from weft.engine.executors.ray_nodes import RayNodes
from weft.errors import ConfigError


def create_executor(
    kind: str,
    worker: str = WORKER,
    others: OtherNodes | RayNodes | None = None,
    stall_s: float | None = None,
) -> Executor:
    """Create an executor that has not started. `kind` is "inline" or "processes"; nodes of Ray need no kind.

    `worker` is the class that each rank runs, as "module:Class". `others` are nodes that have joined this one, or the
    nodes of a Ray cluster, whose actors are the ranks then. `stall_s` is as in ProcessExecutor and NodesExecutor.
    Raises ConfigError for an unknown kind.
    """
    match kind:
        case _ if isinstance(others, RayNodes):
            from weft.engine.executors.ray import RayExecutor

            return RayExecutor(others, worker)
        case "processes" if others:
            from weft.engine.executors.nodes import NodesExecutor

            return NodesExecutor(others, worker, stall_s=stall_s)
        case "inline":
            from weft.engine.executors.inline import InlineExecutor

            return InlineExecutor(worker)
        case "processes":
            from weft.engine.executors.processes import ProcessExecutor

            return ProcessExecutor(worker, stall_s=stall_s)
        case _:
            raise ConfigError(
                f"executor {kind!r} is unknown; use inline (threads of one process) or processes",
                code="unknown-executor",
            )
