"""/openapi.json: the description of all paths, made from the routes and the wire types."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft._version import __version__
from weft.api.anthropic import types as anthropic
from weft.api.batches import types as batches
from weft.api.ollama import embed as ollama_embed
from weft.api.ollama import types as ollama
from weft.api.responses import types as responses
from weft.api.service.openai_types import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from weft.api.service.pooling_types import Embeddings, EmbeddingsRequest, Ranking, RerankRequest, ScoreRequest, Scores
from weft.http.errors import AnthropicErrorFrame, ErrorBody, ErrorFrame, JsonResponse, OllamaErrorFrame, shape_error

# Statuses of any path: a wrong or too long request, a missing key, a server that is full or shuts down.
STATUSES = (400, 401, 403, 404, 405, 408, 409, 413, 414, 429, 431, 500, 501, 503)
REF = "#/components/schemas/{name}"
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "enum": ["batch"]}},
}


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of a path: the types of the request's body, of the answer, and of its stream's parts.

    `media`: type of an answer that is no JSON, or of a stream. `form`: the body is an uploaded file. `query`:
    parameters of the URL. `statuses`: further ones with which it may answer.
    """

    request: Any = None
    answer: Any = None
    part: Any = None
    media: str = ""
    form: bool = False
    query: tuple[str, ...] = ()
    statuses: tuple[int, ...] = ()


PAGE = ("limit", "after", "order")
OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        request=ChatRequest, answer=ChatCompletion, part=ChatChunk, media=EVENTS
    ),
    ("POST", "/v1/completions"): Operation(request=CompletionRequest, answer=Completion, part=Completion, media=EVENTS),
    ("POST", "/v1/responses"): Operation(
        request=responses.ResponsesRequest,
        answer=responses.ResponseObject,
        part=responses.ResponseEvent,
        media=EVENTS,
    ),
    ("POST", "/v1/messages"): Operation(
        request=anthropic.MessagesRequest, answer=anthropic.AnthropicAnswer, part=anthropic.StreamEvent, media=EVENTS
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(request=anthropic.CountRequest, answer=anthropic.TokenCount),
    ("POST", "/v1/embeddings"): Operation(request=EmbeddingsRequest, answer=Embeddings),
    **{("POST", path): Operation(request=ScoreRequest, answer=Scores) for path in ("/v1/score", "/score")},
    **{
        ("POST", path): Operation(request=RerankRequest, answer=Ranking)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    },
    ("POST", "/v1/files"): Operation(form=True, answer=batches.FileObject),
    ("GET", "/v1/files"): Operation(answer=batches.FileList, query=(*PAGE, "purpose")),
    ("GET", "/v1/files/{id}"): Operation(answer=batches.FileObject),
    ("DELETE", "/v1/files/{id}"): Operation(answer=batches.DeletedFile),
    ("GET", "/v1/files/{id}/content"): Operation(media="application/octet-stream", statuses=(206, 416)),
    ("POST", "/v1/batches"): Operation(request=batches.BatchRequest, answer=batches.BatchObject),
    ("GET", "/v1/batches"): Operation(answer=batches.BatchList, query=PAGE[:2]),
    ("GET", "/v1/batches/{id}"): Operation(answer=batches.BatchObject),
    ("POST", "/v1/batches/{id}/cancel"): Operation(answer=batches.BatchObject),
    ("GET", "/v1/models"): Operation(),
    ("GET", "/v1/models/{name:path}"): Operation(),
    ("POST", "/tokenize"): Operation(request=TokenizeRequest),
    ("POST", "/detokenize"): Operation(request=DetokenizeRequest),
    ("GET", "/version"): Operation(),
    ("GET", "/health"): Operation(),
    ("GET", "/health/live"): Operation(),
    ("GET", "/health/ready"): Operation(),
    ("GET", "/ping"): Operation(),
    ("POST", "/ping"): Operation(),
    ("GET", "/load"): Operation(),
    ("GET", "/metrics"): Operation(media="text/plain"),
    ("GET", "/monitor"): Operation(),
    ("GET", "/openapi.json"): Operation(),
    ("GET", "/"): Operation(media="text/plain"),
    ("GET", "/api/version"): Operation(answer=ollama.VersionAnswer),
    ("GET", "/api/tags"): Operation(answer=ollama.ModelList),
    ("GET", "/api/ps"): Operation(answer=ollama.RunningList),
    ("POST", "/api/show"): Operation(request=ollama.ShowRequest, answer=ollama.ShowAnswer),
    ("POST", "/api/chat"): Operation(
        request=ollama.OllamaChatRequest, answer=ollama.ChatAnswer, part=ollama.ChatAnswer, media=LINES
    ),
    ("POST", "/api/generate"): Operation(
        request=ollama.GenerateRequest, answer=ollama.GenerateAnswer, part=ollama.GenerateAnswer, media=LINES
    ),
    ("POST", "/api/embed"): Operation(request=ollama_embed.EmbedRequest, answer=ollama_embed.EmbedAnswer),
    ("POST", "/api/embeddings"): Operation(
        request=ollama_embed.OllamaEmbeddingsRequest, answer=ollama_embed.EmbeddingsAnswer
    ),
    ("POST", "/api/pull"): Operation(
        request=ollama.PullRequest, answer=ollama.PullStatus, part=ollama.PullStatus, media=LINES
    ),
    ("DELETE", "/api/delete"): Operation(request=ollama.ModelRequest),
    ("POST", "/api/create"): Operation(),
    ("POST", "/api/copy"): Operation(),
    ("POST", "/api/push"): Operation(),
    ("POST", "/api/blobs/{digest}"): Operation(),
    ("POST", "/sleep"): Operation(query=("level",)),
    ("POST", "/wake_up"): Operation(),
    ("GET", "/is_sleeping"): Operation(),
    ("POST", "/reset_prefix_cache"): Operation(),
    ("POST", "/start_profile"): Operation(query=("steps",)),
    ("POST", "/stop_profile"): Operation(),
    ("GET", "/profile"): Operation(query=("partial",)),
    ("GET", "/profile_trace"): Operation(media="application/gzip"),
    ("GET", "/layout"): Operation(),
}
FRAMES = (ErrorFrame, AnthropicErrorFrame, OllamaErrorFrame)


async def openapi(request: Request) -> Response:
    """/openapi.json: this description."""
    state = request.app.state
    if not hasattr(state, "description"):
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        state.description = await asyncio.to_thread(describe, routes)
    return JsonResponse(state.description)


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """The description of the routes, in OpenAPI 3.1."""
    schemas, components = _schemas()
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for method in methods_of(route):
            operation = OPERATIONS[method, route.path]
            described = _describe(route, method, operation, schemas)
            paths.setdefault(PARAMETER.sub(r"{\1}", route.path), {})[method.lower()] = described
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Weft", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": keys},
        "security": [{}, *({name: []} for name in keys)],
    }


def methods_of(route: Route) -> list[str]:
    """The methods that are described: HEAD is GET without a body."""
    return sorted((route.methods or set()) - {"HEAD"})


def _schemas() -> tuple[dict[Any, Any], dict[str, Any]]:
    """The schema of each wire type, and of the types that they refer to."""
    types: dict[Any, None] = dict.fromkeys(FRAMES)
    for operation in OPERATIONS.values():
        types |= dict.fromkeys(kind for kind in (operation.request, operation.answer, operation.part) if kind)
    made, components = msgspec.json.schema_components(types, ref_template=REF)
    return dict(zip(types, made, strict=True)), components


def _describe(route: Route, method: str, operation: Operation, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    summary = (route.endpoint.__doc__ or "").partition(": ")[2] or route.path
    described: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub(r'[^a-z0-9]+', '_', route.path.lower())}",
        "summary": " ".join(summary.split()),
        "responses": {"200": _answer(operation, schemas), **_errors(route.path, operation.statuses, schemas)},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in PARAMETER.findall(route.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in operation.query]
    if parameters:
        described["parameters"] = parameters
    content = _content("application/json", schemas[operation.request]) if operation.request else {}
    content |= _content("multipart/form-data", UPLOAD) if operation.form else {}
    if content:
        described["requestBody"] = {"required": True, "content": content}
    return described


def _answer(operation: Operation, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.part is not None:
        # A stream's parts: one per line, or as the data of one event each.
        content |= _content(operation.media, {"type": "string", "x-part": schemas[operation.part]})
    elif operation.media:
        return {"description": "OK", "content": _content(operation.media, {"type": "string"})}
    schema = schemas[operation.answer] if operation.answer is not None else {}
    return {"description": "OK", "content": {**_content("application/json", schema), **content}}


def _errors(path: str, more: Sequence[int], schemas: Mapping[Any, Any]) -> dict[str, Any]:
    """The errors of a path, in the form of its API; `more`: further statuses."""
    frame = type(shape_error(400, ErrorBody("", ""), path))
    content = _content("application/json", schemas[frame])
    described = {str(status): {"description": HTTPStatus(status).phrase, "content": content} for status in STATUSES}
    return described | {str(status): {"description": HTTPStatus(status).phrase} for status in more}


def _content(media: str, schema: Any) -> dict[str, Any]:
    return {media: {"schema": schema}}
