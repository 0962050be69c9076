"""NodeRanks: the ranks of a node that is not the head, between their processes and the head."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any

import msgspec

from weft.engine.executors.messages import FromRank, Launch, RunStep
from weft.engine.executors.node_messages import (
    Beat,
    EndRanks,
    MeetAt,
    PassOn,
    PrintStacks,
    RankLost,
    RankMessage,
    RankState,
    StartRanks,
    ToNode,
)
from weft.engine.executors.rank import WORKER
from weft.engine.executors.rank_processes import NodeWirings, RankProcesses, network_environment
from weft.engine.executors.rank_watch import RankWatch, watch_silence
from weft.engine.executors.ranks import compile_ahead
from weft.engine.processes.beats import SILENCE_S, STACKS_S, Watch
from weft.engine.processes.causes import cause_of
from weft.engine.processes.framing import Channel, FrameError, encode_frame
from weft.errors import CORE, Cause
from weft.plan.plan import Plan
from weft.plan.wiring import Tcp


class NodeRanks:
    """Runs this node's ranks as the head at the other end of `channel` asks, until one side ends.

    `node` is this node's number, `address` and `interface` its route to the others, `checkpoint` its own copy of the
    model.
    """

    def __init__(self, channel: Channel[Any], node: int, address: str, interface: str, checkpoint: str) -> None:
        self._node, self._address, self._interface, self._checkpoint = node, address, interface, checkpoint
        self._channel = channel
        self._sending = threading.Lock()
        self._processes = RankProcesses(self._take, self._lose)
        self._watch = Watch(self._beat, self._head_silent, "head")
        self._addresses: SimpleQueue[Tcp | None] = SimpleQueue()  # of rank 0; None at the end
        self._rank_watch: RankWatch | None = None
        self._starter: threading.Thread | None = None
        self._steps: Counter[int] = Counter()
        self._end: Cause | None = None

    def run_until_end(self, messages: Iterable[Any]) -> Cause:
        """Run the ranks; return the cause of the end, in the phase "shutdown" if the engine was closed in order.

        `messages` are the channel's, a StartRanks first.
        """
        try:
            for message in messages:
                self._watch.heard()
                self._handle(message)
                if self._end:
                    break
        except FrameError as error:
            self._end = self._own_cause("unknown-message", str(error))
        finally:
            self._watch.stop()
            if self._rank_watch:
                self._rank_watch.stop()
            if self._starter:
                self._addresses.put(None)
                self._starter.join()
            self._processes.end()
        return self._end or self._own_cause("head-lost", "the head has closed the connection")

    def _own_cause(self, code: str, cause: str) -> Cause:
        hint = "see the log of node 0, and start this node again with it"
        return Cause(rank=CORE, phase="step" if self._steps else "start", code=code, cause=cause, hint=hint)

    def _handle(self, message: ToNode) -> None:
        match message:
            case StartRanks(plan, worker):
                # In a thread: heartbeats are read at the same time, and a fork server may import torch first.
                self._watch.start()
                if message.stall_s is not None:
                    self._rank_watch = watch_silence(self._processes, message.stall_s, self._lose)
                    self._rank_watch.start()
                self._starter = threading.Thread(target=self._try_start, args=(plan, worker), name="weft-start")
                self._starter.start()
            case MeetAt(address):
                self._addresses.put(address)
            case PassOn(ranks, inner):
                if isinstance(inner, RunStep):
                    self._steps.update(ranks)
                self._processes.send(inner, ranks)
            case PrintStacks():
                self._processes.print_stacks()
            case EndRanks(cause):
                self._end = cause

    def _try_start(self, plan: Plan, worker: str) -> None:
        try:
            self._start(plan, worker)
        except Exception as error:
            self._lose(cause_of(error, plan.ranks_of(self._node)[0], "start"))

    def _start(self, plan: Plan, worker: str) -> None:
        """Start the processes of this node's ranks: rank 0 at once, the others once it listens."""
        plan = msgspec.structs.replace(plan, checkpoint=self._checkpoint)
        own = plan.ranks_of(self._node)
        if worker == WORKER:
            compile_ahead(plan)
        if plan.on_cpu:
            self._processes.prepare_forks(network_environment(plan, own[0], self._interface), len(own))
        with NodeWirings(plan, self._node) as wirings:
            for rank in own:
                self._processes.start(rank, network_environment(plan, rank, self._interface), wirings.files[rank])
        if 0 in own:
            self._processes.send(Launch(plan, 0, worker, Tcp(self._address, 0), wirings.wirings[0]), [0])
        if address := self._addresses.get():
            for rank in own:
                if rank:
                    self._processes.send(Launch(plan, rank, worker, address, wirings.wirings[rank]), [rank])

    def _take(self, rank: int, message: FromRank) -> None:
        self._send(RankMessage(rank, message))

    def _lose(self, cause: Cause) -> None:
        self._send(RankLost(cause))

    def _beat(self) -> None:
        # A copy: the thread that starts the ranks adds to it.
        phases = list(self._processes.phases.items())
        states = [RankState(rank, phase, self._steps[rank]) for rank, phase in phases]
        # Never waiting for a head that takes nothing: its silence has to be noticed.
        self._channel.offer(Beat(states), self._sending)

    def _head_silent(self) -> None:
        self._processes.print_stacks()
        time.sleep(STACKS_S)
        self._end = self._own_cause("head-silent", f"the head has been silent for {SILENCE_S:g} s")
        self._channel.hang_up()

    def _send(self, message: msgspec.Struct) -> None:
        frame = encode_frame(message)
        with self._sending, contextlib.suppress(OSError):  # the head is gone, which `run` notices
            self._channel.send_frame(frame)
