"""EngineNodes: the nodes that hold the ranks of engines, from the first start or joined again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from weft.config import EngineConfig
from weft.engine.cluster.assembly import AnyAssembly
from weft.engine.cluster.groups import NodeGroup
from weft.engine.executors.node_messages import OtherNodes
from weft.engine.executors.ranks import CLOSED
from weft.engine.executors.ray_nodes import RayNodes
from weft.engine.replicas.opening import plan_group
from weft.errors import EngineError
from weft.plan.plan import Plan
from weft.planner.execution.replicas import ReplicaPlan

if TYPE_CHECKING:
    from weft.checkpoint.checkpoint import Checkpoint


class EngineNodes:
    """Gives each replica its nodes, and the plan for them, whenever it starts an engine.

    `planned` are the plans of the first start, in the order of the assembly's groups.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, assembly: AnyAssembly, planned: Sequence[ReplicaPlan]
    ) -> None:
        self._config, self._checkpoint, self._assembly = config, checkpoint, assembly
        self._first = {number: (one.plan, assembly.groups[number]) for number, one in enumerate(planned)}
        self._closing = threading.Event()
        # Threads of its own: a wait for a machine may be long, and other work needs asyncio's.
        self._threads = ThreadPoolExecutor(len(planned), thread_name_prefix="weft-nodes")

    @property
    def lasting(self) -> bool:
        """True if an engine that has failed starts again once its nodes, or their resources, are back."""
        return self._assembly.lasting

    def take_first(self) -> OtherNodes | RayNodes:
        """The nodes of the one engine, which has the plan of the first start. To be called once."""
        _, group = self._first.pop(0)
        return group.hand_over()

    async def take(self, number: int) -> tuple[Plan, OtherNodes | RayNodes]:
        """Wait for the nodes of a replica; return the plan for them. Raises ConfigError and PlanError.

        The caller owns the connections that are handed over. It may be cancelled.
        """
        if first := self._first.pop(number, None):
            plan, group = first
            return plan, group.hand_over()
        cancelled = threading.Event()
        gathering = self._threads.submit(self._gather, number, cancelled)
        try:
            again, gathered = await asyncio.wrap_future(gathering)
        except asyncio.CancelledError:
            cancelled.set()
            gathering.add_done_callback(_dismiss)
            raise
        return again, gathered.hand_over()

    def _gather(self, number: int, cancelled: threading.Event) -> tuple[Plan, NodeGroup]:
        group = self._assembly.gather_again(number, lambda: cancelled.is_set() or self._closing.is_set())
        try:
            if cancelled.is_set():
                raise EngineError(CLOSED)
            return plan_group(self._config, self._checkpoint, group), group
        except BaseException as error:
            group.dismiss(error)
            raise

    def close(self) -> None:
        """Wait for no more nodes, and release the nodes that were not taken. May be called twice."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for _, group in self._first.values():
            group.dismiss(EngineError(CLOSED))
        self._first.clear()
        self._assembly.close()


def _dismiss(gathering: Future[tuple[Plan, NodeGroup]]) -> None:
    """Let the nodes go that were gathered for a caller who has left."""
    if not gathering.cancelled() and gathering.exception() is None:
        _, group = gathering.result()
        group.dismiss(EngineError(CLOSED))
