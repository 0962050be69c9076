"""The placement group in which the process of an engine runs: its free bundles are the places of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

KNOWN_S = 3.0  # after which all of Ray's nodes have reported what is free; until then a bundle may seem taken, or free
LOOK_S = 0.1


class OwnGroup(msgspec.Struct, frozen=True):
    """A placement group: its id in hexadecimal digits, and by node the bundles that are free for a rank.

    The index of a bundle with room for several ranks appears once for each.
    """

    id: str
    bundles: dict[str, tuple[int, ...]]

    def take(self, counts: Mapping[str, int]) -> tuple[OwnGroup, dict[str, tuple[int, ...]]]:
        """The group without the first bundles of each node, as many as `counts` says, and these bundles."""
        taken = {node: self.bundles[node][:count] for node, count in counts.items()}
        left = {node: bundles[counts.get(node, 0) :] for node, bundles in self.bundles.items()}
        return OwnGroup(self.id, left), taken


def own_group(ray: Any, kind: str) -> OwnGroup | None:
    """The placement group of this process; None if it runs in none, or if no bundle is free for a rank.

    Args:
        ray: the module, connected.
        kind: resource of which a rank takes one, CPU or GPU.
    """
    from ray.util.placement_group import get_current_placement_group, placement_group_table

    current = get_current_placement_group()
    if current is None:
        return None
    name = current.id.hex()
    table = placement_group_table(current)
    room = sum(int(bundle.get(kind, 0)) for bundle in table["bundles"].values())
    room -= int(ray.get_runtime_context().get_assigned_resources().get(kind, 0))  # this process's own
    nodes = table["bundles_to_node_id"]
    bundles = settled_bundles(lambda: free_bundles(name, kind, nodes, ray.available_resources()), room)
    return OwnGroup(name, bundles) if bundles else None


def settled_bundles(look: Callable[[], dict[str, tuple[int, ...]]], room: int) -> dict[str, tuple[int, ...]]:
    """The free bundles once they have room for `room` ranks, or as they are after KNOWN_S.

    With more room, Ray does not yet count what this process itself takes; with less, it does not count a new bundle or
    one that an actor has just given back, or other actors have taken some.
    """
    deadline = time.monotonic() + KNOWN_S
    while True:
        bundles = look()
        if sum(map(len, bundles.values())) == room or time.monotonic() > deadline:
            return bundles
        time.sleep(LOOK_S)


def free_bundles(
    group: str, kind: str, nodes: Mapping[int, str], available: Mapping[str, float]
) -> dict[str, tuple[int, ...]]:
    """The bundles of a group that are free for ranks, by node.

    Args: group: id of the placement group, in hexadecimal digits. kind: resource of which a rank takes one. nodes: node
        of each bundle, by its index. available: Ray's free resources. It counts a bundle's resources as
        `KIND_group_INDEX_ID`.
    """
    free: dict[str, list[int]] = {}
    for index, node in sorted(nodes.items()):
        room = int(available.get(f"{kind}_group_{index}_{group}", 0))
        if room:
            free.setdefault(node, []).extend([index] * room)
    return {node: tuple(indices) for node, indices in free.items()}
