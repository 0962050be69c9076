"""The gateway's breaker, checks, administration, keys, figures and log."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.log_events import logged
from tests.pure.gateways import answer_json, answer_status, gateway, hang_up, never, upstream
from tests.pure.servers import PATIENCE_S, Exchange
from tests.pure.worlds import refused
from weft.fleet.gateway import access_log
from weft.fleet.gateway.access_log import AccessLog
from weft.fleet.upstreams import check_loop
from weft.fleet.upstreams.breaker import CHECK_LONGEST_S, FAILURES, SHORTEST_S, SLOW_START_S, Breaker, RetryBudget
from weft.fleet.upstreams.check_loop import CheckLoop
from weft.fleet.upstreams.checks import check_health, read_models
from weft.fleet.upstreams.replica import Attempt
from weft.fleet.upstreams.watches import DnsWatch, FileWatch

ADMIN = {"Authorization": "Bearer admin-key"}


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.fail(now, "x", probe=False)
    return breaker


# The breaker


def test_a_breaker_opens_after_failures_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(3):
        for _ in range(FAILURES - 1):
            breaker.fail(0.0, "x", probe=False)
        breaker.succeed(0.0, probe=False)
    assert breaker.admits(0.0) and breaker.share(0.0) == 1.0
    assert not opened().admits(0.0)


def test_exactly_one_probe() -> None:
    breaker = opened()
    assert not breaker.admits(SHORTEST_S - 0.01) and breaker.state(0.5) == "open"
    assert breaker.admits(SHORTEST_S) and breaker.begin()
    assert not breaker.admits(SHORTEST_S) and breaker.state(SHORTEST_S) == "half-open"
    breaker.end(True)  # it was given up: no outcome
    assert breaker.admits(SHORTEST_S)


def test_failed_probes_double_the_pause() -> None:
    breaker, now = opened(), 0.0
    for pause in (1, 2, 4, 5, 5):
        assert not breaker.admits(now + pause - 0.01) and breaker.admits(now + pause)
        now += pause
        probe = breaker.begin()
        breaker.fail(now, "x", probe=probe)
        breaker.end(probe)
    assert pause == CHECK_LONGEST_S


def test_requests_that_were_sent_before_it_opened_change_nothing() -> None:
    breaker = opened()
    for now in (0.9, SHORTEST_S):
        breaker.fail(now, "late", probe=False)
        breaker.succeed(now, probe=False)
        assert not breaker.closed
    assert breaker.admits(SHORTEST_S)


def test_a_recovered_replica_starts_slowly() -> None:
    breaker = opened()
    breaker.succeed(5.0, probe=breaker.begin())
    shares = [breaker.share(5.0 + at * SLOW_START_S / 4) for at in range(5)]
    assert shares == sorted(shares) and shares[0] == 0.1 and shares[-1] == 1.0
    assert breaker.share(5.0) == 1.0  # it is over


def test_a_replica_that_fails_again_soon_waits_longer() -> None:
    """It answers checks, but no requests."""
    breaker, now = opened(), SHORTEST_S
    for pause in (2, 4, 8):
        breaker.succeed(now, probe=breaker.begin())
        breaker.end(True)
        for _ in range(FAILURES):
            breaker.fail(now, "x", probe=False)
        assert not breaker.admits(now + pause - 0.01) and breaker.admits(now + pause)
        now += pause
    breaker.succeed(now, probe=breaker.begin())
    breaker.end(True)
    for _ in range(FAILURES):
        breaker.fail(now + SLOW_START_S, "x", probe=False)
    assert breaker.admits(now + SLOW_START_S + SHORTEST_S)


def test_the_retry_budget() -> None:
    budget = RetryBudget()
    assert sum(budget.spend() for _ in range(100)) == RetryBudget.SAVED
    for _ in range(10):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


# Checks


async def test_checks_open_and_close_the_breaker() -> None:
    async with upstream() as one, gateway(one.url) as live:
        replica, fleet, timeouts = live.replica(one), live.proxy.fleet, live.proxy.timeouts
        one.answer = hang_up
        for _ in range(FAILURES):
            await check_health(replica, fleet, timeouts)
        assert not replica.breaker.closed
        refused(await live.client.get("/health"), 503, code="unhealthy")
        refused(await live.chat(), 503, code="no_upstream")
        fleet.clock = lambda: 1e9
        one.answer = answer_json
        await check_health(replica, fleet, timeouts)
        assert replica.breaker.closed and (await live.client.get("/health/ready")).status_code == 200
        live.assert_idle()


async def test_no_request_tries_a_replica_that_is_ill() -> None:
    """It might wait for all of `first_byte`, and nothing else could find out that the replica has recovered."""
    async with upstream() as ill, upstream() as well, gateway(ill.url, well.url) as live:
        replica, fleet = live.replica(ill), live.proxy.fleet
        for _ in range(FAILURES):
            replica.breaker.fail(0.0, "x", probe=False)
        fleet.clock = lambda: SHORTEST_S
        assert replica.breaker.state(SHORTEST_S) == "half-open"
        for _ in range(4):
            assert (await live.chat()).status_code == 200
        assert not ill.seen and len(well.seen) == 4
        await check_health(replica, fleet, live.proxy.timeouts)
        assert replica.breaker.closed and len(ill.seen) == 1
        live.assert_idle()


async def test_a_slow_name_server_delays_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, checked = asyncio.Event(), asyncio.Event()

    async def look(self: DnsWatch) -> None:
        asked.set()
        await checked.wait()

    async def check(*given: Any, urgent: bool) -> None:
        await asked.wait()
        checked.set()

    monkeypatch.setattr(DnsWatch, "look", look)
    monkeypatch.setattr(check_loop, "check_health", check)
    async with gateway("http://127.0.0.1:9") as live:
        fleet = live.proxy.fleet
        watch = DnsWatch(fleet, "http://localhost:9")
        await asyncio.wait_for(CheckLoop(fleet, live.proxy.timeouts, [watch]).round(), PATIENCE_S)


@pytest.mark.parametrize(("status", "failures"), [(200, 0), (404, 0), (429, 0), (500, 1), (503, 1)])
async def test_what_a_check_makes_of_a_status(status: int, failures: int) -> None:
    async with upstream() as one, gateway(one.url) as live:
        one.answer = answer_status(f"{status} X")
        await check_health(live.replica(one), live.proxy.fleet, live.proxy.timeouts)
        assert live.replica(one).breaker.failures == failures
        assert one.seen[0].path == "/health"


async def test_requests_leave_a_replica_that_checks_find_dead() -> None:
    async def stopped(exchange: Exchange) -> None:
        if exchange.path == "/health":
            exchange.hang_up()
        else:
            await never(exchange)

    async with upstream() as one, upstream() as two, gateway(one.url, two.url) as live:
        one.answer = stopped
        asking = [asyncio.create_task(live.chat()) for _ in range(4)]
        async with asyncio.timeout(PATIENCE_S):
            while len(live.replica(one).unanswered) < 2:
                await asyncio.sleep(0.005)
        for _ in range(FAILURES):
            await check_health(live.replica(one), live.proxy.fleet, live.proxy.timeouts)
        assert [(await task).status_code for task in asking] == [200] * 4
        live.assert_idle()


async def test_models_are_read_from_upstreams() -> None:
    row = {"id": "m", "object": "model", "max_model_len": 4096}

    def listing(data: Any) -> Any:
        return answer_status("200 OK", body=json.dumps(data).encode())

    async with upstream() as one, gateway(one.url) as live:
        replica = live.replica(one)
        for bad in ({"data": 3}, [], {"rows": []}):
            one.answer = listing(bad)
            await read_models(replica, live.proxy.timeouts)
            assert replica.listed is None and (await live.chat(model="any")).status_code == 200
        one.answer = listing({"data": [row, {"id": 3}]})
        await read_models(replica, live.proxy.timeouts)
        assert (await live.client.get("/v1/models")).json() == {"object": "list", "data": [row]}
        refused(await live.chat(model="any"), 404, code="model_not_found")


# Administration


async def test_an_upstream_is_drained_added_and_removed() -> None:
    async with upstream() as one, upstream() as two, gateway(one.url) as live:
        post = live.client.post
        assert (await post("/gateway/add", json={"url": two.url})).status_code == 200
        refused(await post("/gateway/add", json={"url": two.url}), 400, code="duplicate_upstream")
        assert (await post("/gateway/drain", json={"url": one.url})).json()["draining"]
        for _ in range(4):
            assert (await live.chat()).status_code == 200
        assert [seen.path for seen in two.seen if seen.json is None] == ["/health", "/v1/models"], "asked when added"
        assert not one.seen and len([seen for seen in two.seen if seen.json]) == 4
        assert not (await post("/gateway/add", json={"url": one.url})).json()["draining"]
        assert (await post("/gateway/remove", json={"url": two.url})).status_code == 200
        assert (await live.chat()).status_code == 200 and one.seen
        refused(await post("/gateway/remove", json={"url": two.url}), 400, code="unknown_upstream")
        rows = (await live.client.get("/gateway/status")).json()["upstreams"]
        assert [row["url"] for row in rows] == [one.url] and rows[0]["breaker"] == "closed"


async def test_requests_of_a_removed_upstream_go_on() -> None:
    go_on = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await go_on.wait()
        await answer_json(exchange)

    async with upstream() as one, gateway(one.url) as live:
        one.answer = slow
        asking = asyncio.create_task(live.chat())
        async with asyncio.timeout(PATIENCE_S):
            while not one.seen:
                await asyncio.sleep(0.005)
        assert (await live.client.post("/gateway/remove", json={"url": one.url})).json()["connections"] == 1
        go_on.set()
        assert (await asking).status_code == 200
        refused(await live.chat(), 503, code="no_upstream")


@pytest.mark.parametrize(
    ("how", "status", "code"),
    [
        ({"content": "{}", "headers": {"Content-Type": "text/plain"}}, 415, "not_json"),
        ({"json": []}, 400, "body_not_object"),
        ({"json": {}}, 400, "url_missing"),
        ({"json": {"url": "ftp://a"}}, 400, "invalid_upstream"),
        ({"json": {"url": "http://a"}, "headers": {"X-Forwarded-For": "9.9.9.9"}}, 403, "admin_key_unset"),
        ({"content": b"x" * 2**17, "headers": {"Content-Type": "application/json"}}, 413, "body_too_large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_administration_that_is_refused(how: dict[str, Any], status: int, code: str) -> None:
    async with gateway("http://127.0.0.1:9") as live:
        refused(await live.client.post("/gateway/drain", **how), status, code=code)


async def test_secrets_are_not_sent_to_upstreams_that_anybody_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    async with gateway("http://127.0.0.1:9") as live:
        body = {"url": "http://127.0.0.1:10", "key_env": "SOME_KEY"}
        refused(await live.client.post("/gateway/add", json=body), 400, code="key_not_allowed")


@pytest.mark.parametrize("path", ["/gateway/status", "/gateway/drain", "/gateway/add", "/gateway/remove"])
async def test_with_an_admin_key_only_that_one_counts(path: str) -> None:
    async with gateway("http://127.0.0.1:9", admin_key="admin-key") as live:
        method = "GET" if path == "/gateway/status" else "POST"
        for headers in ({}, {"Authorization": "Bearer other"}, {"x-api-key": ""}):
            answer = await live.client.request(method, path, headers=headers, json={"url": "http://127.0.0.1:9"})
            refused(answer, 401, code="invalid_admin_key")
        answer = await live.client.request(method, path, headers=ADMIN, json={"url": "http://127.0.0.1:9"})
        assert answer.status_code != 401


async def test_a_watched_file(tmp_path: Path) -> None:
    path = tmp_path / "upstreams.yaml"
    a, b, c = (f"http://127.0.0.1:{port}" for port in (1, 2, 3))

    def write(text: str, stamp: int) -> None:
        path.write_text(text)
        os.utime(path, ns=(stamp, stamp))

    async with gateway(a) as live:
        fleet = live.proxy.fleet
        watch = FileWatch(fleet, str(path))
        await watch.look()  # it is not there yet
        assert list(fleet.replicas) == [a]
        write(f"[{{url: '{b}'}}, {{url: '{c}', weight: 2}}]", 10**9)
        await watch.look()
        assert list(fleet.replicas) == [a, b, c]
        kept = fleet.replicas[b]
        write(f"[{{url: '{b}'}}, {{url: '{c}', weight: 3}}]", 2 * 10**9)
        await watch.look()
        assert fleet.replicas[b] is kept and fleet.replicas[c].weight == 3
        for bad in ("[{url: x:y}]", "[{}]", "["):
            write(bad, 3 * 10**9 + len(bad))
            await watch.look()
            assert list(fleet.replicas) == [a, b, c]
        write("", 4 * 10**9)
        await watch.look()
        assert list(fleet.replicas) == [a]


async def test_replicas_that_a_file_brought_at_the_start_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "upstreams.yaml"
    a, b = (f"http://127.0.0.1:{port}" for port in (1, 2))
    path.write_text(f"[{{url: '{a}'}}, {{url: '{b}'}}]")
    async with gateway(discover={"file": str(path)}) as live:
        fleet, watch = live.proxy.fleet, live.proxy.watch
        assert watch is not None and list(fleet.replicas) == [a, b]
        # A key that is not there: nothing changes.
        monkeypatch.delenv("NO_SUCH_KEY", raising=False)
        path.write_text(f"[{{url: '{a}', weight: 2}}, {{url: '{b}', key_env: NO_SUCH_KEY}}]")
        await watch.look()
        assert list(fleet.replicas) == [a, b] and fleet.replicas[a].weight == 1
        path.write_text(f"[{{url: '{a}'}}]")
        await watch.look()
        assert list(fleet.replicas) == [a]


async def test_a_stream_that_began_as_a_probe_does_not_keep_others_out() -> None:
    async with upstream() as one, gateway(one.url) as live:
        breaker, now = live.replica(one).breaker, 0.0
        for _ in range(FAILURES):
            breaker.fail(now, "x", probe=False)
        probe = Attempt(live.replica(one), probes=True)
        probe.succeed(SHORTEST_S)
        for _ in range(FAILURES):
            breaker.fail(SHORTEST_S, "x", probe=False)
        assert breaker.admits(3 * SHORTEST_S)
        probe.close()
        live.assert_idle()


async def test_a_failure_counts_once() -> None:
    async with upstream() as one, gateway(one.url) as live:
        attempt = Attempt(live.replica(one))
        attempt.fail(0.0, "status 500")
        attempt.fail(0.0, "its body broke")
        attempt.close()
        assert live.replica(one).breaker.failures == 1


# Keys


async def test_without_an_admin_key_pages_of_other_names_are_refused() -> None:
    async with gateway("http://127.0.0.1:9") as live:
        for host, status in (
            ("evil.example:8080", 403),
            ("[::", 403),
            ("localhost:80", 200),
            ("[::1]", 200),
            ("127.0.0.1", 200),
        ):
            assert (await live.client.get("/gateway/status", headers={"Host": host})).status_code == status, host


async def test_a_body_that_is_not_text() -> None:
    async with upstream() as one, gateway(upstreams=[{"url": one.url, "models": {"ours": "theirs"}}]) as live:
        answer = await live.client.post("/v1/chat/completions", content=b'{"model": "ours", "\xff": 1}')
        refused(answer, 400, code="not_json")
        live.assert_idle()


async def test_clients_need_a_key_and_the_upstream_gets_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"two").hexdigest()
    keys.write_text(
        f"[{{name: a, key: one}}, {{name: b, sha256: {digest}, models: [m]}}, {{name: c, key: x, admin: true}}]"
    )
    monkeypatch.setenv("THEIR_KEY", "theirs")
    async with upstream() as one, gateway(upstreams=[{"url": one.url, "key_env": "THEIR_KEY"}], keys=str(keys)) as live:

        async def ask(key: str, **fields: Any) -> httpx.Response:
            live.client.headers = httpx.Headers({"Authorization": f"Bearer {key}"})
            return await live.chat(**fields)

        for path in ("/v1/models", "/metrics", "/version"):
            refused(await live.client.get(path), 401, code="invalid_api_key")
        assert (await live.client.get("/health/live")).status_code == 200
        refused(await ask("three"), 401, code="invalid_api_key")
        assert (await ask("one", model="other")).status_code == 200
        assert (await ask("two")).status_code == 200
        refused(await ask("two", model="other"), 403, code="model_not_allowed")
        assert {seen.headers["authorization"] for seen in one.seen} == {"Bearer theirs"}
        live.client.headers = httpx.Headers({"x-api-key": "two"})
        twice = b'{"model": "other", "messages": [], "model": "m"}'
        assert (await live.client.post("/v1/chat/completions", content=twice)).status_code == 200
        assert "x-api-key" not in one.seen[-1].headers
        refused(await live.client.get("/gateway/status"), 401, code="invalid_admin_key")
        assert (await live.client.get("/gateway/status", headers={"x-api-key": "x"})).status_code == 200


# Figures and log


async def test_figures_and_the_access_log(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    async with upstream() as one, upstream() as two, gateway(one.url, two.url, access_log=str(path)) as live:
        one.answer = hang_up
        for _ in range(2):
            assert (await live.chat(user="somebody")).status_code == 200
        page = (await live.client.get("/metrics")).text
        assert f'weft:gateway_requests_total{{outcome="complete",status="200",upstream="{two.url}"}} 2.0' in page
        assert f'weft:gateway_connections{{upstream="{one.url}"}} 0.0' in page
        assert "weft:gateway_retries_total{" in page and "weft:gateway_time_to_first_byte_seconds_bucket" in page
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == 2
        assert {"client", "key", "model", "upstream", "tries", "status", "outcome", "total_s"} <= rows[0].keys()
        assert rows[0]["model"] == "m" and rows[0]["upstream"] == two.url and max(row["tries"] for row in rows) == 2
        assert "hello" not in path.read_text() and "somebody" not in path.read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without room")
async def test_a_full_disk_under_the_access_log_fails_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("[{name: a, key: one}]")
    async with upstream() as one, gateway(one.url, keys=str(keys), access_log="/dev/full") as live:
        refused(await live.chat(), 401, code="invalid_api_key")
        live.client.headers = httpx.Headers({"Authorization": "Bearer one"})
        one.answer = answer_status("404 X")
        assert (await live.chat()).status_code == 404
        one.answer = answer_json
        assert (await live.chat()).status_code == 200
        assert "weft:gateway_access_log_lost_total 3.0" in (await live.client.get("/metrics")).text
        assert len(logged(caplog, "access-log-lost")) == 1
        live.assert_idle()


def test_lost_rows_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now, lost = 0.0, []
    rows = AccessLog("/dev/null", lambda: lost.append(now), lambda: now)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(access_log.os, "write", full)
    for _ in range(200):
        rows.write_row({})
        now += 1
    rows.close()
    assert len(lost) == 200 and len(logged(caplog, "access-log-lost")) == 4


def test_a_row_that_was_written_in_part_ends_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "log", os.write
    rows = AccessLog(str(path))
    rows.write_row({"number": 0})
    for _ in range(2):  # the second one has no room at all
        monkeypatch.setattr(access_log.os, "write", lambda descriptor, data: write(descriptor, data[:5]))
        rows.write_row({"number": 1})
        monkeypatch.setattr(access_log.os, "write", lambda descriptor, data: 0)
        rows.write_row({"number": 2})
        monkeypatch.setattr(access_log.os, "write", write)
        rows.write_row({"number": 3})
    rows.close()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines if line.endswith("}")] == [0, 3, 3]


def test_the_access_log_is_for_its_owner_alone(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("{}\n")
    old.chmod(0o644)
    for path in (old, tmp_path / "new"):
        AccessLog(str(path)).close()
        assert path.stat().st_mode & 0o777 == 0o600
    assert old.read_text() == "{}\n"


async def test_refusals_are_counted_and_logged(tmp_path: Path) -> None:
    path, keys = tmp_path / "access.log", tmp_path / "keys.yaml"
    keys.write_text("[{name: a, key: one, models: [m]}]")
    async with gateway("http://127.0.0.1:9", keys=str(keys), access_log=str(path), max_body_bytes=1000) as live:
        refused(await live.chat(), 401, code="invalid_api_key")
        live.client.headers = httpx.Headers({"Authorization": "Bearer one"})
        refused(await live.chat(model="other"), 403, code="model_not_allowed")
        refused(await live.chat(user="u" * 1000), 413, code="body_too_large")
        page = (await live.client.get("/metrics")).text
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        expected = [(401, "invalid-api-key"), (403, "model-not-allowed"), (413, "body-too-large")]
        assert [(row["status"], row["outcome"]) for row in rows] == expected
        assert [row["key"] for row in rows] == [None, "a", "a"]
        for status, outcome in expected:
            assert f'weft:gateway_requests_total{{outcome="{outcome}",status="{status}",upstream=""}} 1.0' in page
        live.assert_idle()


async def test_models_that_were_not_told_are_asked_for_at_the_next_check() -> None:
    broken = True

    async def answer(exchange: Exchange) -> None:
        if broken and exchange.path == "/v1/models":
            exchange.hang_up()
        else:
            await answer_status("200 OK", body=b'{"data": [{"id": "m"}]}')(exchange)

    async with upstream() as one, gateway(one.url) as live:
        one.answer = answer
        loop = CheckLoop(live.proxy.fleet, live.proxy.timeouts)
        await loop.round()
        assert live.replica(one).listed is None
        broken = False
        asked = len(one.seen)
        for _ in range(2):
            await loop.round()
            assert live.replica(one).listed == {"m": {"id": "m"}}
        assert [seen.path for seen in one.seen[asked:]] == ["/health", "/v1/models", "/health"]


async def test_a_fault_in_a_check_does_not_end_the_checks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = 0

    async def broken(*given: Any, urgent: bool) -> None:
        nonlocal rounds
        rounds += 1
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(check_loop, "check_health", broken)
    monkeypatch.setattr(check_loop, "CHECK_EVERY_S", 0.0)
    async with gateway("http://127.0.0.1:9") as live:
        checking = asyncio.create_task(CheckLoop(live.proxy.fleet, live.proxy.timeouts).check_forever())
        async with asyncio.timeout(PATIENCE_S):
            while rounds < 3:
                await asyncio.sleep(0)
        checking.cancel()
    assert len(logged(caplog, "check-failed")) == 1
