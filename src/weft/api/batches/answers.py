"""Answers to the lines of a batch, by the endpoints that answer over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.api.batches.attempts import Attempts, LinePlaces, lost_engine
from weft.api.batches.types import BatchLine
from weft.api.service.service import Service
from weft.errors import FatalRequestError
from weft.http.clients import current
from weft.http.errors import describe_error, error_response
from weft.http.key_rates import MORE_THAN_A_MINUTE, RateError, RequestCount, counting

Endpoint = Callable[[Request], Awaitable[Response]]

LATER = (429, 503)  # statuses of a server that is full or shuts down
RETRY_S = 1.0


class NotNowError(Exception):
    """The server shuts down, or its engine has died: a later server answers the line."""


async def answer(
    service: Service,
    endpoint: Endpoint,
    line: BatchLine,
    places: LinePlaces | None = None,
    attempts: Attempts | None = None,
) -> tuple[int, bytes]:
    """Status and body of the answer to a line, which counts as a request of the current client.

    While the server or a limit of the client is full, the line waits without a place among `places`. If an engine dies
    with it, it is sent again as `attempts` allow, finally alone. Raises NotNowError.
    """
    count = RequestCount(service.clients.rates, current.get().name)
    attempts = attempts or Attempts()
    while not attempts.spent:
        async with places.take(alone=attempts.alone) if places else nullcontext():
            status, body, error = await _attempt(service, endpoint, line, count, attempts)
        if _is_final(status, error):
            return status, body
        await asyncio.sleep(RETRY_S)
        # A prompt is prepared again only when the limit allows it.
        while isinstance(error, RateError) and error.tokens and not count.pay_tokens(error.tokens):
            if service.draining:
                raise NotNowError
            await asyncio.sleep(RETRY_S)
    return _given_up(line, attempts)


async def _attempt(
    service: Service, endpoint: Endpoint, line: BatchLine, count: RequestCount, attempts: Attempts
) -> tuple[int, bytes, Exception | None]:
    """Send a line once. Raises NotNowError. Storing the answer deletes the deaths that `attempts` has noted."""
    died = False
    try:
        await attempts.begin()
        status, body, error = await _try(service, endpoint, line, count)
        died = lost_engine(error)
        if status != 200 and (service.draining or service.engine.failure is not None):
            raise NotNowError
    except (asyncio.CancelledError, NotNowError):
        await attempts.settle(died=died)
        raise
    if not _is_final(status, error):
        await attempts.settle(died=died)
    return status, body, error


def _is_final(status: int, error: Exception | None) -> bool:
    """Return True if an answer is final; False if the line is to be sent again."""
    code = None if error is None else describe_error(error)[1].code
    return status not in LATER or code in ("request_too_slow", MORE_THAN_A_MINUTE.replace("-", "_"))


def _given_up(line: BatchLine, attempts: Attempts) -> tuple[int, bytes]:
    """Status and body for a line that is not sent again."""
    error = FatalRequestError(
        f"{attempts.deaths} engines or servers died while they had this line, the last one while it had no other: it "
        "is not asked again; look for the cause in the server's log"
    )
    return describe_error(error)[0], bytes(error_response(error, line.url).body)


async def _try(
    service: Service, endpoint: Endpoint, line: BatchLine, count: RequestCount
) -> tuple[int, bytes, Exception | None]:
    """Status and body of an answer, and its error. A later error does not count."""
    raised = None
    token = counting.set(count)
    try:
        count.enter()
        try:
            response = await endpoint(_request(service, line))
            if response.status_code in LATER:
                count.refuse()
        except Exception as error:
            if describe_error(error)[0] in LATER:
                count.refuse()
            raise
        finally:
            count.leave()
    except Exception as error:  # as over HTTP, where a handler gets all
        raised = error
        response = error_response(error, line.url)
    finally:
        counting.reset(token)
    return response.status_code, bytes(response.body), raised


def _request(service: Service, line: BatchLine) -> Request:
    """The line as a request of a client that never disconnects."""
    inbox: list[dict[str, Any]] = [
        {"type": "http.request", "body": msgspec.json.encode(line.body), "more_body": False},
    ]

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await asyncio.Event().wait()
        raise AssertionError("this event is never set")

    scope = {
        "type": "http",
        "method": "POST",
        "path": line.url,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "app": SimpleNamespace(state=SimpleNamespace(service=service)),
    }
    return Request(scope, receive)
