"""Prometheus metrics under vLLM's names, so that its dashboards work."""

from __future__ import annotations

import itertools
import math
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector as PrometheusCollector

from weft.api.observe.buckets import BucketCounts
from weft.engine.core.request import Stats

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


class ServerMetrics:
    """Metrics of all replicas. `model` is the first served name, `stats` has an entry for each replica."""

    def __init__(self, model: str, max_model_len: int, stats: Callable[[], Sequence[Stats]]) -> None:
        tokens = token_buckets(max_model_len)
        self.replicas = [ReplicaMetrics(tokens) for _ in stats()]
        self.registry = CollectorRegistry()
        self.registry.register(EngineStats(model, stats))
        self.registry.register(RequestTimes(model, self.replicas))

    def finished(self) -> int:
        """Number of choices that have ended, of all replicas together."""
        return sum(replica.finished.total() for replica in self.replicas)

    def bucket_counts(self, field: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Bounds of the histogram in a field of `ReplicaMetrics`, and counts up to each, over all replicas."""
        histograms: list[BucketCounts] = [getattr(replica, field) for replica in self.replicas]
        totals = [float(sum(counts)) for counts in zip(*(each.cumulative for each in histograms), strict=True)]
        return (*histograms[0].bounds, math.inf), tuple(totals)

    def render(self) -> bytes:
        """The body of /metrics."""
        return generate_latest(self.registry)


class CacheConfig(PrometheusCollector):
    """vLLM's `vllm:cache_config_info`, from which boards read the KV cache's blocks: labels of a gauge that is 1."""

    def __init__(self, model: str, config: Mapping[str, str], stats: Callable[[], Sequence[Stats]]) -> None:
        """`config`: the labels that are the same for all replicas."""
        self._model, self._config, self._stats = model, dict(config), stats

    def collect(self) -> Iterator[Metric]:
        names = (*LABELS, *self._config, "num_gpu_blocks")
        gauge = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache.", labels=names)
        for number, now in enumerate(self._stats()):
            gauge.add_metric((self._model, str(number), *self._config.values(), str(now.blocks_total)), 1)
        yield gauge


class ReplicaMetrics:
    """Histograms of one replica; a request counts for the replica that generated the token in question.

    `tokens` are the bounds for numbers of tokens. `finished` counts choices by the reason of their end.
    """

    def __init__(self, tokens: Sequence[float]) -> None:
        self.ttft = BucketCounts(TTFT)
        self.itl = BucketCounts(ITL)
        self.e2e = BucketCounts(REQUEST)
        self.queue = BucketCounts(REQUEST)
        self.prefill = BucketCounts(REQUEST)
        self.inference = BucketCounts(REQUEST)
        self.decode = BucketCounts(REQUEST)
        self.prompt_tokens = BucketCounts(tokens)
        self.generation_tokens = BucketCounts(tokens)
        self.longest_answer = BucketCounts(tokens)
        self.finished: Counts[str] = Counts()


# Name, text, and field of ReplicaMetrics. vLLM's published board has an older name for the times between tokens.
HISTOGRAMS = (
    ("time_to_first_token_seconds", "Arrival to first token.", "ttft"),
    ("inter_token_latency_seconds", "Between one token and the next.", "itl"),
    ("time_per_output_token_seconds", "Between one token and the next.", "itl"),
    ("e2e_request_latency_seconds", "Arrival to last token.", "e2e"),
    ("request_queue_time_seconds", "Arrival to the first step.", "queue"),
    ("request_prefill_time_seconds", "First step to first token.", "prefill"),
    ("request_inference_time_seconds", "First step to last token.", "inference"),
    ("request_decode_time_seconds", "First token to last.", "decode"),
    ("request_prompt_tokens", "Prompt tokens, once per choice.", "prompt_tokens"),
    ("request_generation_tokens", "Tokens generated per choice.", "generation_tokens"),
    ("request_max_num_generation_tokens", "Tokens of the longest choice of each request.", "longest_answer"),
)


class RequestTimes(PrometheusCollector):
    """Histograms and counters of requests, with a row for each replica."""

    def __init__(self, model: str, replicas: Sequence[ReplicaMetrics]) -> None:
        self._rows = [((model, str(number)), replica) for number, replica in enumerate(replicas)]

    def collect(self) -> Iterator[Metric]:
        for name, text, field in HISTOGRAMS:
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for labels, replica in self._rows:
                counts: BucketCounts = getattr(replica, field)
                family.add_metric(labels, counts.buckets, counts.sum)
            yield family
        success = CounterMetricFamily(
            "vllm:request_success", "Requests finished, by reason.", labels=(*LABELS, "finished_reason")
        )
        for labels, replica in self._rows:
            for reason, count in replica.finished.items():
                success.add_metric((*labels, reason), count)
        yield success
