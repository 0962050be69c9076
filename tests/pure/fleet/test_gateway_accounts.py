"""The gateway's ledger, rates, quotas, budget and overflow."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.log_events import logged
from tests.pure.gateways import CHAT, answer_json, answer_status, gateway, hang_up, never, upstream
from tests.pure.servers import PATIENCE_S, Exchange
from tests.pure.worlds import refused
from tests.refusals import refuses
from weft.api.server.openapi import OPERATIONS
from weft.errors import ConfigError
from weft.fleet.accounts.ledger import DAY_HOURS, HOUR_S, KEPT_HOURS, Amount, Ledger
from weft.fleet.accounts.prices import TOOL_TOKENS
from weft.fleet.accounts.rates import ACTIVE_S, Shares
from weft.fleet.gateway.accounts import WITHOUT_ANSWER
from weft.fleet.gateway.completion import COUNTED
from weft.fleet.upstreams.config import make_config
from weft.fleet.upstreams.paths import PUBLIC
from weft.http.errors import HttpError
from weft.machine.sqlite_files import copy_path

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
PRICE = {"input": 1.0, "output": 2.0}
COST = (10 * 1.0 + 5 * 2.0) / 1e6


async def answer_usage(exchange: Exchange) -> None:
    """Answer like a cloud: whole or streamed, with the usage if it is asked for."""
    if not exchange.json.get("stream"):
        body = json.dumps({"model": exchange.json["model"], "choices": [], "usage": USAGE}).encode()
        exchange.head("200 OK", "Content-Type: application/json", f"Content-Length: {len(body)}")
        exchange.writer.write(body)
        return
    exchange.stream()
    exchange.event({"id": "1", "model": exchange.json["model"], "choices": [{"index": 0, "text": "a"}]})
    if (exchange.json.get("stream_options") or {}).get("include_usage"):
        exchange.event({"id": "1", "model": exchange.json["model"], "choices": [], "usage": USAGE})
    exchange.event(b"[DONE]")
    exchange.end()


# The ledger


def test_what_was_reserved_is_replaced_by_what_was_taken(tmp_path: Path) -> None:
    now = 10.0 * HOUR_S
    ledger = Ledger(str(tmp_path / "ledger"), lambda: now)
    first = ledger.reserve("a", "m", "u", Amount(100, 50, 2.0))
    second = ledger.reserve("b", "m", "u", Amount(10, 10, 1.0))
    assert ledger.dollars(1) == 3.0 and ledger.tokens("a", 1) == 150
    ledger.settle(first, Amount(90, 5, 0.5))
    assert ledger.dollars(1) == 1.5 and ledger.tokens("a", 1) == 95
    now += HOUR_S
    assert ledger.dollars(1) == 0.0 and ledger.dollars(2) == 1.5
    ledger.settle(second, Amount(), requests=0)
    assert ledger.dollars(DAY_HOURS) == 0.5
    assert [(row["key"], row["requests"]) for row in ledger.rows(DAY_HOURS)] == [("a", 1)]
    now += DAY_HOURS * HOUR_S
    assert ledger.dollars(DAY_HOURS) == 0.0 and not ledger.rows(DAY_HOURS)
    ledger.close()


def test_a_ledger_forgets_after_some_weeks(tmp_path: Path) -> None:
    now = 0.0
    ledger = Ledger(str(tmp_path / "ledger"), lambda: now)
    kept = []
    for _ in range(4):
        ledger.settle(ledger.reserve("a", "m", "u", Amount(1, 1, 1.0)), Amount(1, 1, 1.0))
        kept.append(ledger.dollars(10 * KEPT_HOURS))
        for _ in range(KEPT_HOURS // 2 // DAY_HOURS):
            now += DAY_HOURS * HOUR_S
            ledger.settle(ledger.reserve("a", "m", "u", Amount()), Amount(), requests=0)
        now += KEPT_HOURS * HOUR_S / 2 % (DAY_HOURS * HOUR_S)
    assert kept == [1.0, 2.0, 2.0, 2.0]
    ledger.close()


def spend(ledger: Ledger, dollars: float) -> None:
    """One request that has ended."""
    ledger.settle(ledger.reserve("a", "m", "u", Amount(1, 1, dollars)), Amount(1, 1, dollars))


@pytest.mark.parametrize("opened_wrong", [False, True])
def test_a_clock_that_is_wrong_for_some_hours_empties_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, opened_wrong: bool
) -> None:
    path, wrong = str(tmp_path / "ledger"), 10 * 365 * DAY_HOURS * HOUR_S
    now = 500_000.0 * HOUR_S
    ledger = Ledger(path, lambda: now)
    spend(ledger, 5.0)
    now += wrong
    if opened_wrong:
        ledger.close()
        ledger = Ledger(path, lambda: now)
    for _ in range(5):
        spend(ledger, 0.25)
        now += HOUR_S
    assert logged(caplog, "clock-jumped")
    now -= wrong + 5 * HOUR_S
    spend(ledger, 1.0)
    assert ledger.dollars(DAY_HOURS) == 6.0 + 5 * 0.25  # rows of the future count: the budget is never exceeded
    ledger.close()


def test_a_ledger_that_was_not_used_for_long_forgets_a_day_later(tmp_path: Path) -> None:
    now = 500_000.0 * HOUR_S
    ledger = Ledger(str(tmp_path / "ledger"), lambda: now)
    spend(ledger, 5.0)
    now += 2 * KEPT_HOURS * HOUR_S
    for hour in range(DAY_HOURS + 1):
        spend(ledger, 0.0)
        assert ledger.dollars(10 * KEPT_HOURS) == (5.0 if hour < DAY_HOURS else 0.0)
        now += HOUR_S
    ledger.close()


OLD = Path(__file__).parents[2] / "data" / "ledgers" / "ledger-93539c4e.sqlite"
OLD_HOUR = 500_002  # of its last rows


def test_a_ledger_of_an_older_version_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    shutil.copyfile(OLD, path)
    path.chmod(0o644)
    ledger = Ledger(str(path), lambda: OLD_HOUR * float(HOUR_S))
    # Three hours of 0.75 dollars, and 0.5 that were reserved when it was closed.
    assert ledger.dollars(3) == 3 * 0.75 + 0.5 and ledger.dollars(1) == 0.75 + 0.5
    assert ledger.tokens("team-a", 3) == 3 * (130 + 1300) and ledger.tokens("team-b", 3) == 3 * 130 + 30
    spend(ledger, 1.0)
    ledger.close()
    kept = copy_path(path, 0)
    assert {file.stat().st_mode & 0o777 for file in (path, kept)} == {0o600}
    with closing(sqlite3.connect(kept)) as old, closing(sqlite3.connect(OLD)) as given:
        for table in ("spent", "reserved"):
            assert (
                old.execute(f"SELECT * FROM {table}").fetchall() == given.execute(f"SELECT * FROM {table}").fetchall()
            )
    again = Ledger(str(path), lambda: OLD_HOUR * float(HOUR_S))
    assert again.dollars(3) == 3 * 0.75 + 0.5 + 1.0
    again.close()


def test_a_ledger_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger")
    Ledger(path).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")
    with refuses(ConfigError, "file-too-new", path, 99):
        Ledger(path)


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("dollars", "'many'"),
        ("dollars", "-1e9"),
        ("dollars", "9e999"),
        ("dollars", "NULL"),
        ("dollars", "x'00'"),
        ("prompt_tokens", "-5"),
        ("completion_tokens", "'x'"),
        ("completion_tokens", "1.5"),
        ("prompt_tokens", "9223372036854775807"),
    ],
)
@pytest.mark.parametrize("table", ["spent", "reserved"])
def test_amounts_that_are_none_are_refused(tmp_path: Path, table: str, column: str, value: str, older: bool) -> None:
    path = tmp_path / "ledger"
    if older:
        shutil.copyfile(OLD, path)
    else:
        ledger = Ledger(str(path), lambda: OLD_HOUR * float(HOUR_S))
        spend(ledger, 1.0)
        ledger.reserve("a", "m", "u", Amount(1, 1, 1.0))
        ledger.close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA ignore_check_constraints = TRUE")
        database.execute(f"UPDATE {table} SET {column} = {value}")
        database.commit()
    before = path.read_bytes()
    with refuses(ConfigError, "damaged-ledger", path, table):
        Ledger(str(path))
    assert path.read_bytes() == before


def test_nothing_but_amounts_is_written(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "ledger"))
    for dollars in (float("inf"), float("nan"), -1.0):
        with pytest.raises(sqlite3.IntegrityError):
            spend(ledger, dollars)
    assert ledger.dollars(1) == 0.0
    ledger.close()


@pytest.mark.parametrize("how", ["renamed", "replaced", "overwritten"])
async def test_a_file_that_is_taken_away_is_noticed(tmp_path: Path, how: str) -> None:
    path = tmp_path / "ledger"
    async with upstream() as one, gateway(one.url, ledger=str(path)) as live:
        one.answer = answer_usage
        assert (await live.chat()).status_code == 200
        aside = tmp_path / "aside"
        if how == "overwritten":
            os.truncate(path, 10)
        else:
            path.rename(aside)
        if how == "replaced":
            path.write_bytes(b"x" * 100_000)
        message = refused(await live.chat(), 503, code="ledger_not_written")
        assert str(tmp_path) not in message and len(one.seen) == 1
        if how != "overwritten":
            aside.rename(path)
            assert (await live.chat()).status_code == 200
        live.assert_idle()


def test_nothing_is_lost_by_a_kill(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger")
    code = (
        "import os, signal; from weft.fleet.accounts.ledger import Amount, Ledger\n"
        f"ledger = Ledger({path!r}, lambda: 0.0)\n"
        "for _ in range(20): ledger.settle(ledger.reserve('a', 'm', 'u', Amount(9, 9, 9.0)), Amount(1, 2, 0.5))\n"
        "ledger.reserve('a', 'm', 'u', Amount(100, 0, 4.0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    ledger = Ledger(path, lambda: 0.0)
    assert ledger.dollars(1) == 20 * 0.5 + 4.0 and ledger.tokens("a", 1) == 20 * 3 + 100
    assert ledger.rows(1)[0]["requests"] == 21
    with refuses(ConfigError, "cannot-use-ledger", path):
        Ledger(path)  # it belongs to one gateway
    ledger.close()


def test_a_file_belongs_to_one_gateway_from_its_opening(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger")
    Ledger(path).close()
    ledger = Ledger(path)  # which writes nothing
    with refuses(ConfigError, "cannot-use-ledger", path):
        Ledger(path)
    code = f"from weft.fleet.accounts.ledger import Ledger; Ledger({path!r})"
    other = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert other.returncode and re.search(r"\bConfigError: .*" + re.escape(path), other.stderr)
    ledger.settle(ledger.reserve("a", "m", "u", Amount(1, 1, 1.0)), Amount(1, 1, 0.5))
    ledger.close()
    again = Ledger(path)
    assert again.dollars(1) == 0.5
    again.close()


def test_a_file_that_is_no_ledger(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"not a database" * 100)
    with refuses(ConfigError, "cannot-use-ledger", "x"):
        Ledger(str(tmp_path / "x"))


# Keys


def write_keys(folder: Path, text: str) -> str:
    (folder / "keys.yaml").write_text(text)
    return str(folder / "keys.yaml")


@pytest.mark.parametrize(("limit", "most"), [("rpm: 3", 3), ("tpm: 100", 3)], ids=str)
async def test_rates_of_a_key(tmp_path: Path, limit: str, most: int) -> None:
    pytest.importorskip("limits", reason="rates need the package limits")
    keys = write_keys(tmp_path, f"[{{name: a, key: one, {limit}}}, {{name: b, key: two}}]")
    async with upstream() as one, gateway(one.url, keys=keys) as live:
        live.client.headers = httpx.Headers({"Authorization": "Bearer one"})
        body = b'{"model": "m", "pad": "' + b"x" * 90 + b'"}'
        answers = [await live.client.post("/v1/completions", content=body) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * most + [429] * (5 - most)
        refused(answers[-1], 429, code="rate_limit")
        assert int(answers[-1].headers["retry-after"]) >= 1
        live.client.headers = httpx.Headers({"Authorization": "Bearer two"})
        assert (await live.client.post("/v1/completions", content=body)).status_code == 200
        live.assert_idle()


async def test_a_request_that_one_limit_forbids_does_not_count_for_the_other(tmp_path: Path) -> None:
    pytest.importorskip("limits", reason="rates need the package limits")
    keys = write_keys(tmp_path, "[{name: a, key: one, rpm: 2, tpm: 1000}]")
    async with upstream() as one, gateway(one.url, keys=keys) as live:
        live.client.headers = httpx.Headers({"Authorization": "Bearer one"})
        answers = [await live.chat() for _ in range(30)]
        assert [answer.status_code for answer in answers] == [200] * 2 + [429] * 28
        refused(answers[-1], 429, code="rate_limit")
        rates = live.proxy.accounts._rates._rates
        item, limiter = rates._items["a", "tokens"], rates._limiter
        assert limiter is not None
        # Two chats of less than 100 tokens each, not thirty.
        assert limiter.get_window_stats(item, "a", "tokens").remaining > 1000 - 200
        live.assert_idle()


@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=str)
async def test_tokens_of_answers_count_without_a_ledger(tmp_path: Path, fields: dict[str, Any]) -> None:
    pytest.importorskip("limits", reason="rates need the package limits")
    keys = write_keys(tmp_path, "[{name: a, key: one, tpm: 60}, {name: b, key: two}]")

    async def long(exchange: Exchange) -> None:
        usage = {**USAGE, "completion_tokens": 1000}
        if not exchange.json.get("stream"):
            body = json.dumps({"choices": [], "usage": usage}).encode()
            exchange.head("200 OK", "Content-Type: application/json", f"Content-Length: {len(body)}")
            exchange.writer.write(body)
            return
        exchange.stream()
        if (exchange.json.get("stream_options") or {}).get("include_usage"):
            exchange.event({"choices": [], "usage": usage})
        exchange.event(b"[DONE]")
        exchange.end()

    async with upstream() as one, gateway(one.url, keys=keys) as live:
        one.answer = long
        live.client.headers = httpx.Headers({"Authorization": "Bearer one"})
        fields = {**fields, "stream_options": {"include_usage": False, "pad": "x" * 10}} if fields else {}
        first = await live.chat(**fields)
        assert first.status_code == 200 and ("usage" in first.text) == (not fields)
        if fields:
            assert one.seen[0].json["stream_options"] == {"include_usage": True}
        refused(await live.chat(**fields), 429, code="rate_limit")
        live.client.headers = httpx.Headers({"Authorization": "Bearer two"})
        assert (await live.chat(**fields)).status_code == 200  # whose tokens nobody counts
        assert one.seen[-1].json.get("stream_options") == fields.get("stream_options")
        live.assert_idle()


PARTS = 40  # of an answer, before its client leaves


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("with_ledger", [False, True])
async def test_tokens_of_an_answer_count_if_its_client_leaves_early(
    tmp_path: Path, path: str, with_ledger: bool
) -> None:
    """The server heeds no limit, so that more comes than was reserved."""
    pytest.importorskip("limits", reason="rates need the package limits")
    keys = write_keys(tmp_path, f"[{{name: a, key: one, admin: true, tpm: {PARTS + 25}}}]")

    async def talk(exchange: Exchange) -> None:
        exchange.stream()
        if path == "/v1/messages":
            begun = {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}}
            exchange.chunk(b"event: message_start\ndata: " + json.dumps(begun).encode() + b"\n\n")
        for _ in range(PARTS):
            exchange.event({"choices": [{"index": 0, "delta": {"content": "x"}}]})
        await exchange.writer.drain()
        await never(exchange)

    ledger = {"ledger": str(tmp_path / "ledger")} if with_ledger else {}
    async with upstream() as one, gateway(one.url, keys=keys, **ledger) as live:
        one.answer = talk
        live.client.headers = httpx.Headers({"Authorization": "Bearer one"})
        asked = {**CHAT, "stream": True, "max_tokens": 5}
        async with live.client.stream("POST", path, json=asked) as answer:
            seen = ""
            async for text in answer.aiter_text():
                seen += text
                if seen.count('"x"') == PARTS:
                    break
        async with asyncio.timeout(PATIENCE_S):
            while live.proxy.running:
                await asyncio.sleep(0.005)
        refused(await live.chat(), 429, code="rate_limit")
        if with_ledger:
            (row,) = (await live.client.get("/gateway/status")).json()["spending"]["usage_day"]
            assert PARTS <= row["completion_tokens"] <= PARTS + 1
        live.assert_idle()


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": -5, "completion_tokens": 1},
        {"prompt_tokens": 1, "completion_tokens": 2**53},
        {"prompt_tokens": True, "completion_tokens": 1},
        {"prompt_tokens": 1.0, "completion_tokens": 1},
        {"prompt_tokens": "1", "completion_tokens": 1},
        {"prompt_tokens": 1},
    ],
    ids=str,
)
async def test_figures_that_can_be_none_count_as_none(tmp_path: Path, usage: dict[str, Any]) -> None:
    async with upstream() as own, upstream() as cloud:
        cloud.answer = answer_status("200 OK", body=json.dumps({"choices": [], "usage": usage}).encode())
        own.answer = answer_status("429 X")
        async with gateway(**overflowing(own.url, cloud.url, tmp_path / "ledger")) as live:
            assert (await live.chat(max_tokens=100)).status_code == 200
            ledger = live.proxy.accounts.ledger
            assert ledger is not None
            most = 100 * PRICE["output"] / 1e6  # of the answer, beside the prompt's
            assert most < ledger.dollars(1) < 2 * most
            assert ledger.rows(1)[0]["completion_tokens"] == 100
            live.assert_idle()


async def test_a_ledger_that_cannot_be_written_leaves_nothing_running(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, "[{name: a, key: one, concurrent: 1}]")
    async with upstream() as one, gateway(one.url, keys=keys, ledger=str(tmp_path / "ledger")) as live:
        one.answer = answer_usage
        live.client.headers = httpx.Headers({"Authorization": "Bearer one"})
        ledger = live.proxy.accounts.ledger
        assert ledger is not None

        def full(*given: Any, **named: Any) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        reserve, settle = ledger.reserve, ledger.settle
        ledger.reserve = full  # type: ignore[assignment, method-assign]
        refused(await live.chat(), 503, code="ledger_not_written")
        ledger.reserve, ledger.settle = reserve, full  # type: ignore[assignment, method-assign]
        assert (await live.chat()).status_code == 200
        ledger.settle = settle  # type: ignore[method-assign]
        assert (await live.chat()).status_code == 200  # the key's only request at once has ended
        live.assert_idle()


async def test_a_ledger_that_cannot_be_read_leaves_nothing_running(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, "[{name: a, key: one, quota: {hour: 600}}, {name: b, key: two}]")
    async with upstream() as own, upstream() as cloud:
        config = overflowing(own.url, cloud.url, tmp_path / "ledger", keys=keys)
        async with gateway(**config) as live:
            own.answer, cloud.answer = answer_status("429 X"), answer_usage
            ledger = live.proxy.accounts.ledger
            assert ledger is not None

            def broken(*given: Any, **named: Any) -> None:
                raise sqlite3.OperationalError("disk I/O error")

            ledger.tokens = ledger.dollars = broken  # type: ignore[assignment, method-assign]
            live.client.headers = httpx.Headers({"Authorization": "Bearer one"})
            refused(await live.chat(), 503, code="ledger_not_read")
            live.client.headers = httpx.Headers({"Authorization": "Bearer two"})
            assert (await live.chat(max_tokens=5)).status_code == 429 and not cloud.seen  # nothing overflows
            live.assert_idle()


async def test_a_reservation_that_cannot_be_cancelled_stays(tmp_path: Path) -> None:
    async with upstream() as one, gateway(one.url, ledger=str(tmp_path / "ledger")) as live:
        one.answer = hang_up
        ledger = live.proxy.accounts.ledger
        assert ledger is not None

        def full(*given: Any, **named: Any) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        ledger.settle = full  # type: ignore[assignment, method-assign]
        refused(await live.chat(max_tokens=70), 502, code="closed_before_response")
        assert ledger.tokens("", 1) > 70
        live.assert_idle()


async def test_whatever_ends_a_request_early_gives_its_body_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with upstream() as one, gateway(one.url) as live:

        def fails(exchange: object) -> None:
            raise RuntimeError("unforeseen")

        monkeypatch.setattr(live.proxy.accounts, "enter", fails)
        assert (await live.chat()).status_code == 500
        live.assert_idle()


async def test_the_ledger_keeps_names_that_an_upstream_lists(tmp_path: Path) -> None:
    async with upstream() as one, gateway(one.url, ledger=str(tmp_path / "ledger")) as live:
        one.answer = answer_usage
        ledger = live.proxy.accounts.ledger
        assert ledger is not None
        for name in ("m", "invented", "another"):
            assert (await live.chat(model=name)).status_code == 200
        live.replica(one).listed = {"m": {}}
        assert (await live.chat()).status_code == 200
        assert [(row["model"], row["requests"]) for row in ledger.rows(1)] == [("", 3), ("m", 1)]


async def test_requests_of_a_key_at_once(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, "[{name: a, key: one, concurrent: 2}]")
    async with upstream() as one, gateway(one.url, keys=keys) as live:
        live.client.headers = httpx.Headers({"Authorization": "Bearer one"})
        one.answer = never
        asking = [asyncio.create_task(live.chat()) for _ in range(2)]
        async with asyncio.timeout(PATIENCE_S):
            while len(one.seen) < 2:
                await asyncio.sleep(0.005)
        refused(await live.chat(), 429, code="too_many_at_once")
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        one.answer = answer_json
        async with asyncio.timeout(PATIENCE_S):
            while live.proxy.running:
                await asyncio.sleep(0.005)
        assert (await live.chat()).status_code == 200
        live.assert_idle()


@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=str)
async def test_usage_and_quota_of_a_key(tmp_path: Path, fields: dict[str, Any]) -> None:
    keys = write_keys(tmp_path, "[{name: a, key: one, admin: true, quota: {hour: 60}}]")
    async with upstream() as one, gateway(one.url, keys=keys, ledger=str(tmp_path / "ledger")) as live:
        one.answer = answer_usage
        live.client.headers = httpx.Headers({"Authorization": "Bearer one"})
        answers = [await live.chat(**fields, max_tokens=5) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 3 + [429] * 2
        refused(answers[-1], 429, code="quota_exceeded")
        assert re.search(r"'a' .*\b45 .*\b60 ", answers[-1].text)
        assert "usage" not in answers[0].text or not fields  # the client of a stream did not ask for it
        rows = (await live.client.get("/gateway/status")).json()["spending"]["usage_day"]
        assert [(row["key"], row["requests"], row["prompt_tokens"], row["completion_tokens"]) for row in rows] == [
            ("a", 3, 30, 15)
        ]


def test_the_tokens_of_every_endpoint_with_a_body_are_counted_or_it_makes_none() -> None:
    """Keys with a quota get 403 from the others."""
    asked = {path for (method, path), operation in OPERATIONS.items() if method == "POST" and operation.request}
    assert asked & PUBLIC <= {*COUNTED, *WITHOUT_ANSWER}


@pytest.mark.parametrize(("path", "status"), [("/v1/moderations", 403), ("/api/chat", 200), ("/tokenize", 200)])
async def test_a_key_with_a_quota_gets_answers_that_are_counted(tmp_path: Path, path: str, status: int) -> None:
    keys = write_keys(tmp_path, "[{name: a, key: one, quota: {day: 60000}}]")
    async with upstream() as one, gateway(one.url, keys=keys, ledger=str(tmp_path / "ledger")) as live:
        live.client.headers = httpx.Headers({"Authorization": "Bearer one"})
        assert (await live.client.post(path, json={"model": "m"})).status_code == status
        assert len(one.seen) == (status == 200)
        assert (await live.client.get("/version")).status_code == 200
        live.assert_idle()


# Shares


def fill(shares: Shares, name: str) -> int:
    """Number of requests that a key gets beside those that run."""
    count = 0
    with suppress(HttpError):
        for count in range(1, 1000):  # noqa: B007
            shares.enter(name)
        return count
    return count - 1


def test_a_key_alone_gets_all_and_two_get_their_shares() -> None:
    now = 0.0
    shares = Shares(12, {"a": 3.0, "b": 1.0}, lambda: now)
    assert fill(shares, "a") == 12
    assert fill(shares, "b") == 0  # nobody is sent away, but what ends is b's
    for _ in range(4):
        shares.leave("a")
    assert fill(shares, "a") == 1  # up to its nine of twelve
    assert fill(shares, "b") == 3
    now = ACTIVE_S + 1
    for _ in range(3):
        shares.leave("b")
    assert fill(shares, "a") == 3  # b has sent nothing for a while
    assert fill(shares, "b") == 0


def test_room_that_others_have_a_right_to_stays_free() -> None:
    shares = Shares(10, {"a": 1.0, "b": 1.0}, lambda: 0.0)
    shares.enter("b")
    assert fill(shares, "a") == 5
    assert fill(shares, "b") == 4
    assert fill(shares, "") == 0


async def test_requests_of_all_keys_at_once(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, "[{name: a, key: one, weight: 3}, {name: b, key: two, concurrent: 1}]")
    async with upstream() as one, gateway(one.url, keys=keys, concurrent=2) as live:
        one.answer = never
        asking = []
        for count, key in enumerate(("one", "two"), 1):
            live.client.headers = httpx.Headers({"Authorization": f"Bearer {key}"})
            asking.append(asyncio.create_task(live.chat()))
            async with asyncio.timeout(PATIENCE_S):
                while len(one.seen) < count:
                    await asyncio.sleep(0.005)
        refused(await live.chat(), 429, code="too_many_at_once")
        live.client.headers = httpx.Headers({"Authorization": "Bearer one"})
        refused(await live.chat(), 429, code="share_exceeded")
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        one.answer = answer_json
        async with asyncio.timeout(PATIENCE_S):
            while live.proxy.running:
                await asyncio.sleep(0.005)
        assert (await live.chat()).status_code == 200
        live.assert_idle()


@pytest.mark.parametrize(("weight", "code"), [("1", "weight-without-limit"), ("0", "invalid-field")])
async def test_weights_that_mean_nothing(tmp_path: Path, weight: str, code: str) -> None:
    keys = write_keys(tmp_path, f"[{{name: a, key: one, weight: {weight}}}]")
    with refuses(ConfigError, code):
        async with gateway("http://127.0.0.1:9", keys=keys):
            pass


# Overflow


def overflowing(own: str, cloud: str, ledger: Path, **config: Any) -> dict[str, Any]:
    upstreams = [
        {"url": own, "models": ["m"]},
        {"url": cloud, "models": {"m": "theirs"}, "overflow": True, "price": PRICE},
    ]
    return {"upstreams": upstreams, "ledger": str(ledger), "budget": {"hour": 1.0, "day": 2.0}, **config}


@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=str)
async def test_a_full_upstream_overflows_within_the_budget(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with upstream() as own, upstream() as cloud:
        budget = {"hour": 0.000_8}  # of which a request with max_tokens 100 may take about 0.0003
        config = overflowing(own.url, cloud.url, tmp_path / "ledger", budget=budget)
        async with gateway(**config) as live:
            cloud.answer = answer_usage
            assert (await live.chat(max_tokens=100, **fields)).status_code == 200 and not cloud.seen
            own.answer = answer_status("429 X")
            answer = await live.chat(max_tokens=100, **fields)
            assert answer.status_code == 200 and cloud.seen[-1].json["model"] == "theirs"
            assert "theirs" not in answer.text and '"m"' in answer.text
            ledger = live.proxy.accounts.ledger
            assert ledger is not None and ledger.dollars(1) == pytest.approx(COST)
            cloud.answer = never
            asking = [asyncio.create_task(live.chat(max_tokens=100, **fields)) for _ in range(6)]
            async with asyncio.timeout(PATIENCE_S):
                while sum(task.done() for task in asking) < 4:
                    await asyncio.sleep(0.005)
            assert {task.result().status_code for task in asking if task.done()} == {429}
            assert ledger.dollars(1) <= 0.000_8
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            async with asyncio.timeout(PATIENCE_S):
                while live.proxy.running:
                    await asyncio.sleep(0.005)
            assert COST * 2 < ledger.dollars(1) <= 0.000_8  # nobody knows what a cancelled request cost
            live.assert_idle()


@pytest.mark.parametrize("objective", [{"queue": 1}, {"ttft_s": 1.0}], ids=str)
async def test_requests_overflow_beyond_the_objective(tmp_path: Path, objective: dict[str, Any]) -> None:
    go_on = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await go_on.wait()
        await answer_usage(exchange)

    async with (
        upstream() as own,
        upstream() as cloud,
        gateway(**overflowing(own.url, cloud.url, tmp_path / "ledger", objective=objective)) as live,
    ):
        live.replica(own).prefill_tok_s = 18.0  # a chat of the tests has about 18 tokens
        own.answer, cloud.answer = slow, answer_usage
        asking = [asyncio.create_task(live.chat(max_tokens=5)) for _ in range(2)]
        async with asyncio.timeout(PATIENCE_S):
            while len(own.seen) + len(cloud.seen) < 2:
                await asyncio.sleep(0.005)
        assert (await live.chat(max_tokens=5)).status_code == 200 and cloud.seen
        picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        sent, stayed = len(cloud.seen), len(own.seen)
        asking.append(asyncio.create_task(live.chat(messages=picture)))  # its price has no bound
        async with asyncio.timeout(PATIENCE_S):
            while len(own.seen) == stayed:
                await asyncio.sleep(0.005)
        assert len(cloud.seen) == sent
        go_on.set()
        assert {(await task).status_code for task in asking} == {200}
        live.assert_idle()


@pytest.mark.parametrize(
    ("limits", "sent"),
    [
        ({}, 4096),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 9, "max_completion_tokens": 7}, 9),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
    ],
    ids=str,
)
@pytest.mark.parametrize("only", [None, "max_tokens", "max_completion_tokens"])
async def test_the_larger_limit_is_reserved_and_sent(
    tmp_path: Path, limits: dict[str, int], sent: int, only: str | None
) -> None:
    async with upstream() as own, upstream() as cloud:
        config = overflowing(own.url, cloud.url, tmp_path / "ledger")
        config["upstreams"][1]["limit_field"] = only
        async with gateway(**config) as live:
            own.answer, cloud.answer = answer_status("429 X"), answer_json  # without a usage
            assert (await live.chat(**limits)).status_code == 200
            asked = cloud.seen[-1].json
            names = ("max_tokens", "max_completion_tokens") if only is None else (only,)
            assert {name: asked.get(name) for name in asked if name.startswith("max_")} == dict.fromkeys(names, sent)
            ledger = live.proxy.accounts.ledger
            assert ledger is not None and ledger.rows(1)[0]["completion_tokens"] == sent


async def test_a_completion_has_one_limit(tmp_path: Path) -> None:
    async with (
        upstream() as own,
        upstream() as cloud,
        gateway(**overflowing(own.url, cloud.url, tmp_path / "ledger")) as live,
    ):
        own.answer, cloud.answer = answer_status("429 X"), answer_usage
        body = {"model": "m", "prompt": "a", "max_tokens": 3}
        assert (await live.client.post("/v1/completions", json=body)).status_code == 200
        assert cloud.seen[-1].json == {**body, "model": "theirs"}


PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
UNPRICED: dict[str, bytes] = {
    "limit beyond all": b'"messages": [], "max_tokens": 99999999999999999999999999',
    "part for a cache": b'"messages": [{"content": [{"type": "text", "text": "a", "cache_control": {}}]}]',
    "message for a cache": b'"messages": [{"content": "a", "cache_control": {}}]',
    "call for a cache": b'"messages": [{"tool_calls": [{"id": "a", "cache_control": {}}]}]',
    "tool for a cache": b'"messages": [], "tools": [{"type": "function", "cache_control": {}}]',
    "function for a cache": b'"messages": [], "tools": [{"type": "function", "function": {"cache_control": {}}}]',
    "old function for a cache": b'"messages": [], "functions": [{"name": "f", "cache_control": {}}]',
    "part that is no text": b'"messages": [{"content": [{"type": "text", "text": {}}]}]',
    "picture": b'"messages": ' + json.dumps(PICTURE).encode(),
    "escaped picture": b'"messages": ' + json.dumps(PICTURE).replace("image_url", "image\\u005furl").encode(),
    "search": b'"messages": [], "web_search_options": {}',
    "escaped search": b'"messages": [], "web\\u005fsearch_options": {}',
    "faster tier": b'"messages": [], "service_tier": "priority"',
    "tool of the vendor": b'"messages": [], "tools": [{"type": "web_search"}]',
    "messages that are none": b'"messages": "x"',
    "several choices": b'"messages": [], "n": 2',
}


@pytest.mark.parametrize("fields", UNPRICED.values(), ids=UNPRICED.keys())
async def test_requests_without_a_known_price_do_not_overflow(tmp_path: Path, fields: bytes) -> None:
    async with (
        upstream() as own,
        upstream() as cloud,
        gateway(**overflowing(own.url, cloud.url, tmp_path / "ledger")) as live,
    ):
        own.answer, cloud.answer = answer_status("429 X"), answer_usage
        body = b'{"model": "m", %b}' % fields
        answer = await live.client.post("/v1/chat/completions", content=body)
        assert answer.status_code == 429 and not cloud.seen
        live.assert_idle()


MISCOUNTED: list[dict[str, Any]] = [
    {"max_tokens": 1e5},
    {"max_tokens": True},
    {"max_tokens": 5, "max_completion_tokens": "100000"},
    {"n": "8"},
    {"best_of": 2.0},
    {"stream": 1},
    {"stream": "true"},
    {"stream": True, "stream_options": {"include_usage": True, "Include_Usage": False}},
]


@pytest.mark.parametrize("fields", MISCOUNTED, ids=str)
async def test_what_an_upstream_may_convert_is_refused_where_tokens_count(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with upstream() as own, gateway(own.url, ledger=str(tmp_path / "ledger")) as live:
        assert (await live.chat(**fields)).status_code == 400 and not own.seen
        live.assert_idle()
    async with upstream() as own, gateway(own.url) as live:  # where nothing is counted
        assert (await live.chat(**fields)).status_code == 200


async def test_tools_reserve_what_a_template_may_add(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    reserved = []
    async with upstream() as own, upstream() as cloud:
        config = overflowing(own.url, cloud.url, tmp_path / "ledger")
        async with gateway(**config) as live:
            own.answer, cloud.answer = answer_status("429 X"), answer_json  # without a usage
            ledger = live.proxy.accounts.ledger
            assert ledger is not None
            for fields in ({"user": "u" * 100}, {"tools": tools}):
                before = ledger.dollars(1)
                assert (await live.chat(max_tokens=1, **fields)).status_code == 200
                reserved.append(ledger.dollars(1) - before)
    assert reserved[1] - reserved[0] > (TOOL_TOKENS - 100) * PRICE["input"] / 1e6


async def test_no_request_to_an_overflow_upstream_is_sent_twice(tmp_path: Path) -> None:
    async with (
        upstream() as own,
        upstream() as cloud,
        gateway(**overflowing(own.url, cloud.url, tmp_path / "ledger")) as live,
    ):
        own.answer, cloud.answer = answer_status("429 X"), answer_usage
        assert (await live.chat(max_tokens=5)).status_code == 200
        cloud.answer = hang_up
        assert (await live.chat(max_tokens=5)).status_code == 429
        assert len(cloud.seen) == 2
        live.assert_idle()


async def test_a_body_that_names_fields_twice_overflows_with_the_last(tmp_path: Path) -> None:
    async with (
        upstream() as own,
        upstream() as cloud,
        gateway(**overflowing(own.url, cloud.url, tmp_path / "ledger")) as live,
    ):
        own.answer = answer_status("429 X")
        cloud.answer, raw = answer_usage, b'{"model":"m","max_tokens":5,"messages":[{"content":"a"}]}'
        twice = raw.replace(b'"content":"a"', b'"content":[{"type":"image_url"}],"content":"a"')
        assert (await live.client.post("/v1/chat/completions", content=twice)).status_code == 200
        assert cloud.seen[-1].json["messages"] == [{"content": "a"}]
        sent = int(cloud.seen[-1].headers["content-length"])
        assert sent < len(twice)  # the first one is gone, not only unread


async def test_an_upstream_that_cannot_be_reached_costs_nothing(tmp_path: Path) -> None:
    async with upstream() as own:
        config = overflowing(own.url, "http://127.0.0.1:9", tmp_path / "ledger")
        async with gateway(**config) as live:
            own.answer = answer_status("429 X")
            assert (await live.chat(max_tokens=5)).status_code == 429
            ledger = live.proxy.accounts.ledger
            assert ledger is not None and ledger.dollars(1) == 0.0


async def test_without_a_limit_of_the_client_an_answer_gets_one(tmp_path: Path) -> None:
    async with (
        upstream() as own,
        upstream() as cloud,
        gateway(**overflowing(own.url, cloud.url, tmp_path / "ledger")) as live,
    ):
        own.answer, cloud.answer = answer_status("429 X"), answer_usage
        assert (await live.chat()).status_code == 200
        assert cloud.seen[-1].json["max_tokens"] == 4096


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"budget": None}, "overflow-without-budget"),
        ({"ledger": None}, "overflow-without-budget"),
        ({"budget": {}}, "empty-budget"),
        ({"upstreams": [{"url": "a:1", "overflow": True}]}, "overflow-models"),
        ({"upstreams": [{"url": "a:1", "overflow": True, "models": ["m"], "price": {"input": 1}}]}, "invalid-field"),
        ({"objective": {"ttft": 1}}, "unknown-field"),
    ],
    ids=str,
)
def test_faults(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    with refuses(ConfigError, code):
        make_config({**overflowing("a:1", "b:1", tmp_path / "ledger"), **changes})
