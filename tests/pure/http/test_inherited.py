"""The listening socket that systemd passes: taken, refused, or meant for another process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.refusals import refuses
from weft.errors import ConfigError
from weft.http import listen
from weft.http.options import ServeOptions

Passes = Callable[..., dict[str, str]]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """A function that passes a descriptor, as systemd passes the first: it belongs to the server from then on."""

    def pass_on(descriptor: int, count: str = "1", pid: int | None = None) -> dict[str, str]:
        monkeypatch.setattr(listen, "FIRST_PASSED", os.dup(descriptor))
        return {"LISTEN_FDS": count, "LISTEN_PID": f"{pid or os.getpid()}", "LISTEN_FDNAMES": "weft.socket", "A": "b"}

    return pass_on


def test_a_passed_socket_is_the_server_s(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        for name, value in passes(opened.fileno()).items():
            monkeypatch.setenv(name, value)
        options = ServeOptions(port=1)  # of no account
        with listen.bind(options) as listener:
            assert not {*listen.PASSED_VARIABLES} & {*os.environ}, "a program started later takes nothing for its own"
            assert not os.get_inheritable(listener.fileno())
            listen.start_listening(listener, options)
            assert listen.public_url(listener, options) == f"http://127.0.0.1:{opened.getsockname()[1]}"
            with socket.create_connection(opened.getsockname()) as client, listener.accept()[0] as accepted:
                accepted.sendall(b"1")
                assert client.recv(1) == b"1"


def test_the_path_of_a_passed_unix_socket_counts_as_the_flag(passes: Passes, tmp_path: Path) -> None:
    """Whoever is behind a proxy on such a socket must not look like this machine."""
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(tmp_path / "socket"))
        opened.listen()
        listener = listen.inherited_listener(passes(opened.fileno()))
        assert listener is not None
        with listener:
            assert listen.bound_options(listener, ServeOptions()).uds == str(tmp_path / "socket")


@pytest.mark.parametrize(
    "environ",
    [{}, {"LISTEN_FDS": "1"}, {"LISTEN_FDS": "1", "LISTEN_PID": "1"}, {"LISTEN_PID": f"{os.getpid()}"}],
    ids=["none", "no process", "another process", "no count"],
)
def test_sockets_for_others_are_left_alone(environ: dict[str, str]) -> None:
    before = dict(environ)
    assert listen.inherited_listener(environ) is None and environ == before


def test_what_is_no_listening_socket_is_refused(passes: Passes, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as opened, refuses(ConfigError, "several-sockets-passed"):
        listen.inherited_listener(passes(opened.fileno(), count="2"))
    with socket.socket() as silent, refuses(ConfigError, "passed-socket-unusable"):
        listen.inherited_listener(passes(silent.fileno()))
    with (tmp_path / "file").open("w") as file, refuses(ConfigError, "passed-socket-unusable"):
        listen.inherited_listener(passes(file.fileno()))
