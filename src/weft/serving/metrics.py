"""Prometheus metrics under vLLM's names, so that its dashboards work."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector as PrometheusCollector

from weft.core.request import Stats

LABELS = ("model_name", "engine")
ENGINE = "0"  # one engine per replica
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


def token_buckets(most: int) -> list[int]:
    """Histogram bounds 1, 2, 5, 10, 20, 50, ... up to `most` tokens."""
    bounds, scale = [], 1
    while scale <= most:
        bounds += [step * scale for step in (1, 2, 5) if step * scale <= most]
        scale *= 10
    return bounds


class EngineStats(PrometheusCollector):
    """Counters and gauges of the core, collected when Prometheus asks for them."""

    def __init__(self, model: str, stats: Callable[[], Stats]) -> None:
        self._labels = (model, ENGINE)
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        now = self._stats()
        gauges = (
            ("num_requests_running", "Requests in the running batch.", float(now.running)),
            ("num_requests_waiting", "Requests waiting in the queue.", float(now.waiting)),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", now.blocks_used / max(1, now.blocks_total)),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        counters = (
            ("prompt_tokens", "Prompt tokens computed or found in the cache.", now.prompt_tokens),
            ("generation_tokens", "Tokens generated.", now.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", now.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", now.prefix_hits),
            ("num_preemptions", "Requests preempted to free KV blocks.", now.preemptions),
            ("spec_decode_num_draft_tokens", "Draft tokens proposed.", now.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", now.accepted_tokens),
        )
        for name, text, total in counters:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counter.add_metric(self._labels, total)
            yield counter
        steps = CounterMetricFamily("weft:steps", "Steps that the engine has finished.", labels=LABELS)
        steps.add_metric(self._labels, now.steps)
        yield steps
        sizes = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens per step.", labels=LABELS)
        below = itertools.accumulate(now.step_sizes)
        buckets = [(str(float(2**power)), float(count)) for power, count in enumerate(below)]
        sizes.add_metric(self._labels, [*buckets, ("+Inf", float(now.steps))], float(now.computed_tokens))
        yield sizes


class Metrics:
    """Metrics of one engine; `model` is the first served name."""

    def __init__(self, model: str, max_model_len: int, stats: Callable[[], Stats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineStats(model, stats))
        tokens = token_buckets(max_model_len)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            family = Histogram(f"vllm:{name}", text, LABELS, registry=self.registry, buckets=buckets)
            return family.labels(model, ENGINE)

        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT)
        self.itl = histogram("inter_token_latency_seconds", "Between one token and the next.", ITL)
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST)
        self.queue = histogram("request_queue_time_seconds", "Arrival to the first step.", REQUEST)
        self.prefill = histogram("request_prefill_time_seconds", "First step to first token.", REQUEST)
        self.inference = histogram("request_inference_time_seconds", "First step to last token.", REQUEST)
        self.decode = histogram("request_decode_time_seconds", "First token to last.", REQUEST)
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens, once per choice.", tokens)
        self.generation_tokens = histogram("request_generation_tokens", "Tokens generated per choice.", tokens)
        self._success = Counter(
            "vllm:request_success",
            "Requests finished, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._model = model

    def count_finished(self, reason: str) -> None:
        """Count one finished choice."""
        self._success.labels(self._model, ENGINE, reason).inc()

    def render(self) -> bytes:
        """The body of /metrics."""
        return generate_latest(self.registry)
