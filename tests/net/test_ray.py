"""Ranks as Ray actors on the nodes of a cluster of this machine: the tokens of one rank, and faults."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cpu import checkpoints, tiny
from tests.net.head import answers
from tests.refusals import refuses
from weft import LLM
from weft.errors import ConfigError, EngineError, PlanError

ray = pytest.importorskip("ray", reason="needs the extra weft[ray]")

# Ray's own code leaves sockets and files to the garbage collector.
LIBRARY_WARNINGS = ("ResourceWarning", "DeprecationWarning", "FutureWarning")
pytestmark = pytest.mark.filterwarnings(*(f"ignore::{name}" for name in LIBRARY_WARNINGS))

ROOT = Path(__file__).parents[2]
WAIT_S = 90
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1_000_000,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with a CPU each."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}/src:{ROOT}:{ROOT}/tests/cpu")
        patch.setenv("RAY_DEDUP_LOGS", "0")
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


def test_a_pipeline_over_two_nodes(cluster: Any, model: str, alone: list[list[int]]) -> None:
    with on_ray(model, pipeline_parallel_size=2) as llm:
        nodes = [row["node"] for row in llm.layout()]
        assert set(nodes) == {node["NodeID"] for node in ray.nodes()} and len(nodes) == 2
        assert answers(llm) == alone
    wait_for_cpus(2)  # the bundles are given back


def test_an_actor_that_dies_fails_the_engine_at_once(cluster: Any, model: str, alone: list[list[int]]) -> None:
    with on_ray(model, tensor_parallel_size=2) as llm:
        assert answers(llm) == alone
        actors = [one for one in psutil.process_iter() if "RankActor.run" in " ".join(one.cmdline())]
        assert len(actors) == 2
        os.kill(max(actor.pid for actor in actors), signal.SIGKILL)
        with refuses(EngineError, "actor-died", "Ray actor has died"):
            for _ in range(3):
                answers(llm)


def test_a_cluster_that_is_too_small(cluster: Any, model: str) -> None:
    """Wanted and present devices, before anything is reserved."""
    with refuses(PlanError, "ray-too-small", "4 ranks", "room for 1", "room for 1"):
        on_ray(model, tensor_parallel_size=2, pipeline_parallel_size=2)


def test_resources_that_others_hold(cluster: Any, model: str) -> None:
    """Never pending for ever: the deadline, and the difference."""
    from ray.util.placement_group import placement_group, remove_placement_group

    wait_for_cpus(2)
    holder = placement_group([{"CPU": 1.0}])
    assert holder.wait(WAIT_S)
    try:
        with refuses(EngineError, "ray-resources", "within 1 s", "1 CPU on Ray node", "free in the cluster: 1 CPU"):
            on_ray(model, pipeline_parallel_size=2, start_timeout=1)
    finally:
        remove_placement_group(holder)


def test_options_of_the_other_executor(model: str) -> None:
    with refuses(ConfigError, "nnodes-with-ray"):
        on_ray(model, nnodes=2)


@pytest.mark.long
def test_eight_ranks_on_two_machines_of_four(cluster: Any, tmp_path: Path) -> None:
    """Seed 004: gpt2 with tensor parallel 4 in each of two pipeline stages; every group is inside a node."""
    for _ in range(2):
        cluster.add_node(num_cpus=4)
    gpt2 = str(checkpoints.make("gpt2", tmp_path))
    options = {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1_000_000}
    with LLM(gpt2, **options) as llm:
        expected = answers(llm)
    with LLM(
        gpt2,
        **options,
        distributed_executor_backend="ray",
        tensor_parallel_size=4,
        pipeline_parallel_size=2,
    ) as llm:
        assert answers(llm) == expected
        nodes = [row["node"] for row in llm.layout()]
    assert len(set(nodes[:4])) == len(set(nodes[4:])) == 1 and nodes[0] != nodes[4]
