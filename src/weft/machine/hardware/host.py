"""The host: cores, memory and GPUs that this process may use, as the planner takes them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from math import ceil
from pathlib import Path

import msgspec

from weft.machine.hardware import cpu, cuda, nvml
from weft.machine.hardware.cpu import Cpu
from weft.machine.hardware.topology import Gpu, GpuPair

# Variables that influence a layout; the planner is pure and takes them from the Host.
PLANNING_VARIABLES = ("VLLM_PP_LAYER_PARTITION", "VLLM_ATTENTION_BACKEND", "VLLM_BATCH_INVARIANT", "TRITON_INTERPRET")

# Packages with kernels for GPUs, and the module that each is imported as.
KERNEL_PACKAGES = {"triton": "triton", "flashinfer-python": "flashinfer", "humming-kernels": "humming"}


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """This machine, within the limits of this process.

    `cores` are the CPU numbers open to this process: its affinity mask, cut to a container's CPU quota. `threads` is
    OMP_NUM_THREADS, an upper limit per rank. Memory is in bytes and within the container's limit; the free memory
    includes what the kernel can reclaim. `pairs` are every two of the `gpus`; `driver` is their driver's version, ""
    without one. `cpu` is the whole machine's. `environment` holds the PLANNING_VARIABLES that are set, `packages` the
    versions of the KERNEL_PACKAGES that are installed.
    """

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
        """Cores that one rank computes on."""
        return self.cores[: self.threads]

    def gpus_of(self, devices: Iterable[str]) -> list[Gpu]:
        """GPUs of devices such as "cuda:1", in their order; "cpu" is skipped."""
        return [self.gpus[int(name.removeprefix("cuda:"))] for name in devices if name != "cpu"]


def probe_host(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Host:
    """Probe this machine; the kernel's files are read below `root`. Takes milliseconds without a GPU."""
    total, free = memory_bytes(root)
    other_order = cuda.has_other_order(environment)
    driver = nvml.probe_driver(environment.get("CUDA_VISIBLE_DEVICES"), root, other_order=other_order)
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
    """Versions of the installed KERNEL_PACKAGES, "" if unknown; nothing is imported."""
    versions = {}
    for package in (name for name, module in KERNEL_PACKAGES.items() if find_spec(module)):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    return versions


def usable_cores(root: Path = Path("/")) -> tuple[int, ...]:
    """CPU numbers of the affinity mask, cut to the CPU quota."""
    # macOS has no affinity.
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    quota = cpu_quota(root)
    if quota is None or quota >= len(cores):
        return tuple(cores)
    # Containers with a quota share a mask: begin at the current CPU, so that not all of them take CPU 0.
    try:
        stat = (root / "proc/self/stat").read_text()
        begin = cores.index(int(stat.rpartition(")")[2].split()[36]))
    except (OSError, ValueError, IndexError):
        begin = 0
    return tuple(sorted((cores[begin:] + cores[:begin])[:quota]))


def cpu_quota(root: Path = Path("/")) -> int | None:
    """CPU quota of the tightest enclosing control group, in whole CPUs rounded up; None without a quota."""
    quotas = []
    for group in control_groups("cpu", root):
        unified = _read_file(group / "cpu.max")
        quota, period = unified.split() if unified else ("", "")
        quota, period = (
            quota or _read_file(group / "cpu.cfs_quota_us"),
            period or _read_file(group / "cpu.cfs_period_us"),
        )
        if quota.isdecimal() and period.isdecimal():  # neither "max" nor -1
            quotas.append(max(1, ceil(int(quota) / int(period))))
    return min(quotas, default=None)


def memory_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """(total, free) bytes of memory: the machine's, or the tightest enclosing control group's if smaller."""
    total, free = _machine_memory(root)
    for group in control_groups("memory", root):
        limit = _read_file(group / "memory.max") or _read_file(group / "memory.limit_in_bytes")
        used = _read_file(group / "memory.current") or _read_file(group / "memory.usage_in_bytes")
        if not (limit.isdecimal() and used.isdecimal()):  # "max", or the root group
            continue
        # File pages that were not touched again count as used but are freed at once when memory is needed.
        stat = dict(line.split() for line in _read_file(group / "memory.stat").splitlines())
        idle = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        total = min(total, int(limit))
        free = min(free, max(0, int(limit) - max(0, int(used) - idle)))
    return total, free


def resident_bytes(root: Path = Path("/")) -> int:
    """Resident memory of this process; where the system does not tell, its peak."""
    if statm := _read_file(root / "proc/self/statm"):
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def thread_delay_s(root: Path = Path("/")) -> float:
    """Seconds in which this thread could have run, but its cores had other work; 0 where the system does not tell."""
    counts = _read_file(root / "proc/thread-self/schedstat").split()
    return int(counts[1]) / 1e9 if len(counts) > 1 else 0.0


def _machine_memory(root: Path) -> tuple[int, int]:
    """(total, free) bytes of the whole machine."""
    lines = (line.split() for line in _read_file(root / "proc/meminfo").splitlines())
    info = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    if "MemTotal" in info:
        total = info["MemTotal"]
        return total, info.get("MemAvailable", info.get("MemFree", total))
    # macOS: the kernel reports only the total without a foreign tool.
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total // 2


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Directories of this process's control group and of all that enclose it, for v2 and for a v1 controller."""
    for line in _read_file(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        # Inside a container the path may be the outer one, which does not exist there; enclosing ones then do.
        innermost = top / path.strip("/")
        for group in (innermost, *innermost.parents):
            if group.is_relative_to(top) and group.is_dir():
                yield group


def _read_file(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
