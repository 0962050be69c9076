"""`weft top`: its JSON and CSV, servers and gateways, and servers that go away."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.pure.commands import refused_line, weft
from tests.pure.servers import Exchange, serving, weft_server
from tests.pure.worlds import FakeEngine, World, saying
from weft.cli import top, top_watch
from weft.cli.top import Look
from weft.cli.top_csv import COLUMNS, MISSING, csv_header, csv_lines
from weft.cli.top_view import Sparks, page
from weft.cli.top_watch import Target, Watch, core_ticks
from weft.monitor.figures import FINDING_FIELDS, GPU_FIELDS, MODEL_FIELDS, RANK_FIELDS, join_figures
from weft.monitor.finding import Limits

GPU = {
    "index": 0,
    "name": "NVIDIA H100, 80GB",
    "utilization": 93,
    "memory_utilization": 41,
    "memory_used_bytes": 64 << 30,
    "memory_total_bytes": 80 << 30,
    "power_w": 612.5,
    "sm_clock_mhz": 1755,
    "temperature_c": 61,
    "pcie_tx_Bps": 1.5e9,
    "pcie_rx_Bps": 0.5e9,
    "nvlink_tx_Bps": None,
    "nvlink_rx_Bps": None,
    "processes": [{"pid": 7, "name": "python", "used_bytes": 1 << 30}],
    "ranks": [],
}
MODEL = {
    "name": "m",
    "running": 3,
    "waiting": 1,
    "kv_usage": 0.5,
    "prefix_hit_rate": None,
    "ttft_s": {"p50": 0.1, "p95": 0.4},
    "itl_s": {"p50": 0.01, "p95": None},
    "tok_s": 1234.5,
}
RANK = {"rank": 0, "device": "cuda:0", "layers": 30, "compute": 0.75, "communication": None, "waiting": 0.25}
FINDING = {"code": "straggler", "text": "rank 1 is slow", "value": 2.0, "remedy": "--tensor-split 2,1"}


def figures(node: str = "rig", ranks: tuple[int, ...] = (0,), **more: Any) -> dict[str, Any]:
    """One server's answer to GET /monitor; it has more fields than `weft top` prints."""
    return {
        "time": 1.0,
        "nodes": [{"node": node, "gpus": [{**GPU, "ranks": list(ranks), "power_limit_w": 700.0}]}],
        "models": [MODEL],
        "ranks": [{**RANK, "rank": rank, "stage": 0, "node": node, "first_layer": 0} for rank in ranks],
        "diagnosis": [FINDING],
    } | more


async def answering(exchange: Exchange, answers: dict[str, Any]) -> None:
    found = answers.get(exchange.path)
    if found is None:
        exchange.refuse("404 Not Found", b"{}")
    elif isinstance(found, str):
        exchange.refuse("401 Unauthorized", json.dumps({"error": {"code": found}}).encode())
    else:
        exchange.refuse("200 OK", json.dumps(found).encode())


def keyed(exchange: Exchange) -> str:
    return exchange.headers.get("authorization", "")


# --- one object ---


def test_the_fields_of_json() -> None:
    joined = join_figures([figures()], {"node": "rig", "gpus": [GPU | {"index": 1}]}, 5.0)
    assert list(joined) == ["time", "nodes", "models", "ranks", "diagnosis"] and joined["time"] == 5.0
    (node,) = joined["nodes"]
    assert list(node) == ["node", "gpus"] and [gpu["index"] for gpu in node["gpus"]] == [0, 1]
    assert [list(gpu) for gpu in node["gpus"]] == [list(GPU_FIELDS)] * 2 and node["gpus"][0]["ranks"] == [0]
    assert [list(row) for row in joined["models"]] == [list(MODEL_FIELDS)]
    assert [list(row) for row in joined["ranks"]] == [list(RANK_FIELDS)]
    assert [list(row) for row in joined["diagnosis"]] == [list(FINDING_FIELDS)]


def test_two_servers_on_one_gpu() -> None:
    joined = join_figures([figures(ranks=(0,)), figures(ranks=(1,)), figures(node="other")], None, 0.0)
    assert [(node["node"], node["gpus"][0]["ranks"]) for node in joined["nodes"]] == [("rig", [0, 1]), ("other", [0])]


def test_csv_has_the_columns_of_nvidia_smi() -> None:
    asked = ["index", "name", "utilization.gpu", "utilization.memory", "memory.used", "memory.total", "temperature.gpu"]
    names = [name.partition(" [")[0] for name in csv_header().split(", ")]
    assert [name for name in names if name in asked] == asked
    (line,) = csv_lines(join_figures([figures()], None, 0.0))
    values = dict(zip(names, line.split(", "), strict=True))
    assert (values["utilization.gpu"], values["memory.used"], values["power.draw"]) == ("93 %", "65536 MiB", "612.50 W")
    assert values["name"] == "NVIDIA H100  80GB" and values["nvlink.tx"] == MISSING and values["host"] == "rig"
    assert len(COLUMNS) == len(names) - 2


def test_the_page_fits_any_width() -> None:
    look = Look([("http://rig:8000", figures())], join_figures([figures()], None, 0.0), ["http://b: no answer"], {})
    for width in (40, 80, 200):
        out = io.StringIO()
        Console(file=out, width=width, force_terminal=False).print(page(look, Sparks()))
        text = out.getvalue()
        assert max(map(len, text.splitlines())) <= width
        for word in ("straggler", "--tensor-split", "no answer"):
            assert word in text
    assert Sparks().line("a", None) == "▁"


def test_ranks_and_findings_of_several_servers_have_their_url() -> None:
    servers = [("http://rig:8000", figures()), ("http://other:8001", figures(node="other", diagnosis=[]))]
    out = io.StringIO()
    look = Look(servers, join_figures([one for _, one in servers], None, 0.0), [], {})
    Console(file=out, width=200).print(page(look, Sparks()))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert any(line.startswith("http://rig:8000: straggler: ") for line in lines)
    assert lines.index("http://rig:8000") < lines.index("http://other:8001"), "above their ranks"


def test_cores(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu  9 9 9 9 9 9 9 9 0 0\ncpu3 10 0 10 70 10 0 0 0 0 0\nintr 5\n")
    assert core_ticks(tmp_path) == {3: (20, 100)} and core_ticks(tmp_path / "nothing") == {}


# --- servers ---


async def test_a_server_and_one_that_is_not_there() -> None:
    async with serving(lambda one: answering(one, {"/monitor": figures()})) as server:
        watch = Watch([server.url, "http://127.0.0.1:1"], None, None)
        found, problems = await watch.look()
        watch.close()
    assert found == [(server.url, figures())]
    assert len(problems) == 1 and "127.0.0.1:1" in problems[0] and "cannot connect" in problems[0]


async def test_a_gateway_stands_for_its_upstreams() -> None:
    sent: list[tuple[str, str]] = []

    async def upstream(exchange: Exchange) -> None:
        sent.append((exchange.path, keyed(exchange)))
        await answering(exchange, {"/monitor": figures(node="upstream")})

    async with serving(upstream) as behind:
        status = {"upstreams": [{"url": behind.url}, {"url": "http://127.0.0.1:1"}]}

        async def gateway(exchange: Exchange) -> None:
            sent.append((exchange.path, keyed(exchange)))
            admin = keyed(exchange) == "Bearer admin"
            await answering(exchange, {"/gateway/status": status if admin else "invalid_admin_key"})

        async with serving(gateway) as front:
            watch = Watch([front.url], "api", "admin")
            found, problems = await watch.look()
            watch.close()
    assert [(url, answer["nodes"][0]["node"]) for url, answer in found] == [(behind.url, "upstream")]
    assert len(problems) == 1 and problems[0].startswith("http://127.0.0.1:1 (of ")
    assert sent == [
        ("/gateway/status", "Bearer api"),
        ("/gateway/status", "Bearer admin"),
        ("/monitor", ""),
    ], "no key goes to a URL that the user has not named, and the admin key to gateways only"


async def test_what_is_missing_is_said() -> None:
    cases = [
        ({"/gateway/status": "invalid_admin_key"}, "WEFT_ADMIN_KEY"),
        ({"/gateway/status": "invalid_api_key", "/monitor": "invalid_api_key"}, "VLLM_API_KEY"),
        ({"/monitor": {"other": 1}}, "no figures"),
        ({}, "HTTP 404"),
    ]
    for answers, told in cases:
        async with serving(lambda one, answers=answers: answering(one, answers)) as server:  # type: ignore[misc]
            watch = Watch([server.url], None, None)
            found, problems = await watch.look()
            watch.close()
        assert not found and len(problems) == 1 and told in problems[0], problems


async def test_a_server_that_goes_away_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_watch, "PATIENCE_S", 0.1)
    silent = asyncio.Event()

    async def moody(exchange: Exchange) -> None:
        if silent.is_set():
            await asyncio.sleep(0.3)
        await answering(exchange, {"/monitor": figures()})

    async with serving(moody) as server:
        watch = Watch([server.url], None, None)
        seen = []
        for quiet in (False, True, False):
            (silent.set if quiet else silent.clear)()
            found, problems = await watch.look()
            seen.append((len(found), len(problems)))
        watch.close()
    assert seen == [(1, 0), (0, 1), (1, 0)]


async def test_a_server_s_own_answer() -> None:
    async with weft_server(World()) as live:
        target = Target(live.url)
        assert await target.upstreams() is None
        found = await target.figures()
        target.close()
    assert [row["rank"] for row in found["ranks"]] == [0, 1] and found["models"][0]["name"] == "tiny"
    joined = join_figures([found], None, 0.0)
    assert joined["diagnosis"] == [] and [row["layers"] for row in joined["ranks"]] == [30, 30]


async def test_a_client_that_does_not_read() -> None:
    world = World(FakeEngine(saying("x" * 40_000)), max_model_len=50_000)
    world.service.monitor.limits = Limits(unread_s=0.02)
    async with weft_server(world) as live:
        client = await live.connect()
        client.writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        body = json.dumps({"model": "tiny", "prompt": "ab", "max_tokens": 40_000, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        await client.send(head.encode() + body)
        for _ in range(400):
            await asyncio.sleep(0.02)
            if world.service.monitor.unread_s():
                break
        await world.service.monitor.refresh()
        await asyncio.sleep(0.05)
        monitor = world.service.monitor
        monitor._clock = lambda: 1e9  # the last snapshot is not fresh any more
        await monitor.refresh()
        assert [finding.code for finding in monitor.findings] == ["slow_client"]
        assert await world.metric("weft:diagnosis", code="slow_client") == 1.0
        client.writer.transport.abort()
        for _ in range(400):
            await asyncio.sleep(0.01)
            if not world.service.monitor.unread_s():
                break
        assert not world.service.monitor.unread_s(), "nothing is kept of a client that has gone"


# --- the command ---


def test_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_watch, "local_urls", tuple)
    monkeypatch.setattr(top, "BETWEEN_S", 0.01)
    status, out, _ = weft("top", "--json")
    (line,) = out.splitlines()
    assert status == 0 and list(json.loads(line)) == ["time", "nodes", "models", "ranks", "diagnosis"]
    status, out, _ = weft("top", "--once")
    assert status == 0 and "No server of this user" in out
    status, out, _ = weft("top", "--once", "--format", "csv")
    assert status == 0 and out.startswith(csv_header())


def test_no_server_answers() -> None:
    status, out, err = weft("top", "--json", "--url", "http://127.0.0.1:1", "--url", "http://127.0.0.1:2")
    assert status == 1 and json.loads(out)["ranks"] == [] and err.count("cannot connect") == 2
    refused_line("top --interval 0", 2, "invalid-flag-value", "0")
