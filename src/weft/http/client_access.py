"""Middleware that admits clients with a key, within their rates."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.http.access import comes_from_here
from weft.http.clients import ANYBODY, Client, Clients, current
from weft.http.errors import HttpError, api_path, error_response
from weft.http.key_rates import RequestCount, counting

# Paths that --open-listing shows to processes of this machine.
LISTINGS = ("/v1/models", "/api/tags", "/api/version", "/api/ps")


class RequireKey:
    """Middleware that answers 401 to requests without a key, and 429 to requests beyond a key's rates.

    `keyless` paths need no key, nor do local requests for lists with `open_listing`.
    """

    def __init__(self, app: ASGIApp, clients: Clients, keyless: Iterable[str], open_listing: bool) -> None:
        self._app, self._clients = app, clients
        self._keyless, self._open_listing = frozenset(keyless), open_listing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            client = self._identify(scope)
            count = RequestCount(self._clients.rates, client.name)
            counted = scope["method"] == "POST"
            if counted:
                count.enter()
        except HttpError as error:
            await error_response(error, api_path(scope))(scope, receive, send)
            return
        token, counting_token = current.set(client), counting.set(count)
        try:
            await self._app(scope, receive, send)
        finally:
            if counted:
                count.leave()
            counting.reset(counting_token)
            current.reset(token)

    def _identify(self, scope: Scope) -> Client:
        client = self._clients.find(Headers(scope=scope))
        if client is not None:
            return client
        path = api_path(scope)
        if path in self._keyless or (self._open_listing and _lists(scope, path) and comes_from_here(scope)):
            return ANYBODY
        raise HttpError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid-api-key")


def _lists(scope: Scope, path: str) -> bool:
    listed = path in LISTINGS or path.startswith("/v1/models/")
    return listed and scope["method"] in ("GET", "HEAD")
