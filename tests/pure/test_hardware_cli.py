"""weft hardware: what a person, a program and weft plan read of this machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pure.commands import weft
from tests.pure.fake_nvml import GIB, FakeNvml, bridged, eight_h100, old_driver, sliced, two_consumer_cards
from tests.refusals import has_values
from weft.errors import ConfigError
from weft.hardware import host, nvml
from weft.hardware.cpu import Cpu, CpuSpeed, NumaNode
from weft.hardware.hardware_file import read_hardware_file
from weft.hardware.host import Host
from weft.probes import links, speeds
from weft.probes.speeds import GpuSpeed, PairSpeed

Run = Callable[..., tuple[int, str, str]]
CPU = Cpu(
    model="Intel(R) Xeon(R) Gold 6430",
    sockets=2,
    cores=64,
    threads=128,
    features=("avx512f", "amx_bf16"),
    nodes=(NumaNode(0, tuple(range(64)), 256 * GIB, GIB), NumaNode(1, tuple(range(64, 128)), 256 * GIB, GIB)),
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Run]:
    """weft WORDS on a machine with these GPUs, of which all pairs work but those that `faults` names."""
    monkeypatch.setattr(speeds, "measure_cpu", lambda _: CpuSpeed(50e9, 1e12))

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
        monkeypatch.setattr(links, "measure_links", lambda it: measured(it, faults))

        return weft

    return place


def measured(here: Host, faults: dict[str, str]) -> tuple[tuple[GpuSpeed, ...], tuple[PairSpeed, ...]]:
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


def test_a_machine_without_gpus(on: Callable[..., Run]) -> None:
    status, out, err = on()("hardware")
    assert (status, err) == (0, "")
    has_values(out, "rig: 2 x Intel Xeon Gold 6430", "64 cores", "128 threads", "32 ")
    assert "amx_bf16" in out and "NUMA node 1: 64 threads, 274.9 GB" in out
    assert "429.5 GB free of 549.8 GB" in out and "reads 50.0 GB/s, 1.00 TFLOPS in 32 bits" in out
    assert "no GPU is visible" in out


def test_consumer_cards(on: Callable[..., Run]) -> None:
    status, out, err = on(two_consumer_cards())("hardware")
    assert status == 0 and "measuring copies between the GPUs" in err
    assert "2 GPUs, driver 550.54.15" in out
    has_values(out, "GPU 0: NVIDIA GeForce RTX 4090, 25.2 GB", "25.8 GB", "PCIe 4 x16 (1", "2100 MHz (210")
    has_values(out, "Planet (pid 4242) 6.4 GB, python (pid 77) 2.1 GB", "(pid 78)")
    assert "PCIe 4 x4;" in out and "4 of 16 PCIe lanes" in out
    assert [out.count(speed) for speed in ("900 GB/s", "24 GB/s from", "25 GB/s to")] == [2, 2, 2]
    assert "PHB a CPU's host bridge" in out and "SYS" not in out
    has_values(out, "0-1: no peer-to-peer", "chipset", "all bytes arrive", "host")


def test_a_board_with_a_switch(on: Callable[..., Run]) -> None:
    out = on(eight_h100())("hardware")[1]
    assert "GPUs 0, 1, 2, 3: NVIDIA H100 80GB HBM3" in out and "GPUs 4, 5, 6, 7" in out
    has_values(out, "NVLink 4.0, 18 x 27 GB/s", "switch", "NUMA node 1")
    assert out.count("NV18") == 56 and "NV n NVLinks" in out
    has_values(out, "all pairs: peer-to-peer", "all bytes arrive", "12 GB/s")


def test_a_link_that_hangs_is_told_by_name(on: Callable[..., Run]) -> None:
    out = on(bridged((0, 2), (1, 3), count=4), pair02="nothing happened for 15 s")("hardware")[1]
    has_values(out, "0-2: peer-to-peer", "hung: nothing happened for 15 s", "host")
    assert "1-3: peer-to-peer; all bytes arrive" in out and "0-1, 0-3, 1-2, 2-3: no peer-to-peer" in out


def test_the_words_of_weft_hardware(on: Callable[..., Run], golden: Callable[[str, str], None]) -> None:
    pages = [
        on()("hardware"),
        on(two_consumer_cards())("hardware"),
        on(eight_h100())("hardware"),
        on(bridged((0, 2), (1, 3), count=4), pair02="nothing happened for 15 s")("hardware"),
        on(old_driver())("hardware", "--no-measure"),
        on(sliced())("hardware", "--no-measure"),
    ]
    lines = "\n".join(page for _, page, _ in pages).split("\n")
    golden("hardware.txt", "\n".join(map(str.rstrip, lines)))


def test_what_is_not_told_is_marked(on: Callable[..., Run]) -> None:
    out = on(old_driver())("hardware", "--no-measure")[1]
    assert (
        "neither links nor clocks" in out and out.count(" ? ") == 2 and "0-1: peer-to-peer unknown; not measured" in out
    )
    assert "MIG 3g.20gb" in (out := on(sliced())("hardware", "--no-measure")[1]) and "CUDA_VISIBLE_DEVICES=MIG-" in out


MACHINES: dict[str, Callable[[], FakeNvml] | None] = {
    "no GPU": None,
    "two consumer cards": two_consumer_cards,
    "eight H100": eight_h100,
    "a bridge": lambda: bridged((0, 1)),
    "an old driver": old_driver,
    "MIG slices": sliced,
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_wording_of_a_machine(on: Callable[..., Run], name: str, golden: Callable[[str, str], None]) -> None:
    machine = MACHINES[name]
    golden(f"hardware/{name.replace(' ', '_')}.txt", on(machine and machine())("hardware")[1])


def test_gpus_are_measured_once(on: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = on(bridged((0, 1))), []
    monkeypatch.setattr(links, "measure_links", lambda it: calls.append(it) or measured(it, {}))
    assert "not measured" in run("hardware", "--no-measure")[1] and calls == []
    assert "all bytes arrive" in run("hardware")[1]
    assert "all bytes arrive" in run("hardware")[1] and len(calls) == 1
    run("hardware", "--refresh-hardware")
    assert len(calls) == 2
    # And the plan knows it, without measuring.
    run("plan", "Qwen2.5-0.5B")
    assert len(calls) == 2


def test_a_gpu_that_could_not_be_measured_is_measured_the_next_time(
    on: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = on(bridged((0, 1))), []

    def busy(here: Host) -> tuple[tuple[GpuSpeed, ...], tuple[PairSpeed, ...]]:
        calls.append(here)
        return measured(here, {})[0][:1], ()

    monkeypatch.setattr(links, "measure_links", busy)
    assert "not measured" in run("hardware")[1] and "not measured" in run("hardware")[1] and len(calls) == 2


def test_a_measurement_that_is_not_possible_is_told(on: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = on(bridged((0, 1)))

    def fail(_: Host) -> None:
        raise ConfigError("cannot measure the GPUs of rig: torch sees no GPU", code="no-gpu-visible")

    monkeypatch.setattr(links, "measure_links", fail)
    status, out, err = run("hardware")
    assert status == 0 and "torch sees no GPU" in err and "not measured" in out


@pytest.mark.parametrize("machine", [None, two_consumer_cards, eight_h100, sliced, old_driver])
def test_json_has_all(on: Callable[..., Run], machine: Callable[[], FakeNvml] | None) -> None:
    status, out, _ = on(machine and machine())("hardware", "--json")
    found = json.loads(out)
    assert status == 0 and out.count("\n") == 1
    assert found["host"]["cpu"]["cores"] == 64 and found["speeds"]["cpu"]["bandwidth_Bps"] == 50e9
    assert len(found["host"]["gpus"]) == len(found["speeds"]["gpus"])
    assert ("cpu" in found["hardware"]["nodes"][0]) == (machine is None)


def test_json_tells_what_is_there_also_where_no_plan_is_possible(on: Callable[..., Run]) -> None:
    """A virtual GPU: a name of its own, and a driver that tells little."""
    machine = old_driver()
    machine.cards = [dataclasses.replace(card, name="GRID X-4Q") for card in machine.cards]
    status, out, err = on(machine)("hardware", "--json")
    found = json.loads(out)
    assert (status, found["hardware"], found["host"]["gpus"][0]["name"]) == (0, None, "GRID X-4Q")
    assert "'GRID X-4Q'" in err


@pytest.mark.parametrize(
    "machine", [None, two_consumer_cards, eight_h100, lambda: bridged((0, 2), (1, 3), count=4), sliced, old_driver]
)
def test_the_file_that_is_written_plans_alike(
    on: Callable[..., Run], machine: Callable[[], FakeNvml] | None, tmp_path: Path
) -> None:
    run = on(machine and machine())
    path = tmp_path / "rig.yaml"
    path.write_text(run("hardware", "--yaml")[1])
    here = json.loads(run("plan", "Qwen2.5-1.5B", "--json")[1])
    there = json.loads(run("plan", "Qwen2.5-1.5B", "--gpus", str(path), "--json")[1])
    assert here["best"]["name"] == there["best"]["name"]
    assert here["best"]["kv_tokens"] == there["best"]["kv_tokens"]
    assert there["best"]["predicted"]["single_tok_s"] == pytest.approx(
        here["best"]["predicted"]["single_tok_s"], rel=1e-4
    )
    assert read_hardware_file(str(path)).price is None


def test_described_hardware_can_be_written_too(on: Callable[..., Run], tmp_path: Path) -> None:
    run = on()
    path = tmp_path / "rig.yaml"
    path.write_text(run("hardware", "--nodes", "2x8xH100", "--network", "400Gb", "--yaml")[1])
    assert len(read_hardware_file(str(path)).gpus) == 16
    assert run("hardware", "--gpus", str(path), "--yaml")[1] == path.read_text()
    assert json.loads(run("hardware", "--gpus", "2xL4", "--json")[1])["nodes"][0]["gpus"][0]["count"] == 2


@pytest.mark.parametrize(
    ("words", "status", "values"),
    [
        ("--json --yaml", 2, ("--json", "--yaml")),
        ("demo", 2, ("'demo'", "weft hardware")),
        ("--gpus 2xH1000", 1, ("'H1000'",)),
        ("--gpus 2xH100 --nodes 2x8xH100", 2, ("--gpus", "--nodes")),
        ("--refresh-hardware --no-measure", 2, ("--no-measure",)),
        ("--refresh-hardware --gpus 2xL4", 2, ("--gpus", "--nodes")),
        ("--yaml --no-measure", 1, ("CPU", "--no-measure")),
        ("--refresh", 2, ("--refresh", "weft hardware", "--refresh-hardware")),
    ],
)
def test_bad_words(
    on: Callable[..., Run], words: str, status: int, values: tuple[str, ...], golden: Callable[[str, str], None]
) -> None:
    got, out, err = on()("hardware", *words.split())
    assert (got, out) == (status, "") and err.count("\n") == 1
    has_values(err, *values)
    golden(f"hardware/refused_{words.replace('-', '').replace(' ', '_')}.txt", err)


def test_refresh_measures_the_cpu_again(on: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = on(), []
    monkeypatch.setattr(speeds, "measure_cpu", lambda it: calls.append(it) or CpuSpeed(50e9, 1e12))
    run("plan", "Qwen2.5-0.5B")
    run("plan", "Qwen2.5-0.5B")
    assert len(calls) == 1
    assert run("plan", "Qwen2.5-0.5B", "--refresh-hardware")[0] == 0 and len(calls) == 2
