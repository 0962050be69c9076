"""The ASGI application: routes, API keys and response headers."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from email.utils import formatdate
from functools import lru_cache
from inspect import iscoroutinefunction

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.api.anthropic import messages as anthropic
from weft.api.batches import endpoints as batches
from weft.api.batches.keeper import BatchKeeper
from weft.api.observe.tracing import TraceHeaders
from weft.api.ollama import chat as ollama_chat
from weft.api.ollama import embed as ollama_embed
from weft.api.ollama import models as ollama
from weft.api.ollama.pull import answer_pull
from weft.api.openai import models
from weft.api.openai.chat import chat
from weft.api.openai.completions import completions
from weft.api.openai.embeddings import embeddings
from weft.api.openai.scores import rerank, score
from weft.api.responses.stream import responses
from weft.api.server import health
from weft.api.server.admin import ADMIN_ROUTES
from weft.api.server.openapi import openapi
from weft.api.service.service import Service
from weft.errors import WeftError
from weft.http.client_access import RequireKey
from weft.http.errors import HANDLERS, api_path, handle_exception
from weft.logs import request_id

# Health probes carry no API key, nor do clients that ask for the kind of server; administrators have another key.
KEYLESS_PATHS = ("/", "/health/live", "/health/ready", *(route.path for route in ADMIN_ROUTES))

log = logging.getLogger("weft.serving")

MAX_ID_CHARACTERS = 256  # characters of an X-Request-Id

ROUTES = (
    Route("/v1/chat/completions", chat, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    *(Route(path, score, methods=["POST"]) for path in ("/v1/score", "/score")),
    *(Route(path, rerank, methods=["POST"]) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    Route("/v1/models", models.list_models),
    Route("/v1/models/{name:path}", models.get_model),
    Route("/tokenize", models.tokenize, methods=["POST"]),
    Route("/detokenize", models.detokenize, methods=["POST"]),
    Route("/version", models.version),
    Route("/health", health.health),
    Route("/health/live", health.live),
    Route("/health/ready", health.ready),
    Route("/ping", health.health, methods=["GET", "POST"]),
    Route("/load", health.server_load),
    Route("/metrics", health.metrics),
    Route("/monitor", health.monitor),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/messages", anthropic.messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", anthropic.count, methods=["POST"]),
    Route("/v1/files", batches.by_owner(batches.upload_file), methods=["POST"]),
    Route("/v1/files", batches.by_owner(batches.list_files)),
    Route("/v1/files/{id}", batches.by_owner(batches.get_file)),
    Route("/v1/files/{id}", batches.by_owner(batches.delete_file), methods=["DELETE"]),
    Route("/v1/files/{id}/content", batches.by_owner(batches.file_content)),
    Route("/v1/batches", batches.by_owner(batches.create_batch), methods=["POST"]),
    Route("/v1/batches", batches.by_owner(batches.list_batches)),
    Route("/v1/batches/{id}", batches.by_owner(batches.get_batch)),
    Route("/v1/batches/{id}/cancel", batches.by_owner(batches.cancel_batch), methods=["POST"]),
    Route("/openapi.json", openapi),
    Route("/", ollama.root),
    Route("/api/version", ollama.version),
    Route("/api/tags", ollama.tags),
    Route("/api/ps", ollama.running),
    Route("/api/show", ollama.show, methods=["POST"]),
    Route("/api/chat", ollama_chat.chat, methods=["POST"]),
    Route("/api/generate", ollama_chat.generate, methods=["POST"]),
    Route("/api/embed", ollama_embed.embed, methods=["POST"]),
    Route("/api/embeddings", ollama_embed.embeddings, methods=["POST"]),
    Route("/api/pull", answer_pull, methods=["POST"]),
    Route("/api/delete", ollama.delete, methods=["DELETE"]),
    *(Route(f"/api/{name}", ollama.absent, methods=["POST"]) for name in ("create", "copy", "push")),
    Route("/api/blobs/{digest}", ollama.absent, methods=["POST", "HEAD"]),
    *ADMIN_ROUTES,
)


# Endpoints whose requests a batch may contain.
BATCH_ENDPOINTS = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/embeddings": embeddings,
}


def create_app(service: Service) -> Starlette:
    """Create the application for one service."""
    options = service.options
    middleware = [Middleware(DateHeader)]
    if options.allowed_origins:
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=options.allowed_origins, allow_methods=["*"], allow_headers=["*"])
        )
    if options.enable_request_id_headers or options.log_format == "json":
        middleware.append(Middleware(RequestIds, logs=options.log_format == "json"))
    if options.otlp_traces_endpoint is not None:
        middleware.append(Middleware(TraceHeaders))
    if service.clients.required:
        middleware.append(Middleware(RequireKey, service.clients, KEYLESS_PATHS, options.open_listing))
    middleware.append(Middleware(FixedPaths, ROUTES))
    application = Starlette(routes=ROUTES, middleware=middleware, exception_handlers=HANDLERS)
    application.router.redirect_slashes = False  # else an unknown path gets a redirect instead of its 404
    application.state.service = service
    application.state.batches = BatchKeeper(service, BATCH_ENDPOINTS)
    return application


class FixedPaths:
    """Middleware that calls the endpoints whose paths have no parameters; others go on to the application's router.

    The router tries one route after the other, and wraps endpoint and response for exceptions, twice.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app = app
        self._endpoints = {
            (method, route.path): route.endpoint
            for route in routes
            if not route.param_convertors and iscoroutinefunction(route.endpoint)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope["method"], api_path(scope))) if scope["type"] == "http" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except (HTTPException, ClientDisconnect, WeftError) as error:
            response = await handle_exception(request, error)
        await response(scope, receive, send)


class DateHeader:
    """Middleware that adds a Date header to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_dated(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"date", _date_of(int(time.time())))]
            await send(message)

        await self._app(scope, receive, send_dated)


@lru_cache(maxsize=1)
def _date_of(second: int) -> bytes:
    """A second since 1970 as header fields have it."""
    return formatdate(second, usegmt=True).encode()


class RequestIds:
    """Middleware that returns the X-Request-Id of the request, or a new one, and has it in the request's log lines.

    If it `logs`, each response is a line with the fields method, path, status and seconds until its end.
    """

    def __init__(self, app: ASGIApp, *, logs: bool) -> None:
        self._app, self._logs = app, logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        id = given if 0 < len(given) <= MAX_ID_CHARACTERS and given.isprintable() else uuid.uuid4().hex
        began, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = id
            await send(message)

        token = request_id.set(id)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._logs:
                seconds = round(time.monotonic() - began, 6)
                fields = {"method": scope["method"], "path": scope["path"], "status": status, "seconds": seconds}
                log.info("%s %s: %d", scope["method"], scope["path"], status, extra={"fields": fields})
            request_id.reset(token)
