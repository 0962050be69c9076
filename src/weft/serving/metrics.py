"""Prometheus metrics under vLLM's names, so that its dashboards work."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector as PrometheusCollector

from weft.core.request import Stats

LABELS = ("model_name", "engine")
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
    """Counters and gauges of the cores, collected when Prometheus asks for them; `engine` is the replica's number."""

    def __init__(self, model: str, stats: Callable[[], Sequence[Stats]]) -> None:
        self._model = model
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        rows = [((self._model, str(number)), now) for number, now in enumerate(self._stats())]
        for name, text, gauge_of in GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for labels, now in rows:
                gauge.add_metric(labels, gauge_of(now))
            yield gauge
        for name, text, field in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for labels, now in rows:
                counter.add_metric(labels, getattr(now, field))
            yield counter
        sizes = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens per step.", labels=LABELS)
        for labels, now in rows:
            below = itertools.accumulate(now.step_sizes)
            buckets = [(str(float(2**power)), float(count)) for power, count in enumerate(below)]
            sizes.add_metric(labels, [*buckets, ("+Inf", float(now.steps))], float(now.computed_tokens))
        yield sizes


GAUGES: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the running batch.", lambda now: float(now.running)),
    ("vllm:num_requests_waiting", "Requests waiting in the queue.", lambda now: float(now.waiting)),
    (
        "vllm:kv_cache_usage_perc",
        "Share of KV blocks in use, 0 to 1.",
        lambda now: now.blocks_used / max(1, now.blocks_total),
    ),
    (  # the name of vLLM's published board
        "vllm:gpu_cache_usage_perc",
        "Share of KV blocks in use, 0 to 1.",
        lambda now: now.blocks_used / max(1, now.blocks_total),
    ),
    (
        "weft:replica_up",
        "1 if the replica has an engine, 0 while it starts again.",
        lambda now: float(now.blocks_total > 0),
    ),
)
COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens computed or found in the cache.", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
    ("vllm:num_preemptions", "Requests preempted to free KV blocks.", "preemptions"),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens proposed.", "draft_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", "accepted_tokens"),
    ("weft:steps", "Steps that the engine has finished.", "steps"),
)


class Metrics:
    """Metrics of all replicas. `model` is the first served name, `stats` has an entry for each replica."""

    def __init__(self, model: str, max_model_len: int, stats: Callable[[], Sequence[Stats]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineStats(model, stats))
        families = self._families = RequestFamilies(self.registry, token_buckets(max_model_len))
        self.registry.register(TokenTimes(families))
        self.replicas = [ReplicaMetrics(families, model, str(number)) for number in range(len(stats()))]

    def finished(self) -> int:
        """Number of choices that have ended, of all replicas together."""
        return int(sum(value for name, _, value in self._families.samples("success") if name.endswith("_total")))

    def bucket_counts(self, field: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Bounds of the histogram in a field of `RequestFamilies`, and counts of values up to each, of all replicas."""
        totals: dict[float, float] = {}
        for sample, labels, value in self._families.samples(field):
            if sample.endswith("_bucket"):
                totals[float(labels["le"])] = totals.get(float(labels["le"]), 0.0) + value
        return tuple(sorted(totals)), tuple(totals[bound] for bound in sorted(totals))

    def render(self) -> bytes:
        """The body of /metrics."""
        return generate_latest(self.registry)


class RequestFamilies:
    """Histograms and counters of requests, with a row for each replica. `tokens` are the bounds for tokens."""

    def __init__(self, registry: CollectorRegistry, tokens: Sequence[float]) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{name}", text, LABELS, registry=registry, buckets=buckets)

        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT)
        self.itl = histogram("inter_token_latency_seconds", "Between one token and the next.", ITL)
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST)
        self.queue = histogram("request_queue_time_seconds", "Arrival to the first step.", REQUEST)
        self.prefill = histogram("request_prefill_time_seconds", "First step to first token.", REQUEST)
        self.inference = histogram("request_inference_time_seconds", "First step to last token.", REQUEST)
        self.decode = histogram("request_decode_time_seconds", "First token to last.", REQUEST)
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens, once per choice.", tokens)
        self.generation_tokens = histogram("request_generation_tokens", "Tokens generated per choice.", tokens)
        self.longest_answer = histogram(
            "request_max_num_generation_tokens", "Tokens of the longest choice of each request.", tokens
        )
        self.success = Counter(
            "vllm:request_success", "Requests finished, by reason.", (*LABELS, "finished_reason"), registry=registry
        )

    def samples(self, field: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
        """Name, labels and value of each sample of the family in a field."""
        for metric in getattr(self, field).collect():
            yield from ((sample.name, sample.labels, sample.value) for sample in metric.samples)


class TokenTimes(PrometheusCollector):
    """The times between tokens under the name that vLLM's published board has for them."""

    def __init__(self, families: RequestFamilies) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        old, new = "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"
        family = Metric(new, "Between one token and the next.", "histogram")
        for name, labels, value in self._families.samples("itl"):
            if not name.endswith("_created"):
                family.add_sample(name.replace(old, new), dict(labels), value)
        yield family


class ReplicaMetrics:
    """The rows of one replica; a request counts for the one that gave the token in question."""

    def __init__(self, families: RequestFamilies, model: str, engine: str) -> None:
        self.ttft = families.ttft.labels(model, engine)
        self.itl = families.itl.labels(model, engine)
        self.e2e = families.e2e.labels(model, engine)
        self.queue = families.queue.labels(model, engine)
        self.prefill = families.prefill.labels(model, engine)
        self.inference = families.inference.labels(model, engine)
        self.decode = families.decode.labels(model, engine)
        self.prompt_tokens = families.prompt_tokens.labels(model, engine)
        self.generation_tokens = families.generation_tokens.labels(model, engine)
        self.longest_answer = families.longest_answer.labels(model, engine)
        self._success, self._labels = families.success, (model, engine)

    def count_finished(self, reason: str) -> None:
        """Count one finished choice."""
        self._success.labels(*self._labels, reason).inc()
