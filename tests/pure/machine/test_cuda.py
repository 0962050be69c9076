"""CUDA's numbers of GPUs are the plan's, whatever the order in which CUDA counts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.pure.fake_nvml import Card, FakeNvml, sliced
from weft.engine.executors.rank_processes import rank_environment
from weft.machine.hardware import cuda
from weft.machine.hardware.host import probe_host

SLOW, FAST = Card("NVIDIA GeForce RTX 3060", "0000:01:00.0"), Card("NVIDIA GeForce RTX 4090", "0000:41:00.0")
OTHERWISE = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}


def named(environment: dict[str, str], root: Path) -> list[tuple[int, str]]:
    return [(gpu.index, gpu.name.rpartition(" ")[2]) for gpu in probe_host(environment, root).gpus]


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """The faster card is behind the slower one on the bus."""
    return FakeNvml([SLOW, FAST]).install(monkeypatch)


@pytest.mark.parametrize("said", [{}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}])
def test_the_order_is_that_of_the_bus(
    mixed: FakeNvml, said: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "visible_uuids", lambda: pytest.fail("nobody needs CUDA for this"))
    assert named(said, tmp_path) == [(0, "3060"), (1, "4090")]
    assert named({**said, "CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == [(0, "4090")]
    assert named({**said, "CUDA_VISIBLE_DEVICES": f"{FAST.uuid},0"}, tmp_path) == [(0, "4090"), (1, "3060")]


def test_another_order_is_asked_of_cuda(
    mixed: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown = [cuda.uuid_digits(FAST.uuid), cuda.uuid_digits(SLOW.uuid)]
    monkeypatch.setattr(cuda, "visible_uuids", lambda: shown)
    assert named(OTHERWISE, tmp_path) == [(0, "4090"), (1, "3060")]
    del shown[1]  # as under CUDA_VISIBLE_DEVICES=0, which CUDA reads itself
    assert named({**OTHERWISE, "CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == [(0, "4090")]
    assert not caplog.records


@pytest.mark.parametrize("shown", [None, ["0badcafe"]])
def test_an_unknown_order_of_cuda_is_told(
    mixed: FakeNvml,
    shown: list[str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cuda, "visible_uuids", lambda: shown)
    assert named(OTHERWISE, tmp_path) == [(0, "3060"), (1, "4090")]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in caplog.text


def test_one_gpu_needs_no_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeNvml([FAST]).install(monkeypatch)
    monkeypatch.setattr(cuda, "visible_uuids", lambda: pytest.fail("nobody needs CUDA for this"))
    assert named(OTHERWISE, tmp_path) == [(0, "4090")]


def test_a_slice_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sliced().install(monkeypatch)
    monkeypatch.setattr(cuda, "visible_uuids", lambda: [cuda.uuid_digits("MIG-b")])
    assert [gpu.uuid for gpu in probe_host(OTHERWISE, tmp_path).gpus] == ["MIG-b"]


class Libcuda:
    """The functions of libcuda that are called, for GPUs with these UUIDs."""

    def __init__(self, uuids: Sequence[str], fails: str = "") -> None:
        self.uuids, self.fails = [bytes.fromhex(uuid) for uuid in uuids], fails

    def answer(self, name: str) -> int:
        return 999 if name == self.fails else 0

    def cuInit(self, flags: int) -> int:
        return self.answer("cuInit")

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.uuids)
        return self.answer("cuDeviceGetCount")

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = 10 + number
        return self.answer("cuDeviceGet")

    def cuDeviceGetUuid_v2(self, uuid: Any, device: Any) -> int:
        uuid._obj[:] = self.uuids[device.value - 10]
        return self.answer("cuDeviceGetUuid_v2")


UUIDS = ["8f1c5d6e00112233445566778899aabb", "00112233445566778899aabb8f1c5d6e"]


def test_cuda_is_asked_for_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Libcuda(UUIDS))
    assert cuda.visible_uuids() == UUIDS
    assert cuda.uuid_digits("GPU-8f1c5d6e-0011-2233-4455-66778899AABB") == UUIDS[0]
    assert cuda.uuid_digits("MIG-00112233-4455-6677-8899-aabb8f1c5d6e") == UUIDS[1]
    old = Libcuda(UUIDS)
    names = ("cuInit", "cuDeviceGetCount", "cuDeviceGet")
    functions = {name: getattr(old, name) for name in names} | {"cuDeviceGetUuid": old.cuDeviceGetUuid_v2}
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(**functions))
    assert cuda.visible_uuids() == UUIDS


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid_v2"])
def test_cuda_that_fails_says_nothing(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Libcuda(UUIDS, fails))
    assert cuda.visible_uuids() is None


def test_without_cuda_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert cuda.visible_uuids() is None


def test_ranks_count_along_the_bus_unless_the_user_says_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert rank_environment(1, interface="lo")["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert "CUDA_DEVICE_ORDER" not in rank_environment(1, interface="lo")
