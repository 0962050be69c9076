"""The head's side: wait for all nodes, check them, and hand their connections to the executor."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

import msgspec

from weft.cluster import preflight
from weft.cluster.facts import gather_facts
from weft.cluster.measured import store_cluster
from weft.cluster.messages import (
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
from weft.errors import ConfigError, WeftError, error_reason
from weft.executors.beats import keep_alive
from weft.executors.forks import open_sockets
from weft.executors.framing import Channel, FrameError
from weft.executors.keys import CertificateError, NotWeftError, WrongKeyError
from weft.executors.node_messages import NodeSocket, OtherNodes
from weft.executors.secure import Greeter, accept_securely
from weft.formats.checkpoint import Checkpoint
from weft.hardware.addresses import check_private, interface_of
from weft.hardware.host import Host

log = logging.getLogger("weft.cluster")

ASK_S = 25.0  # seconds for an answer of a node that has joined
SAY_S = 10.0  # between two lines about nodes that are missing
MEASURED_S = 15.0  # seconds of measurements, of which some failed, after which no more are made


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
        self.facts = first.facts

    def ask(self, question: msgspec.Struct) -> FromJoined:
        """Ask, and wait for the answer. Raises ConfigError if the node is gone."""
        try:
            self.connection.settimeout(ASK_S)
            self._channel.send(question)
            return self._receive()
        except (OSError, NotWeftError) as error:
            raise ConfigError(
                f"{preflight.label(self.facts)} does not answer: {error_reason(error)}; see its log",
                code="node-not-answering",
            ) from None

    def dismiss(self, message: str, code: str) -> None:
        """Tell the node that the engine does not start, and close the connection."""
        with suppress(OSError):
            self._channel.send(Dismissed(message, code))
        self._channel.close()

    def _receive(self) -> FromJoined:
        message = next(self._messages, None)
        if message is None:
            raise NotWeftError("it closed the connection")
        return message


class Assembly:
    """All nodes of an engine, checked. `hosts` are their machines, the head's first."""

    def __init__(self, own: Facts, nodes: Sequence[JoinedNode], speeds: Sequence[Speed]) -> None:
        self._own, self._nodes = own, nodes
        self.speeds = speeds

    @property
    def hosts(self) -> list[Host]:
        return [self._own.host, *(node.facts.host for node in self._nodes)]

    @property
    def rooms(self) -> list[int | None]:
        """Number of ranks that each node has room for, None for any: one per GPU."""
        return [len(host.gpus) or None for host in self.hosts]

    @property
    def round_trip_s(self) -> float:
        """The longest time of a small message between two nodes and back."""
        return max(speed.round_trip_s for speed in self.speeds)

    def dismiss(self, error: BaseException) -> None:
        """Tell all nodes why the engine does not start."""
        code = error.code if isinstance(error, WeftError) else "head-failed"
        for node in self._nodes:
            node.dismiss(f"node 0 has ended: {str(error) or type(error).__name__}", code)

    def hand_over(self) -> OtherNodes:
        """Give the connections, as descriptors, to the executor. To be called once."""
        nodes = []
        for node in self._nodes:
            node.connection.settimeout(None)
            about = NodeSocket(node.facts.node, node.facts.host.hostname, node.facts.address, node.connection.detach())
            nodes.append(about)
        return OtherNodes(self._own.address, self._own.interface, tuple(nodes))


def assemble(
    config: EngineConfig, checkpoint: Checkpoint, host: Host, environment: Mapping[str, str] = os.environ
) -> AnyAssembly | None:
    """Wait for the other nodes of the engine, or find them on Ray, and check all; None for an engine of one node.

    Raises ConfigError if this node is not the head, if nodes are missing after `start_timeout`, or if a check fails,
    and PlanError if a Ray cluster is too small.
    """
    if uses_ray(config, host, environment):
        return assemble_on_ray(config, checkpoint, host, environment)
    settings = node_settings(config, environment)
    if settings is None:
        return None
    if settings.node:
        raise ConfigError(
            f"node {settings.node} only has ranks: start it with weft serve {config.model} --headless and the same "
            "flags",
            code="not-the-head",
        )
    own = gather_facts(settings, host, config.model, checkpoint, environment)
    with Door(settings) as door:
        nodes = door.wait_for_all()
    try:
        speeds = check_nodes(own, nodes, settings, fetch_command(config))
    except BaseException as error:
        Assembly(own, nodes, ()).dismiss(error)
        raise
    return Assembly(own, nodes, speeds)


AnyAssembly = Assembly | RayAssembly


def _address_problem(address: str, allow_public: bool) -> str:
    """Problem with the address that a node has chosen; "" if there is none."""
    try:
        check_private(address, allow_public)
    except ConfigError as error:
        return str(error)
    return ""


def fetch_command(config: EngineConfig) -> str:
    """Command that fetches the model on another node."""
    if os.path.exists(config.model):
        path = os.path.abspath(config.model)
        return f"rsync -a NODE0:{shlex.quote(path)} {shlex.quote(os.path.dirname(path))}/"
    return f"weft pull {shlex.quote(config.model)}"


class Door:
    """The head's port at which the other nodes join. A context manager: nobody can connect afterwards."""

    def __init__(self, settings: NodeSettings) -> None:
        """Raises ConfigError if the address is not this machine's, or the port is taken."""
        self._settings = settings
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
        self._came: SimpleQueue[JoinedNode] = SimpleQueue()
        self._greeter = Greeter(listener, self._greet, "weft-door")

    def __enter__(self) -> Door:
        self._greeter.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._greeter.close()
        with suppress(Empty):
            while True:
                self._came.get_nowait().dismiss("node 0 no longer waits for nodes", "node-refused")

    def wait_for_all(self) -> list[JoinedNode]:
        """Return the other nodes, in their order. Raises ConfigError if some have not come in time."""
        settings = self._settings
        joined: dict[int, JoinedNode] = {}
        deadline, say_at = time.monotonic() + settings.start_timeout_s, time.monotonic() + SAY_S
        log.info("waiting at %s for %d other nodes", settings.head, settings.nodes - 1)
        try:
            while len(joined) < settings.nodes - 1:
                now = time.monotonic()
                if now >= deadline:
                    raise self._missing(joined)
                if now >= say_at:
                    say_at = now + SAY_S
                    log.info("still missing: %s", _numbers(settings, joined))
                with suppress(Empty):
                    self._admit(self._came.get(timeout=min(deadline, say_at) - now), joined)
        except BaseException as error:
            for node in joined.values():
                node.dismiss(str(error) or type(error).__name__, getattr(error, "code", "head-failed"))
            raise
        return [joined[number] for number in sorted(joined)]

    def _missing(self, joined: Mapping[int, JoinedNode]) -> ConfigError:
        settings, missing = self._settings, _numbers(self._settings, joined)
        first = next(number for number in range(1, settings.nodes) if number not in joined)
        return ConfigError(
            f"{missing} did not come to {settings.head} within {settings.start_timeout_s:g} s; start there: weft serve "
            f"MODEL --headless --nnodes {settings.nodes} --node-rank {first} --master-addr {settings.address} "
            f"--master-port {settings.port}, or raise --start-timeout",
            code="nodes-missing",
        )

    def _admit(self, node: JoinedNode, joined: dict[int, JoinedNode]) -> None:
        facts, settings = node.facts, self._settings
        reason = _address_problem(facts.address, settings.allow_public)
        if facts.nodes != settings.nodes:
            reason = f"it has --nnodes {facts.nodes}, and node 0 has {settings.nodes}"
        elif not 0 < facts.node < settings.nodes:
            reason = f"its --node-rank {facts.node} is not one of 1 to {settings.nodes - 1}"
        elif facts.node in joined:
            reason = f"{preflight.label(joined[facts.node].facts)} has joined with the same --node-rank"
        if reason:
            log.error("%s is refused: %s", preflight.label(facts), reason)
            node.dismiss(f"node 0 refuses this node: {reason}; start it with the flags of the others", "node-refused")
            return
        joined[facts.node] = node
        left = _numbers(settings, joined)
        log.info(
            "%s has joined: %d of %d%s",
            preflight.label(facts),
            len(joined) + 1,
            settings.nodes,
            f"; missing: {left}" if left else "",
        )

    def _greet(self, connection: socket.socket, peer: str) -> Callable[[], None] | None:
        """Have the other side prove the key, and read its report."""
        settings = self._settings
        secured = connection
        try:
            check_private(peer, settings.allow_public)
            secured = accept_securely(connection, settings.key, settings.certificate)
            node = JoinedNode(secured)
            return lambda: self._came.put(node)
        except WrongKeyError:
            log.error("%s has another cluster key: copy the key file of node 0 to it", peer)
        except CertificateError as error:
            log.error("%s is refused: %s", peer, error)
        except (NotWeftError, FrameError, ConfigError, OSError) as error:
            log.warning("a connection from %s is refused: %s", peer, error)
        secured.close()
        connection.close()
        return None


def _numbers(settings: NodeSettings, joined: Mapping[int, JoinedNode]) -> str:
    missing = [str(number) for number in range(1, settings.nodes) if number not in joined]
    return f"node{'s' * (len(missing) > 1)} {', '.join(missing)}" if missing else ""


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
    store_cluster(facts, speeds)
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
