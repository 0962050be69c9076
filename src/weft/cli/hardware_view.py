"""This machine as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from weft.cli.tables import console, table
from weft.formatting import format_bytes
from weft.hardware.cpu import CpuSpeed
from weft.hardware.host import Host
from weft.hardware.topology import Gpu, GpuPair
from weft.probes.machine import short_cpu_name
from weft.probes.speeds import PairSpeed, Speeds

if TYPE_CHECKING:
    from rich.table import Table

UNKNOWN = "?"  # what the driver does not tell
LEGEND = {
    "NV": "n NVLinks",
    "PIX": "one PCIe bridge between them",
    "PXB": "several PCIe bridges",
    "PHB": "a CPU's host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between CPUs",
}


def print_machine(here: Host, speeds: Speeds) -> None:
    """Everything, on standard output."""
    shown = console()
    for line in cpu_lines(here, speeds):
        shown.print(line, soft_wrap=True)
    if not here.gpus:
        shown.print("no GPU is visible: weft plan and weft serve take the CPU", soft_wrap=True)
        return
    shown.print(f"\n{len(here.gpus)} GPU{'s' * (len(here.gpus) > 1)}, driver {here.driver or UNKNOWN}")
    for line in gpu_lines(here, speeds):
        shown.print(line, soft_wrap=True)
    if here.pairs:
        shown.print(matrix(here))
        for line in pair_lines(here, speeds):
            shown.print(line, soft_wrap=True)


def cpu_lines(here: Host, speeds: Speeds) -> Iterator[str]:
    """The CPU, its memory, and what was measured of both."""
    cpu, open_to_us = here.cpu, len(here.compute_cores)
    if cpu:
        sockets = f"{cpu.sockets} x " if cpu.sockets > 1 else ""
        cores = f"{cpu.cores} core{'s' * (cpu.cores > 1)}"
        threads = f", {cpu.threads} threads" if cpu.threads != cpu.cores else ""
        fewer = f", {open_to_us} of them open to Weft" if open_to_us < cpu.threads else ""
        yield f"{here.hostname}: {sockets}{short_cpu_name(cpu.model)}, {cores}{threads}{fewer}"
        if cpu.features:
            yield f"  instructions: {', '.join(cpu.features)}"
        for node in cpu.nodes if len(cpu.nodes) > 1 else ():
            yield f"  NUMA node {node.number}: {len(node.cores)} threads, {format_bytes(node.memory_total_bytes)}"
    yield f"  memory: {format_bytes(here.memory_free_bytes)} free of {format_bytes(here.memory_total_bytes)}"
    if speeds.cpu:
        teraflops = speeds.cpu.fp32_flops / 1e12
        low = "; the machine was busy, and may be faster: --refresh-hardware" if speeds.cpu.busy else ""
        yield f"  measured: reads {format_bytes(speeds.cpu.bandwidth_Bps)}/s, {teraflops:.2f} TFLOPS in 32 bits{low}"
        yield f"  Weft's own kernels: {own_kernels(speeds.cpu)}"


def own_kernels(speed: CpuSpeed) -> str:
    """What they reach, by the bits of a weight."""
    if speed.kernels is None:
        if speed.library is None:
            return "there is no C++ compiler for them, and slower ones take their place; install g++"
        if speed.library:
            return f"they do not run, and slower ones take their place; delete {speed.library} in Weft's cache"
        return "built at the first start of an engine, and measured after that"
    products = speed.kernels.products
    bits = ", ".join(str(it.bits) for it in products)
    one = ", ".join(f"{it.weights_Bps[0] / 1e9:.0f}" for it in products)
    many = ", ".join(f"{it.matmul_flops / 1e12:.2f}" for it in products)
    return f"weights of {bits} bits at {one} GB/s for one token, {many} TFLOPS for many"


def gpu_lines(here: Host, speeds: Speeds) -> Iterator[str]:
    """Each GPU; those that are alike in everything together."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for gpu in here.gpus:
        alike.setdefault(tuple(one_gpu(gpu, speeds)), []).append(str(gpu.index))
    for (name, *lines), numbers in alike.items():
        yield f"GPU{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {name}"
        yield from (f"  {line}" for line in lines)


def one_gpu(gpu: Gpu, speeds: Speeds) -> Iterator[str]:
    """Its memory and who holds it, its links and clocks, and what was measured."""
    yield f"{gpu.name}, {format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.total_bytes)}"
    if gpu.slice:
        yield "a MIG slice: CUDA shows a process one of them; CUDA_VISIBLE_DEVICES=MIG-... takes another"
    if gpu.holders:
        yield f"in use by {', '.join(map(str, gpu.holders))}"
    elif gpu.held_bytes:
        yield f"{format_bytes(gpu.held_bytes)} are in use, by whom the driver does not tell"
    joined = [
        *pcie(gpu),
        *nvlinks(gpu),
        *([] if gpu.numa_node is None else [f"NUMA node {gpu.numa_node}"]),
        *clocks(gpu),
    ]
    yield "; ".join(joined) or "the driver tells neither links nor clocks"
    if gpu.pcie and gpu.pcie.lanes < gpu.pcie.most_lanes:
        yield f"{gpu.pcie.lanes} of {gpu.pcie.most_lanes} PCIe lanes: look at its slot and riser"
    speed = next((it for it in speeds.gpus if it.gpu == gpu.uuid), None)
    if speed:
        copies, come, go = (
            f"{rate / 1e9:,.0f} GB/s" for rate in (speed.copy_Bps, speed.from_host_Bps, speed.to_host_Bps)
        )
        yield f"measured: copies at {copies}, {come} from the host, {go} to it"


def pcie(gpu: Gpu) -> list[str]:
    link = gpu.pcie
    if link is None:
        return []
    now = f" ({link.generation} when idle)" if link.generation < link.most_generation else ""
    return [f"PCIe {link.most_generation} x{link.lanes}{now}"]


def nvlinks(gpu: Gpu) -> list[str]:
    links = gpu.nvlinks
    if links is None:
        return []
    version = f" {links.version}" if links.version else ""
    return [
        f"NVLink{version}, {links.count} x {links.each_Bps / 1e9:.0f} GB/s" + (" to a switch" if links.switched else "")
    ]


def clocks(gpu: Gpu) -> list[str]:
    found = gpu.clocks
    if found is None:
        return []
    now = "" if found.cores_now_hz is None else f" ({found.cores_now_hz / 1e6:.0f} now)"
    return [f"up to {found.cores_hz / 1e6:.0f} MHz{now}"]


def matrix(here: Host) -> Table:
    """How every two GPUs are joined."""
    known = {(pair.first, pair.second): joint(pair) for pair in here.pairs}
    made = table("", *(f"GPU {gpu.index}" for gpu in here.gpus))
    for row in here.gpus:
        cells = (
            "·" if row is column else known[min(row.index, column.index), max(row.index, column.index)]
            for column in here.gpus
        )
        made.add_row(f"GPU {row.index}", *cells)
    used = {cell.rstrip("0123456789") for cell in known.values()}
    made.caption = "; ".join(f"{word} {meaning}" for word, meaning in LEGEND.items() if word in used) or None
    made.caption_justify = "left"
    return made


def joint(pair: GpuPair) -> str:
    """As nvidia-smi topo writes it."""
    return f"NV{pair.nvlinks}" if pair.nvlinks else pair.ancestor or UNKNOWN


def pair_lines(here: Host, speeds: Speeds) -> Iterator[str]:
    """Peer-to-peer: what the driver says, and what was found; pairs that are alike in one line."""
    told: dict[str, list[str]] = {}
    for pair in here.pairs:
        found = speeds.pair(here.gpus[pair.first].uuid, here.gpus[pair.second].uuid)
        told.setdefault(peer(pair, found), []).append(f"{pair.first}-{pair.second}")
    for what, pairs in told.items():
        yield f"{'all pairs' if len(told) == 1 and len(pairs) > 1 else ', '.join(pairs)}: {what}"


def peer(pair: GpuPair, found: PairSpeed | None) -> str:
    says = {True: "peer-to-peer", False: "no peer-to-peer", None: "peer-to-peer unknown"}[pair.peer]
    says += f" ({pair.reason})" if pair.reason else ""
    if found is None:
        return f"{says}; not measured"
    if found.verdict != "works":
        return (
            f"{says} by the driver, but it is {found.verdict}: {found.detail}; Weft copies by way of the host instead"
        )
    way = "directly" if found.peer else "by way of the host"
    return f"{says}; all bytes arrive, {way}, about {float(f'{found.Bps / 1e9:.2g}'):g} GB/s"
