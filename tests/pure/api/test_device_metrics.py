"""Metrics of ranks and GPUs: their names, labels and values, and how rarely the ranks are asked."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.pure.fake_nvml import bridged, sliced, two_consumer_cards
from tests.pure.worlds import DEAD, PLAN, READY, World
from weft.api.observe.device_metrics import GPU_GAUGES, GPU_LABELS, MIB, DeviceMetrics, GpuWatch
from weft.checkpoint.architectures.place import Span
from weft.engine.core.commands import RankReport, RankStats, Replies
from weft.engine.replicas.running import RunningReplica
from weft.fleet.gateway.metrics import GatewayMetrics
from weft.fleet.upstreams.config import UpstreamConfig
from weft.fleet.upstreams.fleet import Fleet
from weft.fleet.upstreams.policy import POLICIES
from weft.machine.hardware import host, nvml
from weft.machine.hardware.host import Host

EXPERTS = "weft:expert_tokens_total"
MONITORING = Path(__file__).parents[3] / "docs/monitoring"
REPORTS: Replies = [
    RankReport(
        steps=3, compute_s=1.5, communication_s=0.25, waiting_s=4.0, allocated_bytes=100, routed_tokens=(40, 0, 2)
    ),
    RankReport(steps=3, compute_s=1.0, communication_s=None, waiting_s=4.5, allocated_bytes=200, driver_bytes=300),
]


class Ranks:
    """Answers RankStats, and counts how often."""

    def __init__(self) -> None:
        self.asked = 0
        self.now = 0.0
        self.answer: Any = REPORTS
        self.metrics = DeviceMetrics([PLAN], self.call_each, lambda: self.now)

    async def call_each(self, command: RankStats) -> list[tuple[RunningReplica, Replies]]:
        return [(RunningReplica(PLAN, READY), await self.call(command))]

    async def call(self, command: RankStats) -> Replies:
        assert not command.reset, "the counters of others are kept"
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            await asyncio.Event().wait()
        return self.answer

    def values(self, name: str) -> dict[str, float]:
        return {sample.labels["rank"]: sample.value for sample in samples(self.metrics.collect(), name)}


def samples(metrics: Iterator[Metric], name: str) -> list[Any]:
    return [sample for metric in metrics for sample in metric.samples if sample.name == name]


async def test_ranks() -> None:
    ranks = Ranks()
    assert ranks.values("weft:rank_compute_seconds_total") == {}
    await ranks.metrics.refresh()
    assert ranks.values("weft:rank_compute_seconds_total") == {"0": 1.5, "1": 1.0}
    assert ranks.values("weft:rank_communication_seconds_total") == {"0": 0.25}, "the other does not know it"
    assert ranks.values("weft:rank_waiting_seconds_total") == {"0": 4.0, "1": 4.5}
    assert ranks.values("weft:rank_allocated_bytes") == {"0": 100.0, "1": 200.0}
    assert ranks.values("weft:rank_driver_bytes") == {"1": 300.0}
    (first, _) = samples(ranks.metrics.collect(), "weft:rank_allocated_bytes")
    assert first.labels == {"rank": "0", "stage": "0", "device": PLAN.devices[0].name}


async def test_experts() -> None:
    """The second rank has the experts from number 3 on."""
    ranks = Ranks()
    held = [replace(place, experts=Span(3 * rank, 3 * rank + 3)) for rank, place in enumerate(PLAN.places)]
    plan = replace(PLAN, places=tuple(held))
    ranks.answer = [REPORTS[0], replace(REPORTS[1], routed_tokens=(1, 2, 3))]

    async def call_each(command: RankStats) -> list[tuple[RunningReplica, Replies]]:
        return [(RunningReplica(plan, READY), await ranks.call(command))]

    metrics = DeviceMetrics([plan], call_each, lambda: 0.0)
    await metrics.refresh()
    counted = {(one.labels["rank"], one.labels["expert"]): one.value for one in samples(metrics.collect(), EXPERTS)}
    assert counted == {("0", "0"): 40, ("0", "1"): 0, ("0", "2"): 2, ("1", "3"): 1, ("1", "4"): 2, ("1", "5"): 3}


async def test_the_ranks_are_asked_rarely() -> None:
    ranks = Ranks()
    for now in (0.0, 0.5, 0.9, 1.1, 2.0):
        ranks.now = now
        await ranks.metrics.refresh()
    assert ranks.asked == 2


async def test_ranks_that_do_not_answer_keep_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.observe.device_metrics.PATIENCE_S", 0.01)
    ranks = Ranks()
    await ranks.metrics.refresh()
    for answer, asked in ((None, 2), (None, 2), (DEAD, 2)):
        ranks.answer, ranks.now = answer, ranks.now + 10
        await ranks.metrics.refresh()
        assert ranks.asked == asked, "the question is still open"
        assert ranks.values("weft:rank_compute_seconds_total") == {"0": 1.5, "1": 1.0}


async def test_an_engine_that_has_failed_keeps_its_figures() -> None:
    ranks = Ranks()
    await ranks.metrics.refresh()
    ranks.answer, ranks.now = DEAD, 10.0
    await ranks.metrics.refresh()
    assert ranks.asked == 2 and ranks.values("weft:rank_compute_seconds_total") == {"0": 1.5, "1": 1.0}


async def test_the_page_has_them() -> None:
    world = World()
    assert await world.metric("weft:rank_allocated_bytes", rank="1") == 1001


# --- GPUs ---


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Any:
    def create(machine: Any, *devices: str) -> GpuWatch:
        machine.install(monkeypatch)
        driver = nvml.probe_driver(None)
        here = Host(hostname="rig", cores=(0,), memory_total_bytes=1, memory_free_bytes=1, gpus=driver.gpus, driver="1")
        monkeypatch.setattr(host, "probe_host", lambda: here)
        return GpuWatch(devices)

    return create


def test_gpus_of_the_ranks_only(watch: Any) -> None:
    machine = two_consumer_cards()
    machine.cards = [machine.cards[0], dataclasses.replace(machine.cards[1], utilization=(93, 41), power_mw=250_000)]
    gpus = watch(machine, "cuda:1", "cuda:1", "cpu")
    gpus.sample()
    (figures,) = gpus.figures
    values = {name: figure(figures) for name, _, figure in GPU_GAUGES}
    assert (values["GPU_UTIL"], values["MEM_COPY_UTIL"], values["POWER_USAGE"]) == (93, 41, 250.0)
    assert values["FB_USED"] == machine.cards[1].used / MIB
    assert values["FB_FREE"] == (machine.cards[1].memory - machine.cards[1].used) / MIB
    assert values["NVLINK_BANDWIDTH_TOTAL"] is None
    labels = dict(zip(GPU_LABELS, gpus.labels(figures), strict=True))
    assert labels["gpu"] == "1" and labels["UUID"] == machine.cards[1].uuid and labels["Hostname"] == "rig"


def test_a_figure_that_is_not_known_has_no_sample(watch: Any) -> None:
    metrics = DeviceMetrics([PLAN], Ranks().call_each)
    metrics._gpus = watch(sliced(), "cuda:0")
    metrics._gpus.sample()
    assert samples(metrics.collect(), "DCGM_FI_DEV_GPU_UTIL") == []
    assert len(samples(metrics.collect(), "DCGM_FI_DEV_FB_USED")) == 1


def test_traffic_over_nvlink(watch: Any) -> None:
    machine = bridged((0, 1))
    machine.cards = [dataclasses.replace(card, nvlink_KiB=[(0, 0), (9_000, 1_000)]) for card in machine.cards]
    gpus = watch(machine, "cuda:0")
    gpus.sample()
    gpus.sample()
    (figures,) = gpus.figures
    assert figures.nvlink_tx_Bps > 8 * figures.nvlink_rx_Bps > 0


# --- boards ---


async def test_every_metric_and_label_of_vllm_s_board_is_there() -> None:
    board = json.loads((Path(__file__).parents[2] / "data/vllm_board.json").read_text())
    world = World()
    await world.complete(n=2)
    page = (await world.client.get("/metrics")).text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    missing = {name: wanted for name, wanted in board["queries"].items() if not {*wanted} <= labels.get(name, set())}
    assert board["queries"] and missing == {}
    assert await world.metric("vllm:request_max_num_generation_tokens_count") == 1
    itl = [
        await world.metric(f"vllm:{name}_count")
        for name in ("inter_token_latency_seconds", "time_per_output_token_seconds")
    ]
    assert itl[0] == itl[1] > 0


def names_in(text: str) -> set[str]:
    """Metrics that a query, a board or a rule names."""
    return set(re.findall(r"\b(?:vllm:|weft:|DCGM_FI_DEV_)\w+", text))


def page_names(page: str) -> set[str]:
    return {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}


async def test_our_board_and_alerts_query_what_there_is() -> None:
    world = World()
    await world.complete()
    page = (await world.client.get("/metrics")).text
    fleet = Fleet([UpstreamConfig(url="http://127.0.0.1:1")], POLICIES["least_conn"](), lambda: 0.0)
    gateway = GatewayMetrics(fleet).registry
    known = page_names(page) | {f"DCGM_FI_DEV_{name}" for name, _, _ in GPU_GAUGES}
    known |= {name for metric in gateway.collect() for name in (metric.name, f"{metric.name}_total")}
    for file in ("board.json", "alerts.yml"):
        named = names_in((MONITORING / file).read_text())
        assert named and named - known == set()


def test_the_alerts_are_rules_of_prometheus() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian: prometheus) is not here")
    checked = subprocess.run([promtool, "check", "rules", MONITORING / "alerts.yml"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
