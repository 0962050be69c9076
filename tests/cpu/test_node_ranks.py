"""Ranks of several nodes, whose processes and connections are this machine's: results, ends and causes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from fake_worker import HERE, make_plan, make_step, total

from tests.cpu.families import command_line, family
from tests.pure.joining import facts, free_port, joining_settings
from tests.refusals import has_values
from weft.engine.cluster.groups import JoinedGroup
from weft.engine.cluster.join_listener import JoinListener
from weft.engine.cluster.node import NodeSession, run_sessions
from weft.engine.core.commands import RankReport, RankStats
from weft.engine.executors.node_messages import NodeSocket, OtherNodes, RankLost, ToNode
from weft.engine.executors.node_ranks import NodeRanks
from weft.engine.executors.nodes import NodesExecutor
from weft.engine.processes.framing import Channel
from weft.errors import Cause, EngineError, WeftError
from weft.plan.plan import Plan, RankDevice

WAIT_S = 60


def over_nodes(plan: Plan, *nodes: int) -> Plan:
    """The plan with its ranks on these nodes."""
    return msgspec.structs.replace(plan, devices=tuple(RankDevice(node, "cpu", 0) for node in nodes))


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        return listener.accept()[0], theirs


class Cluster:
    """A head with one other node, which is a thread of this process."""

    def __init__(self, stall_s: float | None = None) -> None:
        ours, self.theirs = connected()
        about = NodeSocket(1, "there", "127.0.0.1", ours.detach())
        self.executor = NodesExecutor(OtherNodes("127.0.0.1", "lo", (about,)), HERE, stall_s=stall_s)
        self.channel: Channel[ToNode] = Channel(self.theirs, ToNode)
        self.ranks = NodeRanks(self.channel, 1, "127.0.0.1", "lo", "")
        self.ends: list[Cause] = []
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.ends.append(self.ranks.run_until_end(iter(self.channel)))

    def end(self) -> Cause:
        """Wait for the node's end; return its cause."""
        self.thread.join(WAIT_S)
        return self.ends[0]

    def close(self) -> None:
        self.executor.close()
        self.thread.join(WAIT_S)
        self.channel.close()


@pytest.fixture
def create(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    """Creates clusters of fake workers, closes them, and sees that nothing of them is left."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    created: list[Cluster] = []

    def create(stall_s: float | None = None) -> Cluster:
        created.append(Cluster(stall_s))
        return created[-1]

    yield create
    for cluster in created:
        cluster.close()
    assert family() == []


@pytest.mark.parametrize(
    ("layout", "nodes"),
    [
        ({"stages": 4}, (0, 0, 1, 1)),  # shared memory, the network, shared memory
        ({"tensor": 2, "stages": 2}, (0, 0, 1, 1)),  # groups in shared memory, stages over the network
        ({"tensor": 2}, (1, 1)),  # a replica without ranks on the head
        pytest.param({"tensor": 4}, (0, 0, 1, 1), marks=pytest.mark.long),
    ],
    ids=["pp4", "tp2pp2", "elsewhere", "tp4"],
)
def test_results_over_nodes(create: Callable[[], Cluster], layout: dict[str, int], nodes: tuple[int, ...]) -> None:
    plan = over_nodes(make_plan(**layout), *nodes)
    cluster = create()
    ready = cluster.executor.start(plan)
    assert [capacity.node for capacity in ready.ranks] == [str(node) for node in nodes]
    steps = [make_step(n, [n, 2]) for n in range(12)]
    futures = [cluster.executor.submit(step) for step in steps]
    for step, future in zip(steps, futures, strict=True):
        assert future.result(WAIT_S).tokens == [total(plan, step.tokens)]
    reports = cluster.executor.call(RankStats()).result(WAIT_S)
    assert [report.steps for report in reports if isinstance(report, RankReport)] == [12] * len(nodes)
    cluster.executor.close()
    assert cluster.end().phase == "shutdown"


def rank_processes() -> list[psutil.Process]:
    return [member for member in family() if "weft.worker.process" in command_line(member)]


def nobody_listens(port: int) -> bool:
    """True if a connection to a port is refused, or has got the same port at its own end and met itself."""
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            return bool(connection.getsockname() == connection.getpeername())
    except ConnectionRefusedError:
        return True


@pytest.mark.parametrize("layout", [{"stages": 2}, {"tensor": 2}], ids=str)
def test_nothing_listens_once_the_ranks_are_connected(create: Callable[[], Cluster], layout: dict[str, int]) -> None:
    """Nobody who could not prove the key finds torch's store or gloo, or leaves anything where they listened."""
    cluster = create()
    plan = over_nodes(make_plan(**layout), 0, 1)
    cluster.executor.start(plan)
    ranks = rank_processes()
    assert len(ranks) == 2
    sockets = [one for rank in ranks for one in rank.net_connections("inet")]
    assert [one for one in sockets if one.status == "LISTEN"] == []
    descriptors = [rank.num_fds() for rank in ranks]
    ports = {one.laddr.port for one in sockets}  # of both ends: those of the listeners are among them
    assert len(ports) >= 4
    for port in ports:
        for _ in range(300 // len(ports) + 1):
            assert nobody_listens(port)
    for number in range(3):
        step = make_step(number, [number, 2])
        assert cluster.executor.submit(step).result(WAIT_S).tokens == [total(plan, step.tokens)]
    assert [rank.num_fds() for rank in ranks] == descriptors


def test_a_rank_of_the_other_node_fails(create: Callable[[], Cluster]) -> None:
    """Both nodes end with its cause."""
    cluster = create()
    cluster.executor.start(over_nodes(make_plan("kill 1 step", stages=2), 0, 1))
    error = cluster.executor.submit(make_step(0, [1])).exception(WAIT_S)
    assert isinstance(error, EngineError)
    assert (error.cause.rank, error.cause.phase, error.code) == (1, "step", "process-killed")
    assert "SIGKILL" in error.cause.cause
    assert cluster.end() == error.cause


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_stopped(create: Callable[..., Cluster], victim: int) -> None:
    """Its own node finds it, though nothing runs."""
    cluster = create(stall_s=2.0)
    cluster.executor.start(over_nodes(make_plan(stages=2), 0, 1))
    here, there = cluster.executor._processes.silences, cluster.ranks._processes.silences
    os.kill({**here, **there}[victim].pid, signal.SIGSTOP)
    cause = cluster.executor.failure.result(WAIT_S)
    assert (cause.rank, cause.phase, cause.code) == (victim, "step", "process-stopped")


@pytest.mark.parametrize("side", ["node", "head"])
def test_a_connection_that_ends(create: Callable[[], Cluster], side: str) -> None:
    cluster = create()
    cluster.executor.start(over_nodes(make_plan(stages=2), 0, 1))
    if side == "node":
        cluster.channel.hang_up()
        cause = cluster.executor.failure.result(WAIT_S)
        assert cause.code == "node-lost" and "node 1 (there, 127.0.0.1)" in cause.cause
    else:
        for link in cluster.executor._links:
            link.hang_up()
        assert cluster.end().code == "head-lost"


@pytest.mark.parametrize("side", ["node", "head"])
def test_a_side_that_is_silent(
    create: Callable[[], Cluster], monkeypatch: pytest.MonkeyPatch, side: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other side ends with the cause, after its ranks have printed their stacks."""
    monkeypatch.setattr("weft.engine.processes.beats.BEAT_S", 0.05)
    monkeypatch.setattr("weft.engine.processes.beats.SILENCE_S", 3.0)
    cluster = create()
    cluster.executor.start(over_nodes(make_plan(stages=2), 0, 1))
    if side == "node":
        while not all(link.states for link in cluster.executor._links):  # the first heartbeat
            time.sleep(0.01)
        monkeypatch.setattr(cluster.ranks, "_send", lambda message: None)
        monkeypatch.setattr(cluster.channel, "offer", lambda message, sending: None)
        cause = cluster.executor.failure.result(WAIT_S)
        assert (cause.rank, cause.code) == (1, "node-silent")
        has_values(cause.cause, "rank 1", "step")
    else:
        for link in cluster.executor._links:
            monkeypatch.setattr(link, "send", lambda message: None)
            monkeypatch.setattr(link, "offer", lambda message: None)
        assert cluster.end().code == "head-silent"
    printed, deadline = "", time.monotonic() + WAIT_S
    while "most recent call first" not in printed:  # the copier of the stacks
        assert time.monotonic() < deadline, printed
        time.sleep(0.02)
        printed += capfd.readouterr().err


def test_a_node_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so as often as the engine starts again, and ends with the head, whose port is closed then."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr("weft.engine.cluster.node.CLOSED_S", 0.0)
    settings = joining_settings(free_port())
    there = msgspec.structs.replace(settings, node=1)
    here = facts(1, address="127.0.0.1", interface="lo")
    ends: list[BaseException | None] = []

    def run() -> None:
        try:
            run_sessions([NodeSession(there, here, "", 0)])
            ends.append(None)
        except WeftError as error:
            ends.append(error)

    node = threading.Thread(target=run)
    with JoinListener(settings) as listener:
        node.start()
        for action in ("kill 1 step", "fine"):
            [[joined]] = listener.wait_for([0])
            group = JoinedGroup(facts(0, address="127.0.0.1", interface="lo"), [joined], [], [], 0, lasting=True)
            executor = NodesExecutor(group.hand_over(), HERE)
            plan = over_nodes(make_plan(action, stages=2), 0, 1)
            executor.start(plan)
            error = executor.submit(make_step(0, [1])).exception(WAIT_S)
            assert (error is None) == (action == "fine")
            if error:
                executor.close()
    executor.close()
    node.join(WAIT_S)
    assert ends == [None]
    assert family() == []


def test_the_key_is_not_handed_on(create: Callable[[], Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CLUSTER_KEY", "k" * 40)
    cluster = create()
    cluster.executor.start(over_nodes(make_plan(stages=2), 0, 1))
    environments = [member.environ() for member in family()]
    assert environments and all("WEFT_CLUSTER_KEY" not in variables for variables in environments)
    assert os.environ["WEFT_CLUSTER_KEY"] == "k" * 40


def test_a_silent_node_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is stuck in sending to it neither keeps its silence from being noticed, nor stays stuck."""
    monkeypatch.setattr("weft.engine.processes.beats.BEAT_S", 0.02)
    monkeypatch.setattr("weft.engine.processes.beats.SILENCE_S", 0.2)
    monkeypatch.setattr("weft.engine.executors.nodes.STACKS_S", 0.0)
    monkeypatch.setattr("weft.engine.processes.beats.USER_TIMEOUT_MS", 0)  # the system's own, of minutes
    ours, theirs = connected()
    about = NodeSocket(1, "there", "127.0.0.1", ours.detach())
    executor = NodesExecutor(OtherNodes("127.0.0.1", "lo", (about,)), HERE)
    executor._node_of, executor._phases = [0, 1], ["step", "step"]
    (link,) = executor._links
    large = Cause(rank=0, phase="step", code="large", cause="x" * (8 << 20))
    sender = threading.Thread(target=link.send, args=(RankLost(large),), daemon=True)
    with theirs:
        sender.start()
        theirs.recv(1)  # the thread has begun
        link.start()
        assert executor.failure.result(WAIT_S).code == "node-silent"
        sender.join(WAIT_S)
        assert not sender.is_alive()
        link.close()
