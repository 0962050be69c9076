"""The head's side: wait for all nodes, check them, and hand their connections to the executor."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import msgspec

from weft.checkpoint.checkpoint import Checkpoint
from weft.config import EngineConfig
from weft.engine.cluster import preflight
from weft.engine.cluster.facts import gather_facts
from weft.engine.cluster.groups import Cancelled, JoinedGroup, end_of_head
from weft.engine.cluster.join_listener import JoinListener
from weft.engine.cluster.joined_node import NOT_ANSWERING, JoinedNode
from weft.engine.cluster.measured import store_cluster
from weft.engine.cluster.messages import (
    Facts,
    ListenForPeers,
    ListeningForPeers,
    Measured,
    MeasureTo,
    Speed,
    TellTime,
    Time,
)
from weft.engine.cluster.ray_cluster import RayAssembly, assemble_on_ray, uses_ray
from weft.engine.cluster.settings import NodeSettings, node_settings
from weft.engine.cluster.speed import listen_for_peers, measure_network
from weft.errors import ConfigError
from weft.machine.hardware.host import Host, probe_host
from weft.plan.devices import device_kind
from weft.plan.nodes import part_of_node, place_on_node

Answer = TypeVar("Answer", Time, Measured, ListeningForPeers)

log = logging.getLogger("weft.cluster")

MEASURED_S = 15.0  # seconds of measurements, of which some failed, after which no more are made


class Assembly:
    """All nodes of an engine, or of several replicas, checked. `groups` are the nodes of each replica.

    With `lasting` the head goes on listening, so that nodes may come back after a failure.
    """

    def __init__(self, groups: list[JoinedGroup], gatherer: Gatherer, *, lasting: bool) -> None:
        self.groups, self.lasting = groups, lasting
        self._gatherer = gatherer

    def gather_again(self, number: int, cancelled: Cancelled) -> JoinedGroup:
        """Wait for the nodes of a replica to come back, and check them. Raises ConfigError."""
        return self._gatherer.gather([number], cancelled)[0]

    def dismiss(self, error: BaseException) -> None:
        """Tell all nodes why the engine does not start."""
        for group in self.groups:
            group.dismiss(error)
        self.close()

    def close(self) -> None:
        """Listen for nodes no longer. May be called twice."""
        self._gatherer.listener.close()


class Gatherer:
    """Waits for the nodes of replicas, and checks them."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        listener: JoinListener,
        own: Callable[[], Facts],
        *,
        lasting: bool,
    ) -> None:
        self.listener = listener
        self._config, self._own, self._lasting = config, own, lasting
        self._stored = False

    def gather(self, replicas: Sequence[int], cancelled: Cancelled) -> list[JoinedGroup]:
        """The nodes of these replicas, in order. Raises ConfigError, which they learn of."""
        own = self._own()
        joined = self.listener.wait_for(replicas, cancelled)
        try:
            groups = [self._group(own, number, nodes) for number, nodes in zip(replicas, joined, strict=True)]
        except BaseException as error:
            gone = self._lasting and getattr(error, "code", "") == NOT_ANSWERING
            for node in chain.from_iterable(joined):
                if gone:
                    node.close()  # nodes that are there join again
                else:
                    node.dismiss(*end_of_head(error))
            raise
        if not self._stored:  # later ones are of one replica only
            self._stored = True
            self._store(own, groups)
        return groups

    def _store(self, own: Facts, groups: Sequence[JoinedGroup]) -> None:
        """Keep all nodes, each once, for `weft plan --cluster`."""
        facts = {0: own} | {node.facts.node: node.facts for group in groups for node in group.nodes}
        speeds = list(chain.from_iterable(group.speeds for group in groups))
        store_cluster([facts[number] for number in sorted(facts)], speeds)

    def _group(self, own: Facts, number: int, nodes: Sequence[JoinedNode]) -> JoinedGroup:
        """The nodes of a replica, checked."""
        settings = self.listener.settings
        speeds = check_nodes(own, nodes, settings, preflight.fetch_command(self._config))
        machines = {0: own.host} | {node.facts.node: node.facts.host for node in nodes}
        hosts = [self._part(number, node, machines[node]) for node in settings.groups[number]]
        return JoinedGroup(own, nodes, hosts, speeds, settings.groups[number].start, lasting=self._lasting)

    def _part(self, replica: int, node: int, host: Host) -> Host:
        """The part of a machine that a replica has."""
        settings = self.listener.settings
        number, count = place_on_node(settings.nodes, settings.replicas, replica, node)
        return part_of_node(host, number, count, on_cpu=device_kind(self._config, host) == "cpu")


def assemble(
    config: EngineConfig,
    checkpoint: Checkpoint,
    host: Host,
    environment: Mapping[str, str] = os.environ,
    *,
    lasting: bool = False,
) -> AnyAssembly | None:
    """Wait for the other nodes of the engine, or find them on Ray, and check all; None for an engine of one node.

    With `lasting`, and for several replicas, engines start again after a failure, once their nodes are back.

    Raises ConfigError if this node is not the head, if nodes are missing after `start_timeout`, or if a check fails,
    and PlanError if a Ray cluster is too small.
    """
    if uses_ray(config, host, environment):
        return assemble_on_ray(config, checkpoint, host, environment, lasting=lasting)
    settings = node_settings(config, environment)
    if settings is None:
        return None
    if settings.node:
        raise ConfigError(
            f"node {settings.node} only has ranks: start it with weft serve {config.model} --headless and the same "
            "flags",
            code="not-the-head",
        )
    lasting = lasting or settings.replicas > 1

    def own_facts() -> Facts:
        return gather_facts(settings, probe_host(), config.model, checkpoint, environment)

    own_facts()  # fails before anybody waits
    listener = JoinListener(settings)
    listener.open()
    try:
        gatherer = Gatherer(config, checkpoint, listener, own_facts, lasting=lasting)
        groups = gatherer.gather(range(settings.replicas), lambda: False)
    except BaseException as error:
        listener.close(error)
        raise
    if not lasting:
        listener.close()
    return Assembly(groups, gatherer, lasting=lasting)


AnyAssembly = Assembly | RayAssembly


def check_nodes(own: Facts, nodes: Sequence[JoinedNode], settings: NodeSettings, fetch: str) -> list[Speed]:
    """Check all nodes and the network between them, before any weights are read. Raises ConfigError."""
    for node in nodes:
        asked_s = time.time()
        answer = _ask(node, TellTime(), Time)
        skew = answer.clock_s - (asked_s + time.time()) / 2
        node.facts = msgspec.structs.replace(node.facts, skew_s=skew)
    facts = [own, *(node.facts for node in nodes)]
    problems = preflight.failures(facts, (), fetch)
    speeds: list[Speed] = [] if problems else measure_all(own, nodes, settings)
    problems = problems or preflight.failures(facts, speeds, fetch)
    for failure in problems[1:]:
        log.error("%s", failure)
    if problems:
        more = f" (and {len(problems) - 1} more, above)" if len(problems) > 1 else ""
        raise ConfigError(f"{problems[0]}{more}", code="preflight")
    for line in preflight.summary(facts, speeds):
        log.info("%s", line)
    return speeds


def measure_all(own: Facts, nodes: Sequence[JoinedNode], settings: NodeSettings) -> list[Speed]:
    """Measure the network between every two nodes, one pair after the other.

    Pairs that do not reach each other take CONNECT_S seconds each: after MEASURED_S seconds no further ones are tried.
    """
    listener = listen_for_peers(own.address, settings)
    deadline = time.monotonic() + MEASURED_S
    try:
        ports = {0: (own.address, listener.port)}
        speeds: list[Speed] = []
        for node in nodes:
            for other, (address, port) in ports.items():
                if time.monotonic() > deadline and any(speed.problem for speed in speeds):
                    return speeds
                answer = _ask(node, MeasureTo(other, address, port), Measured)
                # The pair that it was asked for, whichever it names.
                speed = msgspec.structs.replace(answer.speed, first=node.facts.node, second=other)
                if not speed.possible:
                    raise _wrong_answer(node, f"{speed.bytes_per_s:g} B/s in {speed.round_trip_s:g} s")
                speeds.append(speed)
            listening = _ask(node, ListenForPeers(), ListeningForPeers)
            if not 0 < listening.port < 1 << 16:
                raise _wrong_answer(node, f"port {listening.port}")
            ports[node.facts.node] = node.facts.address, listening.port
            back = measure_network(
                0, node.facts.node, node.facts.address, listening.port, settings.key, settings.certificate
            )
            if back.problem:
                speeds.append(back)
    finally:
        listener.close()
    return speeds


def _ask(node: JoinedNode, question: msgspec.Struct, kind: type[Answer]) -> Answer:
    """Ask a node, and wait for its answer, of a `kind`. Raises ConfigError if it is gone, or gives another one."""
    answer = node.ask(question)
    if not isinstance(answer, kind):
        raise _wrong_answer(node, f"a {type(answer).__name__} to a {type(question).__name__}")
    return answer


def _wrong_answer(node: JoinedNode, what: str) -> ConfigError:
    """The error for an answer that a node of this version does not give."""
    return ConfigError(
        f"{preflight.label(node.facts)} answers with {what}; install the same Weft on all nodes", code="wrong-answer"
    )
