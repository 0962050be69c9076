"""Error responses in the form of the called API: OpenAI's, Anthropic's or Ollama's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.engine.executors.ranks import CLOSED
from weft.errors import EngineError, FatalRequestError, QueueFullError, RequestError, WeftError

# Key of a scope whose server sends whole responses in one piece, and of their http.response.start: there, the body,
# whose length the headers have. No body follows.
WHOLE = "weft.whole"


# Code of a prompt that exceeds the context, by which agents know to compact a conversation; and Weft's code for it.
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
NO_ROOM = ("prompt-too-long", "max-tokens-too-large")

FATAL = "request_ends_engines"  # code of a request that is refused, since engines have died with it
CODE_HEADER = b"x-weft-code"  # header with the code of errors whose form has no code; a gateway reads it


class HttpError(WeftError):
    """An error with an HTTP status. Its `code` is sent to clients, with underscores as OpenAI spells codes."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.status, self.param, self.retry_after_s = status, param, retry_after_s
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorFrame(msgspec.Struct):
    """The body of an error response, and the error event of a stream."""

    error: ErrorBody


class AnthropicErrorBody(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorFrame(msgspec.Struct):
    """The body of an error response of Anthropic's API, and its error event."""

    error: AnthropicErrorBody
    type: str = "error"


class OllamaErrorFrame(msgspec.Struct):
    """The body of an error response of Ollama's API, and the last line of a stream that breaks."""

    error: str


AnyErrorFrame = ErrorFrame | AnthropicErrorFrame | OllamaErrorFrame


class JsonResponse(Response):
    """A JSON response of anything that msgspec encodes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if WHOLE not in scope or scope["method"] == "HEAD":
            await super().__call__(scope, receive, send)
            return
        head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send({**head, WHOLE: self.body})


def error_type(status: int) -> str:
    """The `type` field of an error with this status."""
    match status:
        case 401:
            return "authentication_error"
        case 429:
            return "rate_limit_error"
        case 503:
            return "overloaded_error"
        case _:
            return "invalid_request_error" if status < 500 else "server_error"


def describe_error(error: Exception) -> tuple[int, ErrorBody, dict[str, str]]:
    """Status, body and headers of the response to any exception."""
    status, code, param, headers = 500, "internal_error", None, {}
    message = str(error)
    match error:
        case HttpError():
            status, code, param = error.status, error.code.replace("-", "_"), error.param
            headers = dict(error.headers)
        case QueueFullError():
            status, code, headers = 429, "queue_full", {"Retry-After": str(error.retry_after_s)}
        case EngineError() if error.cause == CLOSED:
            status, message, code, headers = 503, "the server is shutting down", "shutting_down", {"Retry-After": "1"}
        case EngineError():
            code = "engine_dead"
        case RequestError():
            status, code = (422, FATAL) if isinstance(error, FatalRequestError) else (400, "invalid_value")
            code = CONTEXT_LENGTH_EXCEEDED if error.code in NO_ROOM else code
            param = error.param
        case HTTPException():
            status, message, headers = error.status_code, error.detail, dict(error.headers or {})
            code = {404: "unknown_url", 405: "method_not_allowed"}.get(status, "http_error")
        case ClientDisconnect():
            status, message, code = 400, "the client went away before the body was whole", "client_disconnected"
        case WeftError():
            pass
        case _:
            message = f"{type(error).__name__}: {error}"
    return status, ErrorBody(message, error_type(status), param, code), headers


def shape_error(status: int, body: ErrorBody, path: str = "") -> AnyErrorFrame:
    """An error in the shape of the API that `path` belongs to."""
    if path.startswith("/v1/messages"):
        return AnthropicErrorFrame(AnthropicErrorBody(anthropic_type(status), body.message))
    if path.startswith("/api/"):
        return OllamaErrorFrame(body.message)
    return ErrorFrame(body)


def anthropic_type(status: int) -> str:
    """Anthropic's name of an error with this status."""
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 404:
            return "not_found_error"
        case 413:
            return "request_too_large"
        case 429:
            return "rate_limit_error"
        case 503:
            return "overloaded_error"
        case _:
            return "invalid_request_error" if status < 500 else "api_error"


def error_frame(error: Exception, path: str = "") -> AnyErrorFrame:
    status, body, _ = describe_error(error)
    return shape_error(status, body, path)


def error_response(error: Exception, path: str = "") -> Response:
    """The response to an exception, in the shape of the API that `path` belongs to."""
    status, body, headers = describe_error(error)
    frame = shape_error(status, body, path)
    if not isinstance(frame, ErrorFrame) and body.code:
        headers[CODE_HEADER.decode()] = body.code
    return JsonResponse(frame, status, headers)


async def handle_exception(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for everything that an endpoint raises."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        problem = "unknown URL" if error.status_code == 404 else "method not allowed"
        error = HTTPException(error.status_code, f"{problem}: {request.method} {request.url.path}", error.headers)
    return error_response(error, api_path(request.scope))


def api_path(scope: Scope) -> str:
    """The path of a request without the prefix that a reverse proxy knows the server by."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


# A handler for Exception alone would do, but Starlette re-raises its exceptions, and the server logs them.
HANDLERS: Mapping[Any, Any] = dict.fromkeys((HTTPException, ClientDisconnect, WeftError, Exception), handle_exception)


def shutting_down_error() -> HttpError:
    """The 503 error for requests that the shutdown refuses or cuts off."""
    return HttpError(503, "the server is shutting down; ask another", code="shutting-down", retry_after_s=1)
