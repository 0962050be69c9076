"""Executors: one protocol to the ranks, as threads of this process or as processes of their own."""

from __future__ import annotations

from weft.errors import ConfigError
from weft.executors.base import Executor
from weft.executors.rank import WORKER


def create_executor(kind: str, worker: str = WORKER) -> Executor:
    """Create an executor that has not started. `kind` is "inline" or "processes".

    `worker` is the class that each rank runs, as "module:Class".
    """
    match kind:
        case "inline":
            from weft.executors.inline import InlineExecutor

            return InlineExecutor(worker)
        case "processes":
            from weft.executors.processes import ProcessExecutor

            return ProcessExecutor(worker)
        case _:
            raise ConfigError(
                f"executor {kind!r} is unknown; use inline (threads of one process) or processes",
                code="unknown-executor",
            )
