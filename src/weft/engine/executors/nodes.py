"""NodesExecutor: ranks as processes on several nodes: this one, the head, if it has any, and the nodes that have
joined."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable

import msgspec

from weft.engine.executors.messages import FromRank, Launch, Listening, Loaded, ToRank
from weft.engine.executors.node_messages import (
    Beat,
    EndRanks,
    FromNode,
    MeetAt,
    NodeSocket,
    OtherNodes,
    PassOn,
    Ping,
    PrintStacks,
    RankLost,
    RankMessage,
    RankState,
    StartRanks,
)
from weft.engine.executors.processes import ProcessExecutor
from weft.engine.executors.rank import WORKER
from weft.engine.executors.rank_processes import NodeWirings, network_environment
from weft.engine.executors.rank_watch import watch_silence
from weft.engine.executors.ranks import CLOSED, OTHER_CODE
from weft.engine.processes.beats import SILENCE_S, STACKS_S, Watch, keep_alive
from weft.engine.processes.framing import Channel, FrameError, encode_frame
from weft.engine.processes.liveness import Heartbeat
from weft.engine.processes.open_sockets import open_sockets
from weft.errors import Cause
from weft.plan.plan import Plan
from weft.plan.wiring import Tcp

LOST = "the process there has ended, or the network is gone: see the log of that node"
SILENT = "check that machine, and its network"


class NodeLink:
    """The head's connection to one other node, with a thread that listens."""

    def __init__(self, about: NodeSocket, executor: NodesExecutor) -> None:
        self.about = about
        self.states: list[RankState] = []
        end = socket.socket(fileno=about.descriptor)
        end.set_inheritable(False)
        end.settimeout(None)
        open_sockets.add(end)
        keep_alive(end)
        self._channel: Channel[FromNode] = Channel(end, FromNode)
        self._executor = executor
        self._sending = threading.Lock()
        self.ended = False
        self.watch = Watch(lambda: self.offer(Ping()), lambda: executor.node_silent(self), str(about.node))
        self._listener = threading.Thread(target=self._listen, name=f"weft-node-{about.node}", daemon=True)

    def start(self) -> None:
        self.watch.start()
        self._listener.start()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; without effect if the node is gone, which the thread that listens notices."""
        frame = encode_frame(message)
        with self._sending, contextlib.suppress(OSError):
            self._channel.send_frame(frame)

    def offer(self, message: msgspec.Struct) -> None:
        """Send a short message if that takes no waiting: not while another is being sent, or the buffer is full."""
        self._channel.offer(message, self._sending)

    def hang_up(self) -> None:
        """End the connection, without waiting."""
        self.ended = True
        self._channel.hang_up()

    def close(self) -> None:
        """End the connection, and the threads. May be called twice."""
        self.watch.stop()
        self.hang_up()
        if self._listener.is_alive() and self._listener is not threading.current_thread():
            self._listener.join()
        self._channel.close()

    def _listen(self) -> None:
        try:
            for message in self._channel:
                self.watch.heard()
                self._executor.take_from_node(self, message)
        except FrameError as error:
            self._executor.node_lost(self, str(error))
        if not self.ended:
            self._executor.node_lost(self, "its connection has closed")


class NodesExecutor(ProcessExecutor):
    """Runs each rank as a process of its node. The tensors of a node's ranks go through shared memory, others through
    the network. With `stall_s`, a rank that shows no sign of life for `stall_s` seconds has failed, on whichever
    node."""

    def __init__(self, others: OtherNodes, worker: str = WORKER, *, stall_s: float | None = None) -> None:
        super().__init__(worker)
        if stall_s is not None:
            self._watch = watch_silence(self._processes, stall_s, self._lose_rank)
        self._others, self._stall_s = others, stall_s
        self._links = [NodeLink(node, self) for node in others.nodes]
        self._node_of: list[int] = []

    def _launch(self, plan: Plan) -> None:
        self._node_of = [device.node for device in plan.devices]
        for link in self._links:
            link.start()
            link.send(StartRanks(plan, self._worker, self._others.lasting, self._stall_s))
        if self._watch:
            self._watch.start()
        own = plan.ranks_of(0)  # none, of a replica on other nodes
        if own and plan.on_cpu:
            self._processes.prepare_forks(self._environment(plan, 0), len(own))
        with NodeWirings(plan) as wirings:
            for rank in own:
                self._start_rank(plan, rank, wirings.files[rank])
        if 0 in own:
            self._send_launch(plan, 0, Tcp(self._others.address, 0), wirings.wirings[0])
        (listening,) = self._await_reports(Listening, 1)
        for rank in own:
            if rank:
                self._send_launch(plan, rank, listening.address, wirings.wirings[rank])
        for link in self._links:
            link.send(MeetAt(listening.address))

    def _environment(self, plan: Plan, rank: int) -> dict[str, str]:
        return network_environment(plan, rank, self._others.interface)

    def _send(self, message: ToRank, ranks: Iterable[int]) -> None:
        ranks = list(ranks)
        assert not isinstance(message, Launch | Heartbeat)
        for link in self._links:
            theirs = [rank for rank in ranks if self._node_of[rank] == link.about.node]
            if theirs:
                link.send(PassOn(theirs, message))
        super()._send(message, ranks)

    def take_from_node(self, link: NodeLink, message: FromNode) -> None:
        """Handle a message from another node."""
        match message:
            case RankMessage(rank, inner):
                if self._has_rank(link, rank):
                    self._take_message(rank, inner)
                else:
                    reason = f"{link.about.label} sent a message of rank {rank}, which it does not have"
                    self._fail(self._cause_of_node(link, "unexpected-message", reason, OTHER_CODE))
            case RankLost(cause):
                self._fail(cause)
            case Beat(states):
                link.states = [state for state in states if self._has_rank(link, state.rank)]

    def _has_rank(self, link: NodeLink, rank: int) -> bool:
        return 0 <= rank < len(self._node_of) and self._node_of[rank] == link.about.node

    def _take_message(self, rank: int, message: FromRank) -> None:
        if isinstance(message, Loaded):
            message = Loaded(msgspec.structs.replace(message.capacity, node=str(self._node_of[rank])))
        super()._take_message(rank, message)

    def node_lost(self, link: NodeLink, reason: str) -> None:
        """Handle the end of a node's connection."""
        self._fail(self._cause_of_node(link, "node-lost", f"{link.about.label} is gone: {reason}", LOST))

    def node_silent(self, link: NodeLink) -> None:
        """Handle a node that sends nothing: print the stacks of the other ranks, and fail."""
        # The phases by the ranks' own messages, which come before the next heartbeat.
        states = "; ".join(
            f"rank {state.rank} in {self._phases[state.rank]}, step {state.steps}" for state in link.states
        )
        for other in self._links:
            if other is not link:
                other.offer(PrintStacks())
        self._processes.print_stacks()
        time.sleep(STACKS_S)
        heard = f"; last heard of: {states}" if states else ""
        silence = f"{link.about.label} has been silent for {SILENCE_S:g} s{heard}"
        cause = self._cause_of_node(link, "node-silent", silence, SILENT)
        # First, as a thread may be waiting for it to take a message, and would keep the others from hearing of the end.
        link.offer(EndRanks(cause))
        link.hang_up()
        self._fail(cause)

    def _cause_of_node(self, link: NodeLink, code: str, cause: str, hint: str) -> Cause:
        rank = self._node_of.index(link.about.node)
        return Cause(rank=rank, phase=self._phases[rank], code=code, cause=cause, hint=hint)

    def _kill(self) -> None:
        super()._kill()
        self._end_nodes()

    def _end(self) -> None:
        self._end_nodes()
        super()._end()
        for link in self._links:
            link.close()

    def _end_nodes(self) -> None:
        """Tell all nodes that the engine has ended, once."""
        cause = self._ended or CLOSED
        for link in self._links:
            if not link.ended:
                link.ended = True
                link.send(EndRanks(cause))
