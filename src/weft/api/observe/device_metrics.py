"""Metrics of ranks, and of the GPUs below them under the names of NVIDIA's dcgm-exporter."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Annotated, get_origin, get_type_hints

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector as PrometheusCollector

from weft.engine.core.commands import TIMES, RankReport, RankStats, Replies
from weft.engine.replicas.running import RunningReplica
from weft.errors import WeftError
from weft.machine.hardware import host, nvml
from weft.machine.hardware.gpu_figures import GpuFigures, GpuSampler
from weft.monitor.gpus import sample_moments
from weft.monitor.history import GpuMoment
from weft.plan.plan import Plan

FRESH_S = 1.0  # least seconds between two queries of the ranks, which answer between two steps
PATIENCE_S = 1.0  # seconds for the answer; a step of a long prompt takes longer, and the last report stands
RANK_LABELS = ("rank", "stage", "device")
# Fields of a rank's report that are metrics, with their descriptions.
RANK_METRICS: dict[str, str] = {
    name: kind.__metadata__[0]
    for name, kind in get_type_hints(RankReport, include_extras=True).items()
    if get_origin(kind) is Annotated
}
# Labels as dcgm-exporter writes them.
GPU_LABELS = ("gpu", "UUID", "device", "modelName", "Hostname")
MIB = 1 << 20

Figure = Callable[[GpuFigures], float | None]
GPU_GAUGES: tuple[tuple[str, str, Figure], ...] = (
    ("GPU_UTIL", "GPU utilization (in %).", lambda gpu: gpu.utilization),
    ("MEM_COPY_UTIL", "Memory utilization (in %).", lambda gpu: gpu.memory_utilization),
    ("FB_USED", "Memory in use (in MiB).", lambda gpu: _scaled(gpu.memory_used_bytes, 1 / MIB)),
    ("FB_FREE", "Memory free (in MiB).", lambda gpu: _free_mib(gpu)),
    ("GPU_TEMP", "Temperature (in C).", lambda gpu: gpu.temperature_c),
    ("POWER_USAGE", "Power draw (in W).", lambda gpu: gpu.power_w),
    ("SM_CLOCK", "Clock of the multiprocessors (in MHz).", lambda gpu: gpu.sm_clock_mhz),
    ("PCIE_TX_THROUGHPUT", "Sent over PCIe (in KB/s).", lambda gpu: _scaled(gpu.pcie_tx_Bps, 1e-3)),
    ("PCIE_RX_THROUGHPUT", "Received over PCIe (in KB/s).", lambda gpu: _scaled(gpu.pcie_rx_Bps, 1e-3)),
    ("NVLINK_BANDWIDTH_TOTAL", "Sent and received over all NVLinks (in MB/s).", lambda gpu: _nvlink_mb(gpu)),
)


class DeviceMetrics(PrometheusCollector):
    """Times and memory of the ranks, and figures of their GPUs, as of the last `refresh`."""

    def __init__(
        self,
        plans: Sequence[Plan],
        call_each: Callable[[RankStats], Awaitable[list[tuple[RunningReplica, Replies]]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`plans` are the plans of all replicas. `call_each` has their ranks execute a command between two steps."""
        self._call = call_each
        self._clock = clock
        self._asked_s = float("-inf")
        self._question: asyncio.Future[None] | None = None
        self._sampling: asyncio.Future[None] | None = None
        self._answers: list[tuple[RunningReplica, Replies]] = []
        self._gpus = GpuWatch([device.name for plan in plans for device in plan.devices])

    async def refresh(self) -> None:
        """Query the ranks and the driver, unless a query is recent. A rank that does not answer keeps its figures."""
        if self._clock() - self._asked_s < FRESH_S:
            return
        self._asked_s = self._clock()
        if self._question is None or self._question.done():
            self._question = asyncio.ensure_future(self._ask())
        if self._gpus.devices and (self._sampling is None or self._sampling.done()):
            self._sampling = asyncio.ensure_future(asyncio.to_thread(self._gpus.sample))
        waits = [future for future in (self._question, self._sampling) if future is not None]
        # Not cancelled after this time: ranks and a driver that do not answer are not queried twice.
        await asyncio.wait(waits, timeout=PATIENCE_S)

    async def _ask(self) -> None:
        """Query the ranks; a failed engine keeps the last reports."""
        with contextlib.suppress(WeftError):
            self._answers = await self._call(RankStats(reset=False))

    def collect(self) -> Iterator[Metric]:
        yield from self._rank_metrics()
        for name, text, figure in GPU_GAUGES if self._gpus.figures else ():
            gauge = GaugeMetricFamily(f"DCGM_FI_DEV_{name}", text, labels=GPU_LABELS)
            for gpu in self._gpus.figures:
                value = figure(gpu)
                if value is not None:
                    gauge.add_metric(self._gpus.labels(gpu), float(value))
            yield gauge

    def reports(self) -> Iterator[tuple[RunningReplica, int, RankReport]]:
        """The last report of each rank: its replica, its number there, and the report."""
        for replica, replies in self._answers:
            for rank, report in enumerate(replies):
                if isinstance(report, RankReport):
                    yield replica, rank, report

    def gpu_moments(self) -> tuple[GpuMoment, ...]:
        """The GPUs as of the last sample."""
        return self._gpus.moments

    def _rank_metrics(self) -> Iterator[Metric]:
        """Counters and gauges per rank; an unknown figure has no sample."""
        for field, text in RANK_METRICS.items():
            if field in TIMES:
                seconds = f"weft:rank_{field.removesuffix('_s')}_seconds"
                family: CounterMetricFamily | GaugeMetricFamily = CounterMetricFamily(seconds, text, labels=RANK_LABELS)
            else:
                family = GaugeMetricFamily(f"weft:rank_{field}", text, labels=RANK_LABELS)
            for labels, value in self._labelled_values(field):
                family.add_metric(labels, value)
            yield family
        yield self._expert_metric()

    def _expert_metric(self) -> Metric:
        """A counter for each expert of each rank: all ranks of a step wait for a rank with busy experts."""
        counter = CounterMetricFamily(
            "weft:expert_tokens", "Tokens that an expert has computed, over all layers.", labels=("rank", "expert")
        )
        for replica, rank, report in self.reports():
            first = replica.plan.places[rank].experts.start
            for expert, tokens in enumerate(report.routed_tokens, first):
                counter.add_metric((str(replica.first_rank + rank), str(expert)), float(tokens))
        return counter

    def _labelled_values(self, field: str) -> Iterator[tuple[Sequence[str], float]]:
        """Labels and value of each rank that reports a field."""
        for replica, rank, report in self.reports():
            value = getattr(report, field)
            if value is not None:
                place, device = replica.plan.places[rank], replica.plan.devices[rank]
                yield (str(replica.first_rank + rank), str(place.stage), device.name), float(value)


class GpuWatch:
    """The GPUs among `devices`, sampled with one session of the driver."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(dict.fromkeys(device for device in devices if device != "cpu"))
        self.figures: tuple[GpuFigures, ...] = ()
        self.moments: tuple[GpuMoment, ...] = ()
        self._hostname = ""
        self._uuids: dict[int, str] = {}
        self._stack = contextlib.ExitStack()
        self._sampler: GpuSampler | None = None

    def sample(self) -> None:
        """Sample the GPUs; blocks for some 50 ms per GPU."""
        if self._sampler is None:
            here = host.probe_host()
            driver = self._stack.enter_context(nvml.open_nvml())
            if driver is None or not here.gpus:
                self.devices = ()
                return
            gpus = here.gpus_of(self.devices)
            self._hostname, self._uuids = here.hostname, {gpu.index: gpu.uuid for gpu in gpus}
            self._sampler = GpuSampler(driver, gpus)
        self.figures = self._sampler.sample()
        self.moments = tuple(sample_moments(self._sampler, self.figures))

    def labels(self, gpu: GpuFigures) -> Sequence[str]:
        """Values of GPU_LABELS."""
        return (str(gpu.index), self._uuids[gpu.index], f"nvidia{gpu.index}", gpu.name, self._hostname)


def _scaled(figure: float | None, factor: float) -> float | None:
    return None if figure is None else figure * factor


def _free_mib(gpu: GpuFigures) -> float | None:
    if gpu.memory_used_bytes is None:
        return None
    return (gpu.memory_total_bytes - gpu.memory_used_bytes) / MIB


def _nvlink_mb(gpu: GpuFigures) -> float | None:
    if gpu.nvlink_tx_Bps is None or gpu.nvlink_rx_Bps is None:
        return None
    return (gpu.nvlink_tx_Bps + gpu.nvlink_rx_Bps) / 1e6
