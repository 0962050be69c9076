"""Measurement of the network between nodes of a Ray cluster, by an actor on each, with the key of the run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from weft.engine.cluster.messages import Speed
from weft.engine.cluster.ray_facts import await_answer
from weft.engine.cluster.ray_seats import Seat
from weft.engine.cluster.speed import PeerListener, measure_network
from weft.engine.executors.ray_nodes import NODE_LABEL, RayNode
from weft.errors import ConfigError

START_S = 30.0  # least seconds for the start of an actor: on a busy machine Ray takes long for a process
ANSWER_S = 25.0  # seconds for a measurement
MEASURED_S = 15.0  # seconds of measurements, of which some failed, after which no more are made


class Measurer:
    """The class of the actors: each listens for the others, and measures the network to them."""

    def __init__(self, key: bytes, certificate: str, allow_public: bool) -> None:
        self._key, self._certificate, self._allow_public = key, certificate, allow_public

    def listen(self, address: str) -> int:
        """Listen at an address of this node; return the port."""
        self._listener = PeerListener(address, self._key, self._certificate, allow_public=self._allow_public)
        return self._listener.port

    def measure(self, first: int, second: int, address: str, port: int) -> bytes:
        """The speed from this node, `first`, to node `second`, which listens at the address: JSON of Speed."""
        return msgspec.json.encode(measure_network(first, second, address, port, self._key, self._certificate))


def measure_seats(
    ray: Any, seats: Sequence[Seat], key: bytes, certificate: str, *, allow_public: bool, start_s: float
) -> list[Speed]:
    """Measure the network between every two nodes of an engine, one pair after the other; [] for one node.

    After MEASURED_S seconds with a failure no further pairs are tried. Raises ConfigError for a node whose actor does
    not start within `start_s` seconds, at least START_S, or does not answer then.
    """
    nodes = [seat.node for seat in seats]
    if len(nodes) < 2:
        return []
    actor = ray.remote(Measurer)
    actors = [
        actor.options(num_cpus=0, max_restarts=0, label_selector={NODE_LABEL: node.id}).remote(
            key, certificate, allow_public
        )
        for node in nodes
    ]
    try:
        return _measure_pairs(ray, nodes, actors, start_s)
    finally:
        for one in actors:
            with suppress(Exception):  # of Ray's, for a process that has died
                ray.kill(one)


def _measure_pairs(ray: Any, nodes: Sequence[RayNode], actors: Sequence[Any], start_s: float) -> list[Speed]:
    listening = [one.listen.remote(node.address) for node, one in zip(nodes, actors, strict=True)]
    started = time.monotonic() + max(start_s, START_S)
    ports = [int(_answer(ray, node, port, started)) for node, port in zip(nodes, listening, strict=True)]
    deadline = time.monotonic() + MEASURED_S
    speeds: list[Speed] = []
    for first, node in enumerate(nodes):
        for second in range(first):
            if time.monotonic() > deadline and any(speed.problem for speed in speeds):
                return speeds
            answer = actors[first].measure.remote(first, second, nodes[second].address, ports[second])
            speed = _answer(ray, node, answer, time.monotonic() + ANSWER_S)
            speeds.append(msgspec.json.decode(speed, type=Speed))
    return speeds


def _answer(ray: Any, node: RayNode, answer: Any, deadline: float) -> Any:
    await_answer(ray, node.label, answer, deadline)
    try:
        return ray.get(answer, timeout=0)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        lines = str(error).strip().splitlines() or ["no answer in time"]
        raise ConfigError(
            f"{node.label} does not measure the network: {lines[-1]}; see `ray status`, and Ray's logs there "
            "(/tmp/ray/session_latest/logs)",
            code="ray-node-not-measuring",
        ) from None
