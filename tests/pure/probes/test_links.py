"""GPUs tried out in a child: what it finds, and what becomes of a link that hangs or kills it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.pure.shapes import SMOLLM2
from tests.refusals import refuses
from weft.engine.executors.rank_processes import rank_environment
from weft.errors import ConfigError
from weft.machine.hardware.host import Host
from weft.machine.hardware.topology import Gpu
from weft.plan.places import cut_places
from weft.plan.plan import Plan, named_devices
from weft.planner.execution import execution
from weft.probes import stored_speeds
from weft.probes.stored_speeds import GpuSpeed, PairSpeed, Verdict
from weft.study.measure import links

Measure = Callable[..., tuple[tuple[GpuSpeed, ...], dict[str, PairSpeed]]]


def host(count: int) -> Host:
    gpus = tuple(
        Gpu(
            index=number,
            name="card",
            uuid=f"GPU-{number}",
            total_bytes=1 << 34,
            free_bytes=1 << 34,
            capability=(8, 0),
        )
        for number in range(count)
    )
    return Host(hostname="here", cores=(0,), memory_total_bytes=1, memory_free_bytes=1, gpus=gpus)


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Measures with an examiner that misbehaves as told, and sees that nothing of it is left."""

    def call(here: Host, deeds: str = "", task_s: float = 60) -> tuple[tuple[GpuSpeed, ...], dict[str, PairSpeed]]:
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        monkeypatch.setenv("WEFT_FAKE_EXAMINER", deeds)
        before = set(threading.enumerate())
        try:
            gpus, pairs = links.measure_links(here, "fake_examiner", start_s=60, task_s=task_s)
        finally:
            assert not [
                one for one in psutil.Process().children() if "weft.engine.sandbox.process" not in one.cmdline()
            ]
            assert set(threading.enumerate()) == before
        return gpus, {f"{pair.first[-1]}-{pair.second[-1]}": pair for pair in pairs}

    return call


def test_all_that_is_there_is_measured(measure: Measure) -> None:
    gpus, pairs = measure(host(3))
    assert gpus[1] == GpuSpeed(gpu="GPU-1", copy_Bps=9e11, from_host_Bps=2e10, to_host_Bps=2.1e10)
    assert [gpu.gpu for gpu in gpus] == ["GPU-0", "GPU-1", "GPU-2"]
    assert set(pairs) == {"0-1", "0-2", "1-2"}
    assert pairs["0-2"] == PairSpeed(first="GPU-0", second="GPU-2", verdict="works", peer=True, Bps=1e10)


def test_one_gpu_has_no_pairs(measure: Measure) -> None:
    gpus, pairs = measure(host(1))
    assert (len(gpus), pairs) == (1, {})


def test_bytes_that_arrive_wrong_are_broken(measure: Measure) -> None:
    pairs = measure(host(3), "0-2 garble")[1]
    garbled = pairs["0-2"]
    assert re.match(r"3\b", garbled.detail)
    assert garbled == PairSpeed(first="GPU-0", second="GPU-2", verdict="broken", peer=True, detail=garbled.detail)
    assert [pairs[it].verdict for it in ("0-1", "1-2")] == ["works", "works"]


def test_a_link_that_hangs_is_told_and_the_others_are_measured_after(measure: Measure) -> None:
    gpus, pairs = measure(host(3), "0-1 hang", task_s=3)
    assert len(gpus) == 3
    assert pairs["0-1"].verdict == "hung" and re.search(r"\b3 s$", pairs["0-1"].detail)
    assert [pairs[it].verdict for it in ("0-2", "1-2")] == ["works", "works"]


@pytest.mark.parametrize(("deed", "detail"), [("die", "killed by SIGKILL"), ("fail", "illegal memory access")])
def test_a_link_that_ends_the_child_is_broken(measure: Measure, deed: str, detail: str) -> None:
    pairs = measure(host(3), f"0-2 {deed}")[1]
    assert pairs["0-2"].verdict == "broken" and detail in pairs["0-2"].detail
    assert [pairs[it].verdict for it in ("0-1", "1-2")] == ["works", "works"]


@pytest.mark.parametrize("deed", ["fail", "die", "hang"])
def test_a_gpu_that_fails_by_itself_says_nothing_of_its_links(
    measure: Measure, deed: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Other processes may hold its memory: its links are no worse for that, and stay on."""
    gpus, pairs = measure(host(3), f"1 {deed}", task_s=3)
    assert [gpu.gpu for gpu in gpus] == ["GPU-0", "GPU-2"]
    assert {name: pair.verdict for name, pair in pairs.items()} == {"0-2": "works"}
    assert "GPU 1 " in caplog.text and caplog.records[-1].levelname == "WARNING"


def test_after_many_faults_the_rest_stays_unknown(measure: Measure) -> None:
    deeds = ",".join(f"{a}-{b} die" for a in range(4) for b in range(a + 1, 4))
    pairs = measure(host(4), deeds)[1]
    assert len(pairs) == links.MAX_FAULTS < 6 and {pair.verdict for pair in pairs.values()} == {"broken"}


def test_a_measurement_that_cannot_begin_says_why(measure: Measure) -> None:
    with refuses(ConfigError, "cannot-measure-gpus", "here", "torch sees no GPU"):
        measure(host(2), "start fail")


# --- what becomes of the verdict ---


@pytest.mark.parametrize("verdict", ["works", "broken", "hung"])
def test_ranks_go_through_the_host_s_memory_where_a_link_fails(
    verdict: Verdict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    here = host(3)
    pair = PairSpeed(first="GPU-0", second="GPU-2", verdict=verdict, peer=True, Bps=1e10)
    stored_speeds.store_speeds(here, msgspec.structs.replace(stored_speeds.load_speeds(here), pairs=(pair,)))
    plan = Plan(
        model="m",
        checkpoint="",
        load_format="dummy",
        shape=SMOLLM2,
        dtype="bfloat16",
        places=cut_places(SMOLLM2, (1.0, 1.0), [len(SMOLLM2.layers)]),
        devices=named_devices("cuda:0", "cuda:1"),
        cores=((0,), (0,)),
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=16,
    )
    linked = execution.with_peer_to_peer(plan, here)
    assert linked.peer_to_peer == (verdict == "works")
    assert rank_environment(1, linked.peer_to_peer, interface="lo").get("NCCL_P2P_DISABLE") == (
        None if verdict == "works" else "1"
    )
    assert (f"0-2 ({verdict})" in caplog.text) == (verdict != "works")
    # One GPU, or the CPU, needs no link.
    for devices in (("cuda:0",), ("cuda:0", "cuda:0"), ("cpu", "cpu")):
        alone = msgspec.structs.replace(plan, devices=named_devices(*devices))
        assert execution.with_peer_to_peer(alone, here) is alone
