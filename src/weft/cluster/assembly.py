"""The head's side: wait for all nodes, check them, and hand their connections to the executor."""

from __future__ import annotations

import logging
import os
import select
import shlex
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import chain

import msgspec

from weft.cluster import preflight
from weft.cluster.facts import gather_facts
from weft.cluster.groups import Cancelled, JoinedGroup, end_of_head
from weft.cluster.measured import store_cluster
from weft.cluster.messages import (
    HEAD_CLOSED,
    Dismissed,
    Facts,
    FromJoined,
    Join,
    ListenForPeers,
    ListeningForPeers,
    Measured,
    MeasureTo,
    Speed,
    TellTime,
    Time,
)
from weft.cluster.ray_cluster import RayAssembly, assemble_on_ray, uses_ray
from weft.cluster.settings import NodeSettings, node_settings
from weft.cluster.speed import listen_for_peers, measure_network
from weft.config import EngineConfig
from weft.errors import ConfigError, error_reason
from weft.executors.beats import keep_alive
from weft.executors.forks import open_sockets
from weft.executors.framing import Channel, FrameError
from weft.executors.keys import CertificateError, NotWeftError, WrongKeyError
from weft.executors.secure import Greeter, accept_securely
from weft.formats.checkpoint import Checkpoint
from weft.hardware.addresses import check_private, interface_of
from weft.hardware.host import Host, probe_host
from weft.plan.devices import device_kind
from weft.plan.nodes import part_of_node, place_on_node

log = logging.getLogger("weft.cluster")

ASK_S = 25.0  # seconds for an answer of a node that has joined
LOOK_S = 0.5  # between two looks at whether the wait is still wanted
SAY_S = 10.0  # between two lines about nodes that are missing
MEASURED_S = 15.0  # seconds of measurements, of which some failed, after which no more are made
NOT_ANSWERING = "node-not-answering"


class JoinedNode:
    """A node that has proved the key and reported its facts."""

    def __init__(self, connection: socket.socket) -> None:
        keep_alive(connection)
        open_sockets.add(connection)
        self.connection = connection
        self._channel: Channel[FromJoined] = Channel(connection, FromJoined)
        self._messages = iter(self._channel)
        connection.settimeout(ASK_S)
        first = self._receive()
        if not isinstance(first, Join):
            raise NotWeftError("its first message is not a report")
        self.facts, self.replica = first.facts, first.replica

    def ask(self, question: msgspec.Struct) -> FromJoined:
        """Ask, and wait for the answer. Raises ConfigError if the node is gone."""
        try:
            self.connection.settimeout(ASK_S)
            self._channel.send(question)
            return self._receive()
        except (OSError, NotWeftError) as error:
            raise ConfigError(
                f"{preflight.label(self.facts)} does not answer: {error_reason(error)}; see its log",
                code=NOT_ANSWERING,
            ) from None

    def dismiss(self, message: str, code: str) -> None:
        """Tell the node that the engine does not start, and close the connection."""
        with suppress(OSError):
            self._channel.send(Dismissed(message, code))
        self._channel.close()

    @property
    def present(self) -> bool:
        """False if the node has closed its end; nothing is read."""
        readable = select.poll()
        readable.register(self.connection, select.POLLIN)
        if not readable.poll(0):
            return True
        try:
            return self.connection.recv(1, socket.MSG_PEEK) != b""
        except OSError:
            return False

    def close(self) -> None:
        """Close the connection without a reason: a node that has run joins again."""
        self._channel.close()

    def _receive(self) -> FromJoined:
        try:
            message = next(self._messages, None)
        except TimeoutError:
            raise NotWeftError(f"nothing came from it within {ASK_S:g} s") from None
        if message is None:
            raise NotWeftError("it closed the connection")
        return message


class Assembly:
    """All nodes of an engine, or of several replicas, checked. `groups` are those of each replica.

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
        self._gatherer.door.close()


class Gatherer:
    """Waits for the nodes of replicas, and checks them."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, door: Door, own: Callable[[], Facts], *, lasting: bool
    ) -> None:
        self.door = door
        self._config, self._own, self._lasting = config, own, lasting
        self._stored = False

    def gather(self, replicas: Sequence[int], cancelled: Cancelled) -> list[JoinedGroup]:
        """The nodes of these replicas, in order. Raises ConfigError, which they learn of."""
        own = self._own()
        joined = self.door.wait_for(replicas, cancelled)
        try:
            groups = [self._group(own, number, nodes) for number, nodes in zip(replicas, joined, strict=True)]
        except BaseException as error:
            gone = self._lasting and getattr(error, "code", "") == NOT_ANSWERING
            for node in chain.from_iterable(joined):
                if gone:
                    node.close()  # those that are there join again
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
        settings = self.door.settings
        speeds = check_nodes(own, nodes, settings, fetch_command(self._config))
        machines = {0: own.host} | {node.facts.node: node.facts.host for node in nodes}
        hosts = [self._part(number, node, machines[node]) for node in settings.groups[number]]
        return JoinedGroup(own, nodes, hosts, speeds, settings.groups[number].start, lasting=self._lasting)

    def _part(self, replica: int, node: int, host: Host) -> Host:
        """The part of a machine that a replica has."""
        settings = self.door.settings
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
    door = Door(settings)
    door.open()
    try:
        gatherer = Gatherer(config, checkpoint, door, own_facts, lasting=lasting)
        groups = gatherer.gather(range(settings.replicas), lambda: False)
    except BaseException as error:
        door.close(error)
        raise
    if not lasting:
        door.close()
    return Assembly(groups, gatherer, lasting=lasting)


AnyAssembly = Assembly | RayAssembly


def _address_problem(address: str, allow_public: bool) -> str:
    """Problem with the address that a node has chosen; "" if there is none."""
    try:
        check_private(address, allow_public)
    except ConfigError as error:
        return str(error)
    return ""


def _flag_problem(facts: Facts, replica: int, settings: NodeSettings) -> str:
    """Flags with which a node does not fit; "" if it does."""
    if facts.nodes != settings.nodes:
        return f"it has --nnodes {facts.nodes}, and node 0 has {settings.nodes}"
    if not 0 < facts.node < settings.nodes:
        return f"its --node-rank {facts.node} is not one of 1 to {settings.nodes - 1}"
    if facts.replicas != settings.replicas:
        return f"it has --data-parallel-size {facts.replicas}, and node 0 has {settings.replicas}"
    if not 0 <= replica < settings.replicas or facts.node not in settings.groups[replica]:
        return f"it has no ranks of replica {replica}"
    return ""


def fetch_command(config: EngineConfig) -> str:
    """Command that fetches the model on another node."""
    if os.path.exists(config.model):
        path = os.path.abspath(config.model)
        return f"rsync -a NODE0:{shlex.quote(path)} {shlex.quote(os.path.dirname(path))}/"
    return f"weft pull {shlex.quote(config.model)}"


class Door:
    """The head's port at which the other nodes join, once for each replica that has ranks there.

    A context manager: nobody can connect afterwards.
    """

    def __init__(self, settings: NodeSettings) -> None:
        """Raises ConfigError if the address is not this machine's, or the port is taken."""
        self.settings = settings
        interface_of(settings.address)
        family = socket.AF_INET6 if ":" in settings.address else socket.AF_INET
        try:
            listener = socket.create_server((settings.address, settings.port), family=family)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {settings.head} for the other nodes: {error_reason(error)}; give all nodes another "
                "--master-port",
                code="cannot-listen",
            ) from None
        self._greeter = Greeter(listener, self._greet, "weft-door")
        self._changed = threading.Condition()  # guards the next
        self._joined: dict[tuple[int, int], JoinedNode] = {}  # by replica and node, until their engine starts
        self._wanted: set[tuple[int, int]] = set()
        self._closed = False

    def __enter__(self) -> Door:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self) -> None:
        self._greeter.start()

    def close(self, error: BaseException | None = None) -> None:
        """Let nobody in any more; tell those that wait here about the error. May be called twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._greeter.close()
        reason = end_of_head(error) if error else ("node 0 no longer waits for nodes", HEAD_CLOSED)
        for node in self._joined.values():
            node.dismiss(*reason)
        self._joined.clear()

    def wait_for(self, replicas: Sequence[int], cancelled: Cancelled = lambda: False) -> list[list[JoinedNode]]:
        """Return the other nodes of each of these replicas, in their order.

        Raises ConfigError if some have not come in time, or if the wait is cancelled.
        """
        settings = self.settings
        wanted = {(number, node) for number in replicas for node in settings.groups[number] if node}
        deadline, say_at = time.monotonic() + settings.start_timeout_s, time.monotonic() + SAY_S
        with self._changed:
            self._wanted |= wanted
            log.info("waiting at %s for %d other nodes", settings.head, len({node for _, node in wanted}))
            try:
                while not self._are_there(wanted):
                    if cancelled():
                        raise ConfigError("the wait for the other nodes has ended", code=HEAD_CLOSED)
                    if time.monotonic() >= deadline:
                        raise self._missing(wanted)
                    if time.monotonic() >= say_at:
                        say_at = time.monotonic() + SAY_S
                        log.info("still missing: %s", self._numbers(wanted))
                    self._changed.wait(LOOK_S)
                taken = {key: self._joined.pop(key) for key in wanted}
            finally:
                self._wanted -= wanted
        return [[taken[number, node] for node in settings.groups[number] if node] for number in replicas]

    def _are_there(self, wanted: Set[tuple[int, int]]) -> bool:
        """Return True if all have joined; forget those that have left."""
        for key in [key for key in wanted if key in self._joined and not self._joined[key].present]:
            self._joined.pop(key).close()
        return wanted <= self._joined.keys()

    def _missing(self, wanted: Set[tuple[int, int]]) -> ConfigError:
        settings = self.settings
        first = min(node for number, node in wanted if (number, node) not in self._joined)
        return ConfigError(
            f"{self._numbers(wanted)} did not come to {settings.head} within {settings.start_timeout_s:g} s; start "
            f"there: weft serve MODEL --headless --nnodes {settings.nodes} --node-rank {first} --master-addr "
            f"{settings.address} --master-port {settings.port}, or raise --start-timeout",
            code="nodes-missing",
        )

    def _numbers(self, wanted: Set[tuple[int, int]]) -> str:
        """The nodes that are missing, in words; "" if there are none."""
        missing = sorted({node for number, node in wanted if (number, node) not in self._joined})
        return f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else ""

    def _admit(self, replica: int, node: JoinedNode) -> None:
        """Let a node that has joined wait for its engine, or dismiss it."""
        facts, settings = node.facts, self.settings
        reason = _address_problem(facts.address, settings.allow_public) or _flag_problem(facts, replica, settings)
        with self._changed:
            before = self._joined.get((replica, facts.node))
            if not reason and before and before.present:
                reason = f"{preflight.label(before.facts)} has joined with the same --node-rank"
            if not reason:
                if before:
                    before.close()
                self._joined[replica, facts.node] = node
                self._log_progress(facts)
                self._changed.notify_all()
                return
        log.error("%s is refused: %s", preflight.label(facts), reason)
        node.dismiss(f"node 0 refuses this node: {reason}; start it with the flags of the others", "node-refused")

    def _log_progress(self, facts: Facts) -> None:
        """Log which nodes have come, once all connections of this one are there."""
        if any(number == facts.node and key not in self._joined for key in self._wanted for number in key[1:]):
            return
        wanted = {node for _, node in self._wanted}
        left = self._numbers(self._wanted)
        there = len(wanted) + 1 - len({node for number, node in self._wanted if (number, node) not in self._joined})
        progress = f": {there} of {len(wanted) + 1}" if wanted else ""
        log.info("%s has joined%s%s", preflight.label(facts), progress, f"; missing: {left}" if left else "")

    def _greet(self, connection: socket.socket, peer: str) -> Callable[[], None] | None:
        """Have the other side prove the key, and read its report."""
        settings = self.settings
        secured = connection
        try:
            check_private(peer, settings.allow_public)
            secured = accept_securely(connection, settings.key, settings.certificate)
            node = JoinedNode(secured)
            return lambda: self._admit(node.replica, node)
        except WrongKeyError:
            log.error("%s has another cluster key: copy the key file of node 0 to it", peer)
        except CertificateError as error:
            log.error("%s is refused: %s", peer, error)
        except (NotWeftError, FrameError, ConfigError, OSError) as error:
            log.warning("a connection from %s is refused: %s", peer, error)
        secured.close()
        connection.close()
        return None


def check_nodes(own: Facts, nodes: Sequence[JoinedNode], settings: NodeSettings, fetch: str) -> list[Speed]:
    """Check all nodes and the network between them, before any weights are read. Raises ConfigError."""
    for node in nodes:
        asked = time.time()
        answer = node.ask(TellTime())
        assert isinstance(answer, Time)
        skew = answer.clock_s - (asked + time.time()) / 2
        node.facts = msgspec.structs.replace(node.facts, skew_s=skew)
    facts = [own, *(node.facts for node in nodes)]
    found = preflight.failures(facts, (), fetch)
    speeds: list[Speed] = [] if found else measure_all(own, nodes, settings)
    found = found or preflight.failures(facts, speeds, fetch)
    for failure in found[1:]:
        log.error("%s", failure)
    if found:
        more = f" (and {len(found) - 1} more, above)" if len(found) > 1 else ""
        raise ConfigError(f"{found[0]}{more}", code="preflight")
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
                answer = node.ask(MeasureTo(other, address, port))
                assert isinstance(answer, Measured)
                speeds.append(answer.speed)
            listening = node.ask(ListenForPeers())
            assert isinstance(listening, ListeningForPeers)
            ports[node.facts.node] = node.facts.address, listening.port
            back = measure_network(
                0, node.facts.node, node.facts.address, listening.port, settings.key, settings.certificate
            )
            if back.problem:
                speeds.append(back)
    finally:
        listener.close()
    return speeds
