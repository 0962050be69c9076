"""`weft top`: its JSON and CSV, servers and gateways, and servers that go away."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.pure.commands import HERE, refused_line, weft
from tests.pure.servers import Exchange, serving, weft_server
from tests.pure.worlds import FakeEngine, World, saying
from weft.cli.top import top
from weft.cli.top.app import TopApp
from weft.cli.top.sparks import Sparks
from weft.cli.top.tables import page
from weft.cli.top.top import COLUMNS, MISSING, csv_header, csv_lines
from weft.cli.top.watch import ServerWatch, Target, TopSnapshot, core_ticks
from weft.machine.hardware.gpu_figures import GpuFigures
from weft.machine.hardware.topology import Holder
from weft.monitor.figures import FINDING_FIELDS, GPU_FIELDS, MODEL_FIELDS, RANK_FIELDS, join_figures
from weft.monitor.finding import Code, Finding, RuleLimits
from weft.monitor.history import GpuMoment
from weft.monitor.rules import foreign_memory

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
    # Scripts know these; the others are ours.
    assert RANK_FIELDS[:6] == ("rank", "device", "layers", "compute", "communication", "waiting")
    assert MODEL_FIELDS[:4] == ("name", "running", "waiting", "kv_usage")
    assert MODEL_FIELDS[4:8] == ("prefix_hit_rate", "ttft_s", "itl_s", "tok_s")
    assert FINDING_FIELDS[:4] == ("code", "text", "value", "remedy")


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


def printed(snapshot: TopSnapshot, width: int, sparks: Sparks | None = None) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(page(snapshot, sparks or Sparks(), width))
    return out.getvalue()


def look_at(*problems: str, **more: Any) -> TopSnapshot:
    """A look at one server, with other fields in its answer."""
    answer = figures() | more
    return TopSnapshot([("http://rig:8000", answer)], join_figures([answer], None, 0.0), list(problems), {})


# --- the live page ---


def shown(app: TopApp) -> str:
    """All text on the screen."""
    return "\n".join("".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips())


async def test_the_live_page_follows_looks_and_the_terminal_s_size() -> None:
    coming: asyncio.Queue[TopSnapshot | None] = asyncio.Queue()
    stop = asyncio.Event()

    async def snapshots() -> AsyncIterator[TopSnapshot]:
        while (snapshot := await coming.get()) is not None:
            yield snapshot

    app = TopApp(snapshots(), stop)
    async with app.run_test(size=(120, 50)) as pilot:

        async def after(snapshot: TopSnapshot) -> str:
            coming.put_nowait(snapshot)
            for _ in range(100):
                await pilot.pause(0.01)
                if app.last is snapshot:
                    break
            await pilot.pause()
            return shown(app)

        text = await after(look_at())
        assert text.index("Diagnosis") < text.index("straggler") < text.index("GPUs") < text.index("Ranks")
        text = await after(look_at(diagnosis=[]))
        assert "Nothing found" in text and "straggler" not in text
        text = await after(TopSnapshot([], join_figures([], None, 0.0), ["http://rig:8000: cannot connect"], {}))
        assert "cannot connect" in text and "Ranks" not in text, "the server is away"
        assert "Ranks" in await after(look_at()), "and back"
        for columns, rows in ((60, 20), (20, 5), (200, 60)):
            await pilot.resize_terminal(columns, rows)
            await pilot.pause()
            assert {len(line) for line in shown(app).splitlines()} == {columns}
        text = await after(look_at())
        assert "share of a step" in text and "q Quit" in text, "keys are told, and there is room for all columns"
        await pilot.press("p")
        assert "held" in await after(look_at(diagnosis=[])) and "straggler" in shown(app)
        await pilot.press("p")
        assert "straggler" not in await after(look_at(diagnosis=[]))
        await pilot.press("q")
    assert stop.is_set() and app.last is not None


class Terminal:
    """`weft top` on a terminal of its own. `text` is all that it has drawn, escapes and all."""

    def __init__(self, *words: str) -> None:
        self._end, terminal = pty.openpty()
        self.resize(100, 30)
        command = [sys.executable, "-m", "weft", "top", *words]
        self.process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env={**HERE, "TERM": "xterm-256color"},
        )
        self.before = termios.tcgetattr(terminal)
        self._terminal, self.text = terminal, ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def until(self, word: str, seconds: float = 20.0) -> None:
        """Read until a word is drawn anew."""
        self.text = ""
        async with asyncio.timeout(seconds):
            while word not in self.text:
                if await asyncio.to_thread(select.select, [self._end], [], [], 0.2) != ([], [], []):
                    self.text += os.read(self._end, 1 << 16).decode(errors="replace")

    async def ended(self) -> int:
        """Exit status, while what it draws is read on."""
        async with asyncio.timeout(20.0):
            while self.process.poll() is None:
                if await asyncio.to_thread(select.select, [self._end], [], [], 0.05) != ([], [], []):
                    os.read(self._end, 1 << 16)
        return self.process.returncode

    def press(self, key: str) -> None:
        os.write(self._end, key.encode())

    @property
    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._terminal)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._terminal)
        os.close(self._end)


@pytest.mark.parametrize("end", ["q", "\x03", "SIGTERM"])
async def test_a_terminal_of_its_own(end: str) -> None:
    """It survives another size and a server that leaves and returns, and gives the terminal back as it was."""
    away = asyncio.Event()

    async def moody(exchange: Exchange) -> None:
        if away.is_set():
            exchange.refuse("404 Not Found", b"{}")
        else:
            await answering(exchange, {"/monitor": figures()})

    async with serving(moody) as server:
        with Terminal("--url", server.url, "--interval", "0.2") as terminal:
            await terminal.until("straggler")
            terminal.resize(70, 20)
            await terminal.until("straggler")
            if end == "q":
                away.set()
                await terminal.until("404")
                away.clear()
                await terminal.until("straggler")
            if end == "SIGTERM":
                terminal.process.send_signal(signal.SIGTERM)
            else:
                terminal.press(end)
            assert await terminal.ended() == 0
            assert terminal.settings == terminal.before


def test_cores(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu  9 9 9 9 9 9 9 9 0 0\ncpu3 10 0 10 70 10 0 0 0 0 0\nintr 5\n")
    assert core_ticks(tmp_path) == {3: (20, 100)} and core_ticks(tmp_path / "nothing") == {}


# --- servers ---


async def test_a_server_and_one_that_is_not_there() -> None:
    async with serving(lambda one: answering(one, {"/monitor": figures()})) as server:
        watch = ServerWatch([server.url, "http://127.0.0.1:1"], None, None)
        found, problems = await watch.snapshot()
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
            watch = ServerWatch([front.url], "api", "admin")
            found, problems = await watch.snapshot()
            watch.close()
    assert [(url, answer["nodes"][0]["node"]) for url, answer in found] == [(behind.url, "upstream")]
    assert len(problems) == 1 and problems[0].startswith("http://127.0.0.1:1 (of ")
    assert sent == [
        ("/gateway/status", "Bearer api"),
        ("/gateway/status", "Bearer admin"),
        ("/monitor", ""),
    ], "no key goes to a URL that the user has not named, and the admin key to gateways only"


async def test_a_server_that_is_found_on_this_machine_gets_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    async def found_server(exchange: Exchange) -> None:
        sent.append(keyed(exchange))
        await answering(exchange, {"/monitor": figures()})

    async with serving(found_server) as server:
        monkeypatch.setattr("weft.cli.top.watch.local_urls", lambda: (server.url,))
        watch = ServerWatch([], "api", "admin")
        found, _ = await watch.snapshot()
        watch.close()
    assert [url for url, _ in found] == [server.url] and set(sent) == {""}


def test_a_key_of_another_service_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    given: list[str | None] = []

    class Spy(ServerWatch):
        def __init__(self, urls: Sequence[str], api_key: str | None, admin_key: str | None) -> None:
            given.append(api_key)
            super().__init__(urls, api_key, admin_key)

    monkeypatch.setattr(top, "ServerWatch", Spy)
    weft("top", "--json", "--url", "http://127.0.0.1:1")
    assert given == [None]


HOLDER = Holder(pid=4711, name="train.py", nbytes=9 << 30)


@pytest.mark.parametrize(
    ("headers", "options", "shown"),
    [
        ({"x-api-key": "api"}, {"api_key": ("api",), "admin_key": "admin"}, False),
        ({"x-api-key": "admin"}, {"api_key": ("api",), "admin_key": "admin"}, True),
        ({"x-api-key": "api"}, {"api_key": ("api",)}, False),
        ({}, {}, True),  # from this machine, and there are no keys
        ({"X-Forwarded-For": "192.0.2.1"}, {}, False),
    ],
    ids=str,
)
async def test_only_the_owner_sees_other_users_processes(
    headers: dict[str, str], options: dict[str, Any], shown: bool
) -> None:
    world = World(**options)
    monitor = world.service.monitor
    monitor._clock = lambda: 1.0
    await monitor.refresh()
    moment = GpuMoment(figures=GpuFigures(index=0, name="card", memory_total_bytes=80 << 30), holders=(HOLDER,))
    monitor._snapshots = tuple(msgspec.structs.replace(snapshot, gpus=(moment,)) for snapshot in monitor._snapshots)
    monitor.findings = list(foreign_memory(monitor.history, RuleLimits()))
    answer = await world.client.get("http://127.0.0.1/monitor", headers=headers)
    (process,) = answer.json()["nodes"][0]["gpus"][0]["processes"]
    (finding,) = answer.json()["diagnosis"]
    assert process["used_bytes"] == HOLDER.nbytes and finding["code"] == "foreign_memory"
    assert [word in answer.text for word in ("4711", "train.py")] == [shown, shown]
    joined = join_figures([answer.json()], None, 0.0)
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=False).print(page(TopSnapshot([], joined, [], {}), Sparks(), 120))
    assert "9" in out.getvalue() and ("4711" in out.getvalue()) == shown and "None" not in out.getvalue()


async def test_the_log_has_a_finding_once_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    monitor = World().service.monitor
    storm = Finding(code=Code.PREEMPTION_STORM, text="lost caches", value=1.0, limit=0.2, remedy="restart")
    storm = msgspec.structs.replace(storm, follows_from=Code.KV_STARVED)
    for now_s in (1.0, 9.0):
        monitor._clock = lambda now_s=now_s: now_s  # type: ignore[misc]
        monitor._diagnose = lambda: [storm]  # type: ignore[method-assign]
        await monitor.refresh()
    lines = [line.getMessage() for line in caplog.records if "lost caches" in line.getMessage()]
    assert lines == ["preemption_storm (follows from kv_starved): lost caches; remedy: restart"]


async def test_what_is_missing_is_said() -> None:
    cases = [
        ({"/gateway/status": "invalid_admin_key"}, "WEFT_ADMIN_KEY"),
        ({"/gateway/status": "invalid_api_key", "/monitor": "invalid_api_key"}, "VLLM_API_KEY"),
        ({"/monitor": {"other": 1}}, "no figures"),
        ({}, "HTTP 404"),
    ]
    for answers, told in cases:
        async with serving(lambda one, answers=answers: answering(one, answers)) as server:  # type: ignore[misc]
            watch = ServerWatch([server.url], None, None)
            found, problems = await watch.snapshot()
            watch.close()
        assert not found and len(problems) == 1 and told in problems[0], problems


async def test_a_server_that_goes_away_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.top.watch.PATIENCE_S", 0.1)
    silent = asyncio.Event()

    async def moody(exchange: Exchange) -> None:
        if silent.is_set():
            await asyncio.sleep(0.3)
        await answering(exchange, {"/monitor": figures()})

    async with serving(moody) as server:
        watch = ServerWatch([server.url], None, None)
        seen = []
        for quiet in (False, True, False):
            (silent.set if quiet else silent.clear)()
            found, problems = await watch.snapshot()
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
    assert found["models"][0]["layout"]["tensor_parallel"] == 2 and "delayed" in found["ranks"][0]
    joined = join_figures([found], None, 0.0)
    assert joined["diagnosis"] == [] and [row["layers"] for row in joined["ranks"]] == [30, 30]


async def test_a_client_that_does_not_read() -> None:
    world = World(FakeEngine(saying("x" * 40_000)), max_model_len=50_000)
    world.service.monitor.limits = RuleLimits(unread_s=0.02)
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
    monkeypatch.setattr("weft.cli.top.watch.local_urls", tuple)
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
