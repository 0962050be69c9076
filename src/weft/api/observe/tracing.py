"""Traces of requests over OpenTelemetry's protocol: the endpoint, and the caller's trace that a request continues.

Spans themselves are made in `api.observe.spans`, which is imported only while --otlp-traces-endpoint is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from weft.errors import ConfigError
from weft.formatting import extra_hint

if TYPE_CHECKING:
    from weft.api.observe.spans import RequestSpans
    from weft.http.options import ServeOptions

PATH = "/v1/traces"  # path of a collector that gets spans over HTTP
GRPC_PORT = 4317
TRACE_HEADERS = (b"traceparent", b"tracestate")  # W3C Trace Context

NO_HEADERS: Mapping[str, str] = MappingProxyType({})

trace_headers: ContextVar[Mapping[str, str]] = ContextVar("trace_headers", default=NO_HEADERS)  # of this request


class TraceHeaders:
    """Middleware that keeps the headers which name the caller's span, for `RequestSpans.record`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            name.decode(): value.decode("latin-1") for name, value in scope.get("headers", ()) if name in TRACE_HEADERS
        }
        token = trace_headers.set(headers)
        try:
            await self._app(scope, receive, send)
        finally:
            trace_headers.reset(token)
            headers.clear()  # tasks that the request leaves behind, such as batches, do not belong to its trace


def traces_url(endpoint: str) -> str:
    """The URL to which spans are posted. Raises ConfigError for a URL that no collector for OTLP over HTTP can have."""
    try:
        url = urlsplit(endpoint)
        port = url.port
    except ValueError:
        url, port = urlsplit(""), None
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint} is not the URL of a collector; give http://HOST:4318{PATH}",
            code="invalid-traces-endpoint",
        )
    if url.path not in ("", "/"):
        return endpoint
    if port == GRPC_PORT:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint} has gRPC's port, and Weft sends traces over HTTP; give the collector's "
            f"other port, as in http://{url.hostname}:4318{PATH}",
            code="traces-over-grpc",
        )
    return url._replace(path=PATH).geturl()


def check_tracing(options: ServeOptions) -> None:
    """Raise ConfigError for a wrong --otlp-traces-endpoint, or without OpenTelemetry, before a model is read."""
    if options.otlp_traces_endpoint is None:
        return
    traces_url(options.otlp_traces_endpoint)
    try:
        for name in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
            import_module(name)
    except ImportError:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry: {extra_hint('otel')}", code="no-opentelemetry"
        ) from None


@contextmanager
def request_spans(options: ServeOptions, model: str) -> Iterator[RequestSpans | None]:
    """Spans that are sent to --otlp-traces-endpoint; None without that option. Raises as `check_tracing`.

    OpenTelemetry's own variables, such as OTEL_SERVICE_NAME and OTEL_EXPORTER_OTLP_TRACES_HEADERS, set the rest.
    """
    check_tracing(options)
    if options.otlp_traces_endpoint is None:
        yield None
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from weft.api.observe.spans import RequestSpans

    url = traces_url(options.otlp_traces_endpoint)
    spans = RequestSpans(OTLPSpanExporter(endpoint=url), model, url)
    try:
        yield spans
    finally:
        spans.close()
