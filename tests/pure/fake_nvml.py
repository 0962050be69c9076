"""NVML as it answers on machines that are not here: pynvml's own names, constants, errors and signatures."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml

SWITCH = "a switch"
EVERY_LINK = 0xFFFFFFFF
GIB = 1 << 30


@dataclass(frozen=True, eq=False)
class MigSlice:
    """A slice of a card, and so its handle."""

    name: str
    uuid: str
    memory: int
    multiprocessors: int
    number: int = 0


@dataclass(frozen=True, eq=False)
class Card:
    """One card, and so its handle. `links` are its NVLinks: a bus address, SWITCH, or None for one that is down.
    `pcie` is generation and lanes now, then the most. `processes` are (pid, bytes or None)."""

    name: str
    bus: str
    memory: int = 24 * GIB
    used: int = GIB // 2
    capability: tuple[int, int] = (8, 6)
    bus_bits: int = 384
    memory_mhz: int = 9751
    cores: int = 10496
    cores_mhz: int = 2100
    cores_now_mhz: int = 210
    pcie: tuple[int, int, int, int] = (1, 16, 4, 16)
    links: Sequence[str | None] = ()
    link_mbps: int = 0
    link_version: int = 0
    node_mask: int = 0
    computing: Sequence[tuple[int, int | None]] = ()
    drawing: Sequence[tuple[int, int | None]] = ()
    slices: Sequence[MigSlice] = ()
    knows_mig: bool = False
    utilization: tuple[int, int] = (0, 0)
    power_mw: int = 30_000
    power_limit_mw: int = 350_000
    temperature_c: int = 40
    throttle: int = 0
    pcie_kBps: tuple[int, int] = (0, 0)
    nvlink_KiB: list[tuple[int, int]] = field(default_factory=list)
    link_errors: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def uuid(self) -> str:
        return f"GPU-{self.bus}"


@dataclass
class FakeNvml:
    """A machine. `ancestors` and `peers` are by (first, second) card, whichever way round; a status of None is one that
    the driver does not tell. `old`: a driver that supports nothing but what the first ones did. `hidden`: a virtual
    machine, which does not see the switches."""

    cards: Sequence[Card]
    ancestors: dict[tuple[int, int], int] = field(default_factory=dict)
    peers: dict[tuple[int, int], int | None] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    old: bool = False
    hidden: bool = False
    inside: int = 0

    def install(self, monkeypatch: Any) -> FakeNvml:
        """In the place of pynvml, on a machine that has a driver."""
        monkeypatch.setitem(__import__("sys").modules, "pynvml", self.module())
        monkeypatch.setattr(ctypes, "CDLL", lambda _: None)
        return self

    def module(self) -> ModuleType:
        """All of pynvml, but for its functions: those that are answered here, with the same arguments."""
        fake = ModuleType("pynvml")
        for name in dir(pynvml):
            attribute = getattr(pynvml, name)
            setattr(
                fake, name, _forbidden(name) if name.startswith("nvml") and inspect.isfunction(attribute) else attribute
            )
        for name, answer in inspect.getmembers(self, inspect.ismethod):
            if name.startswith("nvml"):
                asked = list(inspect.signature(inspect.unwrap(getattr(pynvml, name))).parameters)
                required = list(inspect.signature(answer).parameters)
                assert required == asked[: len(required)], f"{name}{tuple(asked)}"
                setattr(fake, name, answer)
        return fake

    def new(self) -> None:
        if self.old:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self) -> None:
        self.inside += 1

    def nvmlShutdown(self) -> None:
        self.inside -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"550.54.15"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        return self.cards[index]

    def nvmlDeviceGetName(self, handle: Card | MigSlice) -> bytes:
        return handle.name.encode()

    def nvmlDeviceGetUUID(self, handle: Card | MigSlice) -> str:
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle: Card | MigSlice) -> Any:
        if isinstance(handle, Card) and handle.slices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)  # for whoever is not root
        used = handle.used if isinstance(handle, Card) else 0
        return SimpleNamespace(total=handle.memory, used=used, free=handle.memory - used)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Card) -> tuple[int, int]:
        return handle.capability

    def nvmlDeviceGetMigMode(self, device: Card) -> list[int]:
        if not device.knows_mig:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(bool(device.slices)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Card) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Card, index: int) -> MigSlice:
        for mig in device.slices:
            if mig.number == index:
                return mig
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetAttributes(self, device: MigSlice) -> Any:
        return SimpleNamespace(multiprocessorCount=device.multiprocessors)

    def nvmlDeviceGetPciInfo(self, handle: Card) -> Any:
        self.new()
        return SimpleNamespace(busId=nvml_address(handle.bus))

    def nvmlDeviceGetMemoryBusWidth(self, device: Card) -> int:
        self.new()
        return device.bus_bits

    def nvmlDeviceGetMaxClockInfo(self, handle: Card | MigSlice, type: int) -> int:
        if isinstance(handle, MigSlice):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return {pynvml.NVML_CLOCK_SM: handle.cores_mhz, pynvml.NVML_CLOCK_MEM: handle.memory_mhz}[type]

    def nvmlDeviceGetClockInfo(self, handle: Card, type: int) -> int:
        if isinstance(handle, MigSlice):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return {pynvml.NVML_CLOCK_SM: handle.cores_now_mhz, pynvml.NVML_CLOCK_MEM: 405}[type]

    def nvmlDeviceGetNumGpuCores(self, device: Card) -> int:
        return device.cores

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Card) -> int:
        self.new()
        return handle.pcie[0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Card) -> int:
        return handle.pcie[1]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Card) -> int:
        return handle.pcie[2]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Card) -> int:
        return handle.pcie[3]

    def nvmlDeviceGetMemoryAffinity(self, handle: Card, nodeSetSize: int, scope: int) -> list[int]:
        self.new()
        assert scope == pynvml.NVML_AFFINITY_SCOPE_NODE
        return [handle.node_mask, *[0] * (nodeSetSize - 1)]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Card | MigSlice) -> list[Any]:
        self.new()
        return _processes(handle.computing if isinstance(handle, Card) else ())

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Card | MigSlice) -> list[Any]:
        self.new()
        return _processes(handle.drawing if isinstance(handle, Card) else ())

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid not in self.names:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.names[pid]

    def nvmlDeviceGetNvLinkState(self, device: Card, link: int) -> int:
        self.whole(device)
        if not device.links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if link >= len(device.links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(device.links[link] is not None)

    def nvmlDeviceGetNvLinkVersion(self, device: Card, link: int) -> int:
        return device.link_version

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Card, link: int) -> int:
        switched = handle.links[link] == SWITCH and not self.hidden
        return pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if switched else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: Card, link: int) -> Any:
        if self.hidden:
            return SimpleNamespace(busId=b"FFFFFFFF:FFFF:FF.F")
        return SimpleNamespace(busId=nvml_address(str(device.links[link])))

    def nvmlDeviceGetFieldValues(self, handle: Card, fieldIds: Sequence[Any]) -> list[Any]:
        found = []
        for wanted in fieldIds:
            kind, link = wanted if isinstance(wanted, tuple) else (wanted, None)
            if link == EVERY_LINK:
                found.append(self._traffic(handle, kind))
                continue
            scoped = kind == pynvml.NVML_FI_DEV_NVLINK_GET_SPEED and link is not None and handle.links[link] is not None
            value = SimpleNamespace(uiVal=handle.link_mbps if scoped else 0)
            status = pynvml.NVML_SUCCESS if scoped else pynvml.NVML_ERROR_NOT_SUPPORTED
            found.append(SimpleNamespace(nvmlReturn=status, value=value))
        return found

    def _traffic(self, card: Card, kind: int) -> Any:
        """Count of KiB over all NVLinks: the next entry of `nvlink_KiB`, which the second direction uses up."""
        if not card.nvlink_KiB:
            return SimpleNamespace(nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED)
        if kind == pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX:
            count = card.nvlink_KiB[0][0]
        else:
            count = card.nvlink_KiB.pop(0)[1]
        return SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=SimpleNamespace(ullVal=count))

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card | MigSlice:
        slices = [part for card in self.cards for part in card.slices]
        return next(handle for handle in (*self.cards, *slices) if handle.uuid == uuid)

    def nvmlDeviceGetUtilizationRates(self, handle: Card) -> Any:
        self.whole(handle)
        return SimpleNamespace(gpu=handle.utilization[0], memory=handle.utilization[1])

    def nvmlDeviceGetPowerUsage(self, handle: Card) -> int:
        self.whole(handle)
        return handle.power_mw

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Card) -> int:
        self.whole(handle)
        return handle.power_limit_mw

    def nvmlDeviceGetTemperature(self, handle: Card, sensor: int) -> int:
        self.whole(handle)
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return handle.temperature_c

    def nvmlDeviceGetPcieThroughput(self, device: Card, counter: int) -> int:
        self.whole(device)
        return device.pcie_kBps[counter]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Card) -> int:
        self.whole(handle)
        return handle.throttle

    def nvmlDeviceGetNvLinkErrorCounter(self, device: Card, link: int, counter: int) -> int:
        self.new()
        return device.link_errors[counter]

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def whole(self, handle: Card | MigSlice) -> None:
        """A part of a card has figures of memory only, and an old driver none of these."""
        self.new()
        if isinstance(handle, MigSlice):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetTopologyCommonAncestor(self, device1: Card, device2: Card) -> int:
        self.new()
        return self._of(self.ancestors, device1, device2, pynvml.NVML_TOPOLOGY_SYSTEM)

    def nvmlDeviceGetP2PStatus(self, device1: Card, device2: Card, p2pIndex: int) -> int:
        self.new()
        ctypes.c_uint(p2pIndex)  # as pynvml passes it on
        status = self._of(self.peers, device1, device2, pynvml.NVML_P2P_STATUS_OK)
        if status is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return status

    def _of(self, known: dict[tuple[int, int], Any], first: Card, second: Card, usual: Any) -> Any:
        numbers = sorted((list(self.cards).index(first), list(self.cards).index(second)))
        return known.get((numbers[0], numbers[1]), usual)


def nvml_address(bus: str) -> bytes:
    """0000:3b:00.0 as NVML writes it."""
    return f"0000{bus}".upper().encode()


def _processes(told: Sequence[tuple[int, int | None]]) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in told]


def _forbidden(name: str) -> Callable[..., Any]:
    def ask(*_: Any, **__: Any) -> Any:
        raise AssertionError(f"{name} is not answered here")

    return ask


# --- machines ---


def two_consumer_cards() -> FakeNvml:
    """Two RTX 4090, without peer-to-peer, one in a narrow slot and in use by a game."""
    card = Card("NVIDIA GeForce RTX 4090", "0000:01:00.0", capability=(8, 9), memory=24564 << 20)
    second = Card(
        card.name,
        "0000:05:00.0",
        capability=(8, 9),
        memory=24564 << 20,
        used=9 * GIB,
        pcie=(4, 4, 4, 16),
        computing=[(77, 2 * GIB)],
        drawing=[(4242, 6 * GIB), (77, 2 * GIB), (78, None)],
    )
    return FakeNvml(
        [card, second],
        ancestors={(0, 1): pynvml.NVML_TOPOLOGY_HOSTBRIDGE},
        peers={(0, 1): pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED},
        names={4242: "/usr/games/Planet", 77: "python"},
    )


def eight_h100() -> FakeNvml:
    """An HGX board: 18 links of each GPU lead to the switches, four GPUs on each socket."""
    cards = [
        Card(
            "NVIDIA H100 80GB HBM3",
            f"0000:{number:x}b:00.0",
            memory=81559 << 20,
            capability=(9, 0),
            bus_bits=5120,
            memory_mhz=2619,
            cores=16896,
            cores_mhz=1980,
            pcie=(5, 16, 5, 16),
            links=[SWITCH] * 18,
            link_mbps=26562,
            link_version=pynvml.NVML_NVLINK_VERSION_4_0,
            node_mask=1 << ((number - 1) // 4),
            knows_mig=True,
        )
        for number in range(1, 9)
    ]
    near = pynvml.NVML_TOPOLOGY_NODE
    return FakeNvml(cards, ancestors={(a, b): near for a in range(8) for b in range(a + 1, 8) if a // 4 == b // 4})


def bridged(*joined: tuple[int, int], count: int = 2, down: int = 0) -> FakeNvml:
    """RTX 3090 with bridges of four links, of which the first `down` do not work."""
    buses = [f"0000:{number + 1:02x}:00.0" for number in range(count)]
    far = {a: b for pair in joined for a, b in (pair, pair[::-1])}
    cards = [
        Card(
            "NVIDIA GeForce RTX 3090",
            bus,
            links=[None] * down + [buses[far[number]]] * (4 - down) if number in far else [None] * 4,
            link_mbps=14062,
            link_version=pynvml.NVML_NVLINK_VERSION_3_1,
        )
        for number, bus in enumerate(buses)
    ]
    unjoined = {(a, b): 5 for a in range(count) for b in range(a + 1, count) if far.get(a) != b}
    return FakeNvml(cards, peers=dict(unjoined))


def sliced() -> FakeNvml:
    """An A100 cut in two, numbered with a gap, beside a whole one."""
    board = Card(
        "NVIDIA A100-SXM4-40GB",
        "0000:07:00.0",
        memory=40960 << 20,
        capability=(8, 0),
        bus_bits=5120,
        memory_mhz=1215,
        cores=6912,
        cores_mhz=1410,
        links=[SWITCH] * 12,
        link_mbps=25000,
        knows_mig=True,
        slices=[
            MigSlice("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "MIG-a", 19968 << 20, 42),
            MigSlice("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MIG-b", 4864 << 20, 14, number=2),
        ],
    )
    whole = Card(
        board.name,
        "0000:0f:00.0",
        memory=board.memory,
        capability=(8, 0),
        bus_bits=5120,
        memory_mhz=1215,
        cores=6912,
        cores_mhz=1410,
        knows_mig=True,
    )
    return FakeNvml([board, whole])


def old_driver() -> FakeNvml:
    """Two V100 whose driver supports none of what came later."""
    cards = [
        Card("Tesla V100-SXM2-16GB", f"0000:0{number}:00.0", memory=16 * GIB, capability=(7, 0), links=["x"])
        for number in (5, 6)
    ]
    return FakeNvml(cards, old=True)
