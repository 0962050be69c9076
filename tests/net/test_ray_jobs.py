"""Ray Data, Ray Serve and the gateway's discovery on a cluster of this machine, which is gone afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.cpu import tiny
from tests.pure.commands import refused_line, weft
from weft import LLM
from weft.config import EngineConfig
from weft.engine.cluster.ray_cluster import uses_ray
from weft.fleet.gateway.server import create_proxy
from weft.fleet.upstreams.config import make_config
from weft.fleet.upstreams.ray_watch import RayWatch
from weft.machine.hardware.host import probe_host

ray = pytest.importorskip("ray", reason="needs the extra weft-llm[ray]")

# Ray's own code leaves sockets and files to the garbage collector, and warns of its own future.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long]

ROOT = Path(__file__).parents[2]
WAIT_S = 240
FLAGS = "--load-format dummy --dtype float32 --kv-cache-memory-bytes 16M --max-model-len 512"
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "kv_cache_memory_bytes": 16_000_000,
    "max_model_len": 512,
}
HI: list[Any] = [{"role": "user", "content": "hi"}]


def wait_for(condition: Callable[[], Any]) -> Any:
    """The condition's value, once it is true."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.2)
    return value


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of one node with a dashboard, as `ray start --head` makes it; nothing of it is left afterwards."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}/src:{ROOT}:{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("RAY_DEDUP_LOGS", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": True, "dashboard_port": 0}
        )
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        ours = psutil.Process().children(recursive=True)
        ray.shutdown()
        made.shutdown()
    assert ours and not psutil.wait_procs(ours, timeout=WAIT_S)[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("ray-jobs") / "tiny"))


# --- Offline batches ---


def test_a_batch_over_the_cluster_is_that_of_one_machine(cluster: Any, model: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs the extra weft-llm[ray-data]")
    source = tmp_path / "in.jsonl"
    rows = [{"prompt": "hello"[: 1 + at % 5], "at": at} for at in range(70)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no row\n")
    words = ["--model", model, *FLAGS.split(), "--temperature", "0", "--max-tokens", "9"]
    alone, cluster_out = tmp_path / "alone.jsonl", tmp_path / "cluster.jsonl"
    assert weft("batch", str(source), str(alone), *words)[0] == 0
    status, out, err = weft("batch", str(source), str(cluster_out), *words, "--ray", "--data-parallel-size", "2")
    assert status == 0, err
    assert out == f"{cluster_out}: 70 of 71 rows answered; {tmp_path}/cluster.failed.jsonl: 1 failed\n"
    assert cluster_out.read_text() == alone.read_text()
    assert (tmp_path / "cluster.failed.jsonl").read_text() == (tmp_path / "alone.failed.jsonl").read_text()
    assert not list(tmp_path.glob("*.progress*"))
    wait_for(lambda: ray.available_resources().get("CPU") == 4)
    refused_line(
        ["batch", str(source), str(tmp_path / "more.jsonl"), *words, "--ray", "-tp", "8"],
        1,
        "ray-too-small",
        "8 CPU 4 CPU",
    )
    more = ["batch", str(source), str(tmp_path / "more.jsonl"), *words, "--ray", "--data-parallel-size", "9"]
    refused_line(more, 1, "ray-too-small", "9 engines")


# --- Ray Serve, and the gateway in front of it ---


@pytest.fixture(scope="module")
def served(cluster: Any, model: str) -> Iterator[str]:
    """URL of the proxy of an application with up to two replicas."""
    serve = pytest.importorskip("ray.serve", reason="needs the extra weft-llm[ray-serve]")
    from weft.ray.serve import build

    ray.init(address=cluster.address, log_to_driver=False, ignore_reinit_error=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 0.5}
    arguments = {
        "model": model,
        "engine": ENGINE,
        "server": {"served_model_name": ["tiny"]},
        "autoscaling_config": {**scaling, "downscale_delay_s": 600, "metrics_interval_s": 0.5, "look_back_period_s": 1},
    }
    serve.run(build(arguments), name="llm", route_prefix="/llm")
    yield f"http://127.0.0.1:{port}/llm"
    serve.shutdown()


def test_the_whole_api_behind_ray_serve(served: str, model: str) -> None:
    with openai.OpenAI(base_url=f"{served}/v1", api_key="none") as client:
        assert [row.id for row in client.models.list().data] == ["tiny"]
        options: Any = {"model": "tiny", "temperature": 0, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
        whole = client.completions.create(prompt="hello", **options).choices[0].text
        pieces = [chunk.choices[0].text for chunk in client.completions.create(prompt="hello", stream=True, **options)]
        assert "".join(pieces) == whole and len(pieces) > 1
        assert client.chat.completions.create(messages=HI, model="tiny", max_tokens=3).choices[0].finish_reason
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", prompt="a", temperature=-1)
        with pytest.raises(openai.NotFoundError):
            client.files.list()
    with LLM(model, **ENGINE) as llm:
        (alone,) = llm.generate("hello", llm.sampling_params(temperature=0, max_tokens=20, ignore_eos=True))
    assert alone.outputs[0].text == whole


async def test_replicas_follow_the_load(served: str) -> None:
    from ray import serve

    def replicas() -> int:
        states = serve.status().applications["llm"].deployments["weft"].replica_states
        return int(states.get("RUNNING", 0))

    assert replicas() == 1
    async with openai.AsyncOpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0) as client:

        async def ask() -> None:
            while replicas() < 2:
                options: Any = {"max_tokens": 400, "extra_body": {"ignore_eos": True}, "timeout": WAIT_S}
                await client.completions.create(model="tiny", prompt="a", **options)

        await asyncio.wait_for(asyncio.gather(*(ask() for _ in range(12))), WAIT_S)


async def test_the_gateway_finds_the_proxies(served: str, cluster: Any) -> None:
    proxy = create_proxy(make_config({"discover": {"ray": f"http://{cluster.webui_url}"}}), None)
    assert isinstance(proxy.watch, RayWatch)
    await proxy.watch.look()
    assert list(proxy.fleet.replicas) == [served]
    proxy.close()


# --- The backend that is chosen ---


def test_a_process_in_a_placement_group_uses_ray(cluster: Any) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init(address=cluster.address, log_to_driver=False, ignore_reinit_error=True)

    def chosen() -> bool:
        return uses_ray(EngineConfig(model="tiny"), probe_host(), os.environ)

    group = placement_group([{"CPU": 1}])
    assert group.wait(WAIT_S)
    try:
        placed = PlacementGroupSchedulingStrategy(placement_group=group)
        inside = ray.remote(chosen).options(scheduling_strategy=placed, num_cpus=1)
        outside = ray.remote(chosen).options(num_cpus=1)
        assert ray.get([inside.remote(), outside.remote()], timeout=WAIT_S) == [True, False]
    finally:
        remove_placement_group(group)
    assert not chosen()
