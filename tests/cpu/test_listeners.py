"""Listening sockets that a library opens, and the end of that."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from weft.ranks.comm import listeners
from weft.ranks.comm.connect import LAZY_VARIABLE, closing_gloo

WAIT_S = 60
ROUNDS = 3


def test_a_socket_listens_no_longer_and_its_owner_notices_nothing() -> None:
    """Its thread may be about to accept: it finds nothing, and what it does at its own end succeeds."""
    own = socket.create_server(("127.0.0.1", 0))
    own.setblocking(False)
    with own, select.epoll() as epoll:
        epoll.register(own.fileno(), select.EPOLLIN)
        before = listeners.listening_sockets()
        assert own.fileno() in before
        address = own.getsockname()
        waiting = socket.create_connection(address)
        descriptors = len(os.listdir("/proc/self/fd"))
        listeners.stop_listening([own.fileno()])
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert listeners.listening_sockets() == before - {own.fileno()}
        with waiting, pytest.raises(ConnectionResetError):
            waiting.recv(1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with pytest.raises(BlockingIOError):
            own.accept()
        assert epoll.poll(0) == []
        epoll.unregister(own.fileno())


def test_a_socket_listens_no_longer_where_no_file_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(listeners.tempfile, "TemporaryDirectory", refuse)
    with socket.create_server(("127.0.0.1", 0)) as own, select.epoll() as epoll:
        epoll.register(own.fileno(), select.EPOLLIN)
        address = own.getsockname()
        listeners.stop_listening([own.fileno()])
        assert own.fileno() not in listeners.listening_sockets() and epoll.poll(0) == []
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        epoll.unregister(own.fileno())


def test_only_what_has_begun_to_listen_inside_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours:
        with listeners.closing_listeners():
            theirs = socket.create_server(("127.0.0.1", 0))
        found = listeners.listening_sockets()
        assert ours.fileno() in found and theirs.fileno() not in found
        theirs.close()


@pytest.mark.parametrize(("value", "closes"), [(None, True), ("0", True), ("1", False), ("ON", False)])
def test_gloo_that_connects_later_goes_on_listening(
    monkeypatch: pytest.MonkeyPatch, value: str | None, closes: bool
) -> None:
    monkeypatch.delenv(LAZY_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(LAZY_VARIABLE, value)
    with closing_gloo("gloo"):
        later = socket.create_server(("127.0.0.1", 0))
    with later:
        assert (later.fileno() in listeners.listening_sockets()) is not closes
    with closing_gloo("nccl"):
        other = socket.create_server(("127.0.0.1", 0))
    with other:
        assert other.fileno() in listeners.listening_sockets()


def knock(ranks: list[psutil.Process], stopped: threading.Event) -> None:
    """Connect to whatever listens at these processes, and go, until told to stop."""
    while not stopped.is_set():
        for rank in ranks:
            with suppress(psutil.Error):  # it has ended
                for one in rank.net_connections("inet"):
                    if one.status == "LISTEN":
                        with suppress(OSError):
                            socket.create_connection((one.laddr.ip, one.laddr.port), 1).close()


def test_ranks_sum_while_strangers_knock(tmp_path: Path) -> None:
    """From the first group to the last: no rank ends, nothing listens after any of them, and later groups work."""
    command = [sys.executable, "-m", "tests.cpu.gloo_rank"]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdin=PIPE, stdout=PIPE, text=True)
            )
            for rank in range(2)
        ]
        stopped = threading.Event()
        stranger = threading.Thread(target=knock, args=([psutil.Process(rank.pid) for rank in ranks], stopped))
        stranger.start()
        stack.callback(stranger.join)
        stack.callback(stopped.set)
        for number in range(ROUNDS):
            for rank in ranks:
                assert rank.stdout and rank.stdin
                assert rank.stdout.readline() == "0\n", "of sockets that listen"
            for rank in ranks:
                assert rank.stdin
                if number + 1 < ROUNDS:
                    rank.stdin.write("go on\n")
                    rank.stdin.flush()
                else:
                    rank.stdin.close()
        assert [rank.wait(WAIT_S) for rank in ranks] == [0, 0]
