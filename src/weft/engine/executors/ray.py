"""RayExecutor: each rank in a Ray actor, placed by a placement group whose bundles are pinned to the plan's nodes.

Ray places and watches the actors. Messages go through sockets that prove the cluster key, tensors through gloo or NCCL:
nothing passes Ray's object store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from weft.engine.executors.messages import FromRank, Launch, Listening, Loaded, ToRank
from weft.engine.executors.node_messages import Ping, PrintStacks
from weft.engine.executors.rank import WORKER
from weft.engine.executors.rank_processes import rank_environment
from weft.engine.executors.ranks import RankExecutor
from weft.engine.executors.ray_actor import RankActor
from weft.engine.executors.ray_calls import call_bounded, call_watched, join_cluster
from weft.engine.executors.ray_nodes import ENGINE_NAME, NODE_LABEL, Attached, FromActor, Present, RayNodes
from weft.engine.processes.beats import SILENCE_S, Watch, keep_alive
from weft.engine.processes.framing import Channel, FrameError, encode_frame
from weft.engine.processes.keys import CertificateError, NotWeftError, WrongKeyError
from weft.engine.processes.open_sockets import open_sockets
from weft.engine.processes.secure import PER_ADDRESS, Complaints, Greeter, accept_securely
from weft.errors import CORE, Cause, ConfigError, EngineError, error_reason
from weft.plan.plan import Plan
from weft.plan.wiring import Network, Tcp

log = logging.getLogger("weft")

LOOK_S = 0.5  # seconds between two looks at actors that have not connected
SAY_S = 10.0  # seconds between two lines about resources that are missing
STACKS_S = 1.0  # seconds for the ranks to print their stacks, which Ray passes on
RELEASE_S = 10.0  # seconds for Ray to take its resources back
REASON_S = 5.0  # seconds for Ray to say why an actor has died
LATE_S = 10.0  # seconds beyond --start-timeout for what notices its end itself, and says more


@dataclass
class AttachedRank:
    """The driver's connection to an actor."""

    channel: Channel[FromActor]
    about: Attached
    watch: Watch
    thread: threading.Thread
    sending: threading.Lock
    ended: bool = False

    def offer(self, message: msgspec.Struct) -> None:
        """Send a short message if that takes no waiting: the peer's silence has to be noticed."""
        self.channel.offer(message, self.sending)

    def send_frame(self, frame: bytes) -> None:
        with self.sending, contextlib.suppress(OSError):
            self.channel.send_frame(frame)


class RayExecutor(RankExecutor):
    """Runs each rank in an actor of a Ray cluster."""

    def __init__(self, nodes: RayNodes, worker: str = WORKER) -> None:
        super().__init__(worker)
        self._nodes = nodes
        self._ray: Any = None
        self._group: Any = None
        self._bundles: list[int] = []  # by rank
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._attached: dict[int, AttachedRank] = {}
        self._came: SimpleQueue[AttachedRank] = SimpleQueue()
        self._complaints = Complaints()
        self._node_names: list[str] = []
        self._stacks = threading.Lock()  # guards the next
        self._stacks_asked = False

    def _launch(self, plan: Plan) -> None:
        import ray  # slow, and an extra

        self._ray = ray
        # Actors run in other folders than this process.
        plan = msgspec.structs.replace(plan, checkpoint=os.path.abspath(plan.checkpoint))
        self._node_names = [self._nodes.nodes[device.node].id for device in plan.devices]
        if not ray.is_initialized():
            with _cluster_errors():
                join_cluster(ray, self._nodes.cluster, self._nodes.timeout_s, log_to_driver=True)
        self._call_ray(lambda: self._reserve(plan))
        family = socket.AF_INET6 if ":" in self._nodes.address else socket.AF_INET
        listener = socket.create_server((self._nodes.address, 0), family=family)
        # All actors of a machine connect at once, and none tries again.
        most = max(PER_ADDRESS, len(plan.places))
        greeter = Greeter(listener, self._greet, "weft-ray-join", per_address=most)
        greeter.start()
        try:
            self._call_ray(lambda: self._start_actors(plan, listener.getsockname()[1]))
            self._await_actors(len(plan.places))
        finally:
            greeter.close()
            with contextlib.suppress(Empty):
                while True:
                    self._came.get_nowait().channel.close()
        plan = self._with_gpus(plan)
        self._send_launch(plan, 0, Tcp(self._attached[0].about.address, 0))
        (listening,) = self._await_reports(Listening, 1)
        for rank in self._ranks[1:]:
            self._send_launch(plan, rank, listening.address)

    def _call_ray(self, function: Callable[[], None]) -> None:
        """Call Ray's library while its head is there. Raises EngineError for a cluster that has gone, or is silent."""
        with _cluster_errors():
            call_watched(function, self._nodes.cluster, self._nodes.timeout_s + LATE_S)

    def _reserve(self, plan: Plan) -> None:
        """Reserve a bundle for each rank on its node. Raises EngineError if that takes longer than the timeout.

        In the caller's placement group the bundles are reserved already.
        """
        from ray.util.placement_group import PlacementGroup, placement_group

        if self._nodes.placement_group:
            self._group = PlacementGroup(self._ray.PlacementGroupID.from_hex(self._nodes.placement_group))
            bundles = [iter(indices) for indices in self._nodes.bundles]
            self._bundles = [next(bundles[device.node]) for device in plan.devices]
            return
        self._bundles = list(range(len(plan.devices)))
        bundle = {"CPU": 1.0} if plan.on_cpu else {"CPU": 1.0, "GPU": 1.0}
        selectors = [{NODE_LABEL: self._nodes.nodes[device.node].id} for device in plan.devices]
        self._group = placement_group(
            [dict(bundle) for _ in plan.devices],
            strategy="PACK",
            name=f"{ENGINE_NAME}{plan.model}",
            bundle_label_selector=selectors,
        )
        deadline = time.monotonic() + self._nodes.timeout_s
        while not self._group.wait(timeout_seconds=min(SAY_S, max(0.1, deadline - time.monotonic()))):
            missing = self._describe_missing(plan, bundle)
            if time.monotonic() >= deadline:
                raise EngineError(
                    Cause(
                        rank=CORE,
                        phase="start",
                        code="ray-resources",
                        cause=f"Ray did not reserve the ranks within {self._nodes.timeout_s:g} s: {missing}",
                        hint="`ray status` shows who has them; or raise --start-timeout",
                    )
                )
            log.info("waiting for Ray: %s", missing)

    def _describe_missing(self, plan: Plan, bundle: dict[str, float]) -> str:
        """Wanted resources of each node, and the resources that are free in the cluster."""
        counts = Counter(device.node for device in plan.devices)
        wanted = ", ".join(
            f"{count * bundle[kind]:g} {kind} on {self._nodes.nodes[node].label}"
            for node, count in sorted(counts.items())
            for kind in bundle
        )
        free = self._ray.available_resources()
        present = ", ".join(f"{free.get(kind, 0):g} {kind}" for kind in bundle)
        return f"wanted are {wanted}; free in the cluster: {present}"

    def _start_actors(self, plan: Plan, port: int) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # The caller's bundles may have GPUs only.
        cpus = 0 if self._nodes.placement_group and not plan.on_cpu else 1
        for place in plan.places:
            variables = rank_environment(plan.threads(place.rank), plan.peer_to_peer, interface="")
            del variables["GLOO_SOCKET_IFNAME"]  # the actor finds its own
            if not plan.on_cpu:
                # Ranks look at each other's GPUs: all are visible, and the plan says which one is whose.
                variables["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
            placed = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=self._bundles[place.rank]
            )
            actor = (
                self._ray.remote(RankActor)
                .options(
                    num_cpus=cpus,
                    num_gpus=0 if plan.on_cpu else 1,
                    max_restarts=0,
                    scheduling_strategy=placed,
                    runtime_env={"env_vars": variables},
                )
                .remote()
            )
            self._actors.append(actor)
            address = (self._nodes.address, port)
            self._runs.append(
                actor.run_rank.remote(
                    place.rank, self._worker, address, self._nodes.key, not plan.on_cpu, self._nodes.certificate
                )
            )

    def _await_actors(self, count: int) -> None:
        """Wait for the connections of all actors. Raises EngineError for an actor that has died or does not come.

        Each is heard and pinged from its connection on: the last may come long after the first, as an actor imports
        torch before.
        """
        patience_s = self._nodes.timeout_s
        deadline = time.monotonic() + patience_s
        while len(self._attached) < count:
            with contextlib.suppress(Empty):
                attached = self._came.get(timeout=LOOK_S)
                if attached.about.rank in self._attached or attached.about.rank not in range(count):
                    attached.channel.close()  # no rank of ours
                    continue
                self._attached[attached.about.rank] = attached
                attached.thread.start()
                attached.watch.start()
                continue
            if self._ended is not None:
                self._await_reports(Listening, 1)  # raises the cause
            missing = next(rank for rank in range(count) if rank not in self._attached)
            ended, _ = self._ray.wait([self._runs[missing]], timeout=0)
            if ended or time.monotonic() > deadline:
                reason = (
                    self._death(missing)
                    if ended
                    else f"its actor has not connected within {patience_s:g} s (--start-timeout)"
                )
                raise EngineError(
                    Cause(rank=missing, phase="start", code="actor-died" if ended else "actor-missing", cause=reason)
                )

    def _greet(self, connection: socket.socket, peer: str) -> Callable[[], None] | None:
        """Have an actor prove the key, and read its first message."""
        secured = connection
        try:
            secured = accept_securely(connection, self._nodes.key, self._nodes.certificate)
            attached = self._attach(secured)
            return lambda: self._came.put(attached)
        except (NotWeftError, WrongKeyError, CertificateError, FrameError, OSError) as error:
            if self._complaints.is_due(peer):
                log.warning("a connection from %s is refused: %s", peer, str(error) or "it has another cluster key")
        secured.close()
        connection.close()
        return None

    def _attach(self, connection: socket.socket) -> AttachedRank:
        keep_alive(connection)
        open_sockets.add(connection)
        channel: Channel[FromActor] = Channel(connection, FromActor)
        messages = iter(channel)
        about = next(messages, None)
        if not isinstance(about, Attached):
            raise NotWeftError("it is no rank of this engine")
        rank = about.rank
        attached: AttachedRank = AttachedRank(
            channel=channel,
            about=about,
            watch=Watch(lambda: attached.offer(Ping()), lambda: self._silent(rank), str(rank)),
            thread=threading.Thread(target=self._listen, args=(rank, messages), name=f"weft-rank-{rank}", daemon=True),
            sending=threading.Lock(),
        )
        return attached

    def _with_gpus(self, plan: Plan) -> Plan:
        """The plan with the GPUs that Ray has given to the actors."""
        if plan.on_cpu:
            return plan
        devices = [
            msgspec.structs.replace(device, index=self._attached[rank].about.gpu)
            for rank, device in enumerate(plan.devices)
        ]
        return msgspec.structs.replace(plan, devices=tuple(devices))

    def _send_launch(self, plan: Plan, rank: int, address: Tcp) -> None:
        self._send(Launch(plan, rank, self._worker, address, Network()), [rank])

    def _send(self, message: ToRank, ranks: Iterable[int]) -> None:
        frame = encode_frame(message)
        for rank in ranks:
            self._attached[rank].send_frame(frame)

    def _listen(self, rank: int, messages: Iterable[FromActor]) -> None:
        attached = self._attached[rank]
        try:
            for message in messages:
                attached.watch.heard()
                if not isinstance(message, Present | Attached):
                    self._take_message(rank, self._with_node(rank, message))
        except FrameError as error:
            self._fail(Cause(rank=rank, phase=self._phases[rank], code=error.code, cause=str(error)))
        if not attached.ended:
            self._expect_cause()  # Ray may take seconds to say it
            self._fail(Cause(rank=rank, phase=self._phases[rank], code="actor-died", cause=self._death(rank)))

    def _with_node(self, rank: int, message: FromRank) -> FromRank:
        if isinstance(message, Loaded):
            return Loaded(msgspec.structs.replace(message.capacity, node=self._node_names[rank]))
        return message

    def _silent(self, rank: int) -> None:
        """Handle an actor that sends nothing: have the others print their stacks, and fail."""
        with self._stacks:
            first, self._stacks_asked = not self._stacks_asked, True
        for other, attached in list(self._attached.items()):
            if first and other != rank:
                attached.offer(PrintStacks())
        time.sleep(STACKS_S)
        self._fail(
            Cause(
                rank=rank,
                phase=self._phases[rank],
                code="node-silent",
                cause=f"its actor has been silent for {SILENCE_S:g} s",
                hint="check its machine, and the network",
            )
        )

    def _death(self, rank: int) -> str:
        """Ray's reason for the end of an actor, in one line."""
        reasons: list[str] = []

        def ask() -> None:
            try:
                self._ray.get(self._runs[rank], timeout=REASON_S)
                reasons.append("its Ray actor has ended")
            except Exception as error:  # of the actor, or a timeout
                lines = [line.strip() for line in error_reason(error).splitlines() if line.strip()]
                reason = " ".join(lines[:1] + lines[-1:] if len(lines) > 1 else lines)
                reasons.append(f"its Ray actor has died: {reason}")

        call_bounded(ask, REASON_S + 1)
        return reasons[0] if reasons else "its Ray actor has died, and the head of the Ray cluster does not answer"

    def _kill(self) -> None:
        for attached in list(self._attached.values()):
            attached.ended = True
            attached.channel.hang_up()  # the actor's process ends itself

    def _end(self) -> None:
        for attached in self._attached.values():
            attached.ended = True
            attached.watch.stop()
            attached.channel.hang_up()
            if attached.thread.is_alive() and attached.thread is not threading.current_thread():
                attached.thread.join()
            attached.channel.close()
        self._release()

    def _release(self) -> None:
        """Give the actors and the resources back. May be called twice."""
        if self._ray is None or not self._ray.is_initialized():
            return
        from ray.util.placement_group import remove_placement_group

        actors, group = self._actors, self._group
        if self._nodes.placement_group:
            group = None  # the caller's
        self._actors, self._group = [], None

        def give_back() -> None:
            for actor in actors:
                self._ray.kill(actor)
            if group is not None:
                remove_placement_group(group)

        # Ray itself gives them back when this process ends.
        call_bounded(give_back, RELEASE_S)


@contextlib.contextmanager
def _cluster_errors() -> Iterator[None]:
    """Raise EngineError in place of ConfigError: here the engine is at fault, and not a flag."""
    try:
        yield
    except ConfigError as error:
        raise EngineError(Cause(rank=CORE, phase="start", code=error.code, cause=str(error))) from None
