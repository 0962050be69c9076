"""weft cluster status: nodes, devices, links, who runs what, and what is free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.pure.commands import weft, weft_json
from tests.pure.joining import facts
from tests.pure.machines import gpu, host
from weft.api.service.run_files import announced
from weft.engine.cluster import status
from weft.engine.cluster.measured import store_cluster
from weft.engine.cluster.messages import Speed
from weft.engine.cluster.status import ClusterStatus, Link, machine_status, ray_links, ray_node_status, status_lines
from weft.machine.hardware.topology import GpuPair

PAIRS = (
    GpuPair(first=0, second=1, nvlinks=18, peer=True),
    GpuPair(first=0, second=2, ancestor="SYS", peer=False),
    GpuPair(first=1, second=2, ancestor="SYS", peer=False),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status.importlib.util, "find_spec", lambda name: None)


def test_a_machine_with_its_servers_and_links(
    monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    without_ray(monkeypatch)
    machine = host((gpu(0), gpu(1), gpu(2)), pairs=PAIRS)
    monkeypatch.setattr("weft.machine.hardware.host.probe_host", lambda *_: machine)
    measured = Speed(first=1, second=0, round_trip_s=1e-4, bytes_per_s=1.25e9)
    store_cluster([facts(0), facts(1)], [measured])
    with announced(["tiny", "other"], "http://127.0.0.1:8000"):
        code, printed = weft_json("cluster", "status")
        lines = weft("cluster", "status")[1].splitlines()
    assert code == 0 and printed["kind"] == "machine"
    [node] = printed["nodes"]
    assert (node["gpus"], node["gpus_free"]) == (3, 3)
    assert [(one["model"], one["state"], one["url"]) for one in node["engines"]] == [
        ("tiny", "running", "http://127.0.0.1:8000")
    ]
    assert [(link["first"], link["second"], link["kind"]) for link in node["links"]] == [
        ("cuda:0", "cuda:1", "NV18"),
        ("cuda:0", "cuda:2", "SYS"),
        ("cuda:1", "cuda:2", "SYS"),
    ]
    [network] = printed["network"]
    assert (network["first"], network["second"], network["bytes_per_s"]) == ("10.0.0.2", "10.0.0.1", 1.25e9)
    golden("cluster_status.txt", "\n".join(lines[2:]) + "\n")


def test_gpus_that_others_hold_are_not_free() -> None:
    held = msgspec.structs.replace(gpu(0), holders=(SimpleNamespace(),))  # type: ignore[arg-type]
    assert (machine_status(host((held, gpu(1)))).gpus, machine_status(host((held, gpu(1)))).gpus_free) == (2, 1)


def ray_node(name: str, **resources: float) -> dict[str, Any]:
    about = {"NodeID": name * 20, "NodeManagerHostname": f"host-{name}", "NodeManagerAddress": f"10.0.0.{ord(name)}"}
    return {**about, "Alive": True, "Resources": resources, "Labels": {"ray.io/accelerator-type": "H100"}}


def test_a_node_of_ray_and_who_runs_what_on_it(golden: Callable[[str, str], None]) -> None:
    """Bundles of groups that wait or have been removed take nothing elsewhere."""
    node = ray_node("a", CPU=8.0, GPU=4.0)
    own, other = node["NodeID"], "b" * 20
    bundle = {"CPU": 1.0, "GPU": 1.0}
    groups: list[dict[str, Any]] = [
        {
            "name": "weft m",
            "state": "CREATED",
            "bundles": {0: bundle, 1: bundle, 2: bundle},
            "bundles_to_node_id": {0: own, 1: own, 2: other},
        },
        {"name": "", "state": "CREATED", "bundles": {0: {"CPU": 2.0}}, "bundles_to_node_id": {0: own}},
        {"name": "weft old", "state": "REMOVED", "bundles": {0: bundle}, "bundles_to_node_id": {0: own}},
    ]
    about = ray_node_status(node, groups, None)
    assert (about.cpus_free, about.gpus_free) == (4, 2)
    assert [(one.model, one.ranks) for one in about.engines] == [("m", 2), (None, 1)]
    lines = status_lines(ClusterStatus(kind="ray", address="10.0.0.1:6379", nodes=(about,)))
    golden("cluster_status_ray.txt", "\n".join(lines) + "\n")


def test_links_of_the_nodes_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only nodes with several GPUs are asked; one that does not answer is said."""
    asked: list[str] = []

    class LostError(Exception):
        """A node that is gone."""

    def remote(run: Callable[[], bytes]) -> SimpleNamespace:
        def options(*, label_selector: dict[str, str], **_: Any) -> SimpleNamespace:
            asked.extend(label_selector.values())
            return SimpleNamespace(remote=lambda: (label_selector["ray.io/node-id"], run))

        return SimpleNamespace(options=options)

    def get(answer: tuple[str, Callable[[], bytes]], timeout: float) -> bytes:
        if answer[0].startswith("b"):
            raise LostError
        return answer[1]()

    errors = SimpleNamespace(RayError=LostError, GetTimeoutError=TimeoutError)
    ray = SimpleNamespace(remote=remote, get=get, exceptions=errors)
    monkeypatch.setattr(status, "probe_host", lambda environment: host((gpu(0), gpu(1)), pairs=PAIRS[:1]))
    nodes = [ray_node("a", GPU=2.0), ray_node("b", GPU=8.0), ray_node("c", GPU=1.0), ray_node("d", CPU=4.0)]
    links = ray_links(ray, nodes)
    assert asked == ["a" * 20, "b" * 20]
    assert list(links.values()) == [
        (Link(first="cuda:0", second="cuda:1", kind="NV18", peer_to_peer=True),),
        None,
        (),
        (),
    ]


def test_an_address_without_a_cluster_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs the extra weft-llm[ray]")
    monkeypatch.setenv("RAY_ADDRESS", "no such address")
    code, out, err = weft("cluster", "status")
    assert (code, out) == (1, "") and "RAY_ADDRESS" in err
