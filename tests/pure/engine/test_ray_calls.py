"""Bounds of calls of Ray's library: clusters that are dead, silent, or die meanwhile."""

from __future__ import annotations

import importlib.util
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.log_events import logged
from tests.pure.machines import host
from tests.refusals import refuses
from weft.engine.cluster import ray_cluster, status
from weft.engine.executors import ray_calls
from weft.engine.executors.ray_calls import call_watched, join_cluster
from weft.errors import ConfigError

ELSEWHERE = "192.0.2.77:1"  # of the range for documentation


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Functions to call at the end of this process."""
    registered: list[Any] = []
    monkeypatch.setattr(
        ray_calls, "atexit", SimpleNamespace(register=registered.append, unregister=lambda _: registered.clear())
    )
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    return registered


@contextmanager
def head() -> Iterator[tuple[str, socket.socket]]:
    """An address at which somebody listens, and the socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}", listener


def closed_address() -> str:
    with head() as (address, _):
        return address


class FakeRay(ModuleType):
    """The module `ray`, whose `init` notes the addresses that it is given."""

    def __init__(self, last: str) -> None:
        super().__init__("ray")
        self.joined: list[str] = []
        self.exceptions = SimpleNamespace(AuthenticationError=type("AuthenticationError", (Exception,), {}))
        self.services = ModuleType("ray._private.services")
        self.services.canonicalize_bootstrap_address = lambda _: last  # type: ignore[attr-defined]

    def is_initialized(self) -> bool:
        return False

    def init(self, address: str, **_: object) -> None:
        self.joined.append(address)


def install(monkeypatch: pytest.MonkeyPatch, last: str) -> FakeRay:
    """Have programs import a Ray that knows `last` as its last cluster."""
    ray = FakeRay(last)
    for name, module in (("ray", ray), ("ray._private", ModuleType("x")), ("ray._private.services", ray.services)):
        monkeypatch.setitem(sys.modules, name, module)
    return ray


def test_an_address_of_nobody_is_refused_before_ray_tries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, address = install(monkeypatch, "unused:1"), closed_address()
    with refuses(ConfigError, "no-ray-cluster", address, "RAY_ADDRESS"):
        ray_cluster.connect({"RAY_ADDRESS": address})
    assert ray.joined == []


def test_a_dead_cluster_of_this_machine_makes_room_for_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    dead = closed_address()
    ray = install(monkeypatch, dead)
    ray_cluster.connect({})
    assert ray.joined == ["local"] and logged(caplog, "ray-cluster-dead")
    with refuses(ConfigError, "ray-cluster-gone", dead, "ray stop"):
        ray_cluster.connect({}, may_start=False)


def test_a_dead_head_of_another_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "connect_problem", lambda _: "no route")
    ray = install(monkeypatch, ELSEWHERE)
    with refuses(ConfigError, "ray-cluster-gone", ELSEWHERE, "no route"):
        ray_cluster.connect({})
    assert ray.joined == []


def test_status_shows_this_machine_beside_a_dead_cluster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dead = closed_address()
    install(monkeypatch, dead)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert status.cluster_status(host(), {}).kind == "machine"
    assert any(dead in record.getMessage() for record in caplog.records)


def test_a_head_that_accepts_and_says_nothing(monkeypatch: pytest.MonkeyPatch, ends: list[Any]) -> None:
    """Suspended processes do so, and other programs at its port."""
    left = threading.Event()
    ray = install(monkeypatch, "unused:1")
    monkeypatch.setattr(ray, "init", lambda **_: left.wait())
    try:
        with head() as (address, _), refuses(ConfigError, "ray-cluster-gone", address, "0 s"):
            join_cluster(ray, address, 0)
    finally:
        left.set()
    assert ends == [ray_calls._exit_at_once], "Ray's own end of the process would wait for the call"


def test_a_head_that_dies_during_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_calls, "LOOK_S", 0.001)
    left = threading.Event()
    try:
        with head() as (address, listener):

            def hang() -> None:
                listener.close()
                left.wait()

            with refuses(ConfigError, "ray-cluster-gone", address):
                call_watched(hang, address, 60)
    finally:
        left.set()


def test_results_and_errors_pass() -> None:
    assert call_watched(lambda: 7, "auto", 60) == 7
    with pytest.raises(KeyError):
        call_watched(lambda: {"y": 1}["x"], "auto", 60)
