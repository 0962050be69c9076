"""Answers to the lines of a batch, by the endpoints that answer over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.serving.batches.types import BatchLine
from weft.serving.errors import describe_error, error_response
from weft.serving.key_rates import MORE_THAN_A_MINUTE
from weft.serving.service import Service

Endpoint = Callable[[Request], Awaitable[Response]]

LATER = (429, 503)  # statuses of a server that is full or ends
RETRY_S = 1.0


class NotNowError(Exception):
    """The server ends, or its engine has died: a later server answers the line."""


async def answer(service: Service, endpoint: Endpoint, line: BatchLine) -> tuple[int, bytes]:
    """Status and body of the answer to a line. While the server is full it waits. Raises NotNowError."""
    while True:
        status, body, code = await _try(service, endpoint, line)
        if service.draining or service.engine.failure is not None:
            if status == 200:
                return status, body
            raise NotNowError
        if status not in LATER or code in ("request_too_slow", MORE_THAN_A_MINUTE.replace("-", "_")):
            return status, body
        await asyncio.sleep(RETRY_S)


async def _try(service: Service, endpoint: Endpoint, line: BatchLine) -> tuple[int, bytes, str | None]:
    """Status, body and code of the error, if it is one."""
    code = None
    try:
        response = await endpoint(_request(service, line))
    except Exception as error:  # as over HTTP, where a handler gets all
        code = describe_error(error)[1].code
        response = error_response(error, line.url)
    return response.status_code, bytes(response.body), code


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
