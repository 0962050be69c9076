"""This machine as the planner's hardware: joined as it really is, or its CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.fake_nvml import GIB, FakeNvml, bridged, eight_h100, old_driver, sliced, two_consumer_cards
from weft.checkpoint.names.catalogue import find
from weft.machine.hardware import links, nvml
from weft.machine.hardware.cluster import Node, parse_gpus
from weft.machine.hardware.cpu import Cpu, CpuSpeed
from weft.machine.hardware.gpus import find_gpu
from weft.machine.hardware.host import Host
from weft.plan.parallelism import Parallelism
from weft.planner.question import Question
from weft.planner.search.domains import interconnect_domains
from weft.planner.search.search import search
from weft.planner.work.replica import slowest_link_between
from weft.probes.machine import cpu_spec, host_cluster, short_cpu_name, split_cpu
from weft.probes.stored_speeds import GpuSpeed, PairSpeed, Speeds

Make = Callable[..., Host]
NOTHING = Speeds(machine="")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """A host with the GPUs of a made-up machine."""

    def make(machine: FakeNvml, visible: str | None = None) -> Host:
        machine.install(monkeypatch)
        driver = nvml.probe_driver(visible, tmp_path)
        return Host(
            hostname="here",
            cores=(0, 1),
            memory_total_bytes=64 * GIB,
            memory_free_bytes=48 * GIB,
            gpus=driver.gpus,
            pairs=driver.pairs,
            driver=driver.version,
        )

    return make


def node(host: Host, speeds: Speeds = NOTHING) -> Node:
    (found,) = host_cluster(host, speeds).nodes
    return found


# --- GPUs ---


def test_consumer_cards(host: Make) -> None:
    found = node(host(two_consumer_cards()))
    assert [gpu.name for gpu in found.gpus] == ["RTX 4090"] * 2
    assert (found.link, found.bridged) == ("pcie", ())
    assert [gpu.pcie_Bps for gpu in found.gpus] == [32e9, 8e9]
    assert [gpu.held_bytes for gpu in found.gpus] == [0, 8 * GIB]
    assert {gpu.peer for gpu in found.gpus} == {False}
    assert found.gpus[0].memory_bytes == 24564 << 20
    # Not one type any more: the narrow slot and the game's memory make them different.
    assert found.gpus[0] != found.gpus[1]


def test_eight_h100(host: Make) -> None:
    found = node(host(eight_h100()))
    assert (found.link, found.bridged, len(found.gpus)) == ("nvlink", (), 8)
    # The links' raw rate is above what the data sheet counts.
    assert {gpu.nvlink_Bps for gpu in found.gpus} == {450e9}
    assert found.gpus[0] == msgspec.structs.replace(find_gpu("H100"), peer=True)


def test_cards_are_bridged_only_where_a_bridge_is(host: Make) -> None:
    joined = node(host(bridged((0, 1))))
    assert joined.link == "nvlink" and joined.gpus[0].nvlink_Bps == 56e9
    assert node(host(bridged())).link == "pcie"
    half = node(host(bridged((0, 1), down=2)))
    assert half.link == "nvlink" and half.gpus[0].nvlink_Bps == pytest.approx(28.1e9, rel=1e-2)


def test_two_bridges_make_two_islands(host: Make) -> None:
    cluster = host_cluster(host(bridged((0, 2), (1, 3), count=4)), NOTHING)
    assert (cluster.nodes[0].link, cluster.nodes[0].bridged) == ("pcie", ((0, 2), (1, 3)))
    assert slowest_link_between(cluster, [0, 2]) == "nvlink" == slowest_link_between(cluster, [3, 1])
    assert slowest_link_between(cluster, [0, 1]) == "pcie" == slowest_link_between(cluster, [0, 2, 1])
    # Bridged cards are neighbours, so that a tensor-parallel pair is laid on them.
    (island,) = interconnect_domains(cluster)
    assert [device.number for device in island] == [0, 2, 1, 3]
    question = Question(
        model="m",
        shape=find("Llama-3.1-8B").shape,
        cluster=cluster,
        engine="vllm",
        precisions=("bf16",),
        constraints=Parallelism(tensor_parallel=2),
    )
    best = search(question).best
    assert best is not None and best.layout.gpus[:2] == (0, 2)
    apart = msgspec.structs.replace(cluster, nodes=(Node(cluster.gpus, "pcie"),))
    alone = search(msgspec.structs.replace(question, cluster=apart)).best
    assert alone is not None and best.predicted.single_tok_s > alone.predicted.single_tok_s


def test_mig_slices_have_their_share_of_the_board(host: Make) -> None:
    board = find_gpu("A100-40GB-SXM")
    ((large,), (small,), (whole,)) = (node(host(sliced(), visible)).gpus for visible in ("0", "MIG-b", "1"))
    assert (large.name, large.memory_bytes) == ("A100-SXM4-40GB MIG 3g.20gb", 19968 << 20)
    assert large.bandwidth_Bps == board.bandwidth_Bps / 2 and small.bandwidth_Bps == board.bandwidth_Bps / 8
    assert large.flops["bf16"] == pytest.approx(board.flops["bf16"] * 42 / 108)
    assert (large.nvlink_Bps, whole.bandwidth_Bps) == (0.0, board.bandwidth_Bps)


def test_a_slice_of_which_the_driver_tells_little_is_cut_like_its_memory(
    host: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = sliced()
    monkeypatch.setattr(type(machine), "nvmlDeviceGetAttributes", lambda self, device: machine.new())
    machine.old = True
    large = node(host(machine)).gpus[0]
    assert large.flops["bf16"] == find_gpu("A100-40GB-SXM").flops["bf16"] / 2


def test_facts_that_an_old_driver_lacks_are_the_catalogue_s(host: Make) -> None:
    found = node(host(old_driver()))
    assert found.link == "nvlink" and {gpu.peer for gpu in found.gpus} == {None}
    assert found.gpus[0] == find_gpu("V100-SXM2-16GB")


def test_a_card_that_no_catalogue_knows_is_made_from_its_clocks(host: Make) -> None:
    machine = two_consumer_cards()
    machine.cards = [replace(card, name="Prototype X", bus_bits=256, memory_mhz=10000) for card in machine.cards]
    found = node(host(machine)).gpus[1]
    assert (found.name, found.memory_bytes, found.bandwidth_Bps) == ("Prototype X", 24564 << 20, 640e9)
    assert (found.pcie_Bps, found.held_bytes) == (8e9, 8 * GIB)


def works(host: Host, first: int, second: int, peer: bool = True) -> PairSpeed:
    uuids = [gpu.uuid for gpu in host.gpus]
    return PairSpeed(first=uuids[second], second=uuids[first], verdict="works", peer=peer, Bps=20e9)


@pytest.mark.parametrize("verdict", ["broken", "hung"])
def test_one_link_that_fails_spoils_peer_to_peer_for_all(host: Make, verdict: str) -> None:
    here = host(eight_h100())
    bad = msgspec.structs.replace(works(here, 2, 5), verdict=verdict, Bps=0.0)
    found = node(here, Speeds(machine="", pairs=(works(here, 0, 1), bad)))
    assert (found.link, {gpu.peer for gpu in found.gpus}) == ("pcie", {False})
    assert not links.has_peer(found.gpus[0])
    assert node(here, Speeds(machine="", pairs=(works(here, 0, 1),))).link == "nvlink"


def test_peer_to_peer_is_what_was_found_and_not_what_the_name_says(host: Make) -> None:
    machine = two_consumer_cards()
    machine.peers[0, 1] = 0  # a patched driver
    here = host(machine)
    assert [links.has_peer(gpu) for gpu in node(here).gpus] == [True, True]
    staged = Speeds(machine="", pairs=(works(here, 0, 1, peer=False),))
    assert [links.has_peer(gpu) for gpu in node(here, staged).gpus] == [False, False]
    assert not links.has_peer(find_gpu("RTX 4090")) and links.has_peer(find_gpu("L40S"))


def test_a_card_that_copies_slowly_is_slow(host: Make) -> None:
    here = host(two_consumer_cards())
    speeds = tuple(
        GpuSpeed(gpu=gpu.uuid, copy_Bps=copy, from_host_Bps=12e9, to_host_Bps=13e9)
        for gpu, copy in zip(here.gpus, (900e9, 400e9), strict=True)
    )
    first, second = node(here, Speeds(machine="", gpus=speeds)).gpus
    assert (first.bandwidth_Bps, second.bandwidth_Bps) == (1008e9, 500e9)
    assert first.pcie_Bps == pytest.approx(12e9 / 0.85) and second.pcie_Bps == 8e9


# --- the CPU ---

ZEN = Cpu(model="AMD EPYC 9354 32-Core Processor", sockets=1, cores=32, threads=64, features=("avx2", "avx512_bf16"))


def cpu_host(**changed: object) -> Host:
    host = Host(hostname="here", cores=(0, 1, 2, 3), memory_total_bytes=32 * GIB, memory_free_bytes=20 * GIB, cpu=ZEN)
    return msgspec.structs.replace(host, **changed)


def test_without_a_gpu_it_is_the_cpu() -> None:
    cluster = host_cluster(cpu_host(), Speeds(machine="", cpu=CpuSpeed(50e9, 1e12)))
    (cpu,) = cluster.gpus
    assert cluster.on_cpu and (cpu.kind, cpu.name) == ("cpu", "AMD EPYC 9354 (4 cores)")
    assert (cpu.memory_bytes, cpu.bandwidth_Bps) == (20 * GIB, 50e9)
    assert cpu.flops == {"fp32": 1e12, "bf16": 2e12, "fp16": 1e12}
    assert "50 GB/s" in cpu.source and "1.00 TFLOPS" in cpu.source
    assert not parse_gpus("2xH100").on_cpu
    # OMP_NUM_THREADS is a limit.
    assert cpu_spec(cpu_host(threads=2), CpuSpeed(50e9, 1e12)).name == "AMD EPYC 9354 (2 cores)"
    assert cpu_spec(cpu_host(threads=9), CpuSpeed(50e9, 1e12)).name == "AMD EPYC 9354 (4 cores)"


@pytest.mark.parametrize(
    ("features", "bf16"),
    [((), 1), (("avx2", "fma"), 1), (("avx512_bf16",), 2), (("avx512_bf16", "amx_bf16"), 16), (("asimd", "bf16"), 2)],
)
def test_bfloat16_by_instruction_set(features: tuple[str, ...], bf16: int) -> None:
    cpu = msgspec.structs.replace(ZEN, features=features)
    assert cpu_spec(cpu_host(cpu=cpu), CpuSpeed(1e9, 1e9)).flops["bf16"] == bf16 * 1e9


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Intel(R) Xeon(R) Platinum 8480+", "Intel Xeon Platinum 8480+"),
        ("Intel(R) Core(TM) i7-8650U CPU @ 1.90GHz", "Intel Core i7-8650U"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "AMD Ryzen 9 7950X"),
        ("aarch64", "aarch64"),
        ("", "CPU"),
    ],
)
def test_a_cpu_s_name(model: str, name: str) -> None:
    assert short_cpu_name(model) == name


def test_a_machine_of_which_nothing_is_told() -> None:
    spec = cpu_spec(cpu_host(cpu=None, cores=(0,)), CpuSpeed(1e9, 1e9))
    assert spec.name == "CPU (1 core)" and spec.flops["bf16"] == 1e9


@given(st.integers(2, 32))
def test_ranks_share_a_cpu(ranks: int) -> None:
    whole = host_cluster(cpu_host(), Speeds(machine="", cpu=CpuSpeed(50e9, 1e12)))
    parts = split_cpu(whole, ranks)
    assert len(parts.gpus) == ranks and parts.nodes[0].link == "memory"
    assert sum(part.bandwidth_Bps for part in parts.gpus) == pytest.approx(50e9)
    assert sum(part.memory_bytes for part in parts.gpus) <= whole.gpus[0].memory_bytes
    assert sum(part.flops["bf16"] for part in parts.gpus) == pytest.approx(2e12)


def test_a_device_that_is_no_cpu_is_not_shared() -> None:
    gpus = parse_gpus("1xH100")
    whole = host_cluster(cpu_host(), Speeds(machine="", cpu=CpuSpeed(50e9, 1e12)))
    assert split_cpu(gpus, 2) is gpus and split_cpu(whole, 1) is whole
