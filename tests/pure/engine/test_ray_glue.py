"""Parts around Ray, without Ray: the discovery of its proxies, resources of actors, the choice of the backend."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.log_events import logged
from tests.pure.servers import Exchange, serving
from tests.refusals import refuses
from weft.config import EngineConfig
from weft.engine.cluster import ray_bundles, ray_cluster, ray_facts, ray_network
from weft.engine.cluster.messages import Facts
from weft.engine.cluster.ray_bundles import OwnGroup, free_bundles, settled_bundles
from weft.engine.cluster.ray_cluster import uses_ray
from weft.engine.cluster.ray_facts import check_seats
from weft.engine.cluster.ray_seats import Seat
from weft.engine.executors import ranks
from weft.engine.executors.node_messages import Ping, PrintStacks
from weft.engine.executors.ray import RayExecutor
from weft.engine.executors.ray_nodes import Attached, RayNode, RayNodes
from weft.engine.processes.framing import Channel, encode_frame
from weft.errors import Cause, ConfigError, PlanError
from weft.fleet.upstreams.config import Timeouts, make_config
from weft.fleet.upstreams.fleet import Fleet
from weft.fleet.upstreams.policy import POLICIES
from weft.fleet.upstreams.ray_watch import AWAY_S, RayWatch, ServeState, serve_upstreams
from weft.http.options import ServeOptions
from weft.machine.hardware.host import Host
from weft.machine.hardware.topology import Gpu
from weft.ray import resources, serve
from weft.ray.resources import actor_config, actor_resources, check_room, count_engines

# --- discover: {ray: URL} ---


def state(*nodes: str, host: str = "0.0.0.0", **applications: str) -> dict[str, Any]:
    """The dashboard's answer: healthy proxies on the nodes, applications with their states."""
    proxies = {node: {"node_id": node, "node_ip": node, "status": "HEALTHY", "actor_name": "x"} for node in nodes}
    rows = {
        name: {"route_prefix": f"/{name}", "status": status, "deployments": {"weft": {"status": "HEALTHY"}}}
        for name, status in applications.items()
    }
    return {"http_options": {"host": host, "port": 8000}, "proxies": proxies, "applications": rows}


def urls(answer: dict[str, Any]) -> list[str]:
    return [upstream.url for upstream in serve_upstreams(msgspec.convert(answer, ServeState))]


def test_upstreams_are_healthy_proxies_with_applications_of_weft() -> None:
    both = state("10.0.0.2", "10.0.0.1", "fd00::1", llm="RUNNING", other="DEPLOYING", gone="DELETING")
    assert urls(both) == [
        *("http://10.0.0.1:8000/llm", "http://10.0.0.1:8000/other"),
        *("http://10.0.0.2:8000/llm", "http://10.0.0.2:8000/other"),
        *("http://[fd00::1]:8000/llm", "http://[fd00::1]:8000/other"),
    ]
    both["proxies"]["10.0.0.2"]["status"] = "DRAINING"
    both["applications"]["other"]["deployments"] = {"somebody": {}}
    assert urls(both) == ["http://10.0.0.1:8000/llm", "http://[fd00::1]:8000/llm"]
    assert urls(state("10.0.0.1", host="127.0.0.1", llm="RUNNING")) == ["http://127.0.0.1:8000/llm"]
    assert urls({}) == []  # Ray Serve does not run


async def test_upstreams_come_and_go(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Also: a dashboard that does not answer, or wants a token, changes nothing and is logged once."""
    answers: list[tuple[str, bytes]] = [
        ("200 OK", json.dumps(state("10.0.0.1", llm="RUNNING")).encode()),
        ("200 OK", json.dumps(state("10.0.0.1", "10.0.0.2", llm="RUNNING")).encode()),
        ("401 Unauthorized", b"no"),
        ("200 OK", b"<html>"),
        ("200 OK", json.dumps(state("10.0.0.2", llm="RUNNING")).encode()),
    ]
    seen: list[Exchange] = []

    async def dashboard(exchange: Exchange) -> None:
        seen.append(exchange)
        exchange.refuse(*answers[len(seen) - 1])

    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    async with serving(dashboard) as address:
        fleet = Fleet([], POLICIES["least_conn"](), lambda: 0.0)
        watch = RayWatch(fleet, f"http://{address.host}:{address.port}", Timeouts())
        found = []
        for _ in answers:
            await watch.look()
            found.append([url.removeprefix("http://").partition(":")[0] for url in fleet.replicas])
    assert found == [["10.0.0.1"], *[["10.0.0.1", "10.0.0.2"]] * 3, ["10.0.0.2"]]
    assert {exchange.path for exchange in seen} == {"/api/serve/applications/"}
    assert {exchange.headers["authorization"] for exchange in seen} == {"Bearer secret"}
    assert len(logged(caplog, "upstreams-unchanged")) == 1 and "secret" not in caplog.text


async def test_a_dashboard_that_knows_nothing_of_ray_serve_is_believed_after_a_while() -> None:
    answers = [state("10.0.0.1", llm="RUNNING"), {}, {}, {}]

    async def dashboard(exchange: Exchange) -> None:
        exchange.refuse("200 OK", json.dumps(answers.pop(0)).encode())

    now = [0.0]
    async with serving(dashboard) as address:
        fleet = Fleet([], POLICIES["least_conn"](), lambda: now[0])
        watch = RayWatch(fleet, f"http://{address.host}:{address.port}", Timeouts())
        found = []
        for now[0] in (5.0, 6.0, 5.0 + AWAY_S - 1, 5.0 + AWAY_S):
            await watch.look()
            found.append(len(fleet.replicas))
    assert found == [1, 1, 1, 0]


def test_discover_has_one_source() -> None:
    assert make_config({"discover": {"ray": "http://127.0.0.1:8265"}}).discover is not None
    with refuses(ConfigError, "invalid-field", "file, dns"):
        make_config({"discover": {"ray": "http://127.0.0.1:8265", "dns": "http://a:1"}})
    with refuses(ConfigError, "invalid-upstream"):
        RayWatch(Fleet([], POLICIES["random"](), lambda: 0.0), "ray://10.0.0.1:x", Timeouts())


# --- Actors with engines ---


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="tiny", **options)


@pytest.mark.parametrize(
    ("options", "gpus", "cpu", "gpu"),
    [
        ({}, 0, 1, 0),
        ({}, 4, 1, 1),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 8, 1, 4),
        ({"tensor_split": (2.0, 1.0), "pipeline_split": (1, 1, 1)}, 0, 6, 0),
        ({"device": "cpu", "tensor_parallel_size": 2}, 8, 2, 0),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, 8, 1, 2),
        ({"data_parallel_size": 4}, 8, 1, 1),  # replicas are actors of their own
        ({"executor": "ray", "tensor_parallel_size": 8}, 8, 0, 0),
    ],
    ids=str,
)
def test_resources_of_an_actor(options: dict[str, Any], gpus: int, cpu: int, gpu: int) -> None:
    own = actor_config(config(**options))
    assert actor_resources(own, gpus) == {"num_cpus": cpu, "num_gpus": gpu}
    assert own.executor == options.get("executor", "processes")
    assert own.data_parallel_size == (2 if own.enable_expert_parallel else None)


def test_a_token_does_not_enter_the_cluster() -> None:
    with refuses(ConfigError, "token-in-cluster", "HF_TOKEN") as raised:
        actor_config(config(hf_token="hf_secret"))
    assert "hf_secret" not in str(raised.value)


def test_an_engine_that_no_node_has_room_for() -> None:
    """Rather than an actor that is pending for ever."""
    rows = [
        {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0, "GPU": 2.0}},
        {"Alive": True, "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 8.0}},
        {"Alive": False, "NodeManagerAddress": "10.0.0.3", "Resources": {"CPU": 8.0, "GPU": 8.0}},
    ]
    ray = SimpleNamespace(nodes=lambda: rows)
    assert check_room(ray, {"num_cpus": 1, "num_gpus": 1}) == 2
    assert check_room(ray, {"num_cpus": 2, "num_gpus": 0}) == 8
    with refuses(PlanError, "ray-too-small", "4 GPU", "10.0.0.1 has 8 CPU and 2 GPU", "10.0.0.2 has 8 CPU and 0 GPU"):
        check_room(ray, {"num_cpus": 1, "num_gpus": 4})


def test_more_engines_than_there_is_room_for() -> None:
    """On CPUs one for each node that holds its ranks, and as many as fit if so many are asked for."""
    rows = [{"Alive": True, "NodeManagerAddress": "a", "Resources": {"CPU": cpus}} for cpus in (1.0, 4.0)]
    ray = SimpleNamespace(nodes=lambda: rows)
    pair = actor_config(config(tensor_parallel_size=2))
    sizes = actor_resources(pair, 0)
    assert count_engines(ray, pair, sizes, None) == 1 and count_engines(ray, pair, sizes, 2) == 2
    with refuses(PlanError, "ray-too-small", "8 engines", "room for 2"):
        count_engines(ray, pair, sizes, 8)
    spread = config(executor="ray", tensor_parallel_size=2)
    assert count_engines(ray, spread, actor_resources(spread, 0), None) == 2
    wide = config(executor="ray", tensor_parallel_size=6)
    with refuses(PlanError, "ray-too-small", "6 ranks", "5 CPU"):
        count_engines(ray, wide, actor_resources(wide, 0), None)
    rows[1]["Resources"] = {"CPU": 1.0, "GPU": 8.0}  # each rank wants a CPU as well
    with refuses(PlanError, "ray-too-small", "2 ranks", "enough for 1"):
        count_engines(ray, spread, actor_resources(spread, 8), None)


def test_seats_with_gpus_want_cpus(monkeypatch: pytest.MonkeyPatch, facts: Callable[..., Facts]) -> None:
    def node(name: str, **resources: float) -> dict[str, Any]:
        about = {"NodeID": name, "NodeManagerAddress": name, "NodeManagerHostname": name}
        return {**about, "Alive": True, "Resources": resources}

    rows = [node("a", GPU=8.0, CPU=3.0), node("b", GPU=2.0), node("c", CPU=5.0)]
    ray = SimpleNamespace(nodes=lambda: rows, get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "a"))
    monkeypatch.setattr(ray_facts, "gather_from", lambda ray, ids, config: {id: facts() for id in ids})
    assert [seat.room for seat in ray_facts.find_seats(ray, config(), on_cpu=False)] == [3]
    del rows[0]
    with refuses(PlanError, "ray-without-devices", "a GPU and a CPU", "--num-gpus N --num-cpus N"):
        ray_facts.find_seats(ray, config(), on_cpu=False)


def test_actors_are_pinged_while_others_are_awaited() -> None:
    """An actor that hears nothing ends itself."""
    executor = RayExecutor(RayNodes("cluster", "127.0.0.1", b"k", 1.0, ()))
    executor._ray = SimpleNamespace(wait=lambda runs, timeout: ([], runs), is_initialized=lambda: False)
    executor._runs, executor._phases = [object(), object()], ["start"] * 2
    ends = [socket.socketpair() for _ in range(2)]
    for rank, (_, theirs) in enumerate(ends):
        theirs.sendall(encode_frame(Attached(rank, "127.0.0.1", None)))
    waiting = threading.Thread(target=executor._await_actors, args=(2,))
    executor._came.put(executor._attach(ends[0][0]))
    waiting.start()
    heard = next(iter(Channel[Any](ends[0][1], Ping | PrintStacks)))
    assert isinstance(heard, Ping) and waiting.is_alive()
    executor._came.put(executor._attach(ends[1][0]))
    waiting.join(30)
    executor._end()
    for _, theirs in ends:
        theirs.close()
    assert sorted(executor._attached) == [0, 1]


def test_ray_may_take_its_time_to_say_why_an_actor_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that others lost by it is not the cause meanwhile, nor if Ray has one."""
    monkeypatch.setattr(ranks, "ROOT_CAUSE_S", 0.05)
    lost, death = (Cause(rank=rank, phase="step", code="c", cause=f"{rank}") for rank in (1, 0))
    for early in (True, False):
        executor = RayExecutor(RayNodes("cluster", "127.0.0.1", b"k", 1.0, ()))
        if early:
            executor._fail(lost, lost_peer=True)
        executor._expect_cause()
        executor._fail(lost, lost_peer=True)
        time.sleep(0.2)
        assert executor._ended is None
        executor._fail(death)
        assert executor.failure.result(0) == death
        executor.close()
    alone = RayExecutor(RayNodes("cluster", "127.0.0.1", b"k", 1.0, ()))
    alone._fail(lost, lost_peer=True)
    assert alone.failure.result(30) == lost
    alone.close()


def test_keys_do_not_enter_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "import_library", lambda name: None)
    for server in ({"api_key": ["sk-own"]}, {"admin_key": "sk-own"}):
        with refuses(ConfigError, "key-in-cluster", "VLLM_API_KEY") as raised:
            serve.build({"model": "demo", "server": server})
        assert "sk-own" not in str(raised.value)


def test_libraries_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("serve", "data"):
        monkeypatch.setitem(__import__("sys").modules, f"ray.{name}", None)
        with refuses(ConfigError, f"no-ray-{name}", f"weft-llm[ray-{name}]"):
            resources.import_library(name)


def test_arguments_of_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "import_library", lambda name: None)
    with refuses(ConfigError, "invalid-argument", "model"):
        serve.build({"engine": {}})
    with refuses(ConfigError, "invalid-argument", "modle"):
        serve.build({"model": "demo", "modle": 1})
    with refuses(ConfigError, "unknown-argument", "max_model_length"):
        serve.build({"model": "demo", "engine": {"max_model_length": 5}})
    wanted = serve.ServeArguments(
        model="demo", autoscaling_config={"max_replicas": 3}, deployment={"max_ongoing_requests": 7}
    )
    options = serve.deployment_options(wanted, actor_config(config(max_num_seqs=4)))
    assert options["autoscaling_config"] == {"max_replicas": 3} and options["max_ongoing_requests"] == 7
    assert serve.with_key(ServeOptions(), {"VLLM_API_KEY": "k"}).api_key == ("k",)
    assert serve.with_key(ServeOptions(api_key=("own",)), {"VLLM_API_KEY": "k"}).api_key == ("own",)


# --- The backend that is chosen ---


@pytest.fixture
def listener() -> Iterator[str]:
    """Address at which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield f"127.0.0.1:{made.getsockname()[1]}"


def host(gpus: int = 0) -> Host:
    card = Gpu(index=0, name="L4", uuid="GPU-0", total_bytes=24 << 30, free_bytes=24 << 30, capability=(8, 9))
    cards = tuple(msgspec.structs.replace(card, index=at, uuid=f"GPU-{at}") for at in range(gpus))
    return Host(hostname="here", cores=(0, 1), memory_total_bytes=1 << 34, memory_free_bytes=1 << 34, gpus=cards)


def test_the_backend_that_is_left_out(listener: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = {"RAY_ADDRESS": listener}
    four, two = config(tensor_parallel_size=2, pipeline_parallel_size=2), config(tensor_parallel_size=2)
    assert uses_ray(four, host(2), at) and not uses_ray(two, host(2), at)
    assert uses_ray(config(tensor_split=(1.0, 1.0, 1.0)), host(2), at)
    assert not uses_ray(four, host(2), {}) and not uses_ray(four, host(2), {"RAY_ADDRESS": "local"})
    assert not uses_ray(four, host(2), {"RAY_ADDRESS": "127.0.0.1:1"})  # nobody answers
    assert not uses_ray(four, host(0), at)  # a CPU takes any number of ranks
    assert uses_ray(config(device="cuda"), host(0), at)  # a head without GPUs
    assert not uses_ray(config(executor="processes", tensor_parallel_size=4), host(2), at)
    assert uses_ray(config(executor="ray"), host(0), {}) and not uses_ray(config(nnodes=2), host(0), at)
    monkeypatch.setattr(ray_cluster, "_in_placement_group", lambda: True)
    assert uses_ray(two, host(2), {"RAY_JOB_ID": "1"}) and not uses_ray(two, host(2), {})


def test_bundles_of_the_callers_placement_group() -> None:
    """Free bundles are dealt out, each once."""
    nodes = {0: "a", 1: "b", 2: "a", 3: "b"}
    free = {"CPU_group_0_77": 1.0, "CPU_group_1_77": 2.0, "CPU_group_2_77": 1.0, "CPU_group_3_66": 1.0, "CPU": 9.0}
    own = OwnGroup("77", free_bundles("77", "CPU", nodes, free))
    assert own.bundles == {"a": (0, 2), "b": (1, 1)}
    left, taken = own.take({"a": 1, "b": 1})
    assert taken == {"a": (0,), "b": (1,)} and left.bundles == {"a": (2,), "b": (1,)}
    assert left.take({"a": 1})[1] == {"a": (2,)}


def test_what_this_process_takes_itself_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray counts it a moment later; and by then, what another actor holds may not be free yet."""
    monkeypatch.setattr(ray_bundles, "LOOK_S", 0.0)
    told = [{"a": (0, 1), "b": (2,)}, {"b": (2,)}, {"a": (1,), "b": (2,)}]
    assert settled_bundles(iter(told).__next__, 2) == told[2]
    monkeypatch.setattr(ray_bundles, "KNOWN_S", -1.0)
    assert settled_bundles(iter(told).__next__, 2) == told[0]


def test_addresses_are_compared(facts: Callable[..., Facts]) -> None:
    """Ray's address of a node, and the one that its environment wants."""
    node = RayNode("a" * 56, "one", "10.0.0.1")
    check_seats([Seat(node, 1, facts(host_ip="10.0.0.1"))], config())
    with refuses(ConfigError, "preflight", "10.0.0.1", "VLLM_HOST_IP=10.1.0.1", "--node-ip-address 10.1.0.1"):
        check_seats([Seat(node, 1, facts(host_ip="10.1.0.1"))], config())


class NearRay:
    """Actors that are objects of this process, and are killed once."""

    exceptions = SimpleNamespace(RayError=OSError, GetTimeoutError=TimeoutError)

    def __init__(self) -> None:
        self.places: list[dict[str, str]] = []
        self.killed: list[Any] = []

    def remote(self, kind: Callable[..., Any]) -> SimpleNamespace:
        def options(*, label_selector: dict[str, str], **_: Any) -> SimpleNamespace:
            self.places.append(label_selector)
            return SimpleNamespace(remote=lambda *arguments: NearActor(kind(*arguments)))

        return SimpleNamespace(options=options)

    def wait(self, answers: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return answers, []

    def get(self, answer: Callable[[], Any], timeout: float) -> Any:
        return answer()

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)
        actor.end()


class NearActor:
    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> SimpleNamespace:
        method = getattr(self._own, name)
        return SimpleNamespace(remote=lambda *arguments: lambda: method(*arguments))

    def end(self) -> None:
        if hasattr(self._own, "_listener"):
            self._own._listener.close()


def seats_here(facts: Callable[..., Facts], count: int) -> list[Seat]:
    return [Seat(RayNode(f"{n}" * 56, f"host{n}", "127.0.0.1"), 1, facts()) for n in range(count)]


def test_the_network_between_the_nodes_of_ray_is_measured(
    facts: Callable[..., Facts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pair, with the key of the run; a node that others do not reach fails the preflight by its name."""
    ray, key = NearRay(), b"a" * 32
    seats = seats_here(facts, 3)
    speeds = ray_network.measure_seats(ray, seats, key, "", allow_public=False, start_s=0)
    assert [(speed.first, speed.second, speed.problem) for speed in speeds] == [(1, 0, ""), (2, 0, ""), (2, 1, "")]
    assert all(speed.bytes_per_s > 0 and speed.round_trip_s > 0 for speed in speeds)
    assert [list(place.values()) for place in ray.places] == [[seat.node.id] for seat in seats]
    assert len(ray.killed) == 3
    check_seats(seats, config(), speeds)
    assert ray_network.measure_seats(ray, seats[:1], key, "", allow_public=False, start_s=0) == []
    measure = ray_network.measure_network
    monkeypatch.setattr(ray_network, "measure_network", lambda *_: measure(1, 0, "127.0.0.1", 1, key))
    cut = ray_network.measure_seats(ray, seats[:2], key, "", allow_public=False, start_s=0)
    with refuses(ConfigError, "preflight", "node 1", "node 0", "127.0.0.1:1"):
        check_seats(seats[:2], config(), cut)


def test_a_node_of_ray_that_cannot_measure(facts: Callable[..., Facts]) -> None:
    ray = NearRay()

    def get(answer: Callable[[], Any], timeout: float) -> Any:
        raise TimeoutError

    ray.get = get  # type: ignore[method-assign]
    with refuses(ConfigError, "ray-node-not-measuring", "00000000", "host0", "ray status"):
        ray_network.measure_seats(ray, seats_here(facts, 2), b"a" * 32, "", allow_public=False, start_s=0)
    assert len(ray.killed) == 2


class UnschedulableError(OSError):
    """Ray's error for a task whose node is gone."""


class SlowRay:
    """Answers of nodes that come after so many waits: JSON, or an error. Its only node is alive."""

    exceptions = SimpleNamespace(
        RayError=OSError, GetTimeoutError=TimeoutError, TaskUnschedulableError=UnschedulableError
    )

    def __init__(self, answer: bytes | Exception, waits: int, *, alive: bool = True) -> None:
        self._answer, self._waits, self._alive = answer, waits, alive

    def remote(self, run: Callable[..., bytes]) -> SimpleNamespace:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: self))

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "0123456789", "Alive": self._alive}]

    def wait(self, answers: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        self._waits -= 1
        return ([], answers) if self._waits >= 0 else (answers, [])

    def get(self, answer: Any, timeout: float) -> bytes:
        assert timeout == 0
        if self._waits >= 0:
            raise TimeoutError
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def test_a_node_may_report_late(
    facts: Callable[..., Facts], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    config = EngineConfig(model="x")
    now = facts(clock_s=time.time() + 0.01)
    ray = SlowRay(msgspec.json.encode(now), waits=2)
    [reported] = ray_facts.gather_from(ray, ["0123456789"], config).values()
    assert msgspec.structs.replace(reported, skew_s=0.0) == now and abs(reported.skew_s) < 10
    assert len(caplog.messages) == 2
    assert logged(caplog, "node-awaited") == [{"node": "Ray node 01234567"}] * 2
    monkeypatch.setattr(ray_facts, "time", SimpleNamespace(monotonic=count(step=10).__next__, time=time.time))
    late = replace(config, start_timeout=25)
    with refuses(ConfigError, "ray-node-not-reporting", "01234567", " 25 s", "ray status"):
        ray_facts.gather_from(SlowRay(b"", waits=9), ["0123456789"], late)


@pytest.mark.parametrize("skew_s", [-95.0, 95.0])
def test_a_clock_of_a_node_of_ray_that_is_wrong(facts: Callable[..., Facts], skew_s: float) -> None:
    wrong = msgspec.json.encode(facts(clock_s=time.time() + skew_s))
    [found] = ray_facts.gather_from(SlowRay(wrong, waits=0), ["0123456789"], EngineConfig(model="x")).values()
    side = "ahead" if skew_s > 0 else "behind"
    with refuses(ConfigError, "preflight", "node 0", f"s {side}", "timedatectl"):
        check_seats([Seat(RayNode("0123456789", "one", "10.0.0.1"), 1, found)], config())


@pytest.mark.parametrize(("error", "alive"), [(UnschedulableError("gone"), True), (OSError("crashed"), False)])
def test_a_node_that_has_died_is_left_out(error: Exception, alive: bool) -> None:
    """Ray may still list it; one that lives and fails is an error."""
    dead = SlowRay(error, waits=0, alive=alive)
    assert ray_facts.gather_from(dead, ["0123456789"], EngineConfig(model="x")) == {}
    with refuses(ConfigError, "ray-node-not-reporting", "01234567", "crashed"):
        ray_facts.gather_from(SlowRay(OSError("crashed"), waits=0), ["0123456789"], EngineConfig(model="x"))


@pytest.fixture
def facts() -> Callable[..., Facts]:
    def make(**changes: Any) -> Facts:
        values: dict[str, Any] = {
            "node": 0,
            "nodes": 0,
            "host": host(),
            "address": "10.0.0.1",
            "interface": "eth0",
            "interfaces": (),
            "host_ip": "",
            "machine": "m",
            "weft": "1",
            "torch": "2",
            "model": "tiny",
            "model_digest": "d",
            "problem": "",
            "wrong_interface": "",
            "shm_free_bytes": None,
            "open_files": 65536,
            "clock_s": 0.0,
        }
        return Facts(**{**values, **changes})

    return make
