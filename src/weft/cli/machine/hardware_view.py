"""Text output of weft hardware."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from weft.cli.tables import console, figures_table
from weft.formatting import format_bytes
from weft.machine.hardware.cpu import Cpu, CpuSpeed
from weft.machine.hardware.host import Host
from weft.machine.hardware.topology import Gpu, GpuPair, link_name
from weft.probes.machine import short_cpu_name
from weft.probes.stored_speeds import PairSpeed, Speeds

if TYPE_CHECKING:
    from rich.table import Table

UNKNOWN = "?"  # for a figure that the driver does not report
LEGEND = {
    "NV": "n NVLinks",
    "PIX": "one PCIe bridge between them",
    "PXB": "several PCIe bridges",
    "PHB": "a CPU's host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between CPUs",
}


def print_machine(here: Host, speeds: Speeds) -> None:
    """Print the whole machine on standard output."""
    out = console()
    for line in cpu_lines(here, speeds):
        out.print(line, soft_wrap=True)
    if not here.gpus:
        out.print("no GPU is visible: weft plan and weft serve use the CPU", soft_wrap=True)
        return
    out.print(f"\n{len(here.gpus)} GPU{'s' * (len(here.gpus) > 1)}, driver {here.driver or UNKNOWN}")
    for line in gpu_lines(here, speeds):
        out.print(line, soft_wrap=True)
    if here.pairs:
        out.print(link_matrix(here))
        for line in pair_lines(here, speeds):
            out.print(line, soft_wrap=True)


def _processor(cpu: Cpu, available: int) -> str:
    """A CPU's name, and the numbers of its sockets, cores and threads; `available` threads are there for Weft."""
    sockets = f"{cpu.sockets} x " if cpu.sockets > 1 else ""
    cores = f"{cpu.cores} core{'s' * (cpu.cores > 1)}"
    threads = f", {cpu.threads} threads" if cpu.threads != cpu.cores else ""
    fewer = f", {available} of them available to Weft" if available < cpu.threads else ""
    return f"{sockets}{short_cpu_name(cpu.model)}, {cores}{threads}{fewer}"


def cpu_lines(here: Host, speeds: Speeds) -> Iterator[str]:
    """The CPU, its memory, and the measured speeds of both."""
    if here.cpu:
        yield f"{here.hostname}: {_processor(here.cpu, len(here.compute_cores))}"
        if here.cpu.features:
            yield f"  instructions: {', '.join(here.cpu.features)}"
        for node in here.cpu.nodes if len(here.cpu.nodes) > 1 else ():
            yield f"  NUMA node {node.number}: {len(node.cores)} threads, {format_bytes(node.memory_total_bytes)}"
    yield f"  memory: {format_bytes(here.memory_free_bytes)} free of {format_bytes(here.memory_total_bytes)}"
    if speeds.cpu:
        teraflops = speeds.cpu.fp32_flops / 1e12
        low = "; the machine was busy: measure again with --refresh-hardware" if speeds.cpu.busy else ""
        yield f"  measured: reads {format_bytes(speeds.cpu.bandwidth_Bps)}/s, {teraflops:.2f} TFLOPS in 32 bits{low}"
        yield f"  Weft's own kernels: {own_kernels(speeds.cpu)}"


def own_kernels(speed: CpuSpeed) -> str:
    """Measured speeds of Weft's CPU kernels by bits per weight, or the reason why there are none."""
    if speed.kernels is None:
        if speed.library is None:
            return "not built, because there is no C++ compiler; slower kernels run instead. Install g++"
        if speed.library:
            return f"they do not run; slower kernels run instead. Delete {speed.library} in Weft's cache"
        return "they are built when an engine starts for the first time, and measured after that"
    products = speed.kernels.products
    bits = ", ".join(str(product.bits) for product in products)
    one = ", ".join(f"{product.weights_Bps[0] / 1e9:.0f}" for product in products)
    many = ", ".join(f"{product.matmul_flops / 1e12:.2f}" for product in products)
    return f"weights of {bits} bits at {one} GB/s for one token, {many} TFLOPS for many"


def gpu_lines(here: Host, speeds: Speeds) -> Iterator[str]:
    """Lines for each GPU; GPUs with the same lines share them."""
    numbers_of: dict[tuple[str, ...], list[str]] = {}
    for gpu in here.gpus:
        numbers_of.setdefault(tuple(one_gpu(gpu, speeds)), []).append(str(gpu.index))
    for (name, *lines), numbers in numbers_of.items():
        yield f"GPU{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {name}"
        yield from (f"  {line}" for line in lines)


def one_gpu(gpu: Gpu, speeds: Speeds) -> Iterator[str]:
    """A GPU's memory and the processes that use it, its links and clocks, and its measured speeds."""
    yield f"{gpu.name}, {format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.total_bytes)}"
    if gpu.slice:
        yield "a MIG slice: CUDA shows only one to a process; CUDA_VISIBLE_DEVICES=MIG-... selects another"
    if gpu.holders:
        yield f"in use by {', '.join(map(str, gpu.holders))}"
    elif gpu.held_bytes:
        yield f"{format_bytes(gpu.held_bytes)} are in use; the driver does not report by which process"
    parts = [*pcie(gpu), *nvlinks(gpu), *numa_node(gpu), *clocks(gpu)]
    yield "; ".join(parts) or "the driver reports neither links nor clocks"
    if gpu.pcie and gpu.pcie.lanes < gpu.pcie.most_lanes:
        yield f"{gpu.pcie.lanes} of {gpu.pcie.most_lanes} PCIe lanes: check its slot and riser"
    for speed in speeds.gpus:
        if speed.gpu != gpu.uuid:
            continue
        rates = speed.copy_Bps, speed.from_host_Bps, speed.to_host_Bps
        copies, from_host, to_host = (f"{rate / 1e9:,.0f} GB/s" for rate in rates)
        yield f"measured: copies at {copies}, {from_host} from the host, {to_host} to the host"


def pcie(gpu: Gpu) -> list[str]:
    """Generation and lanes of the GPU's PCIe link, if known."""
    link = gpu.pcie
    if link is None:
        return []
    now = f" ({link.generation} when idle)" if link.generation < link.most_generation else ""
    return [f"PCIe {link.most_generation} x{link.lanes}{now}"]


def nvlinks(gpu: Gpu) -> list[str]:
    """Number and speed of the GPU's NVLinks, if it has some."""
    links = gpu.nvlinks
    if links is None:
        return []
    version = f" {links.version}" if links.version else ""
    return [
        f"NVLink{version}, {links.count} x {links.each_Bps / 1e9:.0f} GB/s" + (" to a switch" if links.switched else "")
    ]


def numa_node(gpu: Gpu) -> list[str]:
    """The GPU's NUMA node, if known."""
    return [] if gpu.numa_node is None else [f"NUMA node {gpu.numa_node}"]


def clocks(gpu: Gpu) -> list[str]:
    """The highest and the present clock of the GPU's cores, if known."""
    if gpu.clocks is None:
        return []
    now = "" if gpu.clocks.cores_now_hz is None else f" ({gpu.clocks.cores_now_hz / 1e6:.0f} now)"
    return [f"up to {gpu.clocks.cores_hz / 1e6:.0f} MHz{now}"]


def _link_names(pairs: Iterable[GpuPair]) -> dict[tuple[int, int], str]:
    """The name of the link between two GPUs, for both orders of each pair."""
    names: dict[tuple[int, int], str] = {}
    for pair in pairs:
        names[pair.first, pair.second] = names[pair.second, pair.first] = link_name(pair) or UNKNOWN
    return names


def _link_legend(names: Iterable[str]) -> str:
    used = {name.rstrip("0123456789") for name in names}
    return "; ".join(f"{name} {meaning}" for name, meaning in LEGEND.items() if name in used)


def link_matrix(here: Host) -> Table:
    """A table with the link between every two GPUs."""
    names = _link_names(here.pairs)
    numbers = [gpu.index for gpu in here.gpus]
    table = figures_table("", *(f"GPU {number}" for number in numbers))
    for row in numbers:
        table.add_row(f"GPU {row}", *(names.get((row, column), "·") for column in numbers))
    table.caption = _link_legend(names.values()) or None
    table.caption_justify = "left"
    return table


def pair_lines(here: Host, speeds: Speeds) -> Iterator[str]:
    """Peer-to-peer copies: the driver's report and the test; pairs with the same result share a line."""
    pairs_of: dict[str, list[str]] = {}
    for pair in here.pairs:
        measured = speeds.pair(here.gpus[pair.first].uuid, here.gpus[pair.second].uuid)
        pairs_of.setdefault(peer_to_peer(pair, measured), []).append(f"{pair.first}-{pair.second}")
    for result, pairs in pairs_of.items():
        yield f"{'all pairs' if len(pairs_of) == 1 and len(pairs) > 1 else ', '.join(pairs)}: {result}"


def peer_to_peer(pair: GpuPair, measured: PairSpeed | None) -> str:
    """The driver's report on peer-to-peer copies of a pair, and the result of the test."""
    report = {True: "peer-to-peer", False: "no peer-to-peer", None: "peer-to-peer unknown"}[pair.peer]
    report += f" ({pair.reason})" if pair.reason else ""
    if measured is None:
        return f"{report}; not measured"
    if measured.verdict != "works":
        return (
            f"{report} by the driver, but the test found it {measured.verdict}: {measured.detail}; Weft copies through "
            "the host instead"
        )
    way = "directly" if measured.peer else "through the host"
    return f"{report}; all bytes arrive, {way}, about {float(f'{measured.Bps / 1e9:.2g}'):g} GB/s"
