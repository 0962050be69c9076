"""ServerMonitor: the history of one server, its diagnosis, and the figures that `weft top` shows."""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector as PrometheusCollector

from weft.api.observe.device_metrics import DeviceMetrics
from weft.api.observe.metrics import ServerMetrics
from weft.engine.core.commands import TIMES, RankTimes
from weft.engine.core.request import Request, Stats
from weft.engine.replicas.running import RunningReplica
from weft.monitor.figures import describe_server
from weft.monitor.finding import LIMITS, Finding
from weft.monitor.history import Histogram, History, RankCounters, Snapshot, growing, weights_of
from weft.monitor.price import add_prices
from weft.monitor.rules import CODES, diagnose

if TYPE_CHECKING:
    from weft.planner.execution.forecast import Forecast

log = logging.getLogger("weft.serving")

HISTORY_S = 60.0
FRESH_S = 1.0  # a history grows by at most one moment in this time
PREFIX_TOKENS = 64  # tokens with which prompts are compared
PREFIXES = 4096  # prefixes of the latest prompts


class PrefixCount:
    """Counts prompts that begin like an earlier prompt, whether or not the prefix cache has it."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._known: dict[int, None] = {}  # hashes, the oldest first
        self.prompts = self.repeated = 0

    @property
    def repeated_tokens(self) -> int:
        """Tokens of all common beginnings; only the first tokens of a prompt are compared."""
        return self.repeated * self._tokens

    def add(self, request: Request) -> None:
        """Count a prompt, unless it is short, or has prompt logprobs and so is computed completely."""
        ids = request.prompt
        if len(ids) <= self._tokens or request.params.prompt_logprobs is not None:
            return
        start = hash((request.identity, ids.packed[: 4 * self._tokens]))
        self.prompts += 1
        if start in self._known:
            self.repeated += 1
            del self._known[start]
        elif len(self._known) >= PREFIXES:
            del self._known[next(iter(self._known))]
        self._known[start] = None


class ServerMonitor(PrometheusCollector):
    """Snapshots of a server, at most one per FRESH_S, and their diagnosis.

    `unread_s` gives the seconds for which each stalled client has taken nothing. `forecasts` are the planner's
    forecasts for each replica. `caching`: the prefix cache is on. A server sets all three once it knows them.
    """

    def __init__(
        self,
        model: str,
        replicas: Callable[[], Sequence[RunningReplica]],
        stats: Callable[[], Sequence[Stats]],
        devices: DeviceMetrics,
        metrics: ServerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`replicas` and `stats` have an entry for each replica."""
        self._model, self._replicas, self._stats = model, replicas, stats
        self._devices, self._metrics, self._clock = devices, metrics, clock
        self._plans = tuple(replica.plan for replica in replicas())
        self._began_s = clock()
        self._snapshots: tuple[Snapshot, ...] = ()
        self._refreshing = asyncio.Lock()
        self._logged: set[str] = set()
        self.findings: list[Finding] = []
        self.prefixes = PrefixCount(max(PREFIX_TOKENS, self._plans[0].block_size))
        self.unread_s: Callable[[], Sequence[float]] = tuple
        self.forecasts: Sequence[Forecast] = ()
        self.caching = True
        self.limits = LIMITS

    @property
    def _before(self) -> Snapshot:
        """The server's start: ranks compute little while they load."""
        # Delays during loading are not small: they count from now on.
        unused = {name: 0.0 for name in TIMES if name != "delayed_s"}
        return Snapshot(time_s=self._began_s, ranks=tuple(replace(rank, steps=0, **unused) for rank in self._ranks()))

    @property
    def history(self) -> History:
        """The last HISTORY_S, at least one snapshot after `refresh`."""
        return History(plans=self._plans, weights=self._weights, snapshots=self._snapshots, caching=self.caching)

    @cached_property
    def _weights(self) -> tuple[tuple[int, ...], ...]:
        return weights_of(self._plans)

    async def refresh(self) -> None:
        """Take a snapshot unless the last one is fresh, and diagnose; a new finding is logged once."""
        async with self._refreshing:  # for concurrent clients
            if not self._snapshots or self._clock() - self._snapshots[-1].time_s >= FRESH_S:
                await self._grow()

    async def _grow(self) -> None:
        """Take a snapshot, and diagnose."""
        await self._devices.refresh()
        if not self._snapshots:
            self._snapshots = (self._before,)
        self._snapshots = growing(self._snapshots, self._snapshot(), HISTORY_S)
        # In a thread: the planner takes a while for a large model.
        self.findings = await asyncio.to_thread(self._diagnose)
        for finding in self.findings:
            if finding.code not in self._logged:
                self._logged.add(finding.code)
                cause = f" (follows from {finding.follows_from})" if finding.follows_from else ""
                log.warning("%s%s: %s; remedy: %s", finding.code, cause, finding.text, finding.remedy)

    def _diagnose(self) -> list[Finding]:
        history = self.history
        return add_prices(diagnose(history, self.limits), history, self._forecast)

    def figures(self) -> dict[str, Any]:
        """The figures of this server as GET /monitor has them."""
        node = platform.node()
        nodes = {
            (replica.first_rank + capacity.rank): capacity.node or capacity.host
            for replica in self._replicas()
            for capacity in replica.ready.ranks
        }
        return describe_server(self._model, node, nodes, self.history, self.findings, time.time())

    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily("weft:diagnosis", "1 if the diagnosis has found this.", labels=("code",))
        reported = {finding.code for finding in self.findings}
        for code in CODES:
            gauge.add_metric((code,), float(code in reported))
        yield gauge

    def _snapshot(self) -> Snapshot:
        prefixes = self.prefixes
        return Snapshot(
            time_s=self._clock(),
            ranks=tuple(self._ranks()),
            stats=tuple(self._stats()),
            gpus=self._devices.gpu_moments(),
            unread_s=tuple(self.unread_s()),
            finished=self._metrics.finished(),
            prompts=prefixes.prompts,
            repeated_prompts=prefixes.repeated,
            repeated_tokens=prefixes.repeated_tokens,
            ttft=Histogram(*self._metrics.bucket_counts("ttft")),
            itl=Histogram(*self._metrics.bucket_counts("itl")),
        )

    def _ranks(self) -> Iterator[RankCounters]:
        for replica, rank, report in self._devices.reports():
            capacity = replica.ready.ranks[rank]
            yield RankCounters(
                rank=replica.first_rank + rank,
                replica=replica.number,
                local_rank=rank,
                node=capacity.node or capacity.host,
                **{name: getattr(report, name) for name in RankTimes.__struct_fields__},
            )

    def _forecast(self, replica: int) -> Forecast | None:
        return self.forecasts[replica] if replica < len(self.forecasts) else None
