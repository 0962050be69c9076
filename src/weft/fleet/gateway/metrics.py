"""Prometheus metrics of a gateway, all with the prefix weft:gateway_."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector as PrometheusCollector

from weft.api.observe.buckets import BucketCounts
from weft.api.observe.metrics import REQUEST, TTFT
from weft.fleet.gateway.exchange import Exchange
from weft.fleet.upstreams.fleet import Fleet
from weft.fleet.upstreams.replica import UpstreamReplica


class ReplicaGauges(PrometheusCollector):
    """Connections and health of every replica, collected when Prometheus asks for them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        connections = GaugeMetricFamily(
            "weft:gateway_connections", "Unfinished requests of an upstream.", labels=["upstream"]
        )
        up = GaugeMetricFamily("weft:gateway_up", "1 if an upstream gets requests, else 0.", labels=["upstream"])
        for replica in self._fleet.replicas.values():
            connections.add_metric([replica.name], replica.connections)
            up.add_metric([replica.name], float(replica.breaker.closed and not replica.draining))
        yield connections
        yield up


class EndedRequests(PrometheusCollector):
    """Requests that have ended, counted once for each."""

    def __init__(self) -> None:
        self.requests: Counts[tuple[str, int, str]] = Counts()  # by upstream, status and outcome
        self.first_byte, self.duration = BucketCounts(TTFT), BucketCounts(REQUEST)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "weft:gateway_requests",
            "Requests that have ended, by status and outcome: complete, or the code of an error.",
            labels=("upstream", "status", "outcome"),
        )
        for (upstream, status, outcome), count in self.requests.items():
            requests.add_metric((upstream, str(status), outcome), count)
        yield requests
        for name, text, counts in (
            (
                "time_to_first_byte_seconds",
                "From a whole request to the first byte of its response's body.",
                self.first_byte,
            ),
            ("request_seconds", "From a whole request to the end of its response.", self.duration),
        ):
            yield HistogramMetricFamily(f"weft:gateway_{name}", text, buckets=counts.buckets, sum_value=counts.sum)


class GatewayMetrics:
    """Counters and histograms of requests by their last upstream ("" if there was none)."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(ReplicaGauges(fleet))
        self._ended = EndedRequests()
        self.registry.register(self._ended)
        self._retries = Counter(
            "weft:gateway_retries",
            "Tries whose response was not used, by upstream and reason.",
            ("upstream", "reason"),
            registry=self.registry,
        )
        self._lost_rows = Counter(
            "weft:gateway_access_log_lost",
            "Rows of the access log that could not be written.",
            registry=self.registry,
        )
        self._continued = Counter(
            "weft:gateway_continued",
            "Broken answers that went on, by the upstream that went on.",
            ("upstream",),
            registry=self.registry,
        )

    def count_lost_row(self) -> None:
        """Count a row of the access log that could not be written."""
        self._lost_rows.inc()

    def count(self, exchange: Exchange) -> None:
        """Count a request that has ended."""
        ended = self._ended
        ended.requests[exchange.upstream, exchange.status, exchange.outcome] += 1
        ended.duration.observe(time.monotonic() - exchange.began_s)
        if exchange.first_byte_s:
            ended.first_byte.observe(exchange.first_byte_s - exchange.began_s)

    def count_continued(self, replica: UpstreamReplica) -> None:
        """Count an answer that a replica continues."""
        self._continued.labels(replica.name).inc()

    def count_retry(self, replica: UpstreamReplica, reason: str) -> None:
        """Count a try whose response was not used."""
        self._retries.labels(replica.name, reason).inc()

    def render(self) -> bytes:
        """The body of /metrics."""
        return generate_latest(self.registry)
