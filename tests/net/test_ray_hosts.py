"""One engine on a Ray cluster whose nodes are two hosts, with a cable between them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cpu import tiny
from tests.net import head as head_program
from tests.net.namespaces import HOSTS, Cable, obstacle
from tests.net.programs import COMMON, ROOT, Program, own_environment
from weft import LLM

pytest.importorskip("ray", reason="needs the extra weft[ray]")

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


@pytest.fixture
def cluster(cable: Cable, tmp_path: Path) -> Iterator[str]:
    """Address of a cluster with a node on each host, which has two CPUs."""
    address = f"{HOSTS[0]}:{PORT}"
    folder = Path("/tmp") / f"weft-ray-{tmp_path.name[-8:]}"  # paths of sockets are short
    head = f"--head --port {PORT} --include-dashboard=false --temp-dir {folder}"
    nodes = [
        Program(
            cable.inside(host),
            f"-m ray.scripts.scripts start {words} --node-ip-address {HOSTS[host]} --num-cpus 2 --block "
            "--disable-usage-stats".split(),
            tmp_path / f"ray{host}.log",
            **RAY,
        )
        for host, words in enumerate((head, f"--address {address}"))
    ]
    try:
        yield address
    finally:
        for node in nodes:
            node.close()
        for name in cable.names:
            inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for process in inside:
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


def test_a_pipeline_over_a_cable_that_is_cut(cable: Cable, cluster: str, tmp_path: Path) -> None:
    """A second without the link costs time only; a link that stays cut ends the engine, with stacks and cause."""
    model = str(tiny.write(tmp_path / "tiny"))
    with LLM(model, **COMMON) as llm:
        expected = head_program.answers(llm)
    wait_for_nodes(cable, cluster)
    layout: dict[str, Any] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    words = [str(ROOT / "tests/net/head.py"), model, json.dumps({**COMMON, **layout, "executor": "ray"})]
    words[2] = words[2].replace('"executor"', '"distributed_executor_backend"')
    head = Program(cable.inside(0), words, tmp_path / "head.log", RAY_ADDRESS=cluster, **RAY)
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
