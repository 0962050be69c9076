"""JoinedNode: on the head, a node that has joined the engine, and the messages to it."""

from __future__ import annotations

import select
import socket
import time
from contextlib import suppress

import msgspec

from weft._version import __version__
from weft.engine.cluster import preflight
from weft.engine.cluster.messages import Dismissed, Facts, FromJoined, Joining, Version
from weft.engine.processes.beats import keep_alive
from weft.engine.processes.framing import Channel, FrameError
from weft.engine.processes.keys import NotWeftError
from weft.engine.processes.open_sockets import open_sockets
from weft.errors import ConfigError, error_reason, printable

ASK_S = 25.0  # seconds for an answer of a node that has joined
JOIN_FRAME = 16 << 20  # bytes of a message before the ranks start: a report of a large machine has some 100 kB
NOT_ANSWERING = "node-not-answering"


class JoinedNode:
    """A node that has proved the key and reported its facts."""

    def __init__(self, connection: socket.socket) -> None:
        keep_alive(connection)
        open_sockets.add(connection)
        self.connection = connection
        self._channel: Channel[FromJoined] = Channel(connection, FromJoined, most=JOIN_FRAME)
        self._messages = iter(self._channel)
        connection.settimeout(ASK_S)
        first = self._receive()
        if not isinstance(first, Joining):
            raise NotWeftError("its first message is not a report")
        self.facts, self.replica = self._read_facts(first.facts), first.replica

    def ask(self, question: msgspec.Struct) -> FromJoined:
        """Ask, and wait for the answer. Raises ConfigError if the node is gone."""
        try:
            self.connection.settimeout(ASK_S)
            self._channel.send(question)
            return self._receive()
        except (OSError, NotWeftError, FrameError) as error:
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

    def _read_facts(self, report: msgspec.Raw) -> Facts:
        """Read a node's report. Raises NotWeftError for a node of another version, which is told so."""
        try:
            return msgspec.msgpack.decode(report, type=Facts)
        except msgspec.DecodeError as error:
            reason = f"its report cannot be read: {error}"
            with suppress(msgspec.DecodeError):
                theirs = msgspec.msgpack.decode(report, type=Version)
                has = f"node {theirs.node} has Weft {printable(theirs.weft)}, and node 0 has {__version__}"
                reason = f"{has}; install the same on both"
            self.dismiss(f"node 0 refuses this node: {reason}", "other-version")
            raise NotWeftError(reason) from None

    def _receive(self) -> FromJoined:
        """Receive a message, which has ASK_S seconds in all, however slowly it comes."""
        self._channel.deadline_s = time.monotonic() + ASK_S
        try:
            message = next(self._messages, None)
        except TimeoutError:
            raise NotWeftError(f"nothing came from it within {ASK_S:g} s") from None
        if message is None:
            raise NotWeftError("it closed the connection")
        return message
