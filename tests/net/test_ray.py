"""Ranks as Ray actors on the nodes of a cluster of this machine: the tokens of one rank, and faults."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import pytest
from msgspec.structs import replace

from tests.cpu import checkpoints, tiny
from tests.cpu.test_old_commands import ApiServer, write_published
from tests.cpu.test_serve import ADMIN_KEY
from tests.net.head import answers
from tests.net.programs import COMMON, ROOT, WAIT_S, Program
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.engine.cluster.ray_cluster import connect
from weft.engine.cluster.status import cluster_status
from weft.engine.executors.ray import RayExecutor
from weft.errors import ConfigError, EngineError, PlanError
from weft.machine.hardware.host import probe_host
from weft.plan.plan import Plan

ray = pytest.importorskip("ray", reason="needs the extra weft-llm[ray]")

PATHS = f"{ROOT}/src:{ROOT}:{ROOT}/tests/cpu"

# Ray's own code leaves sockets and files to the garbage collector.
LIBRARY_WARNINGS = ("ResourceWarning", "DeprecationWarning", "FutureWarning")
pytestmark = pytest.mark.filterwarnings(*(f"ignore::{name}" for name in LIBRARY_WARNINGS))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with a CPU each."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PATHS)
        patch.setenv("RAY_DEDUP_LOGS", "0")
        # No processes for work that may come: each takes two seconds of a core.
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        patch.setenv("RAY_enable_worker_prestart", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        cluster.add_node(num_cpus=1)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("ray") / "tiny"))


@pytest.fixture(scope="module")
def alone(model: str) -> list[list[int]]:
    """Tokens of one rank in this process."""
    with LLM(model, **COMMON) as llm:
        return answers(llm)


def wait_for_cpus(count: int) -> None:
    """Wait until so many CPUs are free, which Ray counts a little later."""
    deadline = time.monotonic() + WAIT_S
    while ray.available_resources().get("CPU") != count:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.1)


def on_ray(model: str, **options: Any) -> LLM:
    return LLM(model, **(COMMON | {"distributed_executor_backend": "ray"} | options))


def actors() -> list[psutil.Process]:
    """The processes of ranks on this process's cluster."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RankActor.run" in " ".join(one.cmdline()):
                found.append(one)
    return found


def test_a_pipeline_over_two_nodes_until_an_actor_dies(cluster: Any, model: str, alone: list[list[int]]) -> None:
    """The engine fails at once, with Ray's reason, and gives its resources back."""
    with on_ray(model, pipeline_parallel_size=2) as llm:
        nodes = [row["node"] for row in llm.layout()]
        assert set(nodes) == {node["NodeID"] for node in ray.nodes()} and len(nodes) == 2
        assert answers(llm) == alone
        status = cluster_status(probe_host(), os.environ)
        assert status.kind == "ray" and {node.node for node in status.nodes} == set(nodes)
        assert [(node.cpus, node.cpus_free) for node in status.nodes] == [(1, 0)] * 2
        runs = [engine for node in status.nodes for engine in node.engines if engine.state == "created"]
        assert [(engine.model, engine.ranks) for engine in runs] == [(model, 1)] * 2
        ranks = actors()
        assert len(ranks) == 2
        os.kill(max(rank.pid for rank in ranks), signal.SIGKILL)
        with refuses(EngineError, "actor-died", "Ray actor has died"):
            for _ in range(3):
                answers(llm)
    wait_for_cpus(2)  # the bundles are given back


def test_a_cluster_that_is_too_small(cluster: Any, model: str) -> None:
    """Wanted and present devices, before anything is reserved."""
    with refuses(PlanError, "ray-too-small", "4 ranks", "room for 1", "room for 1"):
        on_ray(model, tensor_parallel_size=2, pipeline_parallel_size=2)


def test_resources_that_others_hold(cluster: Any, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never pending for ever: the deadline, and the difference. The deadline of 5 s is that of the reservation alone:
    a busy machine takes longer until a task has answered."""
    from ray.util.placement_group import placement_group, remove_placement_group

    connect(os.environ, may_start=False)
    wait_for_cpus(2)
    holder = placement_group([{"CPU": 1.0}])
    assert holder.wait(WAIT_S)
    reserve = RayExecutor._reserve

    def reserve_soon(executor: RayExecutor, plan: Plan) -> None:
        executor._nodes = replace(executor._nodes, timeout_s=5.0)
        reserve(executor, plan)

    monkeypatch.setattr(RayExecutor, "_reserve", reserve_soon)
    try:
        with refuses(EngineError, "ray-resources", "within 5 s", "1 CPU on Ray node", "free in the cluster: 1 CPU"):
            on_ray(model, pipeline_parallel_size=2)
    finally:
        remove_placement_group(holder)


def test_options_of_the_other_executor(model: str) -> None:
    with refuses(ConfigError, "nnodes-with-ray"):
        on_ray(model, nnodes=2)


def test_bundles_of_the_callers_placement_group(cluster: Any, model: str, alone: list[list[int]]) -> None:
    """Ranks of an engine in a task take the free bundles of its group; there is no room for a group beside it."""
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def generate() -> tuple[list[list[int]], list[str]]:
        with LLM(model, **COMMON, pipeline_parallel_size=2) as llm:
            return answers(llm), [row["node"] for row in llm.layout()]

    connect(os.environ, may_start=False)
    extra = cluster.add_node(num_cpus=1)
    wait_for_cpus(3)
    group = placement_group([{"CPU": 1.0}] * 3, strategy="STRICT_SPREAD")
    assert group.wait(WAIT_S)
    try:
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
        task = ray.remote(generate).options(num_cpus=1, scheduling_strategy=place, max_retries=0)
        tokens, nodes = ray.get(task.remote(), timeout=WAIT_S)
        assert tokens == alone
        bundles = placement_group_table(group)["bundles_to_node_id"]
        assert sorted(nodes) == sorted([bundles[1], bundles[2]])
    finally:
        remove_placement_group(group)
        cluster.remove_node(extra)


def until_replicas(llm: LLM, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while len(llm.replicas) != count:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.long  # half a minute of processes that start; tests/pure has the choice of nodes
def test_replicas_on_different_nodes(cluster: Any, model: str, alone: list[list[int]]) -> None:
    """One in each node. An actor and then a whole node are lost: answers go on, and the replica comes back."""
    with on_ray(model, data_parallel_size=2) as llm:
        rows = llm.layout()
        assert [row["replica"] for row in rows] == [0, 1]
        assert {row["node"] for row in rows} == {node.node_id for node in cluster.list_all_nodes()}
        assert answers(llm) == alone
        actors()[0].kill()
        assert answers(llm) == alone
        until_replicas(llm, 2)
        lost = next(node for node in cluster.worker_nodes if node.node_id in {row["node"] for row in llm.layout()})
        cluster.remove_node(lost, allow_graceful=False)
        assert answers(llm) == alone
        until_replicas(llm, 1)
        cluster.add_node(num_cpus=1)
        until_replicas(llm, 2)
        assert lost.node_id not in {row["node"] for row in llm.layout()}
        assert answers(llm) == alone


@pytest.mark.long  # as an actor that dies, but for the node
def test_a_raylet_that_is_killed(cluster: Any, model: str) -> None:
    """The engine fails with Ray's reason, and does not hang."""
    extra = cluster.add_node(num_cpus=2)
    with on_ray(model, tensor_parallel_size=2) as llm:
        assert {row["node"] for row in llm.layout()} == {extra.node_id}
        cluster.remove_node(extra, allow_graceful=False)
        with refuses(EngineError, "actor-died", "Ray actor"):
            for _ in range(3):
                answers(llm)


@pytest.fixture(scope="module")
def large_nodes(cluster: Any) -> list[str]:
    """Ids of two nodes with four CPUs each."""
    return [cluster.add_node(num_cpus=4).node_id for _ in range(2)]


@pytest.mark.long  # up to eight processes
@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (4, 2)], ids=["tp2 inside", "tp4 x pp2"])
def test_groups_stay_inside_nodes(
    large_nodes: list[str], tmp_path: Path, request: pytest.FixtureRequest, tensor: int, stages: int
) -> None:
    """Seed 004's gpt2, with tensor parallel 4 in each of two pipeline stages."""
    gpt2 = str(checkpoints.make("gpt2", tmp_path))
    options = {**COMMON, "load_format": "auto"}
    with LLM(gpt2, **options) as llm:
        expected = answers(llm)
    with on_ray(gpt2, load_format="auto", tensor_parallel_size=tensor, pipeline_parallel_size=stages) as llm:
        assert answers(llm) == expected
        nodes = [row["node"] for row in llm.layout()]
    groups = [set(nodes[start : start + tensor]) for start in range(0, len(nodes), tensor)]
    assert [len(group) for group in groups] == [1] * stages
    assert len(set.union(*groups)) == stages and set(nodes) <= set(large_nodes)


@pytest.mark.long  # eight processes and a server
def test_the_server_of_vllms_page(large_nodes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 004's command, word for word but for the module's package and the port."""
    write_published("gpt2", tmp_path / "gpt2", n_head=12)
    monkeypatch.chdir(tmp_path)
    with LLM("gpt2", kv_cache_memory_bytes=1_000_000) as llm:
        (expected,) = llm.generate("San Franciso is a", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    words = "--model gpt2 --tensor-parallel-size 4 --pipeline-parallel-size 2 --distributed-executor-backend ray"
    body = {"model": "gpt2", "prompt": "San Franciso is a", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    with ApiServer(*words.split(), "--port", "0") as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=60).json()
        admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
        rows = httpx.get(f"{server.url}/layout", headers=admin, timeout=60).json()
    assert answer["choices"][0]["token_ids"] == list(expected.outputs[0].token_ids), answer
    assert [row["stage"] for row in rows] == [0] * 4 + [1] * 4
    assert {row["node"] for row in rows} <= set(large_nodes)


# With a view of its own processes alone: Ray would find the clusters of other programs.
ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.long  # the start of a whole cluster
def test_a_local_cluster_is_started(model: str, alone: list[list[int]], tmp_path: Path) -> None:
    """Without RAY_ADDRESS, and where none runs. It ends with the program."""
    if subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make namespaces (unshare)")
    options = {**COMMON, "distributed_executor_backend": "ray", "tensor_parallel_size": 2}
    words = [str(ROOT / "tests/net/head.py"), model, json.dumps(options)]
    with TemporaryDirectory(prefix="ray") as folder:  # paths of sockets are short
        head = Program(ALONE, words, tmp_path / "head.log", RAY_TMPDIR=folder, RAY_ADDRESS="", PYTHONPATH=PATHS)
        try:
            assert len({row["node"] for row in head.answer()["layout"]}) == 1
            assert "no Ray cluster runs here: starting a local one" in head.printed
            head.say()
            assert head.answer()["tokens"] == alone
            family = psutil.Process(head.process.pid).children(recursive=True)
            assert any("gcs_server" in " ".join(member.cmdline()) for member in family)
            assert head.process.stdin
            head.process.stdin.close()
            assert head.process.wait(WAIT_S) == 0, head.printed
            assert not psutil.wait_procs(family, WAIT_S)[1]
        finally:
            head.close()


@pytest.mark.long
def test_the_head_of_the_cluster_is_killed(model: str, tmp_path: Path) -> None:
    """The last line of a program that is a driver says why it ends."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    options = {**COMMON, "distributed_executor_backend": "ray", "pipeline_parallel_size": 2}
    words = [str(ROOT / "tests/net/head.py"), model, json.dumps(options)]
    head = Program([], words, tmp_path / "head.log", RAY_ADDRESS=cluster.address, PYTHONPATH=PATHS)
    try:
        assert len(head.answer()["layout"]) == 2
        node = cluster.head_node
        cluster.remove_node(node, allow_graceful=False)
        head.say()
        status, last = head.end()
        assert status == 1 and "its Ray actor has died" in last, head.printed
    finally:
        head.close()
        cluster.shutdown()
