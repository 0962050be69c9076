"""A machine with fake GPUs, on which weft's commands run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pure.commands import weft
from tests.pure.fake_nvml import GIB, FakeNvml
from weft.machine.hardware import host, nvml
from weft.machine.hardware.cpu import Cpu, CpuSpeed, NumaNode
from weft.machine.hardware.host import Host
from weft.probes import stored_speeds
from weft.probes.stored_speeds import GpuSpeed, PairSpeed
from weft.study.measure import links

Run = Callable[..., tuple[int, str, str]]
CPU = Cpu(
    model="Intel(R) Xeon(R) Gold 6430",
    sockets=2,
    cores=64,
    threads=128,
    features=("avx512f", "amx_bf16"),
    nodes=(NumaNode(0, tuple(range(64)), 256 * GIB, GIB), NumaNode(1, tuple(range(64, 128)), 256 * GIB, GIB)),
)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Run]:
    """weft WORDS on a machine with these GPUs, of which all pairs work but those that `faults` names."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_speeds, "measure_cpu", lambda _: CpuSpeed(50e9, 1e12))

    def place(machine: FakeNvml | None = None, **faults: str) -> Run:
        driver = nvml.DriverReport()
        if machine:
            machine.install(monkeypatch)
            driver = nvml.probe_driver(None, tmp_path)
        here = Host(
            hostname="rig",
            cores=tuple(range(32)),
            memory_total_bytes=512 * GIB,
            memory_free_bytes=400 * GIB,
            cpu=CPU,
            gpus=driver.gpus,
            pairs=driver.pairs,
            driver=driver.version,
        )
        monkeypatch.setattr(host, "probe_host", lambda: here)
        monkeypatch.setattr(links, "measure_links", lambda here: measured(here, faults))
        return weft

    return place


def measured(here: Host, faults: dict[str, str]) -> tuple[tuple[GpuSpeed, ...], tuple[PairSpeed, ...]]:
    """Speeds of all GPUs and pairs; a pair that `faults` names, such as pair01, hangs."""
    gpus = tuple(GpuSpeed(gpu=gpu.uuid, copy_Bps=9e11, from_host_Bps=2.4e10, to_host_Bps=2.5e10) for gpu in here.gpus)
    pairs = []
    for pair in here.pairs:
        fault = faults.get(f"pair{pair.first}{pair.second}", "")
        first, second = here.gpus[pair.first].uuid, here.gpus[pair.second].uuid
        pairs.append(
            PairSpeed(first=first, second=second, verdict="hung", detail=fault)
            if fault
            else PairSpeed(first=first, second=second, verdict="works", peer=bool(pair.peer), Bps=1.234e10)
        )
    return gpus, tuple(pairs)
