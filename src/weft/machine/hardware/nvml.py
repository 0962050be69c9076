"""NVML: the GPUs as NVIDIA's driver reports them, without creating a CUDA context."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from weft.logs import event_fields
from weft.machine.hardware import cuda
from weft.machine.hardware.topology import (
    Ancestor,
    Clocks,
    Gpu,
    GpuPair,
    Holder,
    MigSlice,
    NvLinks,
    Pcie,
    multiprocessors,
)

T = TypeVar("T")

logger = logging.getLogger("weft")

# nvmlGpuTopologyLevel_t; two GPUs of one board share the board's own bridge.
ANCESTORS: dict[int, Ancestor] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# nvmlGpuP2PCapsIndex_t. Plain numbers, because pynvml's constant for the first one is a tuple by mistake.
P2P_READ, P2P_WRITE = 0, 1
# nvmlGpuP2PStatus_t
P2P_OK = 0
P2P_REASONS = {
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the bus between them does not support it",
    4: "switched off in the driver's settings",
    5: "not supported",
}
# nvmlNvlinkVersion_t: its name, and bytes per second of a link in one direction if the driver does not report them.
NVLINK_VERSIONS = {
    1: ("1.0", 20e9),
    2: ("2.0", 25e9),
    3: ("2.2", 25e9),
    4: ("3.0", 25e9),
    5: ("3.1", 25e9),
    6: ("4.0", 25e9),
    7: ("5.0", 50e9),
    8: ("6.0", 100e9),
}
# Beginning of the far end's address if a virtual machine hides it: the link leads to a switch.
HIDDEN = "ffff:ffff:ff"
NODES = 1024  # NUMA nodes in the bit mask that the driver is asked for


class DriverReport(msgspec.Struct, frozen=True):
    """The driver's version, the visible GPUs, and the connection of every two of them; empty without a driver."""

    version: str = ""
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()


def probe_driver(visible: str | None = None, root: Path = Path("/"), *, other_order: bool = False) -> DriverReport:
    """Report the GPUs that CUDA shows under CUDA_VISIBLE_DEVICES=`visible` (None: unset).

    They are numbered along the PCI bus, or with `other_order` as CUDA numbers them in this process. The report is empty
    without a driver.
    """
    if visible is not None and not visible.strip():
        return DriverReport()
    with open_nvml() as nvml:
        if nvml is None:
            return DriverReport()
        try:
            return NvmlSession(nvml, root).report(visible, other_order)
        except nvml.NVMLError as error:
            _warn_no_driver(error)
            return DriverReport()


@contextmanager
def open_nvml() -> Iterator[Any]:
    """The module pynvml with an open session, or None without a driver."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # no driver; spare the import
        yield None
        return
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_DRIVER_NOT_LOADED:  # a library without a loaded driver is no fault
            _warn_no_driver(error)
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _warn_no_driver(error: Exception) -> None:
    logger.warning(
        "NVIDIA's driver does not answer, so no GPU is used: %s", error, extra=event_fields("driver-not-answering")
    )


def memory_holders(nvml: Any, handle: Any) -> Iterator[Holder]:
    """Processes that compute or draw on a GPU, those with the most memory first."""
    none: list[Any] = []
    held_by: dict[int, int | None] = {}
    for question in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in ask_driver(nvml, question, handle, default=none):
            # A process that does both is listed twice, with the same figure.
            held_by[int(process.pid)] = process.usedGpuMemory
    for pid, held in sorted(held_by.items(), key=lambda entry: (-(entry[1] or 0), entry[0])):
        # Not from /proc: inside a container the number may belong to another process there.
        yield Holder(pid, _text(ask_driver(nvml, nvml.nvmlSystemGetProcessName, pid, default="")), held)


def ask_driver(nvml: Any, question: Callable[..., T], *arguments: Any, default: T) -> T:
    """The driver's answer, or the default if the driver or the card has none."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return default


def driver_version() -> str:
    """The driver's version, as in "580.95.05"; "" without a driver."""
    with open_nvml() as nvml:
        return "" if nvml is None else _text(ask_driver(nvml, nvml.nvmlSystemGetDriverVersion, default=""))


class NvmlSession:
    """One session with NVML; the kernel's files are read below `root`.

    Figures that a driver or a card does not support are None or empty. Without a name, a memory or a
    compute capability of a GPU NVMLError is raised, and `report` leaves the board out.
    """

    def __init__(self, nvml: Any, root: Path) -> None:
        self.nvml, self.root = nvml, root
        # Far ends of NVLinks by the GPU's bus address: addresses of GPUs, and None for each link to a switch.
        self.far_ends: dict[str, list[str | None]] = {}

    def report(self, visible: str | None, other_order: bool) -> DriverReport:
        """The GPUs under CUDA_VISIBLE_DEVICES=`visible`, and their connections."""
        nvml = self.nvml
        handles: dict[str, Any] = {}
        gpus: list[Gpu] = []
        for number in range(nvml.nvmlDeviceGetCount()):
            try:
                board = nvml.nvmlDeviceGetHandleByIndex(number)
                on_board = list(self.gpus(number, board))
            except nvml.NVMLError as error:
                logger.warning("the driver does not report GPU %d, which is left out: %s", number, error)
                continue
            handles |= {gpu.uuid: board for gpu in on_board}
            gpus += on_board
        if not gpus:
            return DriverReport()
        by_cuda = as_cuda_shows(gpus) if other_order and len(gpus) > 1 else None
        chosen = by_cuda or visible_gpus(gpus, visible)
        pairs = tuple(self.pair(a, b, handles[a.uuid], handles[b.uuid]) for a, b in combinations(chosen, 2))
        version = _text(self.ask(nvml.nvmlSystemGetDriverVersion, default=""))
        return DriverReport(version, chosen, pairs)

    def ask(self, question: Callable[..., T], *arguments: Any, default: T) -> T:
        """The driver's answer, or the default if the driver or the card has none."""
        return ask_driver(self.nvml, question, *arguments, default=default)

    def gpus(self, number: int, board: Any) -> Iterator[Gpu]:
        """The GPU with this number, or its slices under MIG."""
        nvml = self.nvml
        is_sliced = self.ask(nvml.nvmlDeviceGetMigMode, board, default=(0, 0))[0] == nvml.NVML_DEVICE_MIG_ENABLE
        bus, clocks = self.bus(board), self.clocks(board)
        capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(board))
        common: dict[str, Any] = {
            "index": number,
            "capability": capability,
            "bus": bus,
            "pcie": self.pcie(board),
            "numa_node": self.numa_node(board, bus),
        }
        if not is_sliced:
            yield Gpu(**common, **self.own_fields(board), clocks=clocks, nvlinks=self.nvlinks(board, bus))
            return
        for handle in self.slices(board):
            yield Gpu(**common, **self.own_fields(handle), slice=self.slice(handle, board, clocks, capability))

    def own_fields(self, handle: Any) -> dict[str, Any]:
        """Fields that a board and each of its slices have for themselves.

        The memory of a sliced board is reported to root only.
        """
        memory = self.nvml.nvmlDeviceGetMemoryInfo(handle)
        return {
            "name": _text(self.nvml.nvmlDeviceGetName(handle)),
            "uuid": _text(self.nvml.nvmlDeviceGetUUID(handle)),
            "total_bytes": int(memory.total),
            "free_bytes": int(memory.free),
            "holders": tuple(self.holders(handle)),
        }

    def slices(self, board: Any) -> Iterator[Any]:
        """Handles of a board's slices."""
        for number in range(self.nvml.nvmlDeviceGetMaxMigDeviceCount(board)):
            try:
                yield self.nvml.nvmlDeviceGetMigDeviceHandleByIndex(board, number)
            except self.nvml.NVMLError:  # numbers have gaps
                continue

    def slice(self, handle: Any, board: Any, clocks: Clocks | None, capability: tuple[int, int]) -> MigSlice:
        """The slice's board and its share of the board's multiprocessors."""
        attributes = self.ask(self.nvml.nvmlDeviceGetAttributes, handle, default=None)
        share = None
        if attributes is not None and clocks is not None:
            share = min(1.0, int(attributes.multiprocessorCount) / multiprocessors(clocks, capability))
        return MigSlice(_text(self.nvml.nvmlDeviceGetName(board)), share)

    def clocks(self, board: Any) -> Clocks | None:
        """Highest and current clocks; None if the driver does not report the highest ones."""
        nvml = self.nvml
        try:
            highest = Clocks(
                bus_bits=int(nvml.nvmlDeviceGetMemoryBusWidth(board)),
                memory_hz=nvml.nvmlDeviceGetMaxClockInfo(board, nvml.NVML_CLOCK_MEM) * 1e6,
                cores=int(nvml.nvmlDeviceGetNumGpuCores(board)),
                cores_hz=nvml.nvmlDeviceGetMaxClockInfo(board, nvml.NVML_CLOCK_SM) * 1e6,
            )
        except nvml.NVMLError:  # an old driver, or a virtual GPU
            return None
        kinds = (nvml.NVML_CLOCK_MEM, nvml.NVML_CLOCK_SM)
        now = [self.ask(nvml.nvmlDeviceGetClockInfo, board, kind, default=None) for kind in kinds]
        memory, cores = (None if mhz is None else mhz * 1e6 for mhz in now)
        return msgspec.structs.replace(highest, memory_now_hz=memory, cores_now_hz=cores)

    def pcie(self, board: Any) -> Pcie | None:
        """The PCIe link to the host."""
        nvml = self.nvml
        try:
            return Pcie(
                generation=int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(board)),
                lanes=int(nvml.nvmlDeviceGetCurrPcieLinkWidth(board)),
                most_generation=int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(board)),
                most_lanes=int(nvml.nvmlDeviceGetMaxPcieLinkWidth(board)),
            )
        except nvml.NVMLError:
            return None

    def bus(self, board: Any) -> str:
        """PCI address as /sys writes it: 0000:3b:00.0; "" if unknown."""
        info = self.ask(self.nvml.nvmlDeviceGetPciInfo, board, default=None)
        return "" if info is None else address(_text(info.busId))

    def numa_node(self, board: Any, bus: str) -> int | None:
        """NUMA node from the kernel; in a container that hides it, the first node that the driver reports as near."""
        try:
            node = int((self.root / "sys/bus/pci/devices" / bus / "numa_node").read_text()) if bus else -1
        except (OSError, ValueError):
            node = -1
        if node >= 0:
            return node
        scope = self.nvml.NVML_AFFINITY_SCOPE_NODE
        none: list[Any] = []
        masks = self.ask(self.nvml.nvmlDeviceGetMemoryAffinity, board, NODES // 64, scope, default=none)
        near = (64 * word + bit for word, mask in enumerate(masks) for bit in range(64) if int(mask) >> bit & 1)
        return next(near, None)

    def holders(self, handle: Any) -> Iterator[Holder]:
        """See `memory_holders`."""
        return memory_holders(self.nvml, handle)

    def nvlinks(self, board: Any, bus: str) -> NvLinks | None:
        """The GPU's active links; None if there are none. Also stores their far ends in `far_ends`."""
        nvml = self.nvml
        active = []
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            state = self.ask(nvml.nvmlDeviceGetNvLinkState, board, link, default=None)
            if state is None:  # a card without NVLink, or without links of higher numbers
                break
            if state:
                active.append(link)
        if not active:
            return None
        self.far_ends[bus] = [self.far_end(board, link) for link in active]
        version = self.ask(nvml.nvmlDeviceGetNvLinkVersion, board, active[0], default=0)
        name, usual = NVLINK_VERSIONS.get(version, ("", NVLINK_VERSIONS[2][1]))
        return NvLinks(
            count=len(active),
            version=name,
            each_Bps=self.nvlink_Bps(board, active[0]) or usual,
            switched=None in self.far_ends[bus],
        )

    def far_end(self, board: Any, link: int) -> str | None:
        """Bus address of the GPU at the other end of a link; None for a switch, "" if the driver does not say."""
        nvml = self.nvml
        kind = self.ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, board, link, default=nvml.NVML_NVLINK_DEVICE_TYPE_GPU)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return None
        info = self.ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, board, link, default=None)
        other = "" if info is None else address(_text(info.busId))
        return None if other.startswith(HIDDEN) else other

    def nvlink_Bps(self, board: Any, link: int) -> float:
        """Bytes per second of a link in one direction; 0 if the driver does not report them."""
        nvml = self.nvml
        none: list[Any] = []
        for field in ((nvml.NVML_FI_DEV_NVLINK_GET_SPEED, link), nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON):
            for value in self.ask(nvml.nvmlDeviceGetFieldValues, board, [field], default=none):
                if value.nvmlReturn == nvml.NVML_SUCCESS and value.value.uiVal:
                    return float(value.value.uiVal) * 1e6
        return 0.0

    def pair(self, a: Gpu, b: Gpu, first: Any, second: Any) -> GpuPair:
        """Connection of two visible GPUs."""
        level = self.ask(self.nvml.nvmlDeviceGetTopologyCommonAncestor, first, second, default=None)
        peer, reason = self.peer(first, second)
        return GpuPair(
            first=a.index,
            second=b.index,
            ancestor=None if level is None else ANCESTORS.get(level),
            nvlinks=self.nvlinks_between(a.bus, b.bus),
            peer=peer,
            reason=reason,
        )

    def nvlinks_between(self, first: str, second: str) -> int:
        """Number of links between two GPUs: direct ones, and those to a switch that both are connected to."""
        ends, others = self.far_ends.get(first, []), self.far_ends.get(second, [])
        return max(ends.count(second), others.count(first)) + min(ends.count(None), others.count(None))

    def peer(self, first: Any, second: Any) -> tuple[bool | None, str]:
        """Return True if each may read and write the other's memory, else False and the reason, or None if unknown."""
        for reader, other in ((first, second), (second, first)):
            for index in (P2P_READ, P2P_WRITE):
                status = self.ask(self.nvml.nvmlDeviceGetP2PStatus, reader, other, index, default=None)
                if status is None:
                    return None, ""
                if status != P2P_OK:
                    return False, P2P_REASONS.get(status, "the driver does not say why")
        return True, ""


def address(bus: str) -> str:
    """PCI address as /sys writes it: NVML has eight digits for the domain, so 00000000:3B:00.0 is 0000:3b:00.0."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible_gpus(gpus: Iterable[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """Select the GPUs that CUDA_VISIBLE_DEVICES=`visible` leaves, and renumber them.

    `gpus` are all GPUs, numbered by the driver. Entries are read as CUDA reads them: numbers, or beginnings of UUIDs
    that fit one GPU. The list ends at the first entry that names no GPU (-1 by convention), and an entry given twice
    leaves nothing. If there is a MIG slice among the GPUs, a process gets the first slice and nothing else (NVIDIA's
    MIG user guide, "CUDA Device Enumeration").
    """
    chosen = list(gpus) if visible is None else _named_gpus(list(gpus), visible)
    return renumbered([gpu for gpu in chosen if gpu.slice][:1] or chosen)


def as_cuda_shows(gpus: Iterable[Gpu]) -> tuple[Gpu, ...] | None:
    """Select the GPUs that CUDA itself shows to this process, in its order; None, with a warning, if it does not
    answer."""
    shown = cuda.visible_uuids()
    by_uuid = {cuda.uuid_digits(gpu.uuid): gpu for gpu in gpus}
    if shown is None or not by_uuid.keys() >= set(shown):
        logger.warning(
            "CUDA does not report its order of the GPUs, although %s asks for CUDA's own: they are taken along the PCI "
            "bus; if that is not CUDA's order, set %s=%s",
            cuda.ORDER_VARIABLE,
            cuda.ORDER_VARIABLE,
            cuda.BUS_ORDER,
        )
        return None
    return renumbered([by_uuid[uuid] for uuid in shown])


def renumbered(gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    """The same GPUs with indices from 0."""
    return tuple(msgspec.structs.replace(gpu, index=n) for n, gpu in enumerate(gpus))


def _named_gpus(gpus: list[Gpu], visible: str) -> list[Gpu]:
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        entry = entry.strip()
        if entry.isdecimal():
            matches = [gpu for gpu in gpus if gpu.index == int(entry)][:1]
        else:
            matches = [gpu for gpu in gpus if entry and gpu.uuid.lower().startswith(entry.lower())]
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return []
        chosen.append(matches[0])
    return chosen
