"""Spans of requests, as an exporter gets them: names, attributes, parents and times."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.pure.letters import END, output
from tests.pure.worlds import FakeEngine, Script, Wire, World, endless, saying
from tests.refusals import refuses
from weft.api.observe import tracing
from weft.api.observe.spans import NotingFailures, RequestSpans
from weft.api.observe.tracing import TraceHeaders, check_tracing, request_spans, trace_headers, traces_url
from weft.engine.core.request import Output, Request
from weft.errors import ConfigError
from weft.http.options import ServeOptions

ENDPOINT = "http://127.0.0.1:4318"
TRACE, PARENT = "ab" * 16, "cd" * 8
# vllm/tracing/utils.py of vLLM, and OpenTelemetry's own for the reasons.
ATTRIBUTES = {
    *(f"gen_ai.request.{name}" for name in ("id", "model", "n", "temperature", "top_p", "max_tokens")),
    *(f"gen_ai.usage.{name}" for name in ("num_sequences", "prompt_tokens", "completion_tokens")),
    *(f"gen_ai.latency.{name}" for name in ("e2e", "time_in_queue", "time_to_first_token")),
    *(f"gen_ai.latency.time_in_model_{name}" for name in ("prefill", "decode", "inference")),
    "gen_ai.response.finish_reasons",
}


def scheduled(request: Request) -> Iterable[Output]:
    """Says "hi" after its first step has been told apart from its first token."""
    at_s = time.monotonic()
    for letter in "hi":
        yield output(request.id, letter, scheduled_s=at_s)
    yield output(request.id, END, "stop")


class Traced:
    """A world whose spans are kept."""

    def __init__(self, script: Script = scheduled) -> None:
        self._exporter = InMemorySpanExporter()
        self.world = World(FakeEngine(script), otlp_traces_endpoint=ENDPOINT)
        self.world.service.spans = RequestSpans(self._exporter, "tiny")

    def spans(self) -> list[ReadableSpan]:
        """All spans, once the service has ended."""
        assert self.world.service.spans is not None
        self.world.service.spans.close()
        return list(self._exporter.get_finished_spans())

    def requests(self) -> list[ReadableSpan]:
        return [span for span in self.spans() if span.name == "llm_request"]


def by(flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "vendor=1"}


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


async def test_a_request_is_a_span_with_its_phases() -> None:
    began_ns = time.time_ns()
    given = Traced()
    body = {"prompt": "sesame", "max_tokens": 5, "temperature": 0.25, "top_p": 0.5, "model": "tiny"}
    assert (await given.world.post("/v1/completions", body, headers=by())).status_code == 200
    spans = {span.name: span for span in given.spans()}
    assert spans.keys() == {"llm_request", "queue", "prefill", "decode"}
    whole, queue, prefill, decode = (spans[name] for name in ("llm_request", "queue", "prefill", "decode"))
    assert whole.kind == SpanKind.SERVER and whole.status.status_code == StatusCode.UNSET
    assert whole.parent is not None and whole.context is not None
    assert (whole.parent.span_id, whole.context.trace_id) == (int(PARENT, 16), int(TRACE, 16))
    for phase in (queue, prefill, decode):
        assert phase.parent is not None and phase.parent.span_id == whole.context.span_id
        assert phase.context is not None and phase.context.trace_id == int(TRACE, 16)
    # One after the other, without gaps, over the request's whole time.
    times = [whole.start_time, queue.start_time, queue.end_time, prefill.start_time, prefill.end_time]
    times += [decode.start_time, decode.end_time, whole.end_time]
    assert times[0::2] == times[1::2] and times == sorted(times, key=lambda at: at or 0)
    assert whole.start_time is not None and began_ns <= whole.start_time + 1000
    assert whole.attributes is not None and whole.attributes.keys() == ATTRIBUTES
    attributes = {name.removeprefix("gen_ai."): value for name, value in whole.attributes.items()}
    assert {name: attributes[f"request.{name}"] for name in ("model", "max_tokens", "temperature", "top_p", "n")} == {
        "model": "tiny",
        "max_tokens": 5,
        "temperature": 0.25,
        "top_p": 0.5,
        "n": 1,
    }
    assert (attributes["usage.prompt_tokens"], attributes["usage.completion_tokens"]) == (len("sesame") + 1, 3)
    assert attributes["response.finish_reasons"] == ("stop",)
    for name, value in {
        "e2e": seconds(whole),
        "time_in_queue": seconds(queue),
        "time_to_first_token": seconds(queue) + seconds(prefill),
        "time_in_model_prefill": seconds(prefill),
        "time_in_model_decode": seconds(decode),
        "time_in_model_inference": seconds(prefill) + seconds(decode),
    }.items():
        assert attributes[f"latency.{name}"] == pytest.approx(value, abs=1e-5), name
    assert not any("sesame" in span.to_json() for span in spans.values())
    assert whole.resource.attributes["service.name"] == "weft"


async def test_each_prompt_is_a_request_and_its_choices_are_not() -> None:
    given = Traced(saying("hello"))
    body = {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 2, "model": "tiny"}
    assert (await given.world.post("/v1/completions", body)).status_code == 200
    requests = given.requests()
    asked = [dict(span.attributes or {}) for span in requests]
    assert [one["gen_ai.usage.prompt_tokens"] for one in asked] == [3, 4]
    for one in asked:
        assert one["gen_ai.usage.num_sequences"] == 2 and one["gen_ai.usage.completion_tokens"] == 4
        assert one["gen_ai.response.finish_reasons"] == ("length", "length")
    assert len({one["gen_ai.request.id"] for one in asked}) == 2
    assert all(span.parent is None for span in requests), "nobody's trace is continued"


async def test_a_caller_that_takes_no_sample_gets_no_spans() -> None:
    given = Traced()
    for headers in (by("00"), by("01")):
        await given.world.post("/v1/completions", {"prompt": "ab", "model": "tiny"}, headers=headers)
    assert len(given.requests()) == 1


async def test_a_client_that_leaves_is_an_error() -> None:
    given = Traced(endless)
    wire = Wire(given.world, "/v1/completions", {"model": "tiny", "prompt": "ab", "stream": True})
    await wire.text(until='"a"')
    wire.hang_up()
    await wire.task
    (span,) = given.requests()
    assert span.status.status_code == StatusCode.ERROR
    assert span.attributes is not None and span.attributes["gen_ai.response.finish_reasons"] == ("abort",)


async def test_a_request_without_a_token_has_no_phases() -> None:
    given = Traced(lambda request: ())
    wire = Wire(given.world, "/v1/completions", {"model": "tiny", "prompt": "ab", "stream": True})
    while not given.world.engine.open:
        await asyncio.sleep(0)
    wire.hang_up()
    await wire.task
    (span,) = given.spans()
    assert span.name == "llm_request" and span.status.status_code == StatusCode.ERROR
    assert "gen_ai.latency.time_to_first_token" not in (span.attributes or {})


async def test_a_task_that_a_request_leaves_behind_is_not_of_its_trace() -> None:
    seen: list[tuple[Context, dict[str, str]]] = []

    async def app(*_: object) -> None:
        seen.append((copy_context(), dict(trace_headers.get())))

    scope = {"type": "http", "headers": [(b"traceparent", b"a"), (b"other", b"b")]}
    await TraceHeaders(app)(scope, None, None)  # type: ignore[arg-type]
    ((context, headers),) = seen
    assert headers == {"traceparent": "a"} and context[trace_headers] == {}


# --- the collector ---


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, str, bytes]]]]:
    """A collector's address, and the path, content type and body of each request that it has got."""
    got: list[tuple[str, str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, self.headers["Content-Type"], body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()
            thread.join()


async def test_a_collector_gets_the_spans_over_http() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="opentelemetry-exporter-otlp-proto-http")
    with collector() as (url, got):
        world = World(FakeEngine(scheduled), otlp_traces_endpoint=url)
        with request_spans(world.service.options, world.service.names[0]) as world.service.spans:
            await world.complete()
        ((path, kind, body),) = got
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == ["decode", "llm_request", "prefill", "queue"]


def test_a_collector_that_is_away_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Away(SpanExporter):
        away = True

        def export(self, spans: object) -> SpanExportResult:
            if self.away:
                raise ConnectionError
            return SpanExportResult.SUCCESS

    away = Away()
    exporter = NotingFailures(away, ENDPOINT.replace("//", "//user:secret@") + "?key=secret")
    logging.getLogger("weft").propagate = True
    with caplog.at_level(logging.INFO, "weft"):
        exporter.export([])
        assert exporter.export([]) is SpanExportResult.FAILURE
        away.away = False
        assert exporter.export([]) is exporter.export([]) is SpanExportResult.SUCCESS
    assert [(record.levelname, ENDPOINT in record.getMessage()) for record in caplog.records] == [
        ("WARNING", True),
        ("INFO", True),
    ]
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("https://a/", "https://a/v1/traces"),
        ("http://a:4317/v1/traces", "http://a:4317/v1/traces"),
        ("http://a/tempo/otlp/v1/traces", "http://a/tempo/otlp/v1/traces"),
    ],
)
def test_urls_of_collectors(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize(
    ("endpoint", "code"),
    [
        ("a:4318", "invalid-traces-endpoint"),
        ("grpc://a:4317", "invalid-traces-endpoint"),
        ("http://a:x", "invalid-traces-endpoint"),
        ("http://a:4317", "traces-over-grpc"),
    ],
)
def test_urls_of_no_collector(endpoint: str, code: str) -> None:
    with refuses(ConfigError, code, endpoint, "4318/v1/traces"):
        check_tracing(ServeOptions(otlp_traces_endpoint=endpoint))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(tracing, "import_module", missing)
    with refuses(ConfigError, "no-opentelemetry", "weft-llm[otel]"):
        check_tracing(ServeOptions(otlp_traces_endpoint=ENDPOINT))
    check_tracing(ServeOptions())
