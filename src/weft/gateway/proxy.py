"""Proxy: sends each request to a replica, to another one if that fails, and its response to the client."""

from __future__ import annotations

import asyncio
import secrets
import time

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from weft.errors import WeftError
from weft.gateway.access_log import AccessLog
from weft.gateway.bodies import BodyPool
from weft.gateway.breaker import RetryBudget
from weft.gateway.checks import FileWatch
from weft.gateway.config import Timeouts
from weft.gateway.exchange import HOP_BY_HOP, HOP_HEADER, ClientGoneError, Exchange, client_gone, without
from weft.gateway.fingerprint import fingerprint, model_of, read_fields, with_model
from weft.gateway.fleet import Fleet
from weft.gateway.keys import Keys
from weft.gateway.metrics import GatewayMetrics
from weft.gateway.replica import Attempt, Replica
from weft.gateway.upstream import ResponseHead, UpstreamError
from weft.serving.errors import HttpError, error_frame, error_response


class Proxy:
    """The ASGI application for all paths that are the upstreams'."""

    def __init__(
        self,
        fleet: Fleet,
        keys: Keys,
        timeouts: Timeouts,
        metrics: GatewayMetrics,
        access_log: AccessLog | None = None,
        watch: FileWatch | None = None,
        *,
        bodies: BodyPool,
    ) -> None:
        self.fleet, self.keys, self.timeouts = fleet, keys, timeouts
        self.metrics, self.access_log, self.watch = metrics, access_log, watch
        self.running: set[Exchange] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.draining = False
        self._name = secrets.token_hex(8).encode()
        self.bodies = bodies
        self._budget = RetryBudget()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, self._name)
        try:
            await self._receive(exchange, receive)
        except (WeftError, ClientDisconnect) as error:
            response = error_response(error)
            exchange.outcome, exchange.status = getattr(error, "code", "client-gone"), response.status_code
            self._note_end(exchange)
            await response(scope, receive, send)
            return
        self.running.add(exchange)
        self.idle.clear()
        watching = asyncio.create_task(_watch_client(exchange, receive))
        try:
            await self._serve(exchange, receive, send)
        finally:
            watching.cancel()
            if exchange.attempt is not None:
                exchange.attempt.close()
            self.running.discard(exchange)
            if not self.running:
                self.idle.set()
            self._note_end(exchange)

    def _note_end(self, exchange: Exchange) -> None:
        """Release what a request holds; count and log it."""
        self._release_body(exchange)
        self.metrics.count(exchange)
        if self.access_log is not None:
            self.access_log.write(exchange.log_row())

    def _release_body(self, exchange: Exchange) -> None:
        """Forget the body of a request that goes to no other replica."""
        self.bodies.release(len(exchange.body))
        exchange.body = b""

    def close(self) -> None:
        """Close the idle connections and the log."""
        self.fleet.close()
        if self.access_log is not None:
            self.access_log.close()

    async def _receive(self, exchange: Exchange, receive: Receive) -> None:
        """Receive the request as a whole, with what routing reads. Raises WeftError."""
        scope = exchange.scope
        exchange.client = client = self.keys.identify(scope)
        if self.draining:
            raise HttpError(503, "the gateway is shutting down", code="shutting-down", retry_after_s=1)
        if any(self._name in value for name, value in scope["headers"] if name == HOP_HEADER):
            raise HttpError(508, "an upstream of this gateway leads back to it; remove that one", code="gateway-loop")
        exchange.body = await self.bodies.receive(Request(scope, receive))
        exchange.bytes_in = len(exchange.body)
        fields = read_fields(exchange.body)
        exchange.model = model_of(fields)
        exchange.fingerprint = fingerprint(fields, Headers(scope=scope), reads_prefix=self.fleet.policy.reads_prefix)
        if not client.may_use(exchange.model) and scope["method"] not in ("GET", "HEAD"):
            raise HttpError(
                403,
                f"the key {client.name!r} is not allowed to use model {exchange.model!r:.200}",
                code="model-not-allowed",
            )
        if self.fleet.replicas and not self.fleet.knows_model(exchange.model):
            raise HttpError(
                404,
                f"the model {exchange.model!r:.200} does not exist; GET /v1/models lists those that do",
                code="model-not-found",
                param="model",
            )

    async def _serve(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        """Get a response from a replica and pass it on; without one, an error."""
        try:
            head, first = await self._first_piece(exchange)
        except ClientGoneError as error:
            exchange.outcome = error.code
        except HttpError as error:
            exchange.outcome, exchange.status = error.code, error.status
            await error_response(error)(exchange.scope, receive, send)
        else:
            exchange.first_byte_s = time.monotonic()
            self._release_body(exchange)
            await self._pass_on(exchange, head, first, send)

    # Before the first byte

    async def _first_piece(self, exchange: Exchange) -> tuple[ResponseHead, bytes]:
        """Head and first piece of the response of the first replica that gives one.

        Each replica is tried once. Raises HttpError if none is left, and ClientGoneError.
        """
        self._budget.earn()
        failure: UpstreamError | None = None
        while candidates := self.fleet.candidates(exchange.model, exchange.tried):
            if exchange.gone:
                raise client_gone()
            replica = self.fleet.choose(exchange.fingerprint, candidates)
            attempt = exchange.begin_attempt(replica)
            try:
                head, first = await self._ask(exchange, attempt)
            except ClientGoneError:
                raise
            except UpstreamError as error:
                failure = error
                self._blame(attempt, error)
                if error.stalled and not self._budget.spend():
                    break
                continue
            reason = self._reason_to_retry(head)
            self._judge(attempt, head)
            if not reason or not self._may_retry(exchange, reason):
                return head, first
            if reason == "full":
                exchange.refusal = _refusal_of(replica, head)
            attempt.close()
            self.metrics.count_retry(replica, reason)
        raise self._no_replica(exchange, failure)

    async def _ask(self, exchange: Exchange, attempt: Attempt) -> tuple[ResponseHead, bytes]:
        """Head and first piece of one replica's response. Raises UpstreamError."""
        replica, body, timeouts = attempt.replica, exchange.body, self.timeouts
        own_name = replica.own_name(exchange.model)
        # Two readers of a body that names two models would not agree: a key for one model gets a body with one.
        if own_name != exchange.model or (exchange.model and exchange.client.models is not None):
            body = with_model(body, own_name)
        head = await attempt.request(
            exchange.method,
            exchange.head(replica, len(body)),
            body,
            connect_s=timeouts.connect,
            first_byte_s=timeouts.first_byte,
        )
        first = await attempt.read()
        attempt.note_answered(timeouts.idle)
        return head, first

    def _may_retry(self, exchange: Exchange, reason: str) -> bool:
        """Return True if another replica is there to be asked. Every retry after 5xx is taken from the budget."""
        others = self.fleet.candidates(exchange.model, exchange.tried)
        return bool(others) and (reason != "5xx" or self._budget.spend())

    @staticmethod
    def _reason_to_retry(head: ResponseHead) -> str:
        """Why another replica may give a better response: it is full, or 5xx; "" if there is no reason."""
        full = head.status == 429 or (head.status == 503 and head.header(b"retry-after"))
        if full:
            return "full"
        return "5xx" if head.status >= 500 else ""

    def _judge(self, attempt: Attempt, head: ResponseHead) -> None:
        """Tell the breaker of a response that has begun. A replica that is full is not ill."""
        now = self.fleet.clock()
        if self._reason_to_retry(head) == "5xx":
            attempt.fail(now, f"status {head.status}")
        elif not attempt.replica.breaker.closed:
            attempt.succeed(now)  # of a response of hours, the end would be too late

    def _blame(self, attempt: Attempt, error: UpstreamError) -> None:
        """Count a failure of a replica and end the attempt."""
        attempt.fail(self.fleet.clock(), str(error))
        attempt.close()
        self.metrics.count_retry(attempt.replica, error.code)

    def _no_replica(self, exchange: Exchange, failure: UpstreamError | None) -> HttpError:
        """The error for a request that no replica answered: the refusal of one that is full comes first."""
        if exchange.refusal is not None:
            return exchange.refusal
        if failure is None:
            return HttpError(
                503, "no upstream can take requests now; try again later", code="no-upstream", retry_after_s=1
            )
        name = exchange.tried[-1].name
        status = 504 if failure.stalled else 502
        return HttpError(status, f"upstream {name}: {failure}", code=failure.code)

    # After the first byte

    async def _pass_on(self, exchange: Exchange, head: ResponseHead, first: bytes, send: Send) -> None:
        """Send a response to the client as it comes, no faster than the client reads it."""
        attempt = exchange.attempt
        assert attempt is not None
        exchange.status = head.status
        headers = without(head.headers, HOP_BY_HOP)
        await send({"type": "http.response.start", "status": head.status, "headers": headers})
        ending = EventEnding(head)
        piece = first
        try:
            while piece:
                exchange.bytes_out += len(piece)
                ending.push(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await attempt.read()
        except ClientGoneError as error:
            exchange.outcome = error.code
        except UpstreamError as error:
            exchange.outcome = error.code
            attempt.fail(self.fleet.clock(), str(error))
            if not ending.between_events:
                return  # the server resets a connection whose response is not complete
            broken = HttpError(502, f"upstream {attempt.replica.name}: {error}", code=error.code)
            event = b"data: " + msgspec.json.encode(error_frame(broken)) + b"\n\n"
            await send({"type": "http.response.body", "body": event})
        else:
            if head.status < 500:
                attempt.succeed(self.fleet.clock())
            attempt.close()  # before the client knows: its next request must find this one ended
            exchange.outcome = "complete"
            await send({"type": "http.response.body", "body": b""})


class EventEnding:
    """Knows of a response if it is a stream of events of unknown length, and if the bytes so far end an event."""

    def __init__(self, head: ResponseHead) -> None:
        kind = head.header(b"content-type").partition(b";")[0].strip().lower()
        plain = not head.header(b"content-encoding") and not head.header(b"content-length")
        self._events = plain and kind == b"text/event-stream"
        self._tail = b"\n\n"

    def push(self, piece: bytes) -> None:
        self._tail = (self._tail + piece[-4:])[-4:]

    @property
    def between_events(self) -> bool:
        return self._events and self._tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))


def _refusal_of(replica: Replica, head: ResponseHead) -> HttpError:
    """The answer of a replica that is full, if all others fail."""
    after = head.header(b"retry-after").decode("latin-1")
    return HttpError(
        head.status,
        f"upstream {replica.name} is full, and no other one answers; try again later",
        code="upstream-full",
        retry_after_s=int(after) if after.isdecimal() and len(after) < 7 else 1,
    )


async def _watch_client(exchange: Exchange, receive: Receive) -> None:
    """Cancel the request once the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.leave()
