"""The nodes of each replica's engine: which ones they are, and their connections once they have joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from weft.engine.cluster.joined_node import JoinedNode
from weft.engine.cluster.messages import Facts, Speed
from weft.engine.cluster.preflight import NAME
from weft.engine.executors.node_messages import NodeSocket, OtherNodes
from weft.engine.executors.ray_nodes import RayNodes
from weft.errors import WeftError
from weft.machine.hardware.host import Host

Cancelled = Callable[[], bool]


class NodeGroup(Protocol):
    """The nodes of one engine, checked. Numbers of nodes in its plan begin at `first`."""

    @property
    def first(self) -> int: ...

    @property
    def hosts(self) -> list[Host]:
        """The machines, or the parts of them that the engine has."""
        ...

    @property
    def rooms(self) -> list[int | None]:
        """Number of ranks that each node has room for, None for any."""
        ...

    @property
    def round_trip_s(self) -> float | None:
        """The longest time of a small message between two nodes and back; None if it was not measured."""
        ...

    def dismiss(self, error: BaseException) -> None:
        """Tell all nodes why the engine does not start."""
        ...

    def hand_over(self) -> OtherNodes | RayNodes:
        """Give the connections, as descriptors, to the executor. To be called once."""
        ...


class JoinedGroup:
    """A NodeGroup of nodes that have joined the head. `hosts` are its machines, the head's too if it has ranks."""

    def __init__(
        self,
        own: Facts,
        nodes: Sequence[JoinedNode],
        hosts: list[Host],
        speeds: Sequence[Speed],
        first: int,
        *,
        lasting: bool,
    ) -> None:
        self.nodes, self.hosts, self.speeds, self.first = nodes, hosts, speeds, first
        self._own, self._lasting = own, lasting

    @property
    def rooms(self) -> list[int | None]:
        """One rank per GPU; any number on CPUs."""
        return [len(host.gpus) or None for host in self.hosts]

    @property
    def round_trip_s(self) -> float | None:
        return max((speed.round_trip_s for speed in self.speeds), default=None)

    def dismiss(self, error: BaseException) -> None:
        for node in self.nodes:
            node.dismiss(*end_of_head(error))

    def hand_over(self) -> OtherNodes:
        nodes = []
        for node in self.nodes:
            node.connection.settimeout(None)
            name = node.facts.host.hostname[:NAME]
            about = NodeSocket(node.facts.node, name, node.facts.address, node.connection.detach())
            nodes.append(about)
        return OtherNodes(self._own.address, self._own.interface, tuple(nodes), self._lasting)


def end_of_head(error: BaseException) -> tuple[str, str]:
    """Text and code by which nodes learn of an error of the head."""
    code = error.code if isinstance(error, WeftError) else "head-failed"
    return f"node 0 has ended: {str(error) or type(error).__name__}", code
