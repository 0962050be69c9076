"""A node that is not the head: find the head, prove the key, report, and run ranks until the engine ends."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping

from weft.cluster.facts import gather_facts
from weft.cluster.messages import (
    Dismissed,
    Facts,
    Join,
    ListenForPeers,
    ListeningForPeers,
    Measured,
    MeasureTo,
    TellTime,
    Time,
    ToJoined,
)
from weft.cluster.settings import NodeSettings
from weft.cluster.speed import PeerListener, listen_for_peers, measure_network
from weft.config import EngineConfig
from weft.errors import Cause, ConfigError, EngineError, ModelError, error_reason
from weft.executors.beats import keep_alive
from weft.executors.forks import open_sockets
from weft.executors.framing import Channel
from weft.executors.keys import CertificateError, NotWeftError, WrongKeyError
from weft.executors.node_messages import StartRanks
from weft.executors.node_ranks import NodeRanks
from weft.executors.secure import connect_securely
from weft.formats.checkpoint import Checkpoint
from weft.hardware.host import probe_host
from weft.plan.opening import resolve_checkpoint

log = logging.getLogger("weft.cluster")

AGAIN_S = 0.5  # between two attempts to reach the head
REACH_S = 5.0  # seconds for one attempt


def run_node(config: EngineConfig, settings: NodeSettings, environment: Mapping[str, str] = os.environ) -> None:
    """Run the ranks of this node until the head ends.

    Raises ConfigError if the head is not there in time, has another key or dismisses this node, and EngineError if
    the engine fails.
    """
    checkpoint: Checkpoint | ModelError
    try:
        checkpoint = resolve_checkpoint(config)
    except ModelError as error:
        checkpoint = error  # which the head reports with the other nodes'
    facts = gather_facts(settings, probe_host(), config.model, checkpoint, environment)
    connection = connect_to_head(settings)
    open_sockets.add(connection)
    keep_alive(connection)
    channel: Channel[ToJoined] = Channel(connection, ToJoined)
    try:
        channel.send(Join(facts))
        log.info("node %d has joined the head at %s", settings.node, settings.head)
        path = checkpoint.path if isinstance(checkpoint, Checkpoint) else ""
        cause = Node(settings, facts, path, channel).run()
    finally:
        channel.close()
    if cause.phase != "shutdown":
        raise EngineError(cause)
    log.info("the head has ended the engine")


def connect_to_head(settings: NodeSettings) -> socket.socket:
    """Connect to the head, which may start later, and prove the key. Raises ConfigError."""
    deadline = time.monotonic() + settings.start_timeout_s
    said = ""
    while True:
        try:
            return _open_connection(settings)
        except WrongKeyError:
            raise ConfigError(
                f"the head at {settings.head} has another cluster key; copy its key file to this node",
                code="other-cluster-key",
            ) from None
        except CertificateError as error:
            raise ConfigError(f"the head at {settings.head} is refused: {error}", code="cluster-certificate") from None
        except (OSError, NotWeftError) as error:
            reason = error_reason(error)
        if time.monotonic() > deadline:
            raise ConfigError(
                f"the head at {settings.head} did not answer within {settings.start_timeout_s:g} s: {reason}; start "
                "node 0 there, check --master-addr and --master-port, and the firewall between them",
                code="head-missing",
            )
        if reason != said:
            said = reason
            log.info("waiting for the head at %s: %s", settings.head, reason)
        time.sleep(AGAIN_S)


def _open_connection(settings: NodeSettings) -> socket.socket:
    """Connect once, and prove the key. Raises OSError, NotWeftError, WrongKeyError and CertificateError."""
    connection = socket.create_connection((settings.address, settings.port), REACH_S)
    try:
        return connect_securely(connection, settings.key, settings.certificate)
    except BaseException:
        connection.close()
        raise


class Node:
    """This node's side of the connection to the head."""

    def __init__(self, settings: NodeSettings, facts: Facts, checkpoint: str, channel: Channel[ToJoined]) -> None:
        self._settings, self._facts, self._checkpoint, self._channel = settings, facts, checkpoint, channel
        self._peers: PeerListener | None = None

    def run(self) -> Cause:
        """Answer the head's questions, then run the ranks; return the cause of the end."""
        messages = iter(self._channel)
        try:
            start = self._answer_until_start(messages)
        finally:
            if self._peers:
                self._peers.close()
        ranks = NodeRanks(self._channel, self._settings.node, self._facts.interface, self._checkpoint)
        return ranks.run(_chain(start, messages))

    def _answer_until_start(self, messages: Iterator[ToJoined]) -> StartRanks:
        for message in messages:
            match message:
                case TellTime():
                    self._channel.send(Time(time.time()))
                case ListenForPeers():
                    self._peers = self._peers or listen_for_peers(self._facts.address, self._settings)
                    self._channel.send(ListeningForPeers(self._peers.port))
                case MeasureTo(node, address, port):
                    own = self._settings
                    speed = measure_network(own.node, node, address, port, own.key, own.certificate)
                    self._channel.send(Measured(speed))
                case Dismissed(text, code):
                    raise ConfigError(text, code=code)
                case StartRanks():
                    return message
        raise ConfigError(
            f"the head at {self._settings.head} has ended before the engine started; see its log", code="head-lost"
        )


def _chain(first: ToJoined, rest: Iterator[ToJoined]) -> Iterator[ToJoined]:
    yield first
    yield from rest
