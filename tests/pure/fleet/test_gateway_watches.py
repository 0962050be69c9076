"""The gateway's work in the background: checks while nobody is well, files that change, and faulty ones."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from tests.log_events import logged
from tests.pure.gateways import LiveGateway, answer_json, gateway, hang_up, never, upstream
from tests.pure.servers import PATIENCE_S, Exchange
from weft.api.server.stopping import handle_stop_signals
from weft.errors import ConfigError
from weft.fleet.gateway.server import look_at_hangup, watches_of
from weft.fleet.upstreams import check_loop
from weft.fleet.upstreams.breaker import FAILURES, SHORTEST_S
from weft.fleet.upstreams.check_loop import CheckLoop
from weft.fleet.upstreams.config import make_config
from weft.fleet.upstreams.replica import UpstreamReplica
from weft.fleet.upstreams.watches import FileWatch
from weft.http.key_file import read_keys


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    """SIGHUP as in a terminal, also if these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def break_down(live: LiveGateway, replica: UpstreamReplica) -> None:
    for _ in range(FAILURES):
        replica.breaker.fail(live.proxy.fleet.clock(), "x", probe=False)


# Checks


async def test_while_no_upstream_is_well_each_is_checked_at_every_round() -> None:
    async with upstream() as one, upstream() as two, gateway(one.url, two.url) as live:
        live.proxy.fleet.clock = lambda: 5.0  # no pause ends
        first, second = live.replica(one), live.replica(two)
        checks = CheckLoop(live.proxy.fleet, live.proxy.timeouts)
        break_down(live, first)
        await checks.round()
        assert not first.breaker.closed and not one.seen  # the other one is there
        break_down(live, second)
        await checks.round()
        assert first.breaker.closed and second.breaker.closed


async def test_an_upstream_with_a_model_that_no_other_has_is_checked_at_every_round() -> None:
    async with upstream() as one, upstream() as two:
        models = {one.url: ["a", "b"], two.url: ["a"]}
        async with gateway(upstreams=[{"url": url, "models": names} for url, names in models.items()]) as live:
            live.proxy.fleet.clock = lambda: 5.0
            checks = CheckLoop(live.proxy.fleet, live.proxy.timeouts)
            for stub in (one, two):
                break_down(live, live.replica(stub))
                await checks.round()
            assert live.replica(one).breaker.closed  # b was missing
            assert not live.replica(two).breaker.closed


async def test_a_check_that_waits_delays_no_other() -> None:
    async with upstream() as hangs, upstream() as well, gateway(hangs.url, well.url) as live:
        hangs.answer = never
        checks = CheckLoop(live.proxy.fleet, live.proxy.timeouts)
        for rounds in range(1, 4):
            await checks.begin_round()
            async with asyncio.timeout(PATIENCE_S):
                while sum(seen.path == "/health" for seen in well.seen) < rounds:
                    await asyncio.sleep(0.002)
                while live.replica(well) in checks._running:
                    await asyncio.sleep(0.002)
        assert len(hangs.seen) == 1
        for task in checks._running.values():
            task.cancel()


async def test_of_many_ill_upstreams_some_are_checked_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_loop, "UNHEALTHY_AT_ONCE", 2)
    async with AsyncExitStack() as stack:
        stubs = [await stack.enter_async_context(upstream()) for _ in range(6)]
        live = await stack.enter_async_context(gateway(*(stub.url for stub in stubs)))
        for stub in stubs:
            stub.answer = hang_up
            break_down(live, live.replica(stub))
        checks = CheckLoop(live.proxy.fleet, live.proxy.timeouts)
        for _ in range(3):
            await checks.round()
        assert [len(stub.seen) for stub in stubs] == [1] * 6


async def test_a_failing_check_is_repeated_at_least_every_five_seconds() -> None:
    async with upstream() as one, upstream() as two, gateway(one.url, two.url) as live:
        now = 0.0
        live.proxy.fleet.clock = lambda: now
        breaker = live.replica(one).breaker
        break_down(live, live.replica(one))
        for _ in range(10):
            breaker.fail(now, "x", probe=breaker.begin())
            breaker.end(True)
        assert not breaker.admits(now + SHORTEST_S) and breaker.admits(now + 5.0)


# Files of upstreams


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge"])
async def test_a_file_of_upstreams_that_is_none_changes_nothing(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "upstreams.yaml"
    path.write_text("[{url: 'http://127.0.0.1:9'}]")
    async with gateway(discover={"file": str(path)}) as live:
        watch = live.proxy.watch
        assert isinstance(watch, FileWatch)
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "folder":
            path.mkdir()
        else:
            with path.open("wb") as file:
                file.truncate(2**40)
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(3):
                await watch.look()
        assert len(live.proxy.fleet.replicas) == 1 and len(logged(caplog, "upstreams-unchanged")) == 1
        path.rmdir() if kind == "folder" else path.unlink()
        path.write_text("[{url: 'http://127.0.0.1:9'}, {url: 'http://127.0.0.1:10'}]")
        await watch.look()
        assert len(live.proxy.fleet.replicas) == 2


# Files of keys


class KeyedGateway:
    """A gateway whose file of keys a test writes anew."""

    def __init__(self, live: LiveGateway, path: Path, config: dict[str, Any]) -> None:
        self.live, self.path = live, path
        (_, self._watch) = watches_of(live.proxy, make_config(config), None)

    async def write(self, text: str, mode: int = 0o600) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.chmod(mode)
        new.replace(self.path)
        await self._watch.look()

    async def statuses(self, *keys: str) -> list[int]:
        headers = [{"Authorization": f"Bearer {key}"} for key in keys]
        path = "/v1/chat/completions"
        asked = [await self.live.client.post(path, json={"model": "m"}, headers=header) for header in headers]
        return [answer.status_code for answer in asked]


async def test_keys_are_read_again_when_their_file_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("[{name: a, key: one}, {name: b, key: two}]")
    async with upstream() as one, gateway(one.url, keys=str(path)) as live:
        keyed = KeyedGateway(live, path, {"upstreams": [{"url": one.url}], "keys": str(path)})
        assert await keyed.statuses("one", "two", "three") == [200, 200, 401]
        await keyed.write("[{name: a, key: one}, {name: c, key: three, models: [x]}]")
        assert await keyed.statuses("one", "two", "three") == [200, 401, 403]
        faulty = ("", "[", "[{name: a}]", "[{name: a, key: one, quota: {day: 5}}]", "[{name: a, key: one, weight: 2}]")
        for count, text in enumerate(faulty, 1):
            await keyed.write(text)
            await keyed._watch.look()
            assert await keyed.statuses("one", "two", "three") == [200, 401, 403], text
            assert len(logged(caplog, "keys-unchanged")) == count
        await keyed.write("[{name: b, key: two}]", mode=0o644)
        assert await keyed.statuses("one", "two") == [200, 401]
        path.chmod(0o600)
        await keyed._watch.look()
        assert await keyed.statuses("one", "two") == [401, 200]
        path.unlink()
        await keyed._watch.look()
        assert await keyed.statuses("one", "two") == [401, 200]
        live.assert_idle()


async def test_limits_that_change_count_what_runs(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("[{name: a, key: one}]")
    go_on = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await go_on.wait()
        await answer_json(exchange)

    async with upstream() as one, gateway(one.url, keys=str(path)) as live:
        keyed = KeyedGateway(live, path, {"upstreams": [{"url": one.url}], "keys": str(path)})
        one.answer = wait
        asking = [asyncio.create_task(keyed.statuses("one")) for _ in range(2)]
        async with asyncio.timeout(PATIENCE_S):
            while len(one.seen) < 2:
                await asyncio.sleep(0.002)
        await keyed.write("[{name: a, key: one, concurrent: 2}]")
        assert await keyed.statuses("one") == [429]
        await keyed.write("[{name: b, key: two}]")  # its requests go on without it
        go_on.set()
        assert [await task for task in asking] == [[200], [200]]
        await keyed.write("[{name: a, key: one, concurrent: 1}]")
        assert await keyed.statuses("one", "one") == [200, 200]
        live.assert_idle()


async def test_a_key_for_an_upstream_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "vendor.key"
    path.write_text("first")
    async with upstream() as one:
        config: dict[str, Any] = {"upstreams": [{"url": one.url, "key_file": str(path)}]}
        async with gateway(**config) as live:
            (watch,) = watches_of(live.proxy, make_config(config), None)
            for text, expected in (("second\n", "second"), ("", "second"), ("third", "third")):
                path.write_text(text)
                await watch.look()
                assert (await live.chat()).status_code == 200
                assert one.seen[-1].headers["authorization"] == f"Bearer {expected}"


@pytest.mark.parametrize("kind", [lambda path: os.mkfifo(path), lambda path: path.symlink_to("/dev/zero")])
def test_keys_are_read_from_regular_files_only(tmp_path: Path, kind: Callable[[Path], None]) -> None:
    kind(tmp_path / "keys")
    with pytest.raises(ConfigError):
        read_keys(str(tmp_path / "keys"))


# SIGHUP


async def test_a_hangup_looks_at_files_at_once_and_ends_nothing() -> None:
    async with upstream() as one, gateway(one.url) as live:
        checks = CheckLoop(live.proxy.fleet, live.proxy.timeouts)
        before = signal.getsignal(signal.SIGHUP)
        with look_at_hangup(checks):
            os.kill(os.getpid(), signal.SIGHUP)
            async with asyncio.timeout(PATIENCE_S):
                await checks._hurry.wait()
        assert signal.getsignal(signal.SIGHUP) == before


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_guard_of_a_stop_sees_signals_beside_the_look_at_hangup(factory: Callable[[], Any]) -> None:
    """Both want signals; asyncio's own handlers took the guard's descriptor, which then saw no SIGTERM."""

    async def descriptors() -> tuple[int, int]:
        looked = asyncio.Event()
        checks: Any = SimpleNamespace(look_now=looked.set)
        with handle_stop_signals(lambda number, at_s: None, 1.0):
            before = wakeup_descriptor()
            with look_at_hangup(checks):
                after = wakeup_descriptor()
                os.kill(os.getpid(), signal.SIGHUP)
                await asyncio.wait_for(looked.wait(), PATIENCE_S)
        return before, after

    with asyncio.Runner(loop_factory=factory) as runner:
        before, after = runner.run(descriptors())
    assert before == after


def wakeup_descriptor() -> int:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    return descriptor
