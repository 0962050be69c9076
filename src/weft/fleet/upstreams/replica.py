"""UpstreamReplica: one upstream with its connections, its health and its models."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from typing import Any

from weft.engine.replicas.suspects import Trial
from weft.errors import error_reason
from weft.fleet.upstreams.breaker import Breaker
from weft.fleet.upstreams.config import UpstreamConfig, parse_url, upstream_key
from weft.fleet.upstreams.paths import is_repeatable
from weft.fleet.upstreams.upstream import ResponseHead, UpstreamConnection, UpstreamError

log = logging.getLogger("weft.gateway")

IDLE_CONNECTIONS = 256  # idle connections that are kept open
SEND_AGAIN_S = 1.0  # a kept connection that closes without a response byte later than this may have carried the request


class UpstreamReplica:
    """One upstream.

    - `connections`: number of unfinished requests. `unanswered`: requests without the first token of their response, or
      without its first byte if the gateway reads no tokens. `movable`: requests that another replica can take over.
    - `draining`: it gets no new requests.
    - `listed`: the rows of its /v1/models by name; None before they are known. `asked`: it has responded to the query
      for its models, possibly with an error.
    - `is_weft`: it sends token ids and continues answers.
    - `proved`: it has answered since it last died, so that its next death is not its own fault.
    """

    def __init__(self, config: UpstreamConfig) -> None:
        self.config = config
        self.url = parse_url(config.url)
        self.name = str(self.url)
        self.path, self.authority = self.url.path.encode(), self.url.authority.encode()  # for requests
        self.weight = config.weight
        self.key = upstream_key(config, os.environ)
        self.breaker = Breaker()
        self.connections = 0
        self.unanswered: set[Attempt] = set()
        self.movable: set[Attempt] = set()
        self.draining = False
        self.overflow = config.overflow
        self.proved = True
        self._died_s = float("-inf")
        self._died_proved = True
        self.prefill_tok_s: float | None = None  # predicted by the replica's planner
        self.listed: dict[str, dict[str, Any]] | None = None
        self.asked = False
        self._aliases = config.aliases
        self._tls = ssl.create_default_context() if self.url.scheme == "https" else None
        self._idle: list[UpstreamConnection] = []
        self._closed = False

    # Models

    @property
    def models(self) -> dict[str, str] | None:
        """The upstream's name of each model of the gateway; None if any name may be sent to it."""
        if self._aliases is not None:
            return self._aliases
        return None if self.listed is None else {name: name for name in self.listed}

    @property
    def is_weft(self) -> bool:
        return any(row.get("owned_by") == "weft" for row in (self.listed or {}).values())

    def predicted_ttft_s(self, tokens: int) -> float | None:
        """Predicted seconds to the first token of a prompt of `tokens` tokens, after the waiting prompts.

        None while the replica's speed is unknown.
        """
        if self.prefill_tok_s is None:
            return None
        return (tokens + sum(attempt.tokens for attempt in self.unanswered)) / self.prefill_tok_s

    def serves(self, model: str) -> bool:
        """Return True if the model is or may be served here. Every replica serves "", a request without a model."""
        names = self._aliases if self._aliases is not None else self.listed
        return not model or names is None or model in names

    def covered_by(self, covered: set[str] | None) -> bool:
        """Return True if the models here are all among `covered`; None stands for any model."""
        return covered is None or (self.models is not None and self.models.keys() <= covered)

    def own_name(self, model: str) -> str:
        """This upstream's name of a model of the gateway."""
        return self._aliases.get(model, model) if self._aliases else model

    # Connections

    def idle_connection(self) -> UpstreamConnection | None:
        """The idle connection that was used last; None without idle connections.

        Overflow upstreams keep none: a request that is sent again after a kept connection closed might be billed twice.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
            connection.close()
        return None

    async def connect(self, limit_s: float) -> UpstreamConnection:
        """Open a connection. Raises UpstreamError."""
        try:
            async with asyncio.timeout(limit_s or None):
                return await self._open()
        except TimeoutError:
            raise UpstreamError(
                f"no connection to it within {limit_s:g} s", code="connect-timeout", sent=False
            ) from None
        except OSError as error:
            raise UpstreamError(
                f"cannot connect to it: {error_reason(error)}",
                code="cannot-connect",
                sent=False,
                public="it cannot be reached",
            ) from None

    async def _open(self) -> UpstreamConnection:
        """Open a connection. Raises OSError."""
        loop, url = asyncio.get_running_loop(), self.url
        _, connection = await loop.create_connection(UpstreamConnection, url.host, url.port, ssl=self._tls)
        return connection

    def give_back(self, connection: UpstreamConnection) -> None:
        """Keep a connection for later, or close it."""
        keeps = not self.overflow and not self._closed
        if keeps and connection.reusable and len(self._idle) < IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.close()

    def note_death(self, began_s: float, now: float) -> tuple[bool, bool]:
        """Note that the replica died with a request that it had since `began_s`.

        Return whether this is the first request that reports this death, and whether the replica was `proved` before.
        """
        is_new = began_s > self._died_s
        if is_new:
            self._died_s, self._died_proved, self.proved = now, self.proved, False
        return is_new, self._died_proved

    def give_up_movable(self, error: UpstreamError) -> None:
        """Move requests to other replicas, as far as these can take them over."""
        for attempt in tuple(self.movable):
            attempt.cancel(error)

    def close(self) -> None:
        """Close the idle connections, and connections that become idle later."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()


def _do_nothing() -> None:
    """Stand in for `Attempt.on_answer`."""


class Attempt:
    """One request at one replica, until `close`.

    `counted`: it is a client's request, not the gateway's. `probes`: it may be the probe of an open breaker. `began_s`
    and `trial`: see `Losses`. `on_answer` is called when the answer begins, or the request ends without an answer.
    `resent`: it was sent twice, since a kept connection closed.
    """

    began_s = 0.0
    trial: Trial | None = None
    resent = False

    def __init__(
        self, replica: UpstreamReplica, *, counted: bool = True, probes: bool = False, tokens: int = 0
    ) -> None:
        self.replica, self.tokens = replica, tokens
        self._probe = probes and replica.breaker.begin()
        self._connection: UpstreamConnection | None = None
        self._failure: UpstreamError | None = None
        self._closed = self._failed = False
        self._counted = counted
        self.on_answer: Callable[[], None] = _do_nothing
        if counted:
            replica.connections += 1
            replica.unanswered.add(self)
            replica.movable.add(self)

    async def request(
        self, method: bytes, head: bytes, body: bytes, *, connect_s: float, first_byte_s: float
    ) -> ResponseHead:
        """Send the request; return the head of the response. Raises UpstreamError.

        An idle connection that turns out to be closed is replaced by a new connection. If it closes later, the request
        is not sent again: the replica may have begun to work on it. A request that is not safe to repeat gets no idle
        connection.
        """
        connection = self.replica.idle_connection() if self._may_be_resent(method, head) else None
        if connection is not None:
            self._connection = connection
            loop = asyncio.get_running_loop()
            began = loop.time()
            try:
                return await connection.request(method, head, body, first_byte_s)
            except UpstreamError as error:
                if self._failure or connection.received or error.stalled or loop.time() - began > SEND_AGAIN_S:
                    raise
                connection = await self._connect_again(error, connect_s)
        else:
            connection = await self.replica.connect(connect_s)
        if self._failure is not None:
            connection.close()
            raise self._failure
        self._connection = connection
        return await connection.request(method, head, body, first_byte_s)

    def _may_be_resent(self, method: bytes, head: bytes) -> bool:
        target = head.split(b" ", 2)[1].removeprefix(self.replica.path) if head else b""
        return is_repeatable(method, target.decode("latin-1"))

    async def _connect_again(self, broken: UpstreamError, connect_s: float) -> UpstreamConnection:
        """Replace a closed connection. Raises `broken` if no new connection can be opened: the replica has ended."""
        try:
            connection = await self.replica.connect(connect_s)
        except UpstreamError:
            raise broken from None
        self.resent = broken.sent
        return connection

    async def read_piece(self) -> bytes:
        """The next bytes of the response's body; empty at its end. Raises UpstreamError."""
        assert self._connection is not None
        return await self._connection.read_piece()

    @property
    def at_end(self) -> bool:
        """True if all of the response has been read."""
        return self._connection is not None and self._connection.at_end

    def note_begun(self, limit_s: float, *, movable: bool) -> None:
        """Note that the response has begun; from here on at most `limit_s` seconds may pass without a byte."""
        assert self._connection is not None
        if not movable:
            self.pin()
        self._connection.limit_gaps(limit_s)

    def pin(self) -> None:
        """Note that the request can no longer move to another replica."""
        self.replica.movable.discard(self)

    def note_token(self) -> None:
        """Note that the replica has begun to answer."""
        self.replica.unanswered.discard(self)
        self.on_answer()

    def fail(self, now: float, reason: str) -> None:
        """Count the attempt as a failure of its replica, once; after `close` this does nothing."""
        if self._failed or self._closed:
            return
        self._failed = True
        breaker = self.replica.breaker
        was_closed = breaker.closed
        breaker.fail(now, reason, probe=self._probe)
        self._end_probe()
        if was_closed and not breaker.closed:
            log.warning("upstream %s gets no requests: %s", self.replica.name, reason)

    def succeed(self, now: float) -> None:
        """Count the attempt as a success of its replica."""
        breaker = self.replica.breaker
        self.replica.proved = True
        was_closed = breaker.closed
        breaker.succeed(now, probe=self._probe)
        self._end_probe()
        if breaker.closed and not was_closed:
            log.info("upstream %s gets requests again", self.replica.name)

    def _end_probe(self) -> None:
        """Allow another probe: a stream may go on for long after its outcome as a probe."""
        if self._probe:
            self.replica.breaker.end(self._probe)
            self._probe = False

    def cancel(self, error: UpstreamError) -> None:
        """End the request with `error`, which `request` or `read` then raises."""
        if self._closed:
            return
        self._failure = error
        if self._connection is not None:
            self._connection.fail(error)

    def close(self) -> None:
        """End the request, if it has not ended. Calling it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self.on_answer()
        if self._counted:
            self.replica.connections -= 1
            self.replica.unanswered.discard(self)
            self.replica.movable.discard(self)
        self._end_probe()
        if self._connection is not None:
            self.replica.give_back(self._connection)
