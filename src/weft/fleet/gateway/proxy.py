"""Proxy: sends each request to a replica, or to another if it fails, and the response to the client."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from weft.api.ollama.stream import encode_error_line
from weft.api.responses.errors import encode_error
from weft.errors import WeftError
from weft.fleet.accounts.keys import Keys
from weft.fleet.gateway.access_log import AccessLog
from weft.fleet.gateway.accounts import Accounts
from weft.fleet.gateway.answer import ResumableAnswer, WholeAnswer
from weft.fleet.gateway.bodies import BodyPool
from weft.fleet.gateway.client_watches import ClientWatches
from weft.fleet.gateway.dispatch import Dispatcher
from weft.fleet.gateway.events import EventEnding
from weft.fleet.gateway.exchange import HOP_BY_HOP, OWNER_HEADER, ClientGoneError, Exchange, without
from weft.fleet.gateway.metrics import GatewayMetrics
from weft.fleet.gateway.request_reader import RequestReader
from weft.fleet.upstreams.config import Objective, Timeouts
from weft.fleet.upstreams.fleet import Fleet
from weft.fleet.upstreams.replica import Attempt
from weft.fleet.upstreams.upstream import ResponseHead, UpstreamError
from weft.fleet.upstreams.watches import FleetWatch
from weft.http.errors import WHOLE, HttpError, error_response
from weft.http.flow import JOINED
from weft.http.sse import DONE, encode_error_event

log = logging.getLogger("weft.gateway")

LENGTH = frozenset((b"content-length",))
BODYLESS = (204, 304)
# X-Weft-Prefix would leak other keys' prompts: it compares a prompt with all earlier prompts of the server.
NOT_FOR_CUSTOMERS = HOP_BY_HOP | {OWNER_HEADER, b"x-weft-prefix"}


class Proxy:
    """The ASGI application for all paths that are the upstreams'.

    `resets`: a stream that breaks ends with a reset of its connection, never with an error event.
    """

    resets = False

    def __init__(
        self,
        fleet: Fleet,
        keys: Keys,
        timeouts: Timeouts,
        metrics: GatewayMetrics,
        access_log: AccessLog | None = None,
        watch: FleetWatch | None = None,
        *,
        bodies: BodyPool,
        accounts: Accounts,
        objective: Objective,
    ) -> None:
        self.fleet, self.keys, self.timeouts = fleet, keys, timeouts
        self.metrics, self.access_log, self.watch = metrics, access_log, watch
        self.running: set[Exchange] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.draining = False
        self._name = secrets.token_hex(8).encode()
        self.bodies = bodies
        self.accounts = accounts
        self.reader = RequestReader(fleet, keys, bodies, accounts)
        self._watches = ClientWatches()
        self._dispatcher = Dispatcher(fleet, timeouts, metrics, accounts, objective)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, self._name)
        try:
            await self._receive(exchange, receive)
        except (WeftError, ClientDisconnect) as error:
            response = error_response(error, scope["path"])
            exchange.outcome, exchange.status = getattr(error, "code", "client-gone"), response.status_code
            self._note_end(exchange)
            await response(scope, receive, send)
            return
        except BaseException:
            self._note_end(exchange)
            raise
        self.running.add(exchange)
        self.idle.clear()
        self._watches.begin(exchange, receive)
        try:
            await self._serve(exchange, receive, send)
        finally:
            self._watches.end(exchange)
            if exchange.attempt is not None:
                exchange.attempt.close()
            self.running.discard(exchange)
            if not self.running:
                self.idle.set()
            self._note_end(exchange)

    def _note_end(self, exchange: Exchange) -> None:
        """Release what a request holds; count and log it."""
        self._release_body(exchange)
        self.accounts.leave(exchange)
        self.metrics.count(exchange)
        if self.access_log is not None:
            self.access_log.write_row(exchange.log_row())

    def _release_body(self, exchange: Exchange) -> None:
        """Forget the body of a request that goes to no other replica."""
        self.bodies.release(len(exchange.body))
        exchange.body = b""

    def close(self) -> None:
        """Close the idle connections, the log and the ledger."""
        self.fleet.close()
        if self.watch is not None:
            self.watch.close()
        if self.accounts.ledger is not None:
            self.accounts.ledger.close()
        if self.access_log is not None:
            self.access_log.close()

    async def _receive(self, exchange: Exchange, receive: Receive) -> None:
        """Receive the request as a whole, with what routing reads. Raises WeftError."""
        self.reader.identify(exchange)
        if self.draining:
            raise HttpError(503, "the gateway is shutting down", code="shutting-down", retry_after_s=1)
        if exchange.hops and any(self._name in hop for hop in exchange.hops):
            raise HttpError(
                508, "an upstream of this gateway leads back to it; remove that upstream", code="gateway-loop"
            )
        await self.reader.read_request(exchange, receive)

    async def _serve(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        """Get a response from a replica and pass it on; without a response, send an error."""
        try:
            head, first = await self._dispatcher.begin(exchange)
        except ClientGoneError as error:
            exchange.outcome = error.code
        except HttpError as error:
            exchange.outcome, exchange.status = error.code, error.status
            await error_response(error, exchange.scope["path"])(exchange.scope, receive, send)
        else:
            exchange.first_byte_s = time.monotonic()
            answer = exchange.answer
            if answer is None or not isinstance(answer, ResumableAnswer) or not answer.continuable:
                self._release_body(exchange)  # else it is kept for another replica
            await self._pass_on(exchange, head, first, send)

    # After the first byte

    async def _pass_on(self, exchange: Exchange, head: ResponseHead, first: bytes, send: Send) -> None:
        """Send a response to the client as it arrives, no faster than the client reads it."""
        exchange.status = head.status
        headers = _headers_for_client(exchange, head)
        start: Message = {"type": "http.response.start", "status": head.status, "headers": headers}
        has_body = exchange.method != b"HEAD"
        if exchange.answer is None and self._last(exchange).at_end:
            exchange.bytes_out += len(first)
            self._note_complete(exchange, head)
            if has_body and head.status not in BODYLESS and not head.header(b"content-length"):
                headers.append((b"content-length", b"%d" % len(first)))
            await send({**start, WHOLE: first})
            return
        await send({**start, JOINED: has_body and exchange.answer is None and bool(first)})
        await self._pass_pieces(exchange, head, first, send)

    async def _pass_pieces(self, exchange: Exchange, head: ResponseHead, first: bytes, send: Send) -> None:
        """Send the body of a response that has begun, and its end."""
        ending = EventEnding(head)
        try:
            async with aclosing(self._pieces(exchange, first)) as pieces:
                async for piece in pieces:
                    exchange.bytes_out += len(piece)
                    ending.push(piece)
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except ClientGoneError as error:
            exchange.outcome = error.code
        except UpstreamError as error:
            self._last(exchange).fail(self.fleet.clock(), str(error))
            if ending.complete:
                exchange.outcome = "complete"
                await send({"type": "http.response.body", "body": b""})
                return
            exchange.outcome = error.code
            log.warning("an answer of %s broke: %s", error.upstream or exchange.upstream, error)
            if self.resets or not ending.between_events:
                return  # the server resets a connection with an incomplete response
            await send({"type": "http.response.body", "body": error_event(exchange, error)})
        else:
            self._note_complete(exchange, head)
            await send({"type": "http.response.body", "body": b""})

    def _note_complete(self, exchange: Exchange, head: ResponseHead) -> None:
        """Note that the response is complete. The client's next request must find this request ended."""
        attempt = self._last(exchange)
        if head.status < 500:
            attempt.succeed(self.fleet.clock())
        if head.status < 429:
            self._dispatcher.note_answer(exchange)
        attempt.close()
        exchange.outcome = "complete"

    async def _pieces(self, exchange: Exchange, first: bytes) -> AsyncGenerator[bytes, None]:
        """The bytes for the client. Raises UpstreamError if the response breaks and no replica can continue it."""
        answer, piece = exchange.answer, first
        if isinstance(answer, ResumableAnswer):
            async for shown in self._stream(exchange, answer, first):
                yield shown
            return
        while piece:
            if shown := piece if answer is None else answer.push(piece):
                yield shown
            piece = await self._last(exchange).read_piece()
        if answer is not None:
            yield answer.finish()

    async def _stream(self, exchange: Exchange, answer: ResumableAnswer, first: bytes) -> AsyncGenerator[bytes, None]:
        """The events for the client, possibly of several replicas. Raises UpstreamError if none can continue."""
        piece = first
        while True:
            try:
                while piece:
                    if shown := answer.push(piece):
                        yield shown
                    answer.check()
                    if answer.progressed or not answer.continuable:
                        self._last(exchange).note_token()
                    if not answer.continuable:
                        self._last(exchange).pin()
                    piece = await self._last(exchange).read_piece()
                if shown := answer.finish():
                    yield shown
                answer.check()
                answer.check_complete()
                return
            except UpstreamError as error:
                next_piece = await self._go_on(exchange, answer, error)
                if next_piece is None:
                    return
                piece = next_piece
            if piece == DONE:
                yield DONE
                return

    async def _go_on(self, exchange: Exchange, answer: ResumableAnswer, error: UpstreamError) -> bytes | None:
        """The next piece of a broken answer: another replica's, or the end mark. None if nothing is missing.

        Raises `error` if no replica can continue, and ClientGoneError.
        """
        if isinstance(error, ClientGoneError) or not answer.continuable:
            raise error
        if answer.done:
            return None
        if answer.finished and not answer.lacks_usage:
            return DONE
        try:
            return await self._dispatcher.resume(exchange, answer, error)
        except ClientGoneError:
            raise
        except UpstreamError:
            if answer.finished:  # the client has all of the answer; its usage is unknown
                return DONE
            raise

    @staticmethod
    def _last(exchange: Exchange) -> Attempt:
        assert exchange.attempt is not None
        return exchange.attempt


def _headers_for_client(exchange: Exchange, head: ResponseHead) -> list[tuple[bytes, bytes]]:
    """The headers of a response that are passed on."""
    is_customer = exchange.client.known and not exchange.client.admin
    headers = without(head.headers, NOT_FOR_CUSTOMERS if is_customer else HOP_BY_HOP)
    if isinstance(exchange.answer, WholeAnswer) or head.status in BODYLESS:
        return without(headers, LENGTH)  # the length may change, or describe a body that is not sent
    return headers


def error_event(exchange: Exchange, error: UpstreamError) -> bytes:
    """The last event of a broken stream: the replica's own error event, if it sent any."""
    answer, path = exchange.answer, exchange.scope["path"]
    if isinstance(answer, ResumableAnswer) and answer.error_event:
        return answer.error_event
    broken = HttpError(502, f"the upstream's answer broke: {error.public}", code=error.code)
    if path.startswith("/api/"):
        return encode_error_line(broken)
    if path == "/v1/responses":
        return encode_error(broken, answer.sent_events if isinstance(answer, ResumableAnswer) else 0)
    return encode_error_event(broken, path)
