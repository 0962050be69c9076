"""NVML: what NVIDIA's driver tells of the GPUs, without creating a CUDA context."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from weft.hardware import cuda
from weft.hardware.topology import Ancestor, Clocks, Gpu, GpuPair, Holder, MigSlice, NvLinks, Pcie, multiprocessors

T = TypeVar("T")

logger = logging.getLogger("weft")

# nvmlGpuTopologyLevel_t; two GPUs of one board have its own bridge in common.
ANCESTORS: dict[int, Ancestor] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# nvmlGpuP2PCapsIndex_t. Plain numbers: pynvml's own name of the first one is a tuple, by a slip.
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
# nvmlNvlinkVersion_t: its name, and bytes per second of a link in one direction for drivers that do not tell that.
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
# The far end of a link where a virtual machine hides it: it leads to a switch.
HIDDEN = "ffff:ffff:ff"
NODES = 1024  # NUMA nodes that a bit mask is asked for


class DriverReport(msgspec.Struct, frozen=True):
    """All that it says: its version, the visible GPUs, and how every two of them reach each other."""

    version: str = ""
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()


def probe_driver(visible: str | None = None, root: Path = Path("/"), *, otherwise: bool = False) -> DriverReport:
    """The GPUs that CUDA would show under CUDA_VISIBLE_DEVICES=`visible` (None: unset), numbered along the PCI bus, or
    `otherwise` as CUDA in this process does. None without a driver."""
    if visible is not None and not visible.strip():
        return DriverReport()
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # no driver; spare the import
        return DriverReport()
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_DRIVER_NOT_LOADED:  # as where a library is installed, but no GPU
            logger.warning("NVIDIA's driver cannot be asked, and no GPU is seen: %s", error)
        return DriverReport()
    try:
        probe = NvmlSession(nvml, root)
        handles: dict[str, Any] = {}
        found = []
        for number in range(nvml.nvmlDeviceGetCount()):
            try:
                board = nvml.nvmlDeviceGetHandleByIndex(number)
                there = list(probe.gpus(number, board))
            except nvml.NVMLError as error:
                logger.warning("GPU %d does not answer its driver, and is left out: %s", number, error)
                continue
            handles |= {gpu.uuid: board for gpu in there}
            found += there
        chosen = (as_cuda_shows(found) if otherwise and len(found) > 1 else None) or visible_gpus(found, visible)
        pairs = tuple(probe.pair(a, b, handles[a.uuid], handles[b.uuid]) for a, b in combinations(chosen, 2))
        version = _text(probe.ask(nvml.nvmlSystemGetDriverVersion, default=""))
        return DriverReport(version, chosen, pairs) if found else DriverReport()
    except nvml.NVMLError as error:
        logger.warning("NVIDIA's driver cannot be asked, and no GPU is seen: %s", error)
        return DriverReport()
    finally:
        nvml.nvmlShutdown()


class NvmlSession:
    """One session with NVML, `root` as the kernel's files. What a driver or a card does not support is None or empty;
    without a name, a memory or a compute capability there is no GPU: NVMLError."""

    def __init__(self, nvml: Any, root: Path) -> None:
        self.nvml, self.root = nvml, root
        # Far ends of NVLinks by the GPU's bus address: those of GPUs, and None for each that leads to a switch.
        self.far_ends: dict[str, list[str | None]] = {}

    def ask(self, question: Callable[..., T], *arguments: Any, default: T) -> T:
        """The answer, or the default where the driver or the card has none."""
        try:
            return question(*arguments)
        except self.nvml.NVMLError:
            return default

    def gpus(self, number: int, board: Any) -> Iterator[Gpu]:
        """The GPU of that number, or the slices that it is cut into under MIG."""
        nvml = self.nvml
        sliced = self.ask(nvml.nvmlDeviceGetMigMode, board, default=(0, 0))[0] == nvml.NVML_DEVICE_MIG_ENABLE
        bus, capability, clocks = (
            self.bus(board),
            tuple(nvml.nvmlDeviceGetCudaComputeCapability(board)),
            self.clocks(board),
        )
        common: dict[str, Any] = {
            "index": number,
            "capability": capability,
            "bus": bus,
            "pcie": self.pcie(board),
            "numa_node": self.numa_node(board, bus),
        }
        if not sliced:
            yield Gpu(**common, **self.own(board), clocks=clocks, nvlinks=self.nvlinks(board, bus))
            return
        for handle in self.slices(board):
            yield Gpu(**common, **self.own(handle), slice=self.slice(handle, board, clocks, capability))

    def own(self, handle: Any) -> dict[str, Any]:
        """What a board, or a slice, has for itself. The memory of a sliced board only root is told of."""
        memory = self.nvml.nvmlDeviceGetMemoryInfo(handle)
        return {
            "name": _text(self.nvml.nvmlDeviceGetName(handle)),
            "uuid": _text(self.nvml.nvmlDeviceGetUUID(handle)),
            "total_bytes": int(memory.total),
            "free_bytes": int(memory.free),
            "holders": tuple(self.holders(handle)),
        }

    def slices(self, board: Any) -> Iterator[Any]:
        """The handles of a board's slices."""
        for number in range(self.nvml.nvmlDeviceGetMaxMigDeviceCount(board)):
            try:
                yield self.nvml.nvmlDeviceGetMigDeviceHandleByIndex(board, number)
            except self.nvml.NVMLError:  # numbers have gaps
                continue

    def slice(self, handle: Any, board: Any, clocks: Clocks | None, capability: tuple[int, int]) -> MigSlice:
        attributes = self.ask(self.nvml.nvmlDeviceGetAttributes, handle, default=None)
        share = None
        if attributes is not None and clocks is not None:
            share = min(1.0, int(attributes.multiprocessorCount) / multiprocessors(clocks, capability))
        return MigSlice(_text(self.nvml.nvmlDeviceGetName(board)), share)

    def clocks(self, board: Any) -> Clocks | None:
        nvml = self.nvml
        try:
            most = Clocks(
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
        return msgspec.structs.replace(most, memory_now_hz=memory, cores_now_hz=cores)

    def pcie(self, board: Any) -> Pcie | None:
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
        """The PCI address as /sys writes it: 0000:3b:00.0."""
        info = self.ask(self.nvml.nvmlDeviceGetPciInfo, board, default=None)
        return "" if info is None else address(_text(info.busId))

    def numa_node(self, board: Any, bus: str) -> int | None:
        """As the kernel says; in a container that hides it, the first node that the driver finds near."""
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
        """Processes that compute or draw on it, those with most memory first."""
        nvml = self.nvml
        none: list[Any] = []
        known: dict[int, int | None] = {}
        for question in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
            for process in self.ask(question, handle, default=none):
                # One that does both is told twice, with the same figure.
                known[int(process.pid)] = process.usedGpuMemory
        for pid, held in sorted(known.items(), key=lambda it: (-(it[1] or 0), it[0])):
            # Not from /proc: the number may belong to another process there, outside a container's own ones.
            yield Holder(pid, _text(self.ask(nvml.nvmlSystemGetProcessName, pid, default="")), held)

    def nvlinks(self, board: Any, bus: str) -> NvLinks | None:
        """Its active links, of which the far ends are kept; None where there are none."""
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
        """The bus address of the GPU at the other end of a link; None for a switch."""
        nvml = self.nvml
        kind = self.ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, board, link, default=nvml.NVML_NVLINK_DEVICE_TYPE_GPU)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return None
        info = self.ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, board, link, default=None)
        other = "" if info is None else address(_text(info.busId))
        return None if other.startswith(HIDDEN) else other

    def nvlink_Bps(self, board: Any, link: int) -> float:
        """A link's speed in one direction; 0 where the driver does not tell."""
        nvml = self.nvml
        none: list[Any] = []
        for field in ((nvml.NVML_FI_DEV_NVLINK_GET_SPEED, link), nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON):
            for value in self.ask(nvml.nvmlDeviceGetFieldValues, board, [field], default=none):
                if value.nvmlReturn == nvml.NVML_SUCCESS and value.value.uiVal:
                    return float(value.value.uiVal) * 1e6
        return 0.0

    def pair(self, a: Gpu, b: Gpu, first: Any, second: Any) -> GpuPair:
        """How two visible GPUs reach each other."""
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
        """Direct links, and those to a switch that both hang on."""
        ends, others = self.far_ends.get(first, []), self.far_ends.get(second, [])
        return max(ends.count(second), others.count(first)) + min(ends.count(None), others.count(None))

    def peer(self, first: Any, second: Any) -> tuple[bool | None, str]:
        """Whether each may read and write the other's memory, and why not."""
        for here, there in ((first, second), (second, first)):
            for index in (P2P_READ, P2P_WRITE):
                status = self.ask(self.nvml.nvmlDeviceGetP2PStatus, here, there, index, default=None)
                if status is None:
                    return None, ""
                if status != P2P_OK:
                    return False, P2P_REASONS.get(status, "the driver does not say why")
        return True, ""


def address(bus: str) -> str:
    """NVML writes eight digits of the PCI domain where /sys has four: 00000000:3B:00.0 is 0000:3b:00.0."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible_gpus(found: Iterable[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """Those of `found` (numbered as the driver does) that CUDA_VISIBLE_DEVICES=`visible` leaves, renumbered.

    As CUDA reads it: numbers, or beginnings of UUIDs that fit one GPU; the list ends at the first entry that
    names none (-1 by custom); an entry given twice leaves nothing. Where there is a MIG slice among them a process has
    the first one, and nothing else (NVIDIA's MIG user guide, "CUDA Device Enumeration").
    """
    chosen = list(found) if visible is None else _named(list(found), visible)
    return renumbered([gpu for gpu in chosen if gpu.slice][:1] or chosen)


def as_cuda_shows(found: Iterable[Gpu]) -> tuple[Gpu, ...] | None:
    """Those of `found` that CUDA itself shows this process, in its order; None, and a warning, where it does not
    say."""
    shown, known = cuda.visible_uuids(), {cuda.uuid_digits(gpu.uuid): gpu for gpu in found}
    if shown is None or not known.keys() >= set(shown):
        logger.warning(
            "CUDA does not tell its order of the GPUs, and %s leaves that to it: they are taken along the PCI bus; if "
            "they differ, set %s=%s",
            cuda.ORDER_VARIABLE,
            cuda.ORDER_VARIABLE,
            cuda.BUS_ORDER,
        )
        return None
    return renumbered([known[uuid] for uuid in shown])


def renumbered(gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    return tuple(msgspec.structs.replace(gpu, index=n) for n, gpu in enumerate(gpus))


def _named(found: list[Gpu], visible: str) -> list[Gpu]:
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        entry = entry.strip()
        if entry.isdecimal():
            fits = [gpu for gpu in found if gpu.index == int(entry)][:1]
        else:
            fits = [gpu for gpu in found if entry and gpu.uuid.lower().startswith(entry.lower())]
        if len(fits) != 1:
            break
        if fits[0] in chosen:
            return []
        chosen.append(fits[0])
    return chosen
