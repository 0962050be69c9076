"""The ways in which the ranks of a plan find each other and exchange tensors, as the executor tells each rank."""

from __future__ import annotations

import msgspec


class File(msgspec.Struct, frozen=True, tag=True):
    """Ranks of one host find each other through a file."""

    path: str


class Tcp(msgspec.Struct, frozen=True, tag=True):
    """Ranks find each other through rank 0, which listens at this address of its host.

    Port 0 is for rank 0 alone: it takes a free port, and the executor passes that on to the others.
    """

    host: str
    port: int


Rendezvous = File | Tcp


class GroupFiles(msgspec.Struct, frozen=True):
    """File descriptors that the `ranks` of a group share: memory, and a pipe (read, write) for each rank."""

    ranks: tuple[int, ...]
    memory: int
    pipes: tuple[tuple[int, int], ...]


class EdgeFiles(msgspec.Struct, frozen=True):
    """File descriptors that two consecutive stages share: memory, and two pipes (read, write).

    `full` tells the receiver that a tensor was written, `free` tells the sender that a tensor was taken.
    """

    memory: int
    full: tuple[int, int]
    free: tuple[int, int]


class SharedMemory(msgspec.Struct, frozen=True, tag=True):
    """Memory of the host that a rank shares with others. The rank's process has inherited the descriptors.

    `groups` are the rank's groups of several ranks. `before` is None on the first stage and `after` on the last. A
    group, or a neighbouring stage, that is not on this host alone is missing: it is reached through sockets.
    """

    groups: tuple[GroupFiles, ...] = ()
    before: EdgeFiles | None = None
    after: EdgeFiles | None = None


class Network(msgspec.Struct, frozen=True, tag=True):
    """Sockets, or the links between GPUs: NCCL if each rank has a GPU to itself, else gloo."""


Wiring = SharedMemory | Network
