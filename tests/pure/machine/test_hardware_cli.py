"""weft hardware: what a person, a program and weft plan read of this machine."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pure.commands import refused_line
from tests.pure.fake_nvml import FakeNvml, bridged, eight_h100, old_driver, sliced, two_consumer_cards
from tests.pure.machines_with_gpus import Run, measured
from weft.errors import ConfigError
from weft.machine.hardware.cpu import CpuSpeed
from weft.machine.hardware.hardware_file import read_hardware_file
from weft.machine.hardware.host import Host
from weft.probes import stored_speeds
from weft.probes.stored_speeds import GpuSpeed, PairSpeed
from weft.study.measure import links

PAIR_SPEED = " 12 GB/s"  # of two GPUs, as measured


def test_a_machine_without_gpus(on: Callable[..., Run]) -> None:
    status, out, err = on()("hardware")
    assert (status, err) == (0, "")
    assert re.search(r"^rig: 2 x Intel Xeon Gold 6430, .*\b64 .*\b128 .*\b32 ", out)
    assert "amx_bf16" in out and re.search(r"\bNUMA node 1: 64 .*\b274\.9 GB", out)
    assert re.search(r"\b429\.5 GB .*\b549\.8 GB", out) and re.search(r"\b50\.0 GB/s, 1\.00 TFLOPS\b", out)
    assert "GPU 0" not in out


def test_consumer_cards(on: Callable[..., Run]) -> None:
    status, out, err = on(two_consumer_cards())("hardware")
    assert status == 0 and err
    assert "2 GPUs, driver 550.54.15" in out
    assert re.search(r"GPU 0: .* 4090, .*\b25\.2 GB .*\b25\.8 GB\n  PCIe 4 x16 \(1 .*\b2100 MHz \(210", out)
    assert re.search(r"\bPlanet .*\b4242\b.* 6\.4 GB, python .*\b77\b.* 2\.1 GB, .*\b78\b", out)
    assert "PCIe 4 x4;" in out and "4 of 16 " in out
    assert len(re.findall(r"measured: .*\b900 GB/s, 24 GB/s .*, 25 GB/s ", out)) == 2
    assert out.count("PHB") == 3 and "SYS" not in out, "twice in the matrix, and explained once"
    assert re.search(r"\b0-1: .*\bchipset .*\b12 GB/s", out)


def test_a_board_with_a_switch(on: Callable[..., Run]) -> None:
    out = on(eight_h100())("hardware")[1]
    assert "GPUs 0, 1, 2, 3: NVIDIA H100 80GB HBM3" in out and "GPUs 4, 5, 6, 7" in out
    assert re.search(r"\bNVLink 4\.0, 18 x 27 GB/s .*; NUMA node 1", out) and out.count("NV18") == 56
    assert re.search(r"\bpairs: .*\b12 GB/s", out)


def test_a_link_that_hangs_is_told_by_name(on: Callable[..., Run]) -> None:
    out = on(bridged((0, 2), (1, 3), count=4), pair02="nothing happened for 15 s")("hardware")[1]
    assert re.search(r"\b0-2: .*\bhung: nothing happened for 15 s", out)  # the detail of this test's measurement
    assert "\n1-3: " in out and re.search(r"\n0-1, 0-3, 1-2, 2-3: .*\(not supported\)", out)


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


def test_unknown_facts_are_marked(on: Callable[..., Run]) -> None:
    out = on(old_driver())("hardware", "--no-measure")[1]
    assert out.count(" ? ") == 2 and "GB/s" not in out.partition("\n0-1: ")[2]
    assert "MIG 3g.20gb" in (out := on(sliced())("hardware", "--no-measure")[1]) and "CUDA_VISIBLE_DEVICES=MIG-" in out


def test_gpus_are_measured_once(on: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = on(bridged((0, 1))), []
    monkeypatch.setattr(links, "measure_links", lambda it: calls.append(it) or measured(it, {}))
    assert PAIR_SPEED not in run("hardware", "--no-measure")[1] and calls == []
    assert PAIR_SPEED in run("hardware")[1]
    assert PAIR_SPEED in run("hardware")[1] and len(calls) == 1
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
    assert PAIR_SPEED not in run("hardware")[1] + run("hardware")[1] and len(calls) == 2


def test_a_measurement_that_is_not_possible_is_told(on: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = on(bridged((0, 1)))

    def fail(_: Host) -> None:
        raise ConfigError("cannot measure the GPUs of rig: torch sees no GPU", code="no-gpu-visible")

    monkeypatch.setattr(links, "measure_links", fail)
    status, out, err = run("hardware")
    assert status == 0 and "rig" in err and PAIR_SPEED not in out


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


WRONG_LINES = [
    ("--json --yaml", 2, "json-and-yaml", "--json --yaml"),
    ("demo", 2, "unexpected-argument", "'demo'"),
    ("--gpus 2xH1000", 1, "unknown-gpu", "'H1000'"),
    ("--gpus 2xH100 --nodes 2x8xH100", 2, "gpus-and-nodes", "--gpus --nodes"),
    ("--refresh-hardware --no-measure", 2, "refresh-without-measuring", "--refresh-hardware --no-measure"),
    ("--refresh-hardware --gpus 2xL4", 2, "refresh-of-other-hardware", "--refresh-hardware --gpus --nodes"),
    ("--yaml --no-measure", 1, "cpu-speed-unknown", "--no-measure"),
    ("--refresh", 2, "unknown-flag", "--refresh --refresh-hardware?"),
]


def test_bad_words(on: Callable[..., Run], golden: Callable[[str, str], None]) -> None:
    on()
    entries = [refused_line(f"hardware {words}", *rest) for words, *rest in WRONG_LINES]
    golden("errors/hardware.txt", "".join(entries))


def test_refresh_measures_the_cpu_again(on: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = on(), []
    monkeypatch.setattr(stored_speeds, "measure_cpu", lambda it: calls.append(it) or CpuSpeed(50e9, 1e12))
    run("plan", "Qwen2.5-0.5B")
    run("plan", "Qwen2.5-0.5B")
    assert len(calls) == 1
    assert run("plan", "Qwen2.5-0.5B", "--refresh-hardware")[0] == 0 and len(calls) == 2
