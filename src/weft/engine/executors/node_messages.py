"""Messages between the head, which has the core, and the process of another node, which has only ranks."""

from __future__ import annotations

import msgspec

from weft.engine.executors.messages import Allocate, FromRank, RunCommand, RunStep, ToRank
from weft.errors import Cause
from weft.plan.plan import Plan
from weft.plan.wiring import Tcp


class StartRanks(msgspec.Struct, frozen=True, tag=True):
    """Start the processes of this node's ranks. `worker` is "module:Class".

    With `lasting`, an engine that fails starts again, and the node shall join again. With `stall_s`, a rank that shows
    no sign of life for `stall_s` seconds has failed.
    """

    plan: Plan
    worker: str
    lasting: bool = False
    stall_s: float | None = None


class MeetAt(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 listens at this address: launch the ranks."""

    address: Tcp


class PassOn(msgspec.Struct, frozen=True, tag=True):
    """A message to some of the node's ranks."""

    ranks: list[int]
    message: Allocate | RunStep | RunCommand


class Ping(msgspec.Struct, frozen=True, tag=True):
    """The head is there."""


class PrintStacks(msgspec.Struct, frozen=True, tag=True):
    """Have the ranks print the stacks of their threads."""


class EndRanks(msgspec.Struct, frozen=True, tag=True):
    """The engine has ended. The head's last message."""

    cause: Cause


ToActor = ToRank | Ping | PrintStacks

ToNode = StartRanks | MeetAt | PassOn | Ping | PrintStacks | EndRanks


class RankMessage(msgspec.Struct, frozen=True, tag=True):
    """A message of a rank."""

    rank: int
    message: FromRank


class RankLost(msgspec.Struct, frozen=True, tag=True):
    """The process of a rank has ended without a last message."""

    cause: Cause


class RankState(msgspec.Struct, frozen=True):
    """A rank's phase, and the number of steps that have been passed to it."""

    rank: int
    phase: str
    steps: int


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The node is there."""

    ranks: list[RankState]


FromNode = RankMessage | RankLost | Beat


class NodeSocket(msgspec.Struct, frozen=True):
    """A node that has joined and proved the key: its number, name, address, and our descriptor of the connection."""

    node: int
    name: str
    address: str
    descriptor: int

    @property
    def label(self) -> str:
        """The node in messages to the user."""
        return f"node {self.node} ({self.name}, {self.address})"


class OtherNodes(msgspec.Struct, frozen=True, tag=True):
    """The nodes other than the head, and the head's own address and interface that route to them.

    With `lasting`, an engine that fails starts again with nodes that join again.
    """

    address: str
    interface: str
    nodes: tuple[NodeSocket, ...]
    lasting: bool = False

    @property
    def descriptors(self) -> list[int]:
        """Our descriptors of all connections."""
        return [node.descriptor for node in self.nodes]
