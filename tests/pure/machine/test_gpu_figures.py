"""Live figures of GPUs, on machines with fake GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pure.fake_nvml import FakeNvml, eight_h100, old_driver, sliced, two_consumer_cards
from weft.machine.hardware import nvml
from weft.machine.hardware.gpu_figures import GpuSampler, throttle_reasons
from weft.machine.hardware.topology import Gpu


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    clock = iter(float(second) for second in range(100))

    def create(machine: FakeNvml) -> GpuSampler:
        machine.install(monkeypatch)
        gpus: tuple[Gpu, ...] = nvml.probe_driver(None, tmp_path).gpus
        return GpuSampler(__import__("pynvml"), gpus, lambda: next(clock))

    yield create


def test_figures(sampler: Any) -> None:
    machine = two_consumer_cards()
    busy = dataclasses.replace(
        machine.cards[1],
        utilization=(93, 41),
        power_mw=301_500,
        temperature_c=84,
        throttle=0x4 | 0x20 | 0x40,
        pcie_kBps=(12_000, 3_000),
    )
    machine.cards = [machine.cards[0], busy]
    idle, figures = sampler(machine).sample()
    assert (figures.utilization, figures.memory_utilization, figures.temperature_c) == (93, 41, 84)
    assert (figures.power_w, figures.power_limit_w) == (301.5, 350.0)
    assert (figures.pcie_tx_Bps, figures.pcie_rx_Bps) == (12e6, 3e6)
    assert figures.throttle == ("power cap", "temperature") and idle.throttle == ()
    assert figures.memory_used_bytes == busy.used and figures.memory_total_bytes == busy.memory
    assert figures.nvlink_tx_Bps is None


def test_traffic_over_nvlink_is_the_difference_of_two_samples(sampler: Any) -> None:
    machine = eight_h100()
    card = dataclasses.replace(machine.cards[0], nvlink_KiB=[(100, 50), (1100, 1050)])
    machine.cards = [card]
    samples = sampler(machine)
    (first,) = samples.sample()
    (second,) = samples.sample()
    assert (first.nvlink_tx_Bps, first.nvlink_rx_Bps) == (None, None)
    # The clock is read once per direction: two seconds lie between two samples of one direction.
    assert (second.nvlink_tx_Bps, second.nvlink_rx_Bps) == (1000 * 1024 / 2, 1000 * 1024 / 2)


@pytest.mark.parametrize("machine", [old_driver, sliced])
def test_what_a_driver_does_not_report_is_none(sampler: Any, machine: Any) -> None:
    for figures in sampler(machine()).sample():
        assert figures.memory_total_bytes > 0 and figures.utilization is None and figures.power_w is None


def test_reasons_that_do_not_lower_the_clock() -> None:
    assert throttle_reasons(0x1 | 0x2 | 0x100) == ()
