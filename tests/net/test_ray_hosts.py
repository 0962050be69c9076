"""One engine on a Ray cluster whose nodes are two hosts, with a cable between them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cpu import tiny
from tests.net import head as head_program
from tests.net.namespaces import HOSTS, Cable, obstacle
from tests.net.programs import COMMON, ROOT, Program, own_environment
from weft import LLM

pytest.importorskip("ray", reason="needs the extra weft-llm[ray]")

# Ray's nodes take half a minute; test_ray.py has the same faults with both nodes on one host, but for the cable's.
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(reason := obstacle()), reason=reason)]

PORT = 26379
# `ray start` asks for a token.
RAY = {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}


@pytest.fixture
def cable() -> Iterator[Cable]:
    cable = Cable()
    yield cable
    cable.close()


@contextmanager
def running_cluster(cable: Cable, cpus: int, logs: Path) -> Iterator[str]:
    """Address of a cluster with a node on each host, which has so many CPUs."""
    address = f"{HOSTS[0]}:{PORT}"
    folder = Path("/tmp") / f"weft-ray-{os.getpid()}"  # paths of sockets are short
    head = f"--head --port {PORT} --include-dashboard=false --temp-dir {folder}"
    nodes = [
        Program(
            cable.inside(host),
            f"-m ray.scripts.scripts start {words} --node-ip-address {HOSTS[host]} --num-cpus {cpus} --block "
            "--disable-usage-stats".split(),
            logs / f"ray{host}.log",
            **RAY,
        )
        for host, words in enumerate((head, f"--address {address}"))
    ]
    try:
        wait_for_nodes(cable, address)
        yield address
    finally:
        for node in nodes:
            node.close()
        for name in cable.names:
            inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for process in inside:
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_nodes(cable: Cable, address: str) -> None:
    """Wait until both nodes are alive."""
    program = (
        "import ray, time, sys\n"
        "end = time.monotonic() + 90\n"
        "while time.monotonic() < end:\n"
        "    try:\n"
        f"        ray.init(address='{address}', log_to_driver=False)\n"
        "        if sum(node['Alive'] for node in ray.nodes()) == 2: sys.exit()\n"
        "        ray.shutdown()\n"
        "    except Exception: pass\n"
        "    time.sleep(0.5)\n"
        "sys.exit('no two nodes')\n"
    )
    subprocess.run([*cable.inside(0), sys.executable, "-c", program], check=True, env=own_environment() | RAY)


def start_head(
    cable: Cable, cluster: str, log: Path, model: str, variables: dict[str, str] = RAY, **options: Any
) -> Program:
    """An LLM on the first host, see `tests.net.head`."""
    words = [str(ROOT / "tests/net/head.py"), model, json.dumps({**options, "distributed_executor_backend": "ray"})]
    return Program(cable.inside(0), words, log, RAY_ADDRESS=cluster, **variables)


# By the CPUs of each node: sizes, and the numbers of the nodes of all ranks.
LAYOUTS: dict[int, list[tuple[dict[str, int], list[int]]]] = {
    1: [({"pipeline_parallel_size": 2}, [0, 1]), ({"tensor_parallel_size": 2}, [0, 1])],
    2: [
        ({"tensor_parallel_size": 2}, [0, 0]),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, [0, 0, 1, 1]),
    ],
}


@pytest.mark.parametrize("cpus", LAYOUTS)
def test_the_demo_in_every_layout(cable: Cable, cpus: int, tmp_path: Path) -> None:
    """SmolLM2-135M: pp2 and tp2 across the nodes, tp2 inside one, tp2 x pp2, with the tokens of one rank."""
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 50_000_000, "max_model_len": 256}
    with LLM("demo", **options) as llm:
        expected = head_program.answers(llm)
    with running_cluster(cable, cpus, tmp_path) as cluster:
        for number, (layout, wanted) in enumerate(LAYOUTS[cpus]):
            head = start_head(cable, cluster, tmp_path / f"head{number}.log", "demo", **options, **layout)
            try:
                nodes = [row["node"] for row in head.answer()["layout"]]
                assert [nodes.index(node) for node in nodes] == [wanted.index(node) for node in wanted], nodes
                assert ("network 1-0: " in head.printed) == (len(set(wanted)) == 2)
                across = len(set(wanted[: layout.get("tensor_parallel_size", 1)])) == 2
                assert bool(re.search(r"\bms .*--pipeline-parallel-size 2", head.printed)) == across
                head.say()
                assert head.answer()["tokens"] == expected
            finally:
                head.close()


def test_a_pipeline_over_a_cable_that_is_cut(cable: Cable, tmp_path: Path) -> None:
    """A program without the cluster's token gets one line. A second without the link costs time only; a link that stays
    cut ends the engine, with stacks and cause."""
    model = str(tiny.write(tmp_path / "tiny"))
    with LLM(model, **COMMON) as llm:
        expected = head_program.answers(llm)
    with running_cluster(cable, 2, tmp_path) as cluster:
        without = {"PYTHONPATH": RAY["PYTHONPATH"]}
        stranger = start_head(cable, cluster, tmp_path / "stranger.log", model, without, **COMMON)
        try:
            status, last = stranger.end()
            assert status == 1 and "does not let this program in" in last, stranger.printed
            assert "RAY_AUTH_MODE=token" in last
        finally:
            stranger.close()
        layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
        head = start_head(cable, cluster, tmp_path / "head.log", model, **COMMON, **layout)
        try:
            nodes = [row["node"] for row in head.answer()["layout"]]
            assert len(set(nodes)) == 2 and nodes[0] == nodes[1] != nodes[2] == nodes[3]
            head.say()
            assert head.answer()["tokens"] == expected
            cable.cut()
            head.say()
            time.sleep(1)
            cable.join()
            assert head.answer()["tokens"] == expected
            cable.cut()
            head.say()
            status, _ = head.end()
            # Ray passes on what the actors print, whenever it comes.
            last = [line for line in head.printed.splitlines() if "(RankActor" not in line and line.strip()][-1]
            assert status == 1 and "silent for 8 s" in last, head.printed
            assert "most recent call first" in head.printed, "the stacks of the other ranks"
        finally:
            head.close()
