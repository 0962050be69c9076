"""The CPU as the kernel's files tell of it, and what is measured of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.machine.hardware import cpu
from weft.machine.hardware.cpu import NumaNode, last_cache_bytes, parse_cpu_list

KIB = 1024


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def x86(number: int, socket: int, core: int) -> str:
    return (
        f"processor\t: {number}\nmodel name\t: Some  CPU @ 2GHz\nphysical id\t: {socket}\ncore id\t\t: {core}\n"
        "flags\t\t: fpu avx2 fma avx512f avx512_bf16 amx_bf16\n"
    )


def test_two_sockets_with_two_threads_a_core(tmp_path: Path) -> None:
    seats = [(socket, core) for _ in range(2) for socket in range(2) for core in range(4)]
    info = "\n".join(x86(number, *seat) for number, seat in enumerate(seats))
    nodes = {
        f"sys/devices/system/node/node{number}/{name}": text
        for number, cores in ((0, "0-3,8-11"), (1, "4-7,12-15"))
        for name, text in (
            ("cpulist", cores),
            ("meminfo", f"Node {number} MemTotal:       1000 kB\nNode {number} MemFree:         {number + 1}00 kB\n"),
        )
    }
    found = cpu.probe_cpu(machine(tmp_path, {"proc/cpuinfo": info, **nodes}))
    assert (found.model, found.sockets, found.cores, found.threads) == ("Some CPU @ 2GHz", 2, 8, 16)
    assert found.features == ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")
    assert found.nodes == (
        NumaNode(0, (0, 1, 2, 3, 8, 9, 10, 11), 1000 * KIB, 100 * KIB),
        NumaNode(1, (4, 5, 6, 7, 12, 13, 14, 15), 1000 * KIB, 200 * KIB),
    )


def test_arm_has_other_words(tmp_path: Path) -> None:
    one = "processor\t: {}\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd sve i8mm bf16\nCPU implementer\t: 0x41\n"
    found = cpu.probe_cpu(machine(tmp_path, {"proc/cpuinfo": "\n".join(one.format(number) for number in range(3))}))
    assert (found.sockets, found.cores, found.threads) == (1, 3, 3)
    assert found.features == ("asimd", "sve", "i8mm", "bf16") and found.model


def test_nothing_is_told(tmp_path: Path) -> None:
    found = cpu.probe_cpu(tmp_path)
    assert (found.threads, found.features, found.nodes) == (os.cpu_count(), (), ())
    assert last_cache_bytes(tmp_path) == 0


def test_the_last_cache_counts_once_for_the_cores_that_share_it(tmp_path: Path) -> None:
    files = {}
    for core in range(8):
        for index, (level, size, shared) in enumerate(
            ((1, "32K", f"{core}"), (2, "1024K", f"{core}"), (3, "32M", "0-3" if core < 4 else "4-7"))
        ):
            folder = f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
            files |= {f"{folder}/level": f"{level}\n", f"{folder}/size": size, f"{folder}/shared_cpu_list": shared}
    assert last_cache_bytes(machine(tmp_path, files)) == 64 << 20


@pytest.mark.parametrize(
    ("text", "found"), [("", ()), ("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("2, 5-6\n", (2, 5, 6)), ("x", ())]
)
def test_the_kernel_s_lists(text: str, found: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == found


def test_this_machine_s_cpu() -> None:
    found = cpu.probe_cpu()
    assert found.model and found.cores <= found.threads


def test_the_work_of_cores(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    lines = (
        "cpu  9 9 9 9 9 9 9 9 0 0",
        f"cpu0 {ticks} 0 {ticks} 7 7 0 0 {ticks} 5 5",
        f"cpu1 {ticks} 0 0 9 0 0 0 0 0 0",
        "intr 5 0",
    )
    machine(tmp_path, {"proc/stat": "\n".join(lines)})
    assert [cpu.busy_seconds(cores, tmp_path) for cores in ((0,), (1,), (0, 1))] == [3.0, 1.0, 4.0]
    assert cpu.busy_seconds((7,), tmp_path) is None and cpu.busy_seconds((0,), tmp_path / "none") is None


def test_other_processes_that_compute_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.probes import cpu_speed

    monkeypatch.setattr(cpu_speed, "measure_cores", lambda *_: cpu.CpuSpeed(1.0, 1.0))
    for worked, load, busy in (([0.0, 9.0], 0.0, True), ([5.0, 5.0], 9.0, False), ([None, None], 0.9, True)):
        times = iter(worked)
        monkeypatch.setattr(cpu, "busy_seconds", lambda _, times=times: next(times))
        monkeypatch.setattr(cpu, "load_average", lambda load=load: load)
        assert cpu_speed.measure_watched((0, 1), 1).busy == busy
