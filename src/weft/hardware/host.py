"""This machine as the planner sees it: cores, memory and GPUs that this process may use."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from math import ceil
from pathlib import Path

import msgspec

from weft.hardware import cpu, cuda, nvml
from weft.hardware.cpu import Cpu
from weft.hardware.topology import Gpu, GpuPair

# What the environment may say about a layout; the planner is pure and reads it from here.
PLANNING_VARIABLES = ("VLLM_PP_LAYER_PARTITION", "VLLM_ATTENTION_BACKEND", "TRITON_INTERPRET")

# What attention on GPUs may be computed with, by the name of its package: the module that is imported.
KERNEL_PACKAGES = {"triton": "triton", "flashinfer-python": "flashinfer"}


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """`cores` are the CPU numbers open to this process: its affinity mask, cut to a container's CPU quota.
    `threads` is OMP_NUM_THREADS, an upper limit per rank. Memory is in bytes and within the container's
    limit; free counts what the kernel can reclaim. `environment` holds the PLANNING_VARIABLES that are set. `pairs`
    are every two of the `gpus`; `driver` is their driver's version, "" without one. `cpu` is the whole machine's.
    `packages` are the versions of those KERNEL_PACKAGES that are installed."""

    hostname: str
    cores: tuple[int, ...]
    threads: int | None = None
    memory_total_bytes: int
    memory_free_bytes: int
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    driver: str = ""
    cpu: Cpu | None = None
    environment: dict[str, str] = {}
    packages: dict[str, str] = {}

    @property
    def compute_cores(self) -> tuple[int, ...]:
        """The cores that one rank computes on."""
        return self.cores[: self.threads]

    def gpus_of(self, devices: Iterable[str]) -> list[Gpu]:
        """The GPUs that devices are, by names as "cuda:1" and in their order; a "cpu" is none."""
        return [self.gpus[int(name.removeprefix("cuda:"))] for name in devices if name != "cpu"]


def probe_host(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Host:
    """Look at this machine, below `root` for what the kernel tells in files; milliseconds without a GPU."""
    total, free = memory_bytes(root)
    otherwise = cuda.has_other_order(environment)
    driver = nvml.probe_driver(environment.get("CUDA_VISIBLE_DEVICES"), root, otherwise=otherwise)
    omp = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list is per nesting level
    return Host(
        hostname=socket.gethostname(),
        cores=usable_cores(root),
        threads=int(omp) if omp.isdecimal() and int(omp) > 0 else None,
        memory_total_bytes=total,
        memory_free_bytes=free,
        gpus=driver.gpus,
        pairs=driver.pairs,
        driver=driver.version,
        cpu=cpu.probe_cpu(root),
        environment={name: environment[name] for name in PLANNING_VARIABLES if environment.get(name)},
        packages=kernel_packages(),
    )


def kernel_packages() -> dict[str, str]:
    """Versions of the KERNEL_PACKAGES; nothing is imported. "" is one that does not tell."""
    found = {}
    for package in (name for name, module in KERNEL_PACKAGES.items() if find_spec(module)):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = ""
    return found


def usable_cores(root: Path = Path("/")) -> tuple[int, ...]:
    """The CPU numbers of the affinity mask; under a CPU quota as many as it pays for."""
    # macOS has no affinity.
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    quota = cpu_quota(root)
    if quota is None or quota >= len(cores):
        return tuple(cores)
    # Containers with a quota share a mask: begin where we run now, so that not all of them take CPU 0.
    try:
        stat = (root / "proc/self/stat").read_text()
        begin = cores.index(int(stat.rpartition(")")[2].split()[36]))
    except (OSError, ValueError, IndexError):
        begin = 0
    return tuple(sorted((cores[begin:] + cores[:begin])[:quota]))


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Whole CPUs that the tightest enclosing control group grants, rounded up; None without a quota."""
    quotas = []
    for group in control_groups("cpu", root):
        unified = _read(group / "cpu.max")
        quota, period = unified.split() if unified else ("", "")
        quota, period = quota or _read(group / "cpu.cfs_quota_us"), period or _read(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():  # neither "max" nor -1
            quotas.append(max(1, ceil(int(quota) / int(period))))
    return min(quotas, default=None)


def memory_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """(total, free) bytes: the machine's, or those of the tightest enclosing control group where smaller."""
    lines = (line.split() for line in _read(root / "proc/meminfo").splitlines())
    info = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    if "MemTotal" in info:
        total = info["MemTotal"]
        free = info.get("MemAvailable", info.get("MemFree", total))
    else:  # macOS: the kernel tells only the total without a foreign tool
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free = total // 2
    for group in control_groups("memory", root):
        limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
        used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
        if not (limit.isdecimal() and used.isdecimal()):  # "max", or the root group
            continue
        # File pages that nobody has touched again count as used but go at once when memory is asked for.
        stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
        idle = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        total = min(total, int(limit))
        free = min(free, max(0, int(limit) - max(0, int(used) - idle)))
    return total, free


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The directories of this process's control group and all that enclose it, for v2 and a v1 controller."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        # Inside a container the path may be the outer one, which is not there; its enclosing ones then are.
        group = top / path.strip("/")
        yield from (g for g in (group, *group.parents) if g.is_relative_to(top) and g.is_dir())


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
