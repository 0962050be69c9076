"""Checks of the machine: libraries, shared memory, network, limits, leftovers, ports and disk."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from weft.cache import cache_path
from weft.formatting import format_bytes
from weft.machine.check import Check, skipped
from weft.machine.hardware.host import Host, control_groups
from weft.machine.hardware.listeners import port_holder
from weft.machine.native import prebuilt
from weft.monitor.processes import Process, orphans

PORTS = (8000, 11434)  # weft serve's, and the default of Ollama's clients
MIN_SHM = 1 << 30  # NCCL takes tens of MB per pair of GPUs; containers start with 64 MB
MIN_FILES = 4096  # a connection takes one, a rank some twenty
MIN_DISK = 20e9  # a small model in 16 bits
SUSPECT = ("docker", "br-", "veth", "virbr", "tun", "tap", "cni", "flannel")  # rarely the way to another machine


def check_machine(host: Host, processes: Sequence[Process], root: Path = Path("/")) -> Iterator[Check]:
    """Every check that needs no GPU. The kernel's files are read below `root`."""
    yield check_torch()
    yield check_kernels()
    yield check_memory(host)
    yield check_control_group(root)
    yield check_shared_memory(root / "dev/shm")
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_interfaces([name for _, name in socket.if_nameindex()])
    yield check_orphans(processes)
    yield from (check_port(port, port_holder(port, root)) for port in PORTS)
    yield check_disk()


def check_torch() -> Check:
    """The installed torch."""
    try:
        return Check("torch", "ok", metadata.version("torch"), limit=">=2.11,<2.14")
    except metadata.PackageNotFoundError:
        return Check("torch", "fail", "not installed", limit=">=2.11,<2.14", remedy='pip install "torch>=2.11,<2.14"')


def check_kernels() -> Check:
    """The C++ compiler, and the library of CPU kernels that it builds."""
    built = prebuilt.built_library()
    if built is None:
        return Check("cpu-kernels", "warn", "no C++ compiler", remedy="install g++; until then slower kernels run")
    return Check("cpu-kernels", "ok", f"built: {built}" if built else "built at the first start of an engine")


def check_memory(host: Host) -> Check:
    """Free memory of the host."""
    value = f"{format_bytes(host.memory_free_bytes)} free of {format_bytes(host.memory_total_bytes)}"
    low = host.memory_free_bytes < 0.05 * host.memory_total_bytes
    return Check("memory", "warn" if low else "ok", value, limit="5 %", remedy="end other processes" if low else "")


def check_control_group(root: Path = Path("/")) -> Check:
    """The limit of memory of the tightest enclosing control group, and the use of it."""
    limits = []
    for group in control_groups("memory", root):
        try:
            limit = (group / "memory.max").read_text().strip()
        except OSError:
            continue
        if limit.isdecimal():
            limits.append(int(limit))
    if not limits:
        return skipped("cgroup-memory", "no limit")
    return Check("cgroup-memory", "ok", f"at most {format_bytes(min(limits))} for this container")


def check_shared_memory(folder: Path) -> Check:
    """Space in /dev/shm, which NCCL and torch use between processes of one machine."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return skipped("shared-memory", f"{folder} is not there")
    small = usage.free < MIN_SHM
    return Check(
        "shared-memory",
        "warn" if small else "ok",
        f"{format_bytes(usage.free)} free in {folder}",
        limit=format_bytes(MIN_SHM),
        remedy="docker run --shm-size 16g, or --ipc host" if small else "",
    )


def check_open_files(limit: int) -> Check:
    """The limit of open files of this process."""
    if limit == resource.RLIM_INFINITY or limit >= MIN_FILES:
        return Check("open-files", "ok", "no limit" if limit == resource.RLIM_INFINITY else str(limit), str(MIN_FILES))
    return Check("open-files", "warn", str(limit), str(MIN_FILES), f"ulimit -n {MIN_FILES}")


def check_interfaces(names: Sequence[str]) -> Check:
    """Network interfaces by which another machine could be reached."""
    usable = [name for name in names if name != "lo" and not name.startswith(SUSPECT)]
    if not usable:
        return Check("interfaces", "warn", ", ".join(names), remedy="no interface leads to another machine")
    return Check("interfaces", "ok", ", ".join(usable))


def check_orphans(processes: Sequence[Process]) -> Check:
    """Processes of Weft whose parent is gone: they should have ended with it."""
    left = orphans(processes)
    if not left:
        return Check("orphans", "ok", "none")
    numbers = " ".join(str(process.pid) for process in left)
    return Check("orphans", "fail", f"{len(left)}: {numbers}", "none", f"kill -9 {numbers}, and please report it")


def check_port(port: int, holder: str | None) -> Check:
    """A port that a server would listen on."""
    name = f"port-{port}"
    if holder is None:
        return Check(name, "ok", "free")
    return Check(name, "warn", f"taken by {holder}", remedy="stop it, or give weft serve another --port")


def check_disk() -> Check:
    """Free space for models, and for Weft's own cache."""
    place = cache_path()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    writable = os.access(place, os.W_OK)
    if not writable:
        return Check("disk", "fail", f"{place} cannot be written", remedy="let XDG_CACHE_HOME be a directory of yours")
    small = free < MIN_DISK
    remedy = "delete models that are not used" if small else ""
    return Check(
        "disk", "warn" if small else "ok", f"{format_bytes(free)} free at {place}", format_bytes(MIN_DISK), remedy
    )
