"""Messages between the head and another node, until the ranks start. The head asks, the node answers each once."""

from __future__ import annotations

from math import inf

import msgspec

from weft.engine.executors.node_messages import EndRanks, MeetAt, PassOn, Ping, PrintStacks, StartRanks
from weft.machine.hardware.host import Host

HEAD_CLOSED = "head-closed"  # code of a Dismissed: the head waits for nodes no longer


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a node about itself. Sizes are in bytes, times in seconds.

    - `address`, `interface`: of its route to the head.
    - `host_ip`: VLLM_HOST_IP as it is set there, else "".
    - `machine`: an id of the running system; two nodes may be on one.
    - `model_digest`: of the headers of the model's files; `problem` says why there is none.
    - `wrong_interface`: an interface that a variable names and that the node does not have, as NAME=VALUE.
    - `clock_s`: its clock, when it answered; filled in by the head: `skew_s`, its difference from the head's.
    - `replicas`: number of engines of all nodes, as its flags say.
    """

    node: int
    nodes: int
    host: Host
    address: str
    interface: str
    interfaces: tuple[str, ...]
    host_ip: str
    machine: str
    weft: str
    torch: str
    model: str
    model_digest: str
    problem: str
    wrong_interface: str
    shm_free_bytes: int | None
    open_files: int
    clock_s: float
    skew_s: float = 0.0
    replicas: int = 1


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of the network between two nodes; `problem` says why there is none."""

    first: int
    second: int
    round_trip_s: float = 0.0
    bytes_per_s: float = 0.0
    problem: str = ""

    @property
    def possible(self) -> bool:
        """False for figures that no measurement gives."""
        return bool(self.problem) or (0 < self.round_trip_s < inf and 0 < self.bytes_per_s < inf)


class ListenForPeers(msgspec.Struct, frozen=True, tag=True):
    """Listen at the node's own address for other nodes that measure the network."""


class MeasureTo(msgspec.Struct, frozen=True, tag=True):
    """Measure the network to another node, which listens there."""

    node: int
    address: str
    port: int


class TellTime(msgspec.Struct, frozen=True, tag=True):
    """Tell the time."""


class Dismissed(msgspec.Struct, frozen=True, tag=True):
    """The engine does not start, or this node is not wanted. The head's last message."""

    message: str
    code: str


ToJoined = (
    ListenForPeers | MeasureTo | TellTime | Dismissed | StartRanks | MeetAt | PassOn | Ping | PrintStacks | EndRanks
)


class Join(msgspec.Struct, frozen=True, tag=True):
    """A node's first message on a connection, which is for its ranks of one replica."""

    facts: Facts
    replica: int = 0


class Joining(msgspec.Struct, frozen=True, tag="Join"):
    """A Join as the head takes it: its facts are read once their version is known."""

    facts: msgspec.Raw
    replica: int = 0


class Version(msgspec.Struct, frozen=True):
    """The part of Facts that all versions of Weft understand."""

    weft: str
    node: int


class ListeningForPeers(msgspec.Struct, frozen=True, tag=True):
    port: int


class Measured(msgspec.Struct, frozen=True, tag=True):
    speed: Speed


class Time(msgspec.Struct, frozen=True, tag=True):
    clock_s: float


FromJoined = Joining | ListeningForPeers | Measured | Time
