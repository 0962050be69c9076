"""Servers that really have a fault, found by `weft top` alone; the commands of docs/monitoring.md."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cpu import tiny
from tests.cpu.families import command_line
from tests.cpu.test_serve import ADMIN_KEY, Server, bound_to
from tests.pure.commands import HERE
from weft.checkpoint.hub import demo
from weft.errors import ModelError
from weft.monitor.finding import LIMITS

PAGE = Path(__file__).parents[2] / "docs/monitoring.md"
PATIENCE_S = 60.0  # for what must happen some time
CORES = (0, 1)  # of a test of two ranks, which have one each


class Load:
    """Clients that each send one request after the other while the block runs."""

    def __init__(self, url: str, clients: int, tokens: int, prompts: int = 60, same: int = 0) -> None:
        """`prompts` tokens each, of which the first `same` are those of every prompt."""
        self._url, self._tokens, self._prompts, self._same = url, tokens, prompts, same
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(number,)) for number in range(clients)]

    def _send(self, number: int) -> None:
        draw = random.Random(number)
        with httpx.Client(timeout=120.0) as client:
            while not self._stop.is_set():
                own = [draw.randrange(3, 20) for _ in range(self._prompts - self._same)]
                body = {"prompt": [5] * self._same + own, "max_tokens": self._tokens, "ignore_eos": True}
                with contextlib.suppress(httpx.HTTPError):
                    client.post(f"{self._url}/v1/completions", json=body)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


@contextlib.contextmanager
def slowed(server: Server, rank: int) -> Iterator[None]:
    """Other programs that want a rank's core all the time, and that come before it. It stays behind them."""
    ranks = sorted((one for one in server.family() if "weft.worker" in command_line(one)), key=lambda one: one.pid)
    bound = [one for one in ranks if len(one.cpu_affinity()) == 1]
    assert rank < len(bound), [(one.pid, one.cmdline(), one.cpu_affinity()) for one in ranks]
    (core,) = bound[rank].cpu_affinity()
    for thread in bound[rank].threads():
        os.setpriority(os.PRIO_PROCESS, thread.id, 10)
    with bound_to([core]):
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def top(url: str) -> dict[str, Any]:
    """The object of `weft top --json --url URL`, as its own process prints it."""
    command = [sys.executable, "-m", "weft", "top", "--json", "--url", url]
    return dict(json.loads(subprocess.run(command, env=HERE, capture_output=True, check=True, timeout=30).stdout))


def diagnosis(url: str, *wanted: str) -> dict[str, dict[str, Any]]:
    """Findings of the server by code, once it has found all that is wanted."""
    deadline, found = time.monotonic() + PATIENCE_S, dict[str, dict[str, Any]]()
    while time.monotonic() < deadline:
        time.sleep(1.5)
        found = {one["code"]: one for one in httpx.get(f"{url}/monitor", timeout=30).json()["diagnosis"]}
        if {*wanted} <= found.keys():
            break
    assert {*wanted} <= found.keys(), found
    return found


def gauge(url: str, code: str) -> float:
    page = httpx.get(f"{url}/metrics", timeout=30).text
    (value,) = re.findall(rf'^weft:diagnosis{{code="{code}"}} (\S+)$', page, re.MULTILINE)
    return float(value)


@contextlib.contextmanager
def demo_ranks(cores: Sequence[int], *words: str) -> Iterator[Server]:
    """The demo on these cores."""
    if not {*CORES} <= {*range(os.cpu_count() or 1)}:
        pytest.skip("two ranks need two cores")
    try:
        demo.fetch_demo()
    except ModelError as error:
        pytest.skip(f"the demo model cannot be had: {error}")
    with Server("demo", "--port", "0", "--max-model-len", "512", *words, cores=cores) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("top")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Server]:
    with demo_ranks(CORES, "-tp", "2", "--profile-directory", str(folder / "traces")) as server:
        yield server


@contextlib.contextmanager
def small(folder: Path, *words: str) -> Iterator[Server]:
    """A tiny model: enough for the faults of requests."""
    model = tiny.write(folder / "tiny")
    said = ["--load-format", "dummy", "--dtype", "float32", "--max-model-len", "512", "--port", "0"]
    with Server(str(model), *said, *words) as server:
        yield server


# --- ranks ---


def test_two_ranks_that_are_well(pair: Server) -> None:
    seen: list[str] = []
    with Load(pair.url, clients=4, tokens=60):
        time.sleep(2)
        figures = top(pair.url)
        seen += [one["code"] for one in figures["diagnosis"]]
    # Other programs may have a core of this machine, and the rank there is slow in truth.
    assert {*seen} <= {"straggler", "allreduce_wait"}
    for row in figures["ranks"]:
        assert row["compute"] + row["communication"] + row["waiting"] == pytest.approx(1.0)
        assert row["compute"] > 0 and row["communication"] > 0 and row["waiting"] >= 0
    assert any(row["waiting"] > 0 for row in figures["ranks"]), "the slower one of the two need not wait for the other"
    (model,) = figures["models"]
    assert model["tok_s"] > 0 and model["running"] > 0 and model["ttft_s"]["p95"] >= model["ttft_s"]["p50"] > 0


def shown_commands() -> list[str]:
    """The commands of the page, without their comments."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [line.partition("#")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_the_page_s_commands(pair: Server, folder: Path) -> None:
    commands = [words for words in shown_commands() if words.split()[1] in ("top", "profile")]
    assert len(commands) >= 6
    environment = {**HERE, "WEFT_ADMIN_KEY": ADMIN_KEY, "XDG_CACHE_HOME": str(folder / "no-servers")}
    for words in commands:
        words = re.sub(r"http://\S+", pair.url, words)
        ends = "--json" in words or "--once" in words or "profile" in words
        command = [sys.executable, "-m", *words.split(), *([] if ends else ["--once"])]
        with Load(pair.url, clients=1, tokens=60) if "profile" in words else contextlib.nullcontext():
            ran = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0 and ran.stdout, (words, ran)
    merged = json.loads(gzip.decompress((folder / "weft-trace.json.gz").read_bytes()))
    assert {event["args"]["rank"] for event in merged["traceEvents"] if event.get("cat") == "weft"} == {0, 1}


def test_a_profile(pair: Server, folder: Path) -> None:
    command = [sys.executable, "-m", "weft", "profile", "--url", pair.url, "--steps", "5", "--json"]
    environment = {**HERE, "WEFT_ADMIN_KEY": ADMIN_KEY}
    with Load(pair.url, clients=2, tokens=60):
        ran = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)
    profile = json.loads(ran.stdout)
    report = profile["report"]
    assert [(row["rank"], row["steps"]) for row in report["ranks"]] == [(0, 5), (1, 5)] and not profile["missing"]
    assert [*map(int, report["layers"])] == [*range(30)], "the phases of the C++ stage"
    assert {"attention", "products", "feed-forward", "sums"} <= report["layers"]["7"].keys()
    assert set(profile["predicted"]) == {"attention", "products", "communication", "overhead"}
    refused = subprocess.run(command, env=HERE, cwd=folder, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and "WEFT_ADMIN_KEY" in refused.stderr


@pytest.mark.long  # a machine whose other core is busy too has two slow ranks
def test_a_rank_whose_core_is_busy(pair: Server) -> None:
    with Load(pair.url, clients=4, tokens=60), slowed(pair, 1):
        found = diagnosis(pair.url, "straggler")["straggler"]
        figures = top(pair.url)
        assert gauge(pair.url, "straggler") == 1.0
    # By its time without a core, or by its work at the same time as the other's, whichever is noticed first.
    assert found["ranks"] == [1] and found["value"] > found["limit"] in (LIMITS.delayed, LIMITS.straggler)
    if found["limit"] == LIMITS.straggler:
        assert "--tensor-split" in found["remedy"] and "tokens/s" in found["remedy"], (
            "the planner's figure of the change"
        )
    assert {"straggler"} <= {one["code"] for one in figures["diagnosis"]}
    fast, slow = (row["waiting"] for row in figures["ranks"])
    assert fast > slow, "the other one waits for it"
    assert sum("straggler: " in line for line in pair.lines) == 1, "the log has it once"


@pytest.mark.long
def test_an_uneven_pipeline() -> None:
    with demo_ranks(CORES, "-pp", "2", "--pipeline-split", "26,4") as server:
        with Load(server.url, clients=8, tokens=60):
            found = diagnosis(server.url, "stage_imbalance")["stage_imbalance"]
        assert "--pipeline-split" in found["remedy"] and "tokens/s" in found["remedy"]
        layers = [int(count) for count in re.findall(r"--pipeline-split (\d+),(\d+)", found["remedy"])[0]]
        assert sum(layers) == 30 and layers[0] < 24


@pytest.mark.long
def test_ranks_that_share_a_core() -> None:
    """Each waits in every sum until the others have had the core."""
    with demo_ranks(CORES[:1], "-tp", "3") as server:
        with Load(server.url, clients=4, tokens=60):
            found = diagnosis(server.url, "allreduce_wait")["allreduce_wait"]
        assert found["value"] > LIMITS.exchange
        # The second is what is left if the planner expects nothing of the first.
        assert "--pipeline-parallel-size 3" in found["remedy"] or "free the devices" in found["remedy"]


# --- requests ---


@pytest.mark.long
def test_a_tiny_cache(folder: Path) -> None:
    with small(folder / "cache", "--kv-cache-memory-bytes", "512k", "--max-num-seqs", "64") as server:
        with Load(server.url, clients=24, tokens=200, prompts=20):
            found = diagnosis(server.url, "kv_starved", "preemption_storm")
        assert found["kv_starved"]["value"] > LIMITS.starved
        assert "--kv-cache-memory-bytes" in found["kv_starved"]["remedy"]
        assert "--max-num-seqs" in found["preemption_storm"]["remedy"]


def test_few_sequences_and_no_prefix_cache(folder: Path) -> None:
    words = ["--max-num-seqs", "2", "--no-enable-prefix-caching", "--kv-cache-memory-bytes", "64M"]
    with small(folder / "few", *words) as server:
        # So many clients, and such long answers, that some wait at each look.
        with Load(server.url, clients=16, tokens=60, prompts=150, same=130):
            found = diagnosis(server.url, "batch_small", "prefix_unused")
        assert "--max-num-seqs" in found["batch_small"]["remedy"]
        assert "--enable-prefix-caching" in found["prefix_unused"]["remedy"]
        assert not {*found} & {"kv_starved", "preemption_storm", "straggler"}


@pytest.mark.long
def test_no_false_alarm(folder: Path, mixed_s: float = 300.0) -> None:
    """Requests of all kinds, in bursts and pauses, on a server that has room for them."""
    codes: set[str] = set()
    with small(folder / "well") as server:
        end, draw = time.monotonic() + mixed_s, random.Random(0)
        while time.monotonic() < end:
            clients, tokens, prompts = draw.choice([1, 4, 16]), draw.choice([5, 50, 200]), draw.choice([10, 100, 250])
            with Load(server.url, clients, tokens, prompts, same=draw.choice([0, prompts // 2])):
                time.sleep(draw.uniform(0.5, 8.0))
            codes |= {one["code"] for one in httpx.get(f"{server.url}/monitor").json()["diagnosis"]}
            time.sleep(draw.uniform(0.0, 2.0))
    assert codes == set()
