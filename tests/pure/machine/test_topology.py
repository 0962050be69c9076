"""NVML's facts about GPUs and the links between them, on fake machines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.log_events import logged
from tests.pure.fake_nvml import GIB, FakeNvml, bridged, eight_h100, old_driver, sliced, two_consumer_cards
from weft.machine.hardware import nvml
from weft.machine.hardware.nvml import DriverReport, probe_driver, visible_gpus
from weft.machine.hardware.topology import Clocks, Gpu, GpuPair, Holder, NvLinks, Pcie, interconnect_domains

Look = Callable[..., DriverReport]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Look:
    """Facts about a machine, below a root without the kernel's files."""

    def see(machine: FakeNvml, visible: str | None = None, root: Path = tmp_path) -> DriverReport:
        machine.install(monkeypatch)
        found = probe_driver(visible, root)
        assert machine.inside == 0  # shut down as often as started
        return found

    return see


def test_two_consumer_cards(seen: Look) -> None:
    driver = seen(two_consumer_cards())
    first, second = driver.gpus
    assert driver.version == "550.54.15"
    assert (first.name, first.bus, first.capability) == ("NVIDIA GeForce RTX 4090", "0000:01:00.0", (8, 9))
    assert (first.total_bytes, first.free_bytes) == (24564 << 20, (24564 << 20) - GIB // 2)
    assert first.clocks == Clocks(
        bus_bits=384, memory_hz=9751e6, cores=10496, cores_hz=2100e6, memory_now_hz=405e6, cores_now_hz=210e6
    )
    # It idles at generation 1, and will not under load.
    assert first.pcie == Pcie(generation=1, lanes=16, most_generation=4, most_lanes=16) and first.pcie.Bps == 32e9
    assert second.pcie is not None and second.pcie.Bps == 8e9
    assert first.nvlinks is None and first.numa_node is None
    # What one process does twice is told once; a name or a size that is not told is left out.
    assert second.holders == (
        Holder(4242, "/usr/games/Planet", 6 * GIB),
        Holder(77, "python", 2 * GIB),
        Holder(78, "", None),
    )
    assert [str(it) for it in second.holders][::2] == ["Planet (pid 4242) 6.4 GB", "a process (pid 78)"]
    assert (first.held_bytes, second.held_bytes) == (0, 8 * GIB)
    assert driver.pairs == (
        GpuPair(first=0, second=1, ancestor="PHB", peer=False, reason="the chipset does not support it"),
    )


def test_eight_h100_on_a_switch(seen: Look) -> None:
    driver = seen(eight_h100())
    assert len(driver.gpus) == 8 and len(driver.pairs) == 28
    assert {gpu.nvlinks for gpu in driver.gpus} == {NvLinks(count=18, version="4.0", each_Bps=26562e6, switched=True)}
    assert [gpu.numa_node for gpu in driver.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {(pair.nvlinks, pair.peer) for pair in driver.pairs} == {(18, True)}
    ancestors = {(pair.first, pair.second): pair.ancestor for pair in driver.pairs}
    assert (ancestors[0, 3], ancestors[0, 4], ancestors[4, 7]) == ("NODE", "SYS", "NODE")


def test_a_bridge_between_two(seen: Look) -> None:
    driver = seen(bridged((0, 1)))
    assert driver.gpus[0].nvlinks == NvLinks(count=4, version="3.1", each_Bps=14062e6, switched=False)
    assert driver.gpus[0].nvlinks.Bps == pytest.approx(56.25e9, rel=1e-3)
    assert driver.pairs == (GpuPair(first=0, second=1, ancestor="SYS", nvlinks=4, peer=True),)
    # Links that are down do not count.
    half = seen(bridged((0, 1), down=2))
    assert (half.gpus[1].nvlinks.count, half.pairs[0].nvlinks) == (2, 2)
    assert seen(bridged()).gpus[0].nvlinks is None


def test_two_bridges_between_four(seen: Look) -> None:
    driver = seen(bridged((0, 2), (1, 3), count=4))
    assert {(p.first, p.second): p.nvlinks for p in driver.pairs if p.nvlinks} == {(0, 2): 4, (1, 3): 4}
    assert {p.reason for p in driver.pairs if not p.peer} == {"not supported"}


def test_mig(seen: Look) -> None:
    """CUDA shows a process one slice, and no whole GPU beside it."""
    (large,) = seen(sliced()).gpus
    assert (large.index, large.uuid) == (0, "MIG-a")
    assert (large.total_bytes, large.clocks, large.nvlinks) == (19968 << 20, None, None)
    assert large.slice is not None and large.slice.compute == pytest.approx(42 / 108)
    for visible in ("MIG-b", "MIG-b,MIG-a", "1,MIG-b"):
        (small,) = seen(sliced(), visible).gpus
        assert (small.index, small.uuid) == (0, "MIG-b")
    (whole,) = seen(sliced(), "1").gpus
    assert small.slice is not None and small.slice.board == whole.name
    assert whole.slice is None


def test_links_to_a_switch_that_a_virtual_machine_hides(seen: Look) -> None:
    machine = eight_h100()
    machine.hidden = True
    driver = seen(machine)
    assert {gpu.nvlinks and gpu.nvlinks.switched for gpu in driver.gpus} == {True}
    assert {pair.nvlinks for pair in driver.pairs} == {18}


def test_a_driver_that_supports_nothing(seen: Look) -> None:
    driver = seen(old_driver())
    for gpu in driver.gpus:
        assert (gpu.total_bytes, gpu.capability) == (16 * GIB, (7, 0))
        assert (gpu.clocks, gpu.pcie, gpu.nvlinks, gpu.numa_node, gpu.holders) == (None, None, None, None, ())
    assert driver.pairs == (GpuPair(first=0, second=1),)


def test_the_kernel_s_word_on_numa_is_first(seen: Look, tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("5\n")
    other = tmp_path / "sys/bus/pci/devices/0000:2b:00.0"
    other.mkdir()
    (other / "numa_node").write_text("-1\n")  # a machine without
    assert [gpu.numa_node for gpu in seen(eight_h100()).gpus[:3]] == [5, 0, 0]


def test_pairs_are_those_of_the_visible_gpus(seen: Look) -> None:
    driver = seen(bridged((0, 2), (1, 3), count=4), "3,0,1")
    assert [gpu.bus[5:7] for gpu in driver.gpus] == ["04", "01", "02"]
    assert {(p.first, p.second): p.nvlinks for p in driver.pairs} == {(0, 1): 0, (0, 2): 4, (1, 2): 0}


def test_a_peer_status_that_is_not_told(seen: Look) -> None:
    machine = bridged((0, 1))
    machine.peers[0, 1] = None
    assert seen(machine).pairs[0].peer is None
    machine.peers[0, 1] = pynvml.NVML_P2P_STATUS_UNKNOWN
    assert seen(machine).pairs[0].reason == "the driver does not say why"


@pytest.mark.parametrize("reason", ["LIB_RM_VERSION_MISMATCH", "UNKNOWN", "DRIVER_NOT_LOADED"])
def test_a_driver_that_fails_is_no_gpu_and_told(seen: Look, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{reason}"))

    assert seen(Broken([])) == DriverReport()
    # A library without a driver is common where there is no GPU.
    assert bool(logged(caplog, "driver-not-answering")) == (reason != "DRIVER_NOT_LOADED")


def test_a_gpu_that_is_lost_is_left_out_and_told(seen: Look, caplog: pytest.LogCaptureFixture) -> None:
    class Lost(FakeNvml):
        def nvmlDeviceGetName(self, handle: object) -> bytes:
            if handle in lost:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return b"NVIDIA H100 80GB HBM3"

    cards = eight_h100().cards
    lost = [cards[3]]
    driver = seen(Lost(cards))
    assert [gpu.bus[5] for gpu in driver.gpus] == ["1", "2", "3", "5", "6", "7", "8"] and len(driver.pairs) == 21
    assert "GPU 3" in caplog.text
    assert [gpu.bus[5] for gpu in seen(Lost(cards), "4,3,2").gpus] == ["5"]
    lost = list(cards)
    assert seen(Lost(cards)) == DriverReport()


@pytest.mark.parametrize("visible", ["", "  "])
def test_an_empty_list_hides_all_without_asking(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: pytest.fail("asked the driver"))
    assert probe_driver(visible) == DriverReport()


def test_without_a_driver_pynvml_is_not_imported() -> None:
    script = (
        "import sys; from weft.machine.hardware.host import probe_host; host = probe_host(); "
        "sys.exit('pynvml' in sys.modules and not host.driver)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


# --- CUDA_VISIBLE_DEVICES ---

FOUND = tuple(
    Gpu(index=n, name=f"card {n}", uuid=uuid, total_bytes=2, free_bytes=1, capability=(8, 6))
    for n, uuid in enumerate(["GPU-aa11", "GPU-aa22", "GPU-bb33"])
)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, [0, 1, 2]),
        ("0,1,2", [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("-1", []),
        ("1,-1,2", [1]),  # the list ends at the first that names none
        ("0,7,1", [0]),
        ("GPU-bb33,0", [2, 0]),
        ("GPU-bb", [2]),
        ("gpu-AA22", [1]),
        ("GPU-aa", []),  # fits two
        ("NoDevFiles", []),
        ("1,1", []),
        ("0,", [0]),
        (",0", []),
    ],
)
def test_cuda_visible_devices(visible: str | None, names: list[int]) -> None:
    chosen = visible_gpus(FOUND, visible)
    assert [gpu.name for gpu in chosen] == [f"card {n}" for n in names]
    assert [gpu.index for gpu in chosen] == list(range(len(names)))


# --- islands ---


@pytest.mark.parametrize(
    ("count", "joined", "groups"),
    [
        (1, [], [(0,)]),
        (2, [], [(0,), (1,)]),
        (2, [(0, 1)], [(0, 1)]),
        (4, [(0, 2), (1, 3)], [(0, 2), (1, 3)]),
        (4, [(0, 1), (1, 2), (2, 3)], [(0, 1), (2, 3)]),  # a chain is no island
        (4, [(1, 2), (1, 3), (2, 3)], [(1, 2, 3), (0,)]),
    ],
)
def test_islands(count: int, joined: list[tuple[int, int]], groups: list[tuple[int, ...]]) -> None:
    assert list(interconnect_domains(count, joined)) == groups


@given(st.integers(1, 9), st.data())
def test_islands_hold_each_gpu_once_and_are_joined_throughout(count: int, data: st.DataObject) -> None:
    every = [(a, b) for a in range(count) for b in range(a + 1, count)]
    joined = data.draw(st.sets(st.sampled_from(every))) if every else set()
    groups = interconnect_domains(count, joined)
    assert sorted(gpu for group in groups for gpu in group) == list(range(count))
    assert all((a, b) in joined for group in groups for a in group for b in group if a < b)


def test_every_status_and_level_of_the_driver_has_words() -> None:
    names = [name for name in dir(pynvml) if name.startswith(("NVML_P2P_STATUS_", "NVML_TOPOLOGY_"))]
    assert len(names) > 10
    for name in names:
        known = nvml.ANCESTORS if name.startswith("NVML_TOPOLOGY_") else {**nvml.P2P_REASONS, 0: "", 6: "unknown"}
        assert getattr(pynvml, name) in known, name
