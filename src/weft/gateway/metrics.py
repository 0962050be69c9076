"""Prometheus metrics of a gateway, all with the prefix weft:gateway_."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector as PrometheusCollector

from weft.gateway.exchange import Exchange
from weft.gateway.fleet import Fleet
from weft.gateway.replica import Replica
from weft.serving.metrics import REQUEST, TTFT


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


class GatewayMetrics:
    """Counters and histograms of requests by their last upstream ("" if there was none)."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(ReplicaGauges(fleet))
        self._requests = Counter(
            "weft:gateway_requests",
            "Requests that have ended, by status and outcome: complete, or the code of an error.",
            ("upstream", "status", "outcome"),
            registry=self.registry,
        )
        self._counters: dict[tuple[str, str, str], Counter] = {}
        self._retries = Counter(
            "weft:gateway_retries",
            "Tries whose response was not used, by upstream and reason.",
            ("upstream", "reason"),
            registry=self.registry,
        )
        self._continued = Counter(
            "weft:gateway_continued",
            "Broken answers that went on, by the upstream that went on.",
            ("upstream",),
            registry=self.registry,
        )
        self._first_byte = Histogram(
            "weft:gateway_time_to_first_byte_seconds",
            "From a whole request to the first byte of its response's body.",
            registry=self.registry,
            buckets=TTFT,
        )
        self._duration = Histogram(
            "weft:gateway_request_seconds",
            "From a whole request to the end of its response.",
            registry=self.registry,
            buckets=REQUEST,
        )

    def count(self, exchange: Exchange) -> None:
        """Count a request that has ended."""
        labels = exchange.upstream, str(exchange.status), exchange.outcome
        counter = self._counters.get(labels)
        if counter is None:  # finding it among the labels takes longer than to count
            counter = self._counters[labels] = self._requests.labels(*labels)
        counter.inc()
        self._duration.observe(time.monotonic() - exchange.began_s)
        if exchange.first_byte_s:
            self._first_byte.observe(exchange.first_byte_s - exchange.began_s)

    def count_continued(self, replica: Replica) -> None:
        """Count an answer that goes on at a replica."""
        self._continued.labels(replica.name).inc()

    def count_retry(self, replica: Replica, reason: str) -> None:
        """Count a try whose response was not used."""
        self._retries.labels(replica.name, reason).inc()

    def render(self) -> bytes:
        """The body of /metrics."""
        return generate_latest(self.registry)
