"""Max memory: sizes, the GPUs that it leaves, and that no plan takes more."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.refusals import refuses
from weft.checkpoint.names import catalogue
from weft.errors import ConfigError
from weft.machine.hardware.cluster import Cluster, Node, parse_gpus, parse_nodes
from weft.machine.hardware.gpus import GpuSpec, find_gpu
from weft.plan.max_memory import cap_cluster, device_caps, parse_max_memory, parse_size
from weft.plan.parallelism import Parallelism
from weft.planner.deployment import Workload
from weft.planner.question import Question
from weft.planner.search.domains import usable_devices
from weft.planner.search.search import SearchResult, search

GB = 10**9


def plan(cluster: Cluster, model: str = "Llama-3.1-8B", **more: object) -> SearchResult:
    shape = catalogue.find(model).shape
    asked = {"engine": "weft", "precisions": ("bf16",), **more}
    return search(Question(model=model, shape=shape, cluster=cluster, **asked))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "nbytes"),
    [
        ("40GB", 40 * GB),
        ("40gb", 40 * GB),
        ("40GiB", 40 << 30),
        ("1.5GiB", 3 << 29),
        ("512 MB", 512 * 10**6),
        ("2TB", 2 * 10**12),
        ("20000000000", 20 * GB),
        (20 * GB, 20 * GB),
        (0, 0),
    ],
)
def test_sizes(said: object, nbytes: int) -> None:
    assert parse_size(said, "0") == nbytes


@pytest.mark.parametrize("said", ["40", 40, "40GX", "GB", "-1GB", "", "40GB/s", None, True, 1.5, "1e9", "nan"])
def test_invalid_sizes(said: object) -> None:
    code = "memory-size-out-of-range" if said in ("40", 40, 1.5) else "bad-memory-size"
    with refuses(ConfigError, code, f"--max-memory 0={said}", "40GB"):
        parse_size(said, "0")


def test_devices() -> None:
    caps = parse_max_memory({0: "40GB", "cuda:1": "20GB", "2": 0, "cpu": "64GB", "disk": "1TB"})
    assert caps.gpus == {0: 40 * GB, 1: 20 * GB, 2: 0} and caps.cpu == 64 * GB
    for said, code, value in (
        ({"mps": "1GB"}, "max-memory-unknown-device", "'mps'"),
        ({0: "1GB", "0": "2GB"}, "max-memory-gpu-twice", "GPU 0"),
        ({}, "empty-max-memory", "0=40GB"),
        ({-1: 1}, "max-memory-unknown-device", "-1"),
    ):
        with refuses(ConfigError, code, value):
            parse_max_memory(said)  # type: ignore[arg-type]


def test_gpus_that_are_not_named_are_not_used() -> None:
    cluster = cap_cluster(parse_nodes("2x2xA100"), parse_max_memory({0: "40GB", 3: "20GB"}))
    assert [gpu.limit_bytes for gpu in cluster.gpus] == [40 * GB, 0, 0, 20 * GB]
    assert [it.number for it in usable_devices(cluster)] == [0, 3]
    assert {gpu for it in plan(cluster).candidates for gpu in it.layout.gpus} <= {0, 3}


@pytest.mark.parametrize(
    ("said", "code", "value"),
    [
        ({2: "1GB"}, "max-memory-beyond-gpus", "GPU 2; there are GPUs 0 to 1"),
        ({0: 0}, "max-memory-leaves-no-gpu", "0=40GB"),
        ({"cpu": "8GB"}, "max-memory-leaves-no-gpu", "0=40GB"),
    ],
)
def test_gpus_that_are_not_there(said: dict[int | str, int | str], code: str, value: str) -> None:
    with refuses(ConfigError, code, value):
        cap_cluster(parse_gpus("2xA100"), parse_max_memory(said))


def test_devices_of_an_engine() -> None:
    assert device_caps({1: "2GB", 0: "1GB", 2: 0}, 3, on_cpu=False) == {"cuda:0": GB, "cuda:1": 2 * GB}
    assert device_caps({"cpu": "2GB"}, 0, on_cpu=True) == {"cpu": 2 * GB}
    assert device_caps(None, 0, on_cpu=True) == {}
    with refuses(ConfigError, "max-memory-gpu-on-cpu", "GPU 0"):
        device_caps({0: "2GB"}, 2, on_cpu=True)
    with refuses(ConfigError, "max-memory-without-gpu"):
        device_caps({0: "2GB"}, 0, on_cpu=False)


# --- in the search ---

GPUS = st.sampled_from([find_gpu(name) for name in ("RTX 4090", "RTX 3090", "RTX A6000", "A100-40GB", "RTX 3060")])
WISHES = st.sampled_from(
    [
        Parallelism(),
        Parallelism(device_map_strategy="balanced"),
        Parallelism(device_map_strategy="sequential"),
        Parallelism(device_map_strategy="balanced_low_0"),
        Parallelism(pipeline_parallel=2),
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(GPUS, min_size=1, max_size=4), st.data(), WISHES, st.sampled_from(["weft", "vllm", "llama.cpp"]))
def test_caps_are_respected_or_refused(
    found: list[GpuSpec], data: st.DataObject, constraints: Parallelism, engine: str
) -> None:
    sizes = st.one_of(st.just(0), st.integers(1 << 30, 60 * GB))
    limits = [data.draw(sizes) for _ in found]
    assume(any(limits))
    cluster = cap_cluster(Cluster((Node(tuple(found), "pcie"),), 12.5e9), parse_max_memory(dict(enumerate(limits))))
    answer = plan(cluster, constraints=constraints, engine=engine)
    shape = answer.question.shape
    for candidate in answer.candidates:
        for index, rank in zip(candidate.layout.gpus, candidate.memory.ranks, strict=True):
            assert rank.weights.total + rank.other_bytes + rank.kv_room_bytes <= limits[index]
        for number in range(candidate.layout.parallelism.data_parallel):
            held = [
                it
                for place, _ in candidate.layout.replica(number)[:: candidate.layout.parallelism.tensor_parallel]
                for it in range(place.layers.start, place.layers.stop)
            ]
            assert held == list(range(len(shape.layers)))
    assert answer.candidates or answer.rejected or constraints.pipeline_parallel


@settings(max_examples=25, deadline=None)
@given(st.lists(GPUS, min_size=1, max_size=3), st.data())
def test_caps_above_the_memory_change_nothing(found: list[GpuSpec], data: st.DataObject) -> None:
    cluster = Cluster((Node(tuple(found), "pcie"),), 12.5e9)
    above = {number: gpu.memory_bytes + data.draw(st.integers(0, GB)) for number, gpu in enumerate(found)}
    assert cap_cluster(cluster, parse_max_memory(above)) == cluster
    # Nor do caps of one GPU keep the others from what they do without.
    one = {number: gpu.memory_bytes if number else gpu.memory_bytes - GB for number, gpu in enumerate(found)}
    free, bound = plan(cluster), plan(cap_cluster(cluster, parse_max_memory(one)))
    elsewhere = {it.cut for it in free.candidates if 0 not in it.layout.gpus}
    assert elsewhere <= {it.cut for it in bound.candidates}


def test_a_capped_gpu_gets_less() -> None:
    cluster = cap_cluster(parse_gpus("2xRTX4090"), parse_max_memory({0: "6GB", 1: "22GB"}))
    best = plan(cluster, constraints=Parallelism(tensor_parallel=2)).best
    assert best and [len(place.kv_heads) for place in best.layout.places] == [1, 7]
    stages = plan(cluster, constraints=Parallelism(pipeline_parallel=2)).best
    assert stages and dict(zip(stages.layout.gpus, stages.layout.parallelism.pipeline_split, strict=True))[0] < 8


def test_memory_that_a_cap_lacks_is_told_with_its_flag() -> None:
    from weft.planner.report.advice import advice

    answer = plan(cap_cluster(parse_gpus("1xA100"), parse_max_memory({0: "10GB"})))
    assert answer.best is None
    usable = answer.rejected[0].reason.values["usable"].values
    assert (usable["gpu"], usable["usable_bytes"], usable["limited"]) == ("A100-80GB-SXM", 10 * 10**9, True)
    (without,) = [change for change in advice(answer) if change.code == "without_limit"]
    assert (without.values["flag"], without.values["cut"]) == ("--max-memory", "one GPU, bf16")


def test_a_longer_request_needs_more_of_a_cap() -> None:
    cluster = cap_cluster(parse_gpus("1xA100"), parse_max_memory({0: "20GB"}))
    short, long = (plan(cluster, workload=Workload(max_model_len=length)) for length in (4096, 100_000))
    assert short.best and not long.best
    assert msgspec.structs.replace(cluster) == cluster
