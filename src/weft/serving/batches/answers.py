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

from weft.serving.batches.types import BatchLine
from weft.serving.clients import current
from weft.serving.errors import describe_error, error_response
from weft.serving.key_rates import MORE_THAN_A_MINUTE, RateError, RequestCount, counting
from weft.serving.service import Service

Endpoint = Callable[[Request], Awaitable[Response]]

LATER = (429, 503)  # statuses of a server that is full or ends
RETRY_S = 1.0


class NotNowError(Exception):
    """The server ends, or its engine has died: a later server answers the line."""


async def answer(
    service: Service, endpoint: Endpoint, line: BatchLine, places: asyncio.Semaphore | None = None
) -> tuple[int, bytes]:
    """Status and body of the answer to a line, which counts as a request of the current client.

    While the server is full, or the client's limits have no room, it waits, outside of its place among `places`.
    Raises NotNowError.
    """
    count = RequestCount(service.clients.rates, current.get().name)
    while True:
        async with places or nullcontext():
            status, body, error = await _try(service, endpoint, line, count)
        if service.draining or service.engine.failure is not None:
            if status == 200:
                return status, body
            raise NotNowError
        code = None if error is None else describe_error(error)[1].code
        if status not in LATER or code in ("request_too_slow", MORE_THAN_A_MINUTE.replace("-", "_")):
            return status, body
        await asyncio.sleep(RETRY_S)
        # A prompt is read again only once the limit has room for it.
        while isinstance(error, RateError) and error.tokens and not count.pay_tokens(error.tokens):
            if service.draining:
                raise NotNowError
            await asyncio.sleep(RETRY_S)


async def _try(
    service: Service, endpoint: Endpoint, line: BatchLine, count: RequestCount
) -> tuple[int, bytes, Exception | None]:
    """Status and body of an answer, and its error. One that comes later does not count."""
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
    """The line as a request of a client that never hangs up."""
    inbox: list[dict[str, Any]] = [
        {"type": "http.request", "body": msgspec.json.encode(line.body), "more_body": False},
    ]

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

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
