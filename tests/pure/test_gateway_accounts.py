"""The gateway's ledger, rates, quotas, budget and overflow."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.pure.gateways import answer_json, answer_status, gateway, never, upstream
from tests.pure.servers import PATIENCE_S, Exchange
from tests.pure.worlds import refused
from tests.refusals import refuses
from weft.errors import ConfigError
from weft.gateway.config import make_config
from weft.gateway.ledger import DAY_HOURS, HOUR_S, Amount, Ledger

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


def test_nothing_is_lost_by_a_kill(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger")
    code = (
        "import os, signal; from weft.gateway.ledger import Amount, Ledger\n"
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
            while (await live.chat()).status_code != 200:
                await asyncio.sleep(0.005)
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
        assert "usage" not in answers[0].text or not fields  # the client of a stream did not ask for it
        rows = (await live.client.get("/gateway/status")).json()["spending"]["usage_day"]
        assert [(row["key"], row["requests"], row["prompt_tokens"], row["completion_tokens"]) for row in rows] == [
            ("a", 3, 30, 15)
        ]


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
