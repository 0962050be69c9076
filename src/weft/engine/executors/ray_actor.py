"""RankActor: one rank in a Ray actor. Ray places and watches it; messages and tensors go through our own sockets."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import threading
from importlib import import_module
from queue import SimpleQueue
from typing import Any

import msgspec

from weft import logs
from weft.engine.executors.node_messages import Ping, PrintStacks, ToActor
from weft.engine.executors.rank import RankWorker, gc_paused, run_rank, worker_class
from weft.engine.executors.rank_processes import nccl_log_variables
from weft.engine.executors.ray_nodes import Attached, Present
from weft.engine.executors.rendezvous import join_rendezvous
from weft.engine.processes.beats import Watch, keep_alive
from weft.engine.processes.framing import Channel, FrameError, encode_frame
from weft.engine.processes.secure import connect_securely
from weft.machine.hardware.addresses import interface_of

CONNECT_S = 20.0


class RankActor:
    """The class of the actors. Its process ends with the driver's connection, and with the driver."""

    def run_rank(
        self, rank: int, worker: str, address: tuple[str, int], key: bytes, gpu: bool, certificate: str = ""
    ) -> None:
        """Run a rank, with the class `worker`, for the driver that listens at `address`.

        Returns when the engine has ended.
        """
        logs.configure()
        faulthandler.enable()
        # Before the connection: while torch is imported, which may take long, no heartbeat could be sent.
        with gc_paused():
            connect = import_module("weft.ranks.comm.connect")  # by name: this package does not import torch
            create = worker_class(worker)
        connection = socket.create_connection(address, CONNECT_S)
        own = str(connection.getsockname()[0])
        secured = connect_securely(connection, key, certificate)
        keep_alive(secured)
        _set_interface(interface_of(own))
        if gpu:
            os.environ.update(nccl_log_variables(os.environ))
        driver = Driver(secured)
        driver.send(Attached(rank, own, _own_gpu() if gpu else None))
        launch = driver.inbox.get()
        if launch is None:
            return

        def create_worker() -> RankWorker:
            listener = join_rendezvous(launch, driver.send)
            site = connect.Site(launch.plan, launch.rank, launch.wiring, launch.rendezvous, listener)
            return create(launch.plan, launch.rank, connect.connect_rank(site))

        run_rank(rank, driver.inbox, driver.send, create_worker)
        threading.Event().wait()  # the driver ends this process, once it has the cause of a failure


def _set_interface(interface: str) -> None:
    """Have gloo and NCCL use the interface that routes to the driver, unless the user has named one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _own_gpu() -> int:
    """Number of the GPU that Ray has given to this actor, among all of the node."""
    import ray

    return int(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])


class Driver:
    """The actor's connection to the driver. Messages wait in `inbox`; without the driver the process ends."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self._channel: Channel[ToActor] = Channel(connection, ToActor)
        self._sending = threading.Lock()
        self._watch = Watch(lambda: self._channel.offer(Present(), self._sending), self._channel.hang_up, "driver")
        self._watch.start()
        threading.Thread(target=self._listen, name="weft-driver", daemon=True).start()

    def send(self, message: msgspec.Struct) -> None:
        frame = encode_frame(message)
        with self._sending, contextlib.suppress(OSError):  # the driver is gone, and this process with it
            self._channel.send_frame(frame)

    def _listen(self) -> None:
        try:
            for message in self._channel:
                self._watch.heard()
                if isinstance(message, PrintStacks):
                    faulthandler.dump_traceback()
                elif not isinstance(message, Ping):
                    self.inbox.put(message)
        except FrameError as error:
            os.write(2, f"{error}\n".encode())
        finally:
            os._exit(0)
