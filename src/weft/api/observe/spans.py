"""RequestSpans: OpenTelemetry spans of requests, with the names and attributes of vLLM's, and no text of clients."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from weft._version import __version__
from weft.engine.frontend.collector import Collector
from weft.engine.frontend.outputs import RequestOutput
from weft.logs import request_id

log = logging.getLogger("weft.serving")

QUEUE_SPANS = 2**14  # spans that wait for the thread which sends them; more replace the oldest
QUEUE_VARIABLE = "OTEL_BSP_MAX_QUEUE_SIZE"
CLOSE_S = 2.0  # seconds for the last spans at the end of a server

Attribute = str | int | float | Sequence[str]
Phase = tuple[str, float, float]


class RequestSpans:
    """Makes the spans of each request that has ended; a thread of the SDK hands them to `exporter`.

    Names of attributes are the same as in vLLM's vllm/tracing/utils.py. `url` is named if the exporter fails.
    """

    def __init__(self, exporter: SpanExporter, model: str, url: str = "") -> None:
        self._model = model
        resource = Resource.create({SERVICE_VERSION: __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "weft"}))
        # The SDK logs its own lines with each batch, in another form.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        size = None if QUEUE_VARIABLE in os.environ else QUEUE_SPANS
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(NotingFailures(exporter, url), max_queue_size=size))
        self._tracer = self._provider.get_tracer("weft.serving", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, collectors: Sequence[Collector], headers: Mapping[str, str]) -> None:
        """Make the spans of the prompts of an HTTP request whose headers continue a trace, if they name one.

        An interrupted prompt has the phases that it has reached, and the status "error".
        """
        now_s = time.monotonic()
        parent = self._propagator.extract(headers, Context())
        for collector in collectors:
            self._record_prompt(collector, parent, now_s, time.time() - now_s)

    def _record_prompt(self, collector: Collector, parent: Context, now_s: float, epoch_s: float) -> None:
        """Spans of one prompt. `epoch_s` is the difference of the time of day and the monotonic clock."""
        output = collector.output
        phases = list(_phases(output, now_s))
        arrival_s, end_s = output.metrics.arrival_s, output.metrics.finished_s or now_s

        def nanoseconds(monotonic_s: float) -> int:
            return round((monotonic_s + epoch_s) * 1e9)

        span = self._tracer.start_span(
            "llm_request",
            parent,
            SpanKind.SERVER,
            {**self._asked(collector), **_given(output), **_latencies(arrival_s, end_s, phases)},
            start_time=nanoseconds(arrival_s),
        )
        inside = set_span_in_context(span, parent)
        for name, began_s, ended_s in phases:
            phase = self._tracer.start_span(name, inside, start_time=nanoseconds(began_s))
            phase.end(nanoseconds(ended_s))
        if not output.finished:
            span.set_status(Status(StatusCode.ERROR, "the request ended before its answer"))
        span.end(nanoseconds(end_s))

    def _asked(self, collector: Collector) -> dict[str, Attribute]:
        params = collector.params
        sampling: dict[str, Attribute] = {
            "gen_ai.request.id": request_id.get() or collector.output.request_id,
            "gen_ai.request.model": self._model,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
        }
        if params.max_tokens is not None:
            sampling["gen_ai.request.max_tokens"] = params.max_tokens
        return sampling

    def close(self) -> None:
        """Send what is left, for at most CLOSE_S seconds."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_S)


def _phases(output: RequestOutput, now_s: float) -> Iterator[Phase]:
    """Name, begin and end of the phases that a prompt has reached, on the monotonic clock."""
    times = output.metrics
    if times.first_token_s is None:
        return
    scheduled_s = times.first_token_s if times.scheduled_s is None else times.scheduled_s
    scheduled_s = max(times.arrival_s, min(scheduled_s, times.first_token_s))  # another process's clock
    yield "queue", times.arrival_s, scheduled_s
    yield "prefill", scheduled_s, times.first_token_s
    yield "decode", times.first_token_s, times.finished_s or now_s


def _given(output: RequestOutput) -> dict[str, Attribute]:
    """Attributes of an answer."""
    return {
        "gen_ai.usage.num_sequences": len(output.outputs),
        "gen_ai.usage.prompt_tokens": len(output.prompt_ids),
        "gen_ai.usage.completion_tokens": sum(len(choice.token_ids) for choice in output.outputs),
        "gen_ai.response.finish_reasons": [choice.finish_reason or "abort" for choice in output.outputs],
    }


def _latencies(arrival_s: float, end_s: float, phases: Sequence[Phase]) -> dict[str, Attribute]:
    """Attributes of a request's times, in seconds."""
    latencies: dict[str, Attribute] = {"gen_ai.latency.e2e": end_s - arrival_s}
    if phases:
        queue, prefill, decode = (ended_s - began_s for _, began_s, ended_s in phases)
        latencies |= {
            "gen_ai.latency.time_in_queue": queue,
            "gen_ai.latency.time_to_first_token": queue + prefill,
            "gen_ai.latency.time_in_model_prefill": prefill,
            "gen_ai.latency.time_in_model_decode": decode,
            "gen_ai.latency.time_in_model_inference": prefill + decode,
        }
    return latencies


class NotingFailures(SpanExporter):
    """An exporter that logs one line when spans cannot be sent, and one when they can again."""

    def __init__(self, exporter: SpanExporter, url: str) -> None:
        # Without possible secrets: a name with a password, and the query.
        parts = urlsplit(url)
        self._exporter, self._url = exporter, f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._failed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception:  # of a library's thread, which must go on
            result = SpanExportResult.FAILURE
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failed:
            log.warning("traces cannot be sent to %s, and are lost until they can; is the collector up?", self._url)
        elif self._failed and not failed:
            log.info("traces are sent to %s again", self._url)
        self._failed = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
