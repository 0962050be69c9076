"""JoinListener: on the head, takes the nodes that join the engine, each proved by the cluster key."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence, Set

from weft.engine.cluster import preflight
from weft.engine.cluster.groups import Cancelled, end_of_head
from weft.engine.cluster.joined_node import JoinedNode
from weft.engine.cluster.messages import HEAD_CLOSED, Facts
from weft.engine.cluster.settings import NodeSettings
from weft.engine.processes.framing import FrameError
from weft.engine.processes.keys import CertificateError, NotWeftError, WrongKeyError
from weft.engine.processes.secure import Complaints, Greeter, accept_securely
from weft.errors import ConfigError, error_reason
from weft.formatting import counted
from weft.logs import event_fields
from weft.machine.hardware.addresses import check_private, interface_of

log = logging.getLogger("weft.cluster")

LOOK_S = 0.5  # seconds between two looks at whether the wait is still wanted
SAY_S = 10.0  # seconds between two lines about nodes that are missing


class JoinListener:
    """The head's port at which the other nodes join, once for each replica that has ranks there.

    A context manager: it accepts no connections afterwards.
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
        self._greeter = Greeter(listener, self._greet, "weft-join")
        self._complaints = Complaints()
        self._changed = threading.Condition()  # guards the next
        self._joined: dict[tuple[int, int], JoinedNode] = {}  # by replica and node, until their engine starts
        self._wanted: set[tuple[int, int]] = set()
        self._closed = False

    def __enter__(self) -> JoinListener:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self) -> None:
        self._greeter.start()

    def close(self, error: BaseException | None = None) -> None:
        """Accept no more connections; report the error to clients that wait here. May be called twice."""
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
            log.info("waiting at %s for %s", settings.head, counted(len({node for _, node in wanted}), "other node"))
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
        """Return True if all have joined; forget nodes that have left."""
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
        joined = len(wanted) + 1 - len({node for number, node in self._wanted if (number, node) not in self._joined})
        progress = f": {joined} of {len(wanted) + 1}" if wanted else ""
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
            self._complain(logging.ERROR, peer, f"{peer} has another cluster key: copy the key file of node 0 to it")
        except CertificateError as error:
            self._complain(logging.ERROR, peer, f"{peer} is refused: {error}")
        except (NotWeftError, FrameError, ConfigError, OSError) as error:
            self._complain(logging.WARNING, peer, f"a connection from {peer} is refused: {error}")
        secured.close()
        connection.close()
        return None

    def _complain(self, level: int, peer: str, line: str) -> None:
        if self._complaints.is_due(peer):
            log.log(level, "%s", line, extra=event_fields("peer-refused", peer=peer))


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
