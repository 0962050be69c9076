"""Nodes before their ranks start: settings, keys, addresses, checks, and the division of ranks."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest

from tests.pure.joining import facts, free_port, joining_settings
from tests.pure.machines import checkpoint as dummy_checkpoint
from tests.pure.machines import gpu, host
from tests.pure.machines import plan as plan_on
from tests.refusals import has_values, refusals, refuses
from weft import __version__
from weft.config import EngineConfig
from weft.engine.cluster.facts import gather_facts, wrong_interface
from weft.engine.cluster.join_listener import JoinListener
from weft.engine.cluster.joined_node import JoinedNode
from weft.engine.cluster.messages import HEAD_CLOSED, Dismissed, Facts, Join, Speed
from weft.engine.cluster.node import connect_to_head
from weft.engine.cluster.preflight import failures
from weft.engine.cluster.ray_cluster import RayAssembly, RayGroup, actors_key, occupied_by
from weft.engine.cluster.ray_seats import Seat, choose_for_replicas
from weft.engine.cluster.settings import NodeSettings, node_settings, served_config
from weft.engine.cluster.speed import PeerListener, measure_network
from weft.engine.executors.ray_nodes import RayNode, RayNodes
from weft.engine.processes.framing import LENGTH, Channel
from weft.engine.processes.keys import (
    MESSAGES,
    NotWeftError,
    OtherVersionError,
    WrongKeyError,
    check_connector,
    load_key,
    prove_to_acceptor,
)
from weft.errors import ConfigError, ModelError, PlanError
from weft.machine.hardware.addresses import check_private, interface_of, own_address
from weft.plan.nodes import (
    check_node_memory,
    crossing_warning,
    divide_nodes,
    divide_ranks,
    joined_host,
    on_other_nodes,
    over_nodes,
    part_of_node,
    place_on_node,
)

KEY = "k" * 40
Golden = Callable[[str, str], None]


def settings_of(environment: dict[str, str] | None = None, **options: Any) -> NodeSettings | None:
    return node_settings(EngineConfig(model="m", **options), {"WEFT_CLUSTER_KEY": KEY} | (environment or {}))


TORCHRUN = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_settings_come_from_options_and_from_torchrun() -> None:
    assert settings_of() is None
    assert settings_of(nnodes=1, master_addr="10.0.0.1") is None
    assert settings_of(TORCHRUN, nnodes=1) is None
    settings = settings_of(nnodes=3, node_rank=2, master_addr="10.0.0.1", start_timeout=5)
    assert settings == NodeSettings(
        nodes=3,
        node=2,
        address="10.0.0.1",
        port=29501,
        start_timeout_s=5,
        allow_public=False,
        key=KEY.encode(),
    )
    settings = settings_of(TORCHRUN, nnodes=2)
    assert settings and (settings.nodes, settings.node, settings.head) == (2, 1, "10.0.0.1:29500")
    # torchrun's own store listens at that port.
    settings = settings_of(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, nnodes=2, node_rank=0)
    assert settings and (settings.node, settings.port) == (0, 29501)


def test_only_the_server_is_one_engine_over_the_processes_of_torchrun() -> None:
    """A program under torchrun has one engine per process, and needs no key."""
    assert node_settings(EngineConfig(model="m"), TORCHRUN) is None
    assert served_config(EngineConfig(model="m"), TORCHRUN).nnodes == 2
    assert served_config(EngineConfig(model="m", nnodes=1), TORCHRUN).nnodes == 1
    for environment in ({}, {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}):
        assert served_config(EngineConfig(model="m"), environment).nnodes is None
    with refuses(ConfigError, "bad-torchrun-variable", "GROUP_WORLD_SIZE", "two"):
        served_config(EngineConfig(model="m"), {"GROUP_WORLD_SIZE": "two"})


def test_options_that_do_not_fit_together(golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one line with the way out."""
    monkeypatch.chdir(tmp_path)
    short, wide = Path("short.key"), Path("wide.key")
    for file, text in ((short, "few"), (wide, KEY)):
        file.write_text(text)
        file.chmod(0o600)
    wide.chmod(0o644)
    pair = {"nnodes": 2, "master_addr": "10.0.0.1"}
    cases: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"nnodes": 2}, {}),
        (pair, {"WEFT_CLUSTER_KEY": ""}),
        (pair, {"WEFT_CLUSTER_KEY": "few"}),
        (pair | {"cluster_key_file": str(short)}, {}),
        (pair | {"cluster_key_file": str(wide)}, {}),
        (pair | {"cluster_key_file": "none.key"}, {}),
        (pair | {"node_rank": 2}, {}),
        (pair | {"headless": True}, {}),
        ({"headless": True}, {}),
        ({"node_rank": 1}, {}),
        (pair | {"master_addr": "8.8.8.8"}, {}),
        (pair | {"master_addr": "no such host"}, {}),
        (pair | {"master_port": 70000}, {}),
        ({"nnodes": 2}, TORCHRUN | {"GROUP_RANK": "one"}),
    ]

    def settings_of_case(case: tuple[dict[str, Any], dict[str, str]]) -> object:
        return settings_of(case[1], **case[0])

    golden("errors/nodes.txt", refusals(settings_of_case, cases))


def test_a_name_of_the_head_that_only_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts has such a line; other nodes have the head's real address, and numbers mean what they say."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with refuses(ConfigError, "loopback-master-addr", "gpu1", "127.0.1.1"):
        settings_of(nnodes=2, master_addr="gpu1")
    for name, node in (("gpu1", 1), ("127.0.1.1", 0), ("localhost", 0)):
        settings = settings_of(nnodes=2, master_addr=name, node_rank=node)
        assert settings and settings.address == "127.0.1.1"


def test_a_key_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    assert load_key(str(file), {"WEFT_CLUSTER_KEY": "other"}, 2) == KEY.encode()


def test_a_key_that_another_user_owns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner knows it, and may change it. A file of root is the administrator's."""
    file = tmp_path / "cluster.key"
    file.write_text(KEY)
    file.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    if file.stat().st_uid == 0:
        assert load_key(str(file), {}, 2) == KEY.encode()
        os.chown(file, 1234, -1)
    with refuses(ConfigError, "open-cluster-key", file.stat().st_uid, "chown"):
        load_key(str(file), {}, 2)


# --- the handshake ---


def handshake(theirs: bytes, ours: bytes) -> tuple[object, object]:
    """Outcomes of both sides, connector and acceptor."""
    one, other = socket.socketpair()
    outcomes: list[object] = [None, None]

    def run(side: int, call: Callable[[], None]) -> None:
        try:
            call()
        except (WrongKeyError, NotWeftError) as error:
            outcomes[side] = type(error)

    with one, other:
        thread = threading.Thread(target=run, args=(1, lambda: check_connector(other, ours)))
        thread.start()
        run(0, lambda: prove_to_acceptor(one, theirs))
        thread.join()
    return outcomes[0], outcomes[1]


def test_both_sides_prove_the_key() -> None:
    assert handshake(b"a" * 32, b"a" * 32) == (None, None)
    assert handshake(b"a" * 32, b"b" * 32) == (WrongKeyError, WrongKeyError)


def test_another_version_of_the_messages_is_refused_by_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side's one line names both versions, and what to do."""
    sides = [MESSAGES, MESSAGES + 1]
    words: list[str] = []
    one, other = socket.socketpair()

    def connect() -> None:
        one.sendall(b"weft/%d\r\n" % sides[1] + bytes(32))
        answer = one.recv(8, socket.MSG_WAITALL)
        assert answer == b"weft/%d\r\n" % sides[0]

    with one, other:
        thread = threading.Thread(target=connect)
        thread.start()
        with pytest.raises(OtherVersionError) as refused:
            check_connector(other, b"a" * 32)
        words.append(str(refused.value))
        thread.join()
    one, other = socket.socketpair()
    with one, other:
        other.sendall(b"weft/%d\r\n" % sides[1])
        with pytest.raises(OtherVersionError) as refused:
            prove_to_acceptor(one, b"a" * 32)
        words.append(str(refused.value))
    for line in words:
        assert f"version {sides[1]}" in line and f"version {sides[0]}" in line and "install" in line
    monkeypatch.setattr("weft.engine.cluster.node._open_connection", Mock(side_effect=OtherVersionError(words[0])))
    settings = settings_of(nnodes=2, node_rank=1, master_addr="10.0.0.1", tensor_parallel_size=2)
    assert settings is not None
    with refuses(ConfigError, "other-version", "10.0.0.1", "install"):
        connect_to_head(settings)


def accept(end: socket.socket, outcomes: list[object]) -> None:
    try:
        check_connector(end, b"a" * 32)
    except (WrongKeyError, NotWeftError) as error:
        outcomes.append(type(error))


@pytest.mark.parametrize("send_back", [True, False])
def test_a_connector_without_the_key_is_refused(send_back: bool) -> None:
    """Neither the acceptor's own proof, sent back, nor another protocol gets in."""
    one, other = socket.socketpair()
    outcomes: list[object] = []
    with one, other:
        thread = threading.Thread(target=accept, args=(other, outcomes))
        thread.start()
        if send_back:
            one.sendall(b"weft/1\r\n" + bytes(32))
            one.sendall(one.recv(8 + 64, socket.MSG_WAITALL)[-32:])
        else:
            one.sendall(b"GET / HTTP/1.1\r\nHost: somebody's computer\r\n\r\n")
        thread.join()
    assert outcomes == [WrongKeyError if send_back else NotWeftError]


class Drip:
    """A socket whose other side sends a byte per call, each after a second of `clock`."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.limits: list[float] = []

    def settimeout(self, seconds: float) -> None:
        self.limits.append(seconds)

    def recv(self, size: int) -> bytes:
        self.clock[0] += 1
        return b"w"


def test_the_limit_is_of_the_whole_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("weft.engine.processes.keys.time", SimpleNamespace(monotonic=lambda: clock[0]))
    slow = Drip(clock)
    with pytest.raises(NotWeftError, match=r"\b5 s\b"):
        check_connector(cast(socket.socket, slow), b"a" * 32)
    assert clock == [105.0]
    assert slow.limits == sorted(slow.limits, reverse=True) and slow.limits[-1] == 1


# --- addresses ---


@pytest.mark.parametrize(
    "address", ["10.1.2.3", "172.31.0.1", "192.168.1.1", "169.254.1.1", "127.0.0.1", "::1", "fd00::1", "fe80::1%eth0"]
)
def test_private_addresses(address: str) -> None:
    check_private(address, allow_public=False)


@pytest.mark.parametrize("address", ["8.8.8.8", "172.32.0.1", "100.64.0.1", "2001:db8::1"])
def test_public_addresses(address: str) -> None:
    check_private(address, allow_public=True)
    with refuses(ConfigError, "public-address", address):
        check_private(address, allow_public=False)


def test_the_key_of_actors_on_ray(tmp_path: Path) -> None:
    file = tmp_path / "cluster.key"
    file.write_text(KEY)
    file.chmod(0o600)
    plain, from_file = EngineConfig(model="m"), EngineConfig(model="m", cluster_key_file=str(file))
    assert actors_key(from_file, {}) == actors_key(plain, {"WEFT_CLUSTER_KEY": KEY}) == KEY.encode()
    assert actors_key(plain, {}) != actors_key(plain, {})
    with refuses(ConfigError, "short-cluster-key", "WEFT_CLUSTER_KEY"):
        actors_key(plain, {"WEFT_CLUSTER_KEY": "few"})


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert own_address("127.0.0.1", 1, {}) == "127.0.0.1"
    assert own_address("127.0.0.1", 1, {"VLLM_HOST_IP": "10.0.0.7"}) == "10.0.0.7"
    with refuses(ConfigError, "address-of-another-machine", "203.0.113.7"):
        interface_of("203.0.113.7")


@pytest.mark.parametrize(("chosen", "code"), [("8.8.8.8", "public-address"), ("head.example", "not-an-address")])
def test_an_address_that_the_environment_chooses(chosen: str, code: str) -> None:
    """--allow-public counts for it as well."""
    settings = joining_settings(29501, node=1)
    with refuses(ConfigError, code, chosen):
        gather_facts(settings, host(), "m", ModelError("none", code="none"), {"VLLM_HOST_IP": chosen})
    # Then it only has to be this machine's.
    allowed = msgspec.structs.replace(settings, allow_public=True)
    with refuses(ConfigError, "address-of-another-machine" if code == "public-address" else code, chosen):
        gather_facts(allowed, host(), "m", ModelError("none", code="none"), {"VLLM_HOST_IP": chosen})


def test_variables_that_name_interfaces() -> None:
    here = {"eth0", "lo"}
    for value in ("eth0", "eth1,eth0"):
        assert wrong_interface({"GLOO_SOCKET_IFNAME": value}, here) == ""
    assert wrong_interface({"NCCL_SOCKET_IFNAME": "eth"}, here) == ""  # NCCL takes the beginning of names
    assert wrong_interface({"NCCL_SOCKET_IFNAME": "^docker"}, here) == ""
    assert wrong_interface({"GLOO_SOCKET_IFNAME": "eth"}, here) == "GLOO_SOCKET_IFNAME=eth"
    assert wrong_interface({"NCCL_SOCKET_IFNAME": "=eth"}, here) == "NCCL_SOCKET_IFNAME==eth"


# --- the preflight ---


FINE = Speed(first=1, second=0, round_trip_s=1e-4, bytes_per_s=1e9)


def test_nodes_that_are_alike_pass() -> None:
    assert failures([facts(0), facts(1)], [FINE], "fetch") == []
    # Several nodes of one machine may have its address.
    one = facts(1, host_ip="10.0.0.1", machine="machine0")
    assert failures([facts(0, host_ip="10.0.0.1"), one], [FINE], "fetch") == []


def test_every_failure_names_node_value_and_remedy(golden: Golden) -> None:
    card = host((gpu(0),), hostname="host1")
    cases = [
        facts(1, weft="0.9"),
        facts(1, torch="2.11.0"),
        facts(1, torch=""),
        facts(1, problem="there is no file or directory m", model_digest=""),
        facts(1, model_digest="0123456789abcdef"),
        facts(1, host_ip="10.0.0.9"),
        facts(1, wrong_interface="GLOO_SOCKET_IFNAME=eth7"),
        facts(1, skew_s=-95.2),
        facts(1, open_files=256),
        facts(1, shm_free_bytes=1 << 20, host=card),
    ]
    found = [failures([facts(0, host_ip="10.0.0.9"), case], [FINE], "hf download m") for case in cases]
    cut = msgspec.structs.replace(FINE, problem="10.0.0.1:4711: timed out")
    found.append(failures([facts(0), facts(1)], [cut], "hf download m"))
    assert [len(lines) for lines in found] == [1] * len(found)
    assert all("node 1 (host1, 10.0.0.2)" in line for [line] in found)
    golden("errors/preflight.txt", "".join(f"{line}\n" for [line] in found))


def test_the_network_is_measured_with_the_key() -> None:
    listener = PeerListener("127.0.0.1", b"a" * 32)
    try:
        speed = measure_network(1, 0, "127.0.0.1", listener.port, b"a" * 32)
        assert not speed.problem and speed.round_trip_s > 0 and speed.bytes_per_s > 0
        assert "another cluster key" in measure_network(1, 0, "127.0.0.1", listener.port, b"b" * 32).problem
    finally:
        listener.close()
    assert measure_network(1, 0, "127.0.0.1", listener.port, b"a" * 32).problem


# --- the listener of the head ---


def join(settings: NodeSettings, about: Facts, replica: int = 0) -> socket.socket:
    connection = connect_to_head(settings)
    channel: Channel[Any] = Channel(connection, Join)
    channel.send(Join(about, replica))
    return connection


def test_nodes_join_in_any_order_and_once() -> None:
    settings = joining_settings(free_port(), nodes=3)
    with JoinListener(settings) as listener:
        numbers = (2, 2, 1)
        connections = [join(settings, facts(number, nodes=3)) for number in numbers]
        [joined] = listener.wait_for([0])
    assert [node.facts.node for node in joined] == [1, 2]
    for node in joined:
        node.dismiss("the end", "the-end")
    for connection in connections:
        connection.close()


def test_a_node_of_another_version_whose_report_is_another_one() -> None:
    """Both sides name the versions, though one knows no message of the other; the head goes on waiting."""
    settings = joining_settings(free_port())
    report = {"type": "Join", "facts": {"weft": "9.9\x1b[2J", "node": 1, "new": "x"}, "replica": 0}
    with JoinListener(settings), connect_to_head(settings) as stranger:
        body = msgspec.msgpack.encode(report)
        stranger.sendall(LENGTH.pack(len(body)) + body)
        (message,) = Channel[Any](stranger, Dismissed)
        assert message.code == "other-version"
        has_values(message.message, "node 1", "9.9\\x1b[2J", "node 0", __version__)
        join(settings, facts(1)).close()


def test_a_node_with_a_public_address_is_refused() -> None:
    """It may have come from a private one."""
    settings = joining_settings(free_port())
    admitted: list[JoinedNode] = []
    with JoinListener(settings) as listener:
        waiting = threading.Thread(target=lambda: admitted.extend(*listener.wait_for([0])))
        waiting.start()
        with join(settings, facts(1, address="8.8.8.8")) as refused:
            (message,) = Channel[Any](refused, Dismissed)
        assert "8.8.8.8" in message.message
        with join(settings, facts(1)):
            waiting.join()
    assert [node.facts.address for node in admitted] == ["10.0.0.2"]
    admitted[0].dismiss("the end", "the-end")


def test_a_node_joins_once_for_each_of_its_replicas() -> None:
    """Replica 0 lies on node 0; the others wait for their connection, and another one in the place of a lost one."""
    settings = joining_settings(free_port(), replicas=3)
    assert settings.groups == [range(1), range(1), range(1, 2)]
    with JoinListener(settings) as listener:
        lost = join(settings, facts(1, replicas=3), 2)
        with join(settings, facts(1, replicas=3), 0) as refused:
            (message,) = Channel[Any](refused, Dismissed)
        assert "replica 0" in message.message
        with join(settings, facts(1), 2) as refused:
            (message,) = Channel[Any](refused, Dismissed)
        assert re.search(r"--data-parallel-size 1\b.*\bnode 0 .*\b3\b", message.message)
        lost.close()
        with join(settings, facts(1, replicas=3), 2) as there:
            groups = listener.wait_for([0, 1, 2])
            assert [len(nodes) for nodes in groups] == [0, 0, 1]
            [[], [], [node]] = groups
            assert node.present and node.connection.getpeername() == there.getsockname()
            node.dismiss("the end", "the-end")


def test_a_wait_that_is_given_up() -> None:
    with JoinListener(joining_settings(free_port())) as listener, refuses(ConfigError, HEAD_CLOSED):
        listener.wait_for([0], lambda: True)


def test_a_head_that_has_ended() -> None:
    with refuses(ConfigError, "head-gone"):
        connect_to_head(joining_settings(free_port()), gone_s=0.0)


def test_nodes_that_do_not_come() -> None:
    settings = joining_settings(free_port(), nodes=4, start_timeout_s=0.2)
    with JoinListener(settings) as listener, refuses(ConfigError, "nodes-missing", "nodes 1, 2, 3", settings.head):
        listener.wait_for([0])


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with refuses(ConfigError, "cannot-listen", f"127.0.0.1:{port}"):
            JoinListener(joining_settings(port))


def test_a_head_that_does_not_come_or_has_another_key() -> None:
    with refuses(ConfigError, "head-missing", "0.1 s"):
        connect_to_head(joining_settings(free_port(), start_timeout_s=0.1))
    settings = joining_settings(free_port())
    with JoinListener(settings), refuses(ConfigError, "other-cluster-key", settings.head):
        connect_to_head(joining_settings(settings.port, key=b"b" * 32))


# --- the division of ranks ---


@pytest.mark.parametrize(
    ("nodes", "replicas", "groups"),
    [
        (2, 1, [range(2)]),
        (2, 2, [range(1), range(1, 2)]),
        (4, 2, [range(2), range(2, 4)]),
        (3, 2, [range(2), range(2, 3)]),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),
    ],
)
def test_nodes_are_divided_over_replicas(nodes: int, replicas: int, groups: list[range]) -> None:
    assert divide_nodes(nodes, replicas) == groups
    for number, group in enumerate(groups):
        for node in group:
            count = sum(node in other for other in groups)
            assert place_on_node(nodes, replicas, number, node) == (
                sum(node in other for other in groups[:number]),
                count,
            )


def test_replicas_of_a_node_share_its_devices() -> None:
    machine = host(4, cores=(0, 1, 2, 3))
    parts = [part_of_node(machine, number, 2, on_cpu=False) for number in range(2)]
    assert [[gpu.index for gpu in part.gpus] for part in parts] == [[0, 1], [2, 3]]
    assert [part.cores for part in parts] == [(0, 1), (2, 3)]
    whole = plan_on(parts[1], tensor_parallel_size=2, kv_cache_memory_bytes=10**9)
    plan = on_other_nodes(over_nodes(whole, parts[1:], (2,)), 1)
    assert [(device.node, device.name) for device in plan.devices] == [(1, "cuda:2"), (1, "cuda:3")]
    with refuses(ConfigError, "more-replicas-than-devices", 5, "4 GPUs"):
        part_of_node(machine, 0, 5, on_cpu=False)


# --- the nodes of a Ray cluster ---


CHECKPOINT = dummy_checkpoint("SmolLM2-135M")


def seats(*rooms: int) -> list[Seat]:
    return [Seat(RayNode(f"id{n}", f"host{n}", f"10.0.0.{n}"), room, facts(n)) for n, room in enumerate(rooms)]


@pytest.mark.parametrize(
    ("layout", "rooms", "chosen"),
    [
        ({"pipeline_parallel_size": 2}, (1, 1), [[("id0", 1), ("id1", 1)]]),
        ({"tensor_parallel_size": 2}, (1, 1, 2), [[("id2", 2)]]),  # one node rather than two
        ({"tensor_parallel_size": 2}, (1, 1), [[("id0", 1), ("id1", 1)]]),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, (1, 2, 3), [[("id1", 2), ("id2", 2)]]),
        ({"tensor_parallel_size": 1, "data_parallel_size": 2}, (1, 1), [[("id0", 1)], [("id1", 1)]]),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, (3, 2), [[("id0", 2)], [("id1", 2)]]),
        ({}, (2, 2), [[("id0", 1), ("id1", 1)]]),  # a stage per node
        ({"data_parallel_size": 2}, (2, 2), [[("id0", 1)], [("id1", 1)]]),
    ],
)
def test_nodes_of_ray_are_chosen(
    layout: dict[str, int], rooms: tuple[int, ...], chosen: list[list[tuple[str, int]]]
) -> None:
    config, replicas = EngineConfig(model="m", device="cpu", **layout), layout.get("data_parallel_size", 1)
    found = choose_for_replicas(config, CHECKPOINT, seats(*rooms), replicas)
    assert [[(seat.node.id, seat.room) for seat in group] for group in found] == chosen


def test_a_cluster_without_room_for_all_replicas() -> None:
    config = EngineConfig(model="m", device="cpu", data_parallel_size=3, tensor_parallel_size=1)
    with refuses(PlanError, "ray-too-small", "3 replicas of 1 ranks"):
        choose_for_replicas(config, CHECKPOINT, seats(1, 1), 3)
    # A replica without sizes that starts again waits for as many nodes as it had.
    with refuses(PlanError, "ray-too-small", "2 nodes"):
        choose_for_replicas(EngineConfig(model="m", device="cpu"), CHECKPOINT, seats(4), 1, 2)


def test_a_replica_that_starts_again_leaves_others_their_nodes() -> None:
    [one, two] = seats(2, 1)
    key = RayNodes("cluster", "10.0.0.1", b"", 1.0, ())
    asked: list[dict[str, int]] = []

    def gather(occupied: Mapping[str, int], share: int) -> RayGroup:
        asked.append({**occupied, "share": share})
        return RayGroup(key, [two])

    assembly = RayAssembly([RayGroup(key, [one]), RayGroup(key, [two])], gather, lasting=True)
    assembly.gather_again(0, lambda: False)
    assert asked == [{"id1": 1, "share": 1}]
    assert occupied_by(assembly.groups) == {"id1": 2}


@pytest.mark.parametrize(
    ("tensor", "stages", "most", "counts"),
    [
        (1, 2, (None, None), (1, 1)),
        (2, 2, (None, None), (2, 2)),
        (2, 3, (None, None), (4, 2)),
        (4, 2, (4, 4), (4, 4)),
        (2, 3, (2, 4), (2, 4)),
        (8, 1, (4, 4), (4, 4)),  # seed 000: the group spans nodes
        (2, 1, (None, None), (1, 1)),
        (3, 2, (4, 4), (3, 3)),
        (2, 2, (1, 3), (1, 3)),  # a group would fit, but the first node would get none
    ],
)
def test_ranks_are_divided_in_order(
    tensor: int, stages: int, most: tuple[int | None, ...], counts: tuple[int, ...]
) -> None:
    assert divide_ranks(tensor, stages, most) == counts


@pytest.mark.parametrize(
    ("tensor", "stages", "most", "code"),
    [
        (1, 1, (None, None), "fewer-ranks-than-nodes"),
        (4, 3, (4, 4), "more-ranks-than-gpus"),
        (2, 1, (2, 0), "node-without-gpu"),
    ],
)
def test_ranks_that_cannot_be_divided(tensor: int, stages: int, most: tuple[int | None, ...], code: str) -> None:
    with refuses(PlanError, code):
        divide_ranks(tensor, stages, most)


def test_a_plan_over_nodes_has_each_nodes_own_devices() -> None:
    hosts = [host(2, cores=(0, 1)), host(3, cores=(4, 5, 6))]
    whole = plan_on(joined_host(hosts), pipeline_parallel_size=3, device_ids=(0, 2, 3), kv_cache_memory_bytes=10**9)
    plan = over_nodes(whole, hosts, (1, 2))
    assert [(device.node, device.name) for device in plan.devices] == [(0, "cuda:0"), (1, "cuda:0"), (1, "cuda:1")]
    assert plan.cores == ((0, 1), (4, 5), (6,))
    assert (plan.nodes, plan.ranks_of(1)) == (2, [1, 2])
    assert plan.on_one_node([1, 2]) and not plan.on_one_node([0, 1])


def test_a_node_that_cannot_hold_its_weights() -> None:
    hosts = [host(), host(hostname="small", memory_free_bytes=10**6)]
    plan = over_nodes(plan_on(joined_host(hosts), pipeline_parallel_size=2), hosts, (1, 1))
    with refuses(PlanError, "node-without-memory", "node 1 (small)", "1 MB"):
        check_node_memory(plan, hosts)


def test_a_group_that_spans_nodes_is_warned_of() -> None:
    hosts = [host(), host()]
    plan = over_nodes(plan_on(joined_host(hosts), tensor_parallel_size=2), hosts, (1, 1))
    sums = 2 * len(plan.shape.layers) + 1
    text = crossing_warning(plan, 0.001)
    assert f"{sums} sums" in text and f"{sums * 0.5:.1f} ms" in text and "--pipeline-parallel-size 2" in text
    inside = over_nodes(plan_on(joined_host(hosts), pipeline_parallel_size=2), hosts, (1, 1))
    assert crossing_warning(inside, 0.001) == ""
