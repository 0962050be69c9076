"""The probe of this machine, on made-up machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.machine.hardware import host
from weft.machine.hardware.host import cpu_quota, memory_bytes, probe_host, usable_cores

MEMINFO = "MemTotal:       16000 kB\nMemFree:         4000 kB\nMemAvailable:    8000 kB\nHugePages_Total:       0\n"
KIB = 1024


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_memory_without_a_control_group(tmp_path: Path) -> None:
    assert memory_bytes(machine(tmp_path, {})) == (16000 * KIB, 8000 * KIB)


def test_memory_of_an_old_kernel(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/meminfo": "MemTotal: 16000 kB\nMemFree: 4000 kB\n"})
    assert memory_bytes(root) == (16000 * KIB, 4000 * KIB)


def test_memory_limited_by_cgroup_v2(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pod/app"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/app\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": "5000000\n",
            # The pod's limit binds though the app has none; idle file pages of it can be had back.
            "sys/fs/cgroup/pod/memory.max": "6000000\n",
            "sys/fs/cgroup/pod/memory.current": "5000000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 3000000\ninactive_file 1000000\n",
        },
    )
    assert memory_bytes(root) == (6000000, 2000000)


def test_memory_limited_by_cgroup_v1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    root = machine(
        tmp_path,
        {
            # The path is the one outside the container, which is not there; its top is.
            "proc/self/cgroup": "5:cpuset:/docker/ab\n4:memory:/docker/ab\n0::/\n",
            f"{group}/memory.limit_in_bytes": "7000000\n",
            f"{group}/memory.usage_in_bytes": "4000000\n",
            f"{group}/memory.stat": "inactive_file 1\ntotal_inactive_file 500000\n",
        },
    )
    assert memory_bytes(root) == (7000000, 3500000)


def test_a_limit_above_the_machine_s_memory_is_none(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "4000000\n",
        },
    )
    assert memory_bytes(root) == (16000 * KIB, 8000 * KIB)


def test_a_control_group_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "100\n", "sys/fs/cgroup/memory.current": "900\n"}
    assert memory_bytes(machine(tmp_path, files)) == (100, 0)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "5000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        ({}, None),
    ],
)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], quota: int | None) -> None:
    assert cpu_quota(machine(tmp_path, files)) == quota


@pytest.mark.parametrize(("running_on", "cores"), [(0, (0, 2)), (4, (4, 6)), (6, (0, 6)), (99, (0, 2))])
def test_a_quota_takes_cores_from_where_we_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running_on: int, cores: tuple[int, ...]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {6, 0, 2, 4}, raising=False)
    stat = " ".join(["1 (a )name) S", *["0"] * 35, str(running_on), "0 0"])
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n", "proc/self/stat": stat}
    assert usable_cores(machine(tmp_path, files)) == cores


def test_affinity_without_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {6, 0, 2}, raising=False)
    assert usable_cores(machine(tmp_path, {})) == (0, 2, 6)


@pytest.mark.parametrize(
    ("value", "threads"), [("3", 3), ("4,2", 4), (" 2 ", 2), ("0", None), ("", None), ("many", None)]
)
def test_omp_num_threads(tmp_path: Path, value: str, threads: int | None) -> None:
    assert probe_host({"OMP_NUM_THREADS": value}, machine(tmp_path, {})).threads == threads


def test_the_environment_s_say(tmp_path: Path) -> None:
    environment = {"VLLM_PP_LAYER_PARTITION": "1,2", "VLLM_ATTENTION_BACKEND": "", "HOME": "/"}
    assert probe_host(environment, machine(tmp_path, {})).environment == {"VLLM_PP_LAYER_PARTITION": "1,2"}


def test_this_machine() -> None:
    here = probe_host()
    assert here.cores and here.hostname
    assert 0 < here.memory_free_bytes <= here.memory_total_bytes
    assert "torch" not in host.__dict__
