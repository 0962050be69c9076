"""Nodes of a Ray cluster that an engine runs on, and the messages of a rank that is a Ray actor."""

from __future__ import annotations

import msgspec

from weft.engine.executors.messages import FromRank

NODE_LABEL = "ray.io/node-id"  # label of every node, set by Ray
ENGINE_NAME = "weft "  # begins the name of an engine's placement group


class RayNode(msgspec.Struct, frozen=True):
    """A node of the cluster: Ray's id for it, its host's name and its address."""

    id: str
    name: str
    address: str

    @property
    def label(self) -> str:
        """The node in messages to the user."""
        return f"Ray node {self.id[:8]} ({self.name}, {self.address})"


class RayNodes(msgspec.Struct, frozen=True, tag=True):
    """The nodes of an engine, in the order of the plan's nodes.

    `cluster` is the address of the cluster itself, `address` the address of this process's node, to which actors
    connect. `key` is the cluster key of this run, `certificate` a bundle in PEM, "" without TLS. `timeout_s` limits the
    wait for resources. `placement_group` is the id of the group whose `bundles` the ranks of each node take, "" if the
    engine makes a group of its own.
    """

    cluster: str
    address: str
    key: bytes
    timeout_s: float
    nodes: tuple[RayNode, ...]
    certificate: str = ""
    placement_group: str = ""
    bundles: tuple[tuple[int, ...], ...] = ()


class Attached(msgspec.Struct, frozen=True, tag=True):
    """The first message of an actor: its rank, its address on the way to the driver, and its GPU if it has one."""

    rank: int
    address: str
    gpu: int | None


class Present(msgspec.Struct, frozen=True, tag=True):
    """The actor is there."""


FromActor = Attached | Present | FromRank
