"""Sockets to serve on, and watching steps."""

from __future__ import annotations

import logging
import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.log_events import logged
from tests.refusals import refuses
from weft.api.observe.progress import StepProgress
from weft.errors import ConfigError
from weft.http import listen
from weft.http.options import ServeOptions

ANY = ServeOptions(port=0)


def test_a_free_port_is_found_and_told() -> None:
    with listen.bind(ANY) as one, listen.bind(ANY) as two:
        ports = {listener.getsockname()[1] for listener in (one, two)}
        assert len(ports) == 2 and 0 not in ports
        assert listen.public_url(one, replace(ANY, root_path="/x")) == f"http://127.0.0.1:{one.getsockname()[1]}/x"


def test_a_taken_port_names_who_has_it() -> None:
    with listen.bind(ANY) as one:
        one.listen()
        port = one.getsockname()[1]
        with refuses(ConfigError, "port-taken") as refused:
            listen.bind(replace(ANY, port=port))
        assert re.search(rf"{port} on 127.0.0.1 .*{os.getpid()}.*--port", str(refused.value))


def test_a_port_is_taken_from_the_first_moment_and_free_after_the_last() -> None:
    """Two servers that start at once both load for a while before they listen; afterwards connections linger."""
    with listen.bind(ANY) as one:
        options = replace(ANY, port=one.getsockname()[1])
        with refuses(ConfigError, "port-taken"):
            listen.bind(options)
        listen.start_listening(one, options)
        with socket.create_connection(one.getsockname()) as client:
            one.accept()[0].close()  # first, and so it is this side that lingers
            assert client.recv(1) == b""
    with listen.bind(options) as two:
        listen.start_listening(two, options)


def test_the_second_of_two_binds_at_once_is_refused() -> None:
    with socket.socket() as one, listen.bind(ANY) as two:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        two.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(two.getsockname())
        one.listen()
        with refuses(ConfigError, "port-taken"):
            listen.start_listening(two, replace(ANY, port=two.getsockname()[1]))


@pytest.mark.parametrize(
    ("options", "code", "value"),
    [
        (ServeOptions(port=70000), "invalid-port", "70000"),
        (ServeOptions(port=-1), "invalid-port", "-1"),
        (ServeOptions(host="no.such.host.invalid", port=0), "host-not-here", "no.such.host.invalid"),
        (ServeOptions(uds="/no/such/folder/socket"), "cannot-listen", "/no/such/folder/socket"),
    ],
    ids=repr,
)
def test_addresses_that_cannot_be_had(options: ServeOptions, code: str, value: str) -> None:
    with refuses(ConfigError, code) as refused:
        listen.bind(options)
    assert value in str(refused.value)


def test_a_path_is_taken_over_from_the_dead_only(tmp_path: Path) -> None:
    options = ServeOptions(uds=str(tmp_path / "socket"))
    with listen.bind(options) as one:
        one.listen()
        assert listen.public_url(one, options) == f"unix:{tmp_path}/socket"
        with refuses(ConfigError, "path-taken"):
            listen.bind(options)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "socket"))
    listen.bind(options).close()
    (tmp_path / "file").write_text("mine")
    with refuses(ConfigError, "path-taken"):
        listen.bind(ServeOptions(uds=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_path_belongs_to_one_server_before_it_listens(tmp_path: Path) -> None:
    options = ServeOptions(uds=str(tmp_path / "socket"))
    with listen.bind(options):
        with refuses(ConfigError, "path-taken"):
            listen.bind(options)
        assert (tmp_path / "socket").is_socket()
    assert not list(tmp_path.iterdir())  # and nothing is left
    with listen.bind(options) as again:
        again.listen()


def test_a_lock_that_its_owner_has_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened just before another server ended, locked just after."""
    path, opened = tmp_path / "lock", []

    def open_late(name: str, *how: int) -> int:
        opened.append(open_file(name, *how))
        if len(opened) == 1:
            path.unlink()
        return opened[-1]

    open_file = os.open
    monkeypatch.setattr(os, "open", open_late)
    assert listen._lock(str(path)) == opened[1]
    assert os.path.samestat(os.fstat(opened[1]), path.stat())
    os.close(opened[1])


def test_certificates_are_tried_before_anything_slow(tmp_path: Path) -> None:
    listen.check_tls(ANY)
    with refuses(ConfigError, "ssl-certificate-missing"):
        listen.check_tls(replace(ANY, ssl_keyfile="key"))
    (tmp_path / "cert").write_text("no certificate")
    for path in (tmp_path / "cert", tmp_path / "missing"):
        with refuses(ConfigError, "ssl-certificate-unusable") as refused:
            listen.check_tls(replace(ANY, ssl_certfile=str(path)))
        assert str(path) in str(refused.value)


def test_work_without_a_step_is_a_stall_only_after_the_time() -> None:
    now = 0.0
    progress = StepProgress(10.0, lambda: now)
    now = 100.0  # long idle
    progress.begin()
    now = 110.0
    assert progress.stalled_s(0) == 0.0
    now = 111.0
    assert progress.stalled_s(0) == 11.0
    assert progress.stalled_s(1) == 0.0
    now = 122.0
    assert progress.stalled_s(1) == 11.0


@pytest.mark.parametrize(
    ("host", "has_keys", "warned"),
    [("0.0.0.0", False, True), ("::", False, True), ("0.0.0.0", True, False), ("127.0.0.1", False, False)],
)
def test_a_server_that_everybody_may_use_says_so(
    host: str, has_keys: bool, warned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    options = replace(ANY, host=host)
    with listen.bind(options) as listener:
        listen.warn_without_key(listener, options, has_keys=has_keys)
    assert bool(logged(caplog, "no-key")) == warned
