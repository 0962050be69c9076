"""Connections that are silent, measured clusters, NCCL's log, and Ray's token."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.log_events import logged
from tests.pure.commands import refused_line, weft, weft_json
from tests.pure.engine.test_nodes import FINE, facts
from tests.pure.joining import free_port, joining_settings
from tests.pure.machines import gpu, host, rig
from tests.pure.machines import plan as plan_on
from tests.refusals import has_values, refuses
from weft.cache import cache_path
from weft.checkpoint.checkpoint import Checkpoint
from weft.config import EngineConfig
from weft.engine.cluster import assembly, examination, join_listener, joined_node, ray_cluster
from weft.engine.cluster.measured import FILE, MeasuredCluster, load_cluster, store_cluster
from weft.engine.cluster.messages import Join, ListeningForPeers, Measured, MeasureTo, Speed, TellTime
from weft.engine.cluster.preflight import failures
from weft.engine.cluster.settings import NodeSettings
from weft.engine.cluster.speed import PeerListener, measure_network
from weft.engine.executors.rank_processes import nccl_log_variables
from weft.engine.processes import framing, secure
from weft.engine.processes.keys import NotWeftError
from weft.errors import ConfigError, PlanError
from weft.planner.execution.execution import plan_over_nodes
from weft.ranks.comm import nccl_log

KEY = b"a" * 32


def test_silent_connections_keep_nobody_waiting() -> None:
    """More than one at a time, each of which would take its whole limit."""
    listener = PeerListener("127.0.0.1", KEY)
    silent = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(3)]
    try:
        speed = measure_network(1, 0, "127.0.0.1", listener.port, KEY)
        assert not speed.problem
        assert [end.send(b"w") for end in silent] == [1] * 3, "they are still open"
    finally:
        listener.close()  # does not wait for their limits
        for end in silent:
            end.close()


def test_connections_beyond_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure, "MAX_GREETED", 2)
    listener = PeerListener("127.0.0.1", KEY)
    try:
        silent = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(2)]
        with socket.create_connection(("127.0.0.1", listener.port), 30) as third:
            assert third.recv(1) == b""
        silent.pop().close()
        while measure_network(1, 0, "127.0.0.1", listener.port, KEY).problem:
            pass  # until the place is free
        silent.pop().close()
    finally:
        listener.close()


class Unreachable:
    """A node that no other reaches; each attempt takes a second of `clock`."""

    def __init__(self, number: int, clock: list[float]) -> None:
        self.facts, self.clock = facts(number), clock

    def ask(self, question: object) -> object:
        if isinstance(question, MeasureTo):
            self.clock[0] += 5
            return Measured(Speed(first=self.facts.node, second=question.node, problem="timed out"))
        return ListeningForPeers(1)


def test_a_network_that_is_cut_everywhere_is_said_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 pairs that each take 5 s: the first failures are enough."""
    clock = [0.0]
    monkeypatch.setattr(assembly, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    fine = msgspec.structs.replace(FINE, problem="")
    monkeypatch.setattr(assembly, "measure_network", lambda *_: fine)
    nodes: list[Any] = [Unreachable(number, clock) for number in range(1, 9)]
    settings: Any = SimpleNamespace(key=KEY, certificate="", allow_public=False)
    own = facts(0, address="127.0.0.1")
    speeds = assembly.measure_all(own, nodes, settings)
    assert clock[0] <= 25 and any(speed.problem for speed in speeds)


def test_a_node_that_is_not_reached_is_named_in_a_replica_without_the_first_nodes() -> None:
    cut = Speed(first=3, second=2, problem="10.0.0.3:5: timed out")
    [failure] = failures([facts(0), facts(2, machine="b"), facts(3, machine="c")], [cut], "fetch")
    has_values(failure, "node 3 (host3", "node 2 (host2")


def test_replicas_are_kept_as_one_cluster(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is on the head alone, and no network is measured for it; one that starts again changes nothing."""
    card = "NVIDIA GeForce RTX 4090"
    others = [SimpleNamespace(facts=facts(n, host=rig(card, hostname=f"host{n}"))) for n in (1, 2)]
    listener: Any = SimpleNamespace(
        settings=NodeSettings(
            nodes=3, node=0, address="10.0.0.1", port=1, start_timeout_s=1, allow_public=False, key=KEY, replicas=3
        ),
        wait_for=lambda replicas, cancelled: [[others[number - 1]] if number else [] for number in replicas],
    )
    checked = {0: [], 1: [FINE], 2: [msgspec.structs.replace(FINE, bytes_per_s=1e8)]}
    monkeypatch.setattr(assembly, "check_nodes", lambda own, nodes, *_: checked[nodes[0].facts.node if nodes else 0])
    own = facts(0, host=rig(card, hostname="host0"))
    gatherer = assembly.Gatherer(EngineConfig(model="m"), None, listener, lambda: own, lasting=True)  # type: ignore[arg-type]
    groups = gatherer.gather(range(3), lambda: False)
    assert [group.speeds for group in groups] == list(checked.values())
    gatherer.gather([1], lambda: False)
    stored = msgspec.json.decode((cache_path() / FILE).read_bytes(), type=MeasuredCluster)
    assert [one.hostname for one in stored.hosts] == ["host0", "host1", "host2"] and stored.network_Bps == 1e8


def test_a_node_that_hangs_is_no_node_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_node, "ASK_S", 0.2)
    own, theirs = socket.socketpair()
    with own, theirs:
        theirs.sendall(framing.encode_frame(Join(facts(1), 0)))
        node = joined_node.JoinedNode(own)
        with refuses(ConfigError, "node-not-answering", "node 1", " 0.2 s"):
            node.ask(TellTime())


def test_a_connection_that_closes_at_once_has_not_spoken() -> None:
    """A health check, for example; nothing is known of its certificate."""
    own, theirs = socket.socketpair()
    theirs.close()
    with own, pytest.raises(NotWeftError, match="it closed the connection"):
        secure.accept_securely(own, KEY, "a certificate")


# --- free memory of GPUs ---


def test_a_gpu_that_cannot_hold_its_ranks_weights_is_named_with_its_node() -> None:
    hosts = [host((gpu(0),)), host((gpu(0), gpu(1, free=10**6)), hostname="small")]
    shape = plan_on(hosts[0]).shape
    checkpoint = Checkpoint(model="m", path="/models/m", format="safetensors", shape=shape, generation={})
    config = EngineConfig(model="m", tensor_parallel_size=1, pipeline_parallel_size=3, kv_cache_memory_bytes=10**9)
    with refuses(PlanError, "weights-exceed-free-memory", "0.0 GB are free", "cuda:2 is GPU 1 of node 1 (small)"):
        plan_over_nodes(config, checkpoint, hosts, [1, 2])


# --- weft plan --cluster ---


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def store(*counts: int, bytes_per_s: float = 1.25e9) -> None:
    nodes = [
        facts(number, host=rig(*["NVIDIA GeForce RTX 4090"] * count, hostname=f"host{number}"))
        for number, count in enumerate(counts)
    ]
    slow = msgspec.structs.replace(FINE, bytes_per_s=bytes_per_s)
    store_cluster(nodes, [FINE, slow])


def test_a_plan_for_measured_nodes_and_its_file(cache: Path) -> None:
    """The slowest link counts, and the written file gives the same plan."""
    store(2, 2, bytes_per_s=1.25e9)
    file = cache / "measured.yaml"
    status, planned = weft_json("plan", "Llama-3.1-8B", "--cluster", str(file))
    assert status == 0
    cluster = load_cluster()
    assert [len(node.gpus) for node in cluster.nodes] == [2, 2] and cluster.network_Bps == min(1.25e9, FINE.bytes_per_s)
    assert cluster.network_s == FINE.round_trip_s / 2
    _, again = weft_json("plan", "Llama-3.1-8B", "--gpus", str(file))
    assert again["best"]["predicted"] == planned["best"]["predicted"]
    assert weft_json("plan", "Llama-3.1-8B", "--cluster", str(file))[0] == 0, "the same nodes again"
    store(1, 2)
    refused_line(f"plan Llama-3.1-8B --cluster {file}", 1, "cluster-exists", str(file))


def test_clusters_that_cannot_be_planned_for(cache: Path) -> None:
    name = str(cache / "c.yaml")
    refused_line(f"plan Llama-3.1-8B --cluster {name}", 1, "no-measured-cluster", "--nnodes")
    store(1, 0)
    refused_line(f"plan Llama-3.1-8B --cluster {name}", 1, "measured-node-without-gpu", "node 1")
    refused_line(f"plan Llama-3.1-8B --cluster {name} --gpus 4xH100", 2, "cluster-and-other")
    refused_line("plan Llama-3.1-8B --cluster c.txt", 2, "cluster-not-yaml", "c.txt")
    (cache / "cache/weft/cluster.json").write_text("{")
    assert weft("plan", "Llama-3.1-8B", "--cluster", name)[0] == 1


# --- NCCL's log ---

NCCL = """\
h:1:9 [0] NCCL INFO NCCL_IB_HCA set by environment to mlx5_0.
h:1:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
h:1:9 [0] NCCL INFO Using network IB
h:1:9 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
h:1:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
h:1:9 [0] NCCL INFO Channel 01/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
h:1:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
h:1:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
h:1:9 [0] NCCL INFO Using network IB
"""


def test_choices_of_nccl() -> None:
    assert nccl_log.choices(NCCL) == [
        "NCCL_IB_HCA=mlx5_0",
        "NET/IB: [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
        "network IB",
        "GPUDirect RDMA enabled for HCA 0 'mlx5_0'",
        "3 channel ends via NET/IB/0/GDRDMA",
    ]
    assert nccl_log.choices("h:1:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n") == [
        "NET/Socket: [0]eth0:10.0.0.1<0>"
    ]


def test_the_file_is_a_private_one_unless_the_user_has_another(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nccl_log_variables({"NCCL_DEBUG": "WARN"}) == nccl_log_variables({"NCCL_DEBUG_FILE": "x"}) == {}
    variables = nccl_log_variables({})
    assert nccl_log.read_choices(variables) == [], "NCCL has written nothing"
    monkeypatch.setattr(nccl_log.os, "getpid", lambda: 77)
    file = Path(variables["NCCL_DEBUG_FILE"].replace("%p", "77"))
    assert file.parent.stat().st_mode & 0o077 == 0
    file.write_text(NCCL)
    assert "network IB" in nccl_log.read_choices(variables) and not file.exists()
    file.write_text(NCCL)
    theirs = file.with_name("theirs.log")
    file.rename(theirs)
    assert nccl_log.read_choices({"NCCL_DEBUG_FILE": str(theirs)}) == [] and theirs.exists()


# --- Ray's token ---


class TokenError(Exception):
    """Ray's AuthenticationError."""


@contextlib.contextmanager
def listening() -> Iterator[str]:
    """An address at which somebody listens, as the head of a cluster does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def fake_ray(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    def init(**_: object) -> None:
        if error:
            raise error

    ray = ModuleType("ray")
    ray.is_initialized = lambda: False  # type: ignore[attr-defined]
    ray.init = init  # type: ignore[attr-defined]
    ray.exceptions = SimpleNamespace(AuthenticationError=TokenError)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)


@pytest.mark.parametrize(("mode", "warned"), [("token", False), ("disabled", True), ("", True)])
def test_a_cluster_without_a_token_gets_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str, warned: bool
) -> None:
    fake_ray(monkeypatch)
    ray_cluster._warn_without_token.cache_clear()
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    with listening() as address:
        for _ in range(2):  # a replica that starts again connects anew
            ray_cluster.connect({"RAY_ADDRESS": address})
    warnings = [record for record in caplog.records if "RAY_AUTH_MODE=token" in record.getMessage()]
    assert len(warnings) == warned


def test_a_cluster_that_asks_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ray(monkeypatch, TokenError("no token"))
    with listening() as address, refuses(ConfigError, "ray-token", address, "RAY_AUTH_MODE=token"):
        ray_cluster.connect({"RAY_ADDRESS": address})


def test_a_cluster_that_refuses_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray says so of a program that has no token; nobody may start a cluster beside it instead."""
    with listening() as address:
        caplog.set_level("INFO")
        monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
        fake_ray(monkeypatch, ConnectionError(f"Failed to connect to Ray cluster at {address}"))
        for environment in ({"RAY_ADDRESS": address}, {}):
            with refuses(ConfigError, "ray-token", "RAY_AUTH_MODE=token"):
                ray_cluster.connect(environment)
    with refuses(ConfigError, "no-ray-cluster", address):  # nobody listens there any more
        ray_cluster.connect({"RAY_ADDRESS": address})
    # One that has crashed, and left its address, is no reason not to start another one: `fake_ray` fails again.
    with refuses(ConfigError, "no-ray-cluster", "this machine"):
        ray_cluster.connect({})
    assert logged(caplog, "local-ray-cluster")


def test_a_stranger_does_not_fill_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line in ten seconds for each address, however often it comes."""
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    settings = joining_settings(free_port())
    with join_listener.JoinListener(settings):
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", settings.port)) as stranger:
                stranger.sendall(b"x" * 40)
                assert stranger.recv(1) == b"", "it is closed"
    assert logged(caplog, "peer-refused") == [{"peer": "127.0.0.1"}]
    clock = [0.0]
    monkeypatch.setattr(secure, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(secure, "MAX_PEERS", 2)
    complaints = secure.Complaints()
    assert [complaints.is_due(peer) for peer in "abab"] == [True, True, False, False]
    clock[0] = 10.0
    assert [complaints.is_due(peer) for peer in "aab"] == [True, False, True]
    assert len(complaints._said_s) <= 2


def test_threads_of_greeted_connections_end() -> None:
    before = threading.active_count()
    listener = PeerListener("127.0.0.1", KEY)
    with socket.create_connection(("127.0.0.1", listener.port)):
        listener.close()
    assert threading.active_count() == before


def test_decoders_are_built_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec 0.20 crashes now and then if two threads are the first to build those of the same types: nodes join at
    the same moment."""
    held: list[bool] = []

    def build(messages: object) -> object:
        held.append(framing._building.locked())
        return msgspec.msgpack.Decoder(Any)

    monkeypatch.setattr(framing, "msgspec", SimpleNamespace(msgpack=SimpleNamespace(Decoder=build)))
    framing.FrameDecoder[Any](Any)
    assert held == [True]


def test_the_doctor_visits_the_nodes_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    class LostError(Exception):
        """A node that is gone."""

    class Task:
        """A task that runs when its answer is fetched."""

        def __init__(self, run: Callable[[list[str]], bytes]) -> None:
            self._run = run

        def options(self, *, label_selector: dict[str, str], **_: Any) -> SimpleNamespace:
            (node,) = label_selector.values()
            return SimpleNamespace(remote=lambda flags: (node, self._run, flags))

    def get(answer: tuple[str, Callable[[list[str]], bytes], list[str]], timeout: float) -> bytes:
        node, run, flags = answer
        if node.startswith("b"):
            raise LostError("RayTaskError\nthe node died")
        return run(flags)

    def run(words: list[str], **_: Any) -> SimpleNamespace:
        assert words[-4:] == ["weft", "doctor", "--json", "--no-measure"]
        checks = [{"name": "disk", "status": "warn", "value": "1 GB", "limit": "", "remedy": "x"}]
        return SimpleNamespace(returncode=0, stdout=json.dumps({"ok": True, "checks": checks}).encode(), stderr=b"")

    rows = [
        {"NodeID": id * 20, "NodeManagerHostname": name, "Alive": alive}
        for id, name, alive in (("a", "one", True), ("b", "two", True), ("c", "three", False))
    ]
    errors = SimpleNamespace(RayError=LostError, GetTimeoutError=TimeoutError)
    context = SimpleNamespace(gcs_address="auto")
    ray = SimpleNamespace(
        remote=Task, nodes=lambda: rows, get=get, exceptions=errors, get_runtime_context=lambda: context
    )
    monkeypatch.setattr(examination, "connect", lambda environment, may_start: ray)
    monkeypatch.setattr(examination, "subprocess", SimpleNamespace(run=run, DEVNULL=None))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    status, answer = weft_json("doctor", "--nodes", "--no-measure")
    assert status == 1 and not answer["ok"]
    assert [(check["node"], check["name"], check["status"]) for check in answer["checks"]] == [
        *(("one (aaaaaaaa)", name, "ok") for name in ("reachable", "same-torch", "clock")),
        ("one (aaaaaaaa)", "disk", "warn"),
        ("two (bbbbbbbb)", "reachable", "fail"),
    ]
    assert "the node died" in answer["checks"][-1]["value"]


# --- places of connections that have not proved the key ---


def test_one_address_has_a_quarter_of_the_places() -> None:
    places = secure.Places()
    held = [places.take("10.0.0.9") for _ in range(100)]
    assert sum(one is not None for one in held) == secure.PER_ADDRESS == 16
    assert places.take("10.0.0.8") is not None
    give_back = held[0]
    assert give_back is not None
    give_back()
    assert places.take("10.0.0.9") is not None and places.take("10.0.0.9") is None


def test_strangers_do_not_keep_a_node_out_that_has_proved_the_key() -> None:
    places = secure.Places()
    places.remember("10.0.0.1")
    taken = [places.take(f"10.0.1.{number}") for number in range(100)]
    assert sum(one is not None for one in taken) == secure.MAX_GREETED == 64
    assert places.take("10.0.0.2") is None
    own = [places.take("10.0.0.1") for _ in range(17)]
    assert sum(one is not None for one in own) == 16
    for give_back in [*taken, *own]:
        if give_back is not None:
            give_back()
    assert places._strangers == 0 and not places._taken


def test_an_address_that_becomes_known_gives_its_place_back_to_the_strangers() -> None:
    places = secure.Places()
    give_back = places.take("10.0.0.1")
    places.remember("10.0.0.1")
    again = places.take("10.0.0.1")
    assert give_back is not None and again is not None
    give_back()
    again()
    assert places._strangers == 0 and not places._taken
    for number in range(2 * secure.MAX_KNOWN):
        places.remember(str(number))
    assert len(places._known) == secure.MAX_KNOWN and "10.0.0.1" not in places._known


def test_a_node_joins_while_strangers_hold_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been there before: its address is known by its proof."""
    monkeypatch.setattr(secure, "MAX_GREETED", 1)
    listener = PeerListener("127.0.0.1", KEY)
    silent = None
    try:
        assert not measure_network(1, 0, "127.0.0.1", listener.port, KEY).problem
        while listener._greeter._places._strangers:
            pass  # until its thread has ended
        silent = socket.create_connection(("127.0.0.1", listener.port), source_address=("127.0.0.2", 0))
        with socket.create_connection(("127.0.0.1", listener.port), 30, source_address=("127.0.0.3", 0)) as third:
            assert third.recv(1) == b"", "no place"
        assert not measure_network(1, 0, "127.0.0.1", listener.port, KEY).problem
    finally:
        if silent is not None:
            silent.close()
        listener.close()
