"""A node that is not the head: find the head, prove the key, report, and run ranks until the engine ends."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import msgspec

from weft.checkpoint.checkpoint import Checkpoint
from weft.config import EngineConfig
from weft.engine.cluster.facts import gather_facts
from weft.engine.cluster.messages import (
    HEAD_CLOSED,
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
from weft.engine.cluster.settings import NodeSettings
from weft.engine.cluster.speed import PeerListener, listen_for_peers, measure_network
from weft.engine.executors.node_messages import StartRanks
from weft.engine.executors.node_ranks import NodeRanks
from weft.engine.processes.beats import keep_alive
from weft.engine.processes.framing import Channel
from weft.engine.processes.keys import CertificateError, NotWeftError, OtherVersionError, WrongKeyError
from weft.engine.processes.open_sockets import open_sockets
from weft.engine.processes.secure import connect_securely
from weft.errors import Cause, ConfigError, EngineError, ModelError, error_reason
from weft.machine.hardware.host import probe_host
from weft.plan.opening import resolve_checkpoint

log = logging.getLogger("weft.cluster")

AGAIN_S = 0.5  # seconds between two attempts to reach the head
# Seconds without a listener there after which a head that restarts its engines has ended: after a failure, and after an
# end in order.
GONE_S, CLOSED_S = 5.0, 1.0
HEAD_GONE, HEAD_LOST = "head-gone", "head-lost"
REACH_S = 5.0  # seconds for one attempt


def run_node(config: EngineConfig, settings: NodeSettings, environment: Mapping[str, str] = os.environ) -> None:
    """Run the ranks of this node until the head ends.

    Raises ConfigError if the head is not there in time, has another key or dismisses this node, and EngineError if
    the engine fails and does not start again.
    """
    checkpoint: Checkpoint | ModelError
    try:
        checkpoint = resolve_checkpoint(config)
    except ModelError as error:
        checkpoint = error  # which the head reports with the other nodes'
    facts = gather_facts(settings, probe_host(), config.model, checkpoint, environment)
    path = checkpoint.path if isinstance(checkpoint, Checkpoint) else ""
    numbers = [number for number, nodes in enumerate(settings.groups) if settings.node in nodes]
    run_sessions([NodeSession(settings, facts, path, number) for number in numbers])
    log.info("the head has ended the engine")


def run_sessions(sessions: Sequence[NodeSession]) -> None:
    """Run the ranks of several replicas; the first that fails ends all, with its error."""
    with ThreadPoolExecutor(len(sessions), thread_name_prefix="weft-session") as threads:
        ends = [threads.submit(session.run_replica) for session in sessions]
        try:
            for end in as_completed(ends):
                end.result()
        finally:
            for session in sessions:
                session.stop()


class NodeSession:
    """This node's part in one replica: it joins the head, and again whenever the engine starts again."""

    def __init__(self, settings: NodeSettings, facts: Facts, checkpoint: str, replica: int) -> None:
        self._settings, self._facts, self._checkpoint, self._replica = settings, facts, checkpoint, replica
        self._stopped = threading.Event()
        self._channel: Channel[ToJoined] | None = None
        self._failure: Cause | None = None  # of the last engine

    def run_replica(self) -> None:
        """Run the ranks until the head ends. Raises ConfigError and EngineError as `run_node` does."""
        while not self._stopped.is_set():
            try:
                node = self._join()
                cause = node.run_ranks()
            except ConfigError as error:
                if self._failure is None or error.code not in (HEAD_GONE, HEAD_CLOSED, HEAD_LOST):
                    raise
                if error.code == HEAD_LOST:
                    self._stopped.wait(AGAIN_S)
                    continue
                if self._failure.phase == "shutdown":
                    return
                raise EngineError(self._failure) from None
            finally:
                if self._channel:
                    self._channel.close()
            if not node.lasting and cause.phase == "shutdown":
                return
            if not node.lasting:
                raise EngineError(cause)
            self._failure = cause
            if cause.phase != "shutdown":
                log.error("%s; node %d joins again", EngineError(cause), self._settings.node)

    def stop(self) -> None:
        """End the ranks, and join no more. May be called from any thread, and twice."""
        self._stopped.set()
        if channel := self._channel:
            channel.hang_up()

    def _join(self) -> HeadConnection:
        """Connect to the head, and report. Raises ConfigError."""
        settings, ended = self._settings, self._failure
        gone_s = None if ended is None else CLOSED_S if ended.phase == "shutdown" else GONE_S
        connection = connect_to_head(settings, self._stopped, gone_s)
        open_sockets.add(connection)
        keep_alive(connection)
        channel: Channel[ToJoined] = Channel(connection, ToJoined)
        self._channel = channel
        if self._stopped.is_set():
            channel.hang_up()
        if ended is not None:
            self._facts = msgspec.structs.replace(self._facts, host=probe_host(), clock_s=time.time())
        with contextlib.suppress(OSError):  # the head is gone, as the first read will tell
            channel.send(Join(self._facts, self._replica))
        log.info("node %d has joined the head at %s", settings.node, settings.head)
        return HeadConnection(settings, self._facts, self._checkpoint, channel)


def connect_to_head(
    settings: NodeSettings, stopped: threading.Event | None = None, gone_s: float | None = None
) -> socket.socket:
    """Connect to the head, which may start later, and prove the key.

    With `gone_s`, the head counts as ended if nothing has listened at its address for `gone_s` seconds. Raises
    ConfigError.
    """
    stopped = stopped or threading.Event()
    began = refused_since = time.monotonic()
    logged = ""
    while True:
        try:
            return _open_connection(settings)
        except WrongKeyError:
            raise ConfigError(
                f"the head at {settings.head} has another cluster key; copy its key file to this node",
                code="other-cluster-key",
            ) from None
        except (CertificateError, OtherVersionError) as error:
            raise _refusal(settings, error) from None
        except (OSError, NotWeftError) as error:
            reason = error_reason(error)
            if not isinstance(error, ConnectionRefusedError):
                refused_since = time.monotonic()
        now = time.monotonic()
        if now - began > settings.start_timeout_s:
            raise ConfigError(
                f"the head at {settings.head} did not answer within {settings.start_timeout_s:g} s: {reason}; start "
                "node 0 there, check --master-addr and --master-port, and the firewall between them",
                code="head-missing",
            )
        if gone_s is not None and now - refused_since > gone_s:
            raise ConfigError(f"the head at {settings.head} has ended", code=HEAD_GONE)
        if reason != logged and gone_s != CLOSED_S:
            logged = reason
            log.info("waiting for the head at %s: %s", settings.head, reason)
        if stopped.wait(AGAIN_S):
            raise ConfigError("the wait for the head has ended", code=HEAD_GONE)


def _refusal(settings: NodeSettings, error: Exception) -> ConfigError:
    line = f"the head at {settings.head} is refused: {error}"
    if isinstance(error, OtherVersionError):
        return ConfigError(line, code="other-version")
    return ConfigError(line, code="cluster-certificate")


def _open_connection(settings: NodeSettings) -> socket.socket:
    """Connect once, and prove the key. Raises OSError, NotWeftError, WrongKeyError and CertificateError."""
    connection = socket.create_connection((settings.address, settings.port), REACH_S)
    try:
        return connect_securely(connection, settings.key, settings.certificate)
    except BaseException:
        connection.close()
        raise


class HeadConnection:
    """This node's side of a connection to the head. `lasting`: an engine that fails starts again."""

    def __init__(self, settings: NodeSettings, facts: Facts, checkpoint: str, channel: Channel[ToJoined]) -> None:
        self._settings, self._facts, self._checkpoint, self._channel = settings, facts, checkpoint, channel
        self._peers: PeerListener | None = None
        self.lasting = False

    def run_ranks(self) -> Cause:
        """Answer the head's questions, then run the ranks; return the cause of the end."""
        messages = iter(self._channel)
        try:
            start = self._answer_until_start(messages)
        finally:
            if self._peers:
                self._peers.close()
        facts = self._facts
        ranks = NodeRanks(self._channel, facts.node, facts.address, facts.interface, self._checkpoint)
        self.lasting = start.lasting
        return ranks.run_until_end(_chain(start, messages))

    def _answer_until_start(self, messages: Iterator[ToJoined]) -> StartRanks:
        with contextlib.suppress(OSError):  # the head is gone
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
            f"the head at {self._settings.head} has ended before the engine started; see its log", code=HEAD_LOST
        )


def _chain(first: ToJoined, rest: Iterator[ToJoined]) -> Iterator[ToJoined]:
    yield first
    yield from rest
