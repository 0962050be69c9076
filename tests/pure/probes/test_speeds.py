"""Stored measurements: kept by the machine's fingerprint, and measured again if the file is of no use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.log_events import logged
from tests.refusals import refuses
from weft.errors import ConfigError
from weft.machine.hardware.cpu import Cpu, CpuSpeed, KernelSpeed, ProductSpeed
from weft.machine.hardware.host import Host, probe_host
from weft.machine.hardware.topology import Gpu
from weft.machine.native import prebuilt
from weft.probes import stored_speeds
from weft.probes.stored_speeds import GpuSpeed, PairSpeed, Speeds, cpu_speed_of, fingerprint, load_speeds

CARD = Gpu(index=0, name="card", uuid="GPU-1", total_bytes=8, free_bytes=8, capability=(8, 0))
HOST = Host(
    hostname="here",
    cores=(0, 1),
    memory_total_bytes=1 << 33,
    memory_free_bytes=1 << 32,
    cpu=Cpu(model="CPU", sockets=1, cores=2, threads=2),
    gpus=(CARD,),
    driver="550",
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Host]:
    """The hosts whose CPU was measured; each time one byte per second faster."""
    calls: list[Host] = []

    def measure(host: Host) -> CpuSpeed:
        calls.append(host)
        return CpuSpeed(1e9 + len(calls), 1e12)

    monkeypatch.setattr(stored_speeds, "measure_cpu", measure)
    monkeypatch.setattr(prebuilt, "built_library", lambda: "")
    return calls


@pytest.mark.parametrize(
    "changed",
    [
        {"hostname": "there"},
        {"cores": (0, 1, 2)},
        {"threads": 1},
        {"driver": "560"},
        {"gpus": ()},
        {"gpus": (msgspec.structs.replace(CARD, uuid="GPU-2"),)},
        {"cpu": Cpu(model="another", sockets=1, cores=2, threads=2)},
    ],
)
def test_another_machine_has_another_fingerprint(changed: dict[str, Any]) -> None:
    assert fingerprint(msgspec.structs.replace(HOST, **changed)) != fingerprint(HOST)


def test_facts_that_change_from_minute_to_minute_do_not_count() -> None:
    gpus = (msgspec.structs.replace(CARD, free_bytes=1, index=0),)
    other = msgspec.structs.replace(HOST, memory_free_bytes=1, cores=(4, 5), gpus=gpus, environment={"A": "b"})
    assert fingerprint(other) == fingerprint(HOST)
    assert fingerprint(HOST, 1) != fingerprint(HOST, 2)


def test_the_cpu_is_measured_once(measured: list[Host]) -> None:
    first = cpu_speed_of(HOST)
    assert cpu_speed_of(HOST) == first and measured == [HOST]
    assert cpu_speed_of(msgspec.structs.replace(HOST, hostname="there")) != first
    assert cpu_speed_of(HOST, refresh=True).bandwidth_Bps == 1e9 + 3
    assert cpu_speed_of(HOST).bandwidth_Bps == 1e9 + 3


def test_a_busy_machine_is_measured_again_when_it_is_not(measured: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    stored_speeds.store_speeds(HOST, msgspec.structs.replace(load_speeds(HOST), cpu=CpuSpeed(5.0, 5.0, busy=True)))
    monkeypatch.setattr(stored_speeds, "is_busy", lambda: True)
    assert cpu_speed_of(HOST).bandwidth_Bps == 5.0 and measured == []
    monkeypatch.setattr(stored_speeds, "is_busy", lambda: False)
    assert cpu_speed_of(HOST).bandwidth_Bps == 1e9 + 1


def test_speeds_are_measured_again_once_the_kernels_are_built(
    measured: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(path: str | None) -> float:
        monkeypatch.setattr(prebuilt, "built_library", lambda: path)
        return cpu_speed_of(HOST).bandwidth_Bps

    stored_speeds.store_speeds(HOST, msgspec.structs.replace(load_speeds(HOST), cpu=CpuSpeed(5.0, 5.0, library="")))
    assert built("") == 5.0
    assert built("/cache/bfloat16-1.so") == 1e9 + 1
    stored_speeds.store_speeds(
        HOST, msgspec.structs.replace(load_speeds(HOST), cpu=CpuSpeed(6.0, 6.0, library="bfloat16-1.so", kernels=OWN))
    )
    assert built("/cache/bfloat16-1.so") == built("") == 6.0  # of those to come nothing can be measured
    assert built("/cache/bfloat16-2.so") == 1e9 + 2


def test_speeds_are_measured_again_if_the_kernels_come_or_go(
    measured: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    def anew(kept: CpuSpeed, found: str | None) -> bool:
        monkeypatch.setattr(prebuilt, "built_library", lambda: found)
        stored_speeds.store_speeds(HOST, msgspec.structs.replace(load_speeds(HOST), cpu=kept))
        return cpu_speed_of(HOST) != kept

    without, broken = CpuSpeed(5.0, 5.0, library=None), CpuSpeed(5.0, 5.0, library="a.so")
    runs = msgspec.structs.replace(broken, kernels=OWN)
    assert anew(runs, None) and not anew(runs, "") and not anew(runs, "/cache/a.so")  # the compiler is gone
    assert anew(without, "") and not anew(without, None)  # and there
    assert anew(broken, "") and not anew(broken, "/cache/a.so")  # a library that did not run is deleted


def test_gpus_stay_known_when_the_cpu_is_measured(measured: list[Host]) -> None:
    pair = PairSpeed(first="GPU-1", second="GPU-2", verdict="hung", detail="x")
    gpu = GpuSpeed(gpu="GPU-1", copy_Bps=1.0, from_host_Bps=1.0, to_host_Bps=1.0)
    stored_speeds.store_speeds(HOST, msgspec.structs.replace(load_speeds(HOST), gpus=(gpu,), pairs=(pair,)))
    cpu_speed_of(HOST)
    found = load_speeds(HOST)
    assert (found.gpus, found.pairs) == ((gpu,), (pair,)) and found.cpu is not None
    assert found.pair("GPU-2", "GPU-1") == pair and found.pair("GPU-1", "GPU-3") is None


def test_measurements_that_others_stored_meanwhile_stay(measured: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GpuSpeed(gpu="GPU-1", copy_Bps=1.0, from_host_Bps=1.0, to_host_Bps=1.0)

    def slowly(host: Host) -> CpuSpeed:
        stored_speeds.store_speeds(host, msgspec.structs.replace(load_speeds(host), gpus=(gpu,)))
        return CpuSpeed(3.0, 3.0)

    monkeypatch.setattr(stored_speeds, "measure_cpu", slowly)
    cpu_speed_of(HOST)
    assert (load_speeds(HOST).gpus, load_speeds(HOST).cpu) == ((gpu,), CpuSpeed(3.0, 3.0))


def kept(found: Speeds) -> bytes:
    return msgspec.json.encode(found)


OWN = KernelSpeed(
    products=(ProductSpeed(bits=16, weights_Bps=(9.0, 8.0, 7.0, 6.0), matmul_flops=1.0),),
    cache_Bps=1.0,
    attention_flops=1.0,
    rows_Bps=1.0,
)
FILE = Speeds(machine=fingerprint(HOST, stored_speeds.VERSION), cpu=CpuSpeed(7.0, 7.0))


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        kept(FILE)[:-4],
        b"\xff\xfe",
        b"[]",
        b"{}",
        kept(msgspec.structs.replace(FILE, machine="another")),
        kept(msgspec.structs.replace(FILE, version=stored_speeds.VERSION + 1)),
        kept(msgspec.structs.replace(FILE, cpu=CpuSpeed(0.0, 7.0))),
        kept(msgspec.structs.replace(FILE, cpu=CpuSpeed(-1.0, 7.0))),
        kept(FILE).replace(b"7.0", b"1e999"),
        kept(FILE).replace(b"7.0", b'"fast"'),
        kept(msgspec.structs.replace(FILE, cpu=CpuSpeed(7.0, 7.0, kernels=msgspec.structs.replace(OWN, rows_Bps=0.0)))),
        kept(msgspec.structs.replace(FILE, cpu=CpuSpeed(7.0, 7.0, kernels=OWN))).replace(b"9.0", b"-9.0"),
        kept(msgspec.structs.replace(FILE, cpu=CpuSpeed(7.0, 7.0, kernels=OWN))).replace(b"9.0,", b""),
    ],
)
def test_a_damaged_file_is_measured_anew(measured: list[Host], cache: Path, damaged: bytes) -> None:
    stored_speeds.speeds_path(HOST).parent.mkdir()
    stored_speeds.speeds_path(HOST).write_bytes(kept(FILE))
    assert cpu_speed_of(HOST) == FILE.cpu
    stored_speeds.speeds_path(HOST).write_bytes(damaged)
    assert load_speeds(HOST).cpu is None
    assert cpu_speed_of(HOST).bandwidth_Bps == 1e9 + 1 and load_speeds(HOST).cpu == cpu_speed_of(HOST)
    assert [file.suffix for file in stored_speeds.speeds_path(HOST).parent.iterdir()] == [".json"]


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (msgspec.structs.replace(FILE, machine="another"), "it describes another machine or an older measurement"),
        (msgspec.structs.replace(FILE, version=1), "it describes another machine or an older measurement"),
        (msgspec.structs.replace(FILE, cpu=CpuSpeed(0.0, 7.0)), "its figures are impossible"),
    ],
)
def test_a_file_that_is_ignored_says_why(
    measured: list[Host], cache: Path, caplog: pytest.LogCaptureFixture, stored: Speeds, reason: str
) -> None:
    stored_speeds.speeds_path(HOST).parent.mkdir()
    stored_speeds.speeds_path(HOST).write_bytes(kept(stored))
    load_speeds(HOST)
    assert f"ignored ({reason})" in caplog.text


def test_a_cache_that_cannot_be_written_is_told_and_no_reason_to_stop(
    measured: list[Host], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cache / "weft").write_text("a file")
    assert cpu_speed_of(HOST) != cpu_speed_of(HOST)
    assert logged(caplog, "measurements-not-stored")


def test_nothing_is_left_of_a_file_that_cannot_be_written(measured: list[Host], cache: Path) -> None:
    stored_speeds.speeds_path(HOST).mkdir(parents=True)
    cpu_speed_of(HOST)
    assert list(stored_speeds.speeds_path(HOST).parent.iterdir()) == [stored_speeds.speeds_path(HOST)]


# --- the measurement itself ---


def test_this_cpu_is_measured_in_a_child() -> None:
    here = probe_host()
    found = stored_speeds.measure_cpu(here)
    assert found.bandwidth_Bps > 1e8 and found.fp32_flops > 1e8


@pytest.mark.parametrize(
    ("features", "kind"),
    [(("avx2", "fma", "avx512f"), "SkylakeX"), (("avx2", "fma"), "Haswell"), (("asimd",), None), ((), None)],
)
def test_numpy_takes_the_largest_instruction_set(features: tuple[str, ...], kind: str | None) -> None:
    assert stored_speeds.openblas_core_type(features) == kind


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import sys; sys.exit('no numpy here')", "no numpy here"),
        ("print('what?')", "JSON is malformed"),
        ("import sys; sys.exit(3)", "status 3"),
        ("import time; time.sleep(60)", "more than 1 s"),
    ],
)
def test_a_measurement_that_fails_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, told: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(stored_speeds, "CPU_DEADLINE_S", 1.0 if "sleep" in script else 60.0)
    with refuses(ConfigError, "cannot-measure-cpu") as error:
        stored_speeds.measure_cpu(HOST)
    assert told in str(error.value) and "--gpus" in str(error.value) and "\n" not in str(error.value)
