"""A server of one engine whose processes are killed and stopped: it tells the truth, and it serves again."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from scripts.programs.soak.mixed import ANSWERED, DOUBLED, LOST, RETRYABLE, Kind, judge_stream
from tests.cpu import tiny
from tests.cpu.families import SERVER, command_line
from tests.cpu.test_serve import Server, eventually
from tests.log_events import logged_json

ROOT = Path(__file__).parents[2]
SERVED = "--load-format dummy --dtype float32 --max-model-len 16384 --kv-cache-memory-bytes 16M --progress-timeout 2"
ENDLESS = 12_000  # tokens, of which each takes at least a millisecond: no request ends before its engine is killed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tiny.write(tmp_path_factory.mktemp("models") / "tiny")
    (folder / "config.json").write_text(json.dumps({**tiny.CONFIG, "max_position_embeddings": 16384}))
    return str(folder)


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Server]:
    words = "--port 0 -tp 2 --served-model-name tiny --log-format json"
    with Server(model, *SERVED.split(), *words.split()) as server:
        yield server


def members(server: Server, module: str) -> list[psutil.Process]:
    found = [member for member in server.family() if module in command_line(member)]
    return sorted(found, key=lambda member: member.pid)


PROMPTS = ([5, 6, number] for number in itertools.count(7))


class Asked(threading.Thread):
    """A request in flight; `status` and `text` are those of its answer.

    Each has a prompt of its own: a request with which two engines in a row died is refused.
    """

    def __init__(self, url: str, *, stream: bool, tokens: int = 400) -> None:
        super().__init__()
        self._url, self._stream, self._tokens = url, stream, tokens
        self.status, self.text, self.headers = 0, "", httpx.Headers()
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        body = {"prompt": next(PROMPTS), "max_tokens": self._tokens, "ignore_eos": True, "stream": self._stream}
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60) as answer:
                self.status, self.headers = answer.status_code, answer.headers
                for text in answer.iter_text():
                    self.begun.set()
                    self.text += text
        except httpx.RemoteProtocolError:
            pass  # a stream that has told its error breaks off

    def told(self) -> dict[str, Any]:
        """The error."""
        self.join(60)
        return dict(json.loads(self.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"])


def health(server: Server) -> httpx.Response:
    return httpx.get(f"{server.url}/health", timeout=30)


@contextmanager
def watched_health(server: Server) -> Iterator[list[tuple[int, str]]]:
    """The answers of /health, one after the other: a restart may take less time than a new connection."""
    answers: list[tuple[int, str]] = []
    ended = threading.Event()

    def watch() -> None:
        with httpx.Client(timeout=30) as client:
            while not ended.wait(0.02):
                answer = client.get(f"{server.url}/health")
                answers.append((answer.status_code, answer.text))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield answers
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("module", "blow", "cause"),
    [
        ("weft.worker", signal.SIGKILL, r"rank 1 .*\bstep\b.*\bSIGKILL\b"),
        ("weft.worker", signal.SIGSEGV, r"rank 1 .*\bstep\b.*\bSIGSEGV\b"),
        ("weft.engine.replicas.process", signal.SIGSEGV, r"\bcore .*\bstep\b.*\bSIGSEGV\b"),
        ("weft.worker", signal.SIGSTOP, r"rank 1 .*\bstep\b.*\bSIGSTOP\b"),
        ("weft.engine.replicas.process", signal.SIGSTOP, r"\bcore .*\bstep\b.*\bSIGSTOP\b"),
    ],
    ids=["rank killed", "rank crashed", "core crashed", "rank stopped", "core stopped"],
)
def test_a_single_engine_starts_again(server: Server, module: str, blow: signal.Signals, cause: str) -> None:
    eventually(lambda: health(server).status_code == 200)
    old = [*members(server, "weft.worker"), *members(server, "weft.engine.replicas.process")]
    streamed = Asked(server.url, stream=True, tokens=ENDLESS)
    assert streamed.begun.wait(30)
    whole = Asked(server.url, stream=False, tokens=ENDLESS)
    eventually(lambda: httpx.get(f"{server.url}/load", timeout=30).json()["server_load"] == 2)
    with watched_health(server) as answers:
        members(server, module)[-1].send_signal(blow)
        eventually(lambda: any(status == 503 and re.search(cause, text) for status, text in list(answers)))
    errors = [streamed.told(), whole.told()]
    assert (whole.status, streamed.status) == (503, 200) and int(whole.headers["Retry-After"]) > 0
    assert all(error["code"] == "engine_restarts" and re.search(cause, error["message"]) for error in errors)
    # A request that comes while the engine starts waits for it.
    later = Asked(server.url, stream=False, tokens=2)
    later.join(60)
    assert later.status == 200 and health(server).status_code == 200
    eventually(lambda: not any(member.is_running() for member in old))
    parents = {
        psutil.Process(members(server, module)[0].ppid()) for module in ("weft.worker", "weft.engine.replicas.process")
    }
    assert [SERVER in parent.cmdline() for parent in parents] == [True], "one server forks all that start again"
    assert re.search(cause, next(line for line in reversed(server.lines) if "ERROR" in line))


def test_an_idle_stop_is_noticed_and_sigterm_does_not_wait_for_it(server: Server) -> None:
    eventually(lambda: health(server).status_code == 200)
    with watched_health(server) as answers:
        members(server, "weft.worker")[0].suspend()
        eventually(lambda: any(re.search(r"rank 0 .*\bstep\b.*\bSIGSTOP\b", text) for _, text in list(answers)))
    eventually(lambda: health(server).status_code == 200)
    family, rank = server.family(), members(server, "weft.worker")[0]
    asked = Asked(server.url, stream=True, tokens=ENDLESS)
    assert asked.begun.wait(30)
    rank.suspend()
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0, "though --shutdown-timeout has 30 s left"
    eventually(lambda: not any(member.is_running() for member in family))  # whoever adopted them has to notice, too
    assert logged_json(server.lines, "process-stopped")


@pytest.mark.parametrize(
    ("received", "outcome"),
    [
        (b'data: {"choices": [{}]}\n\ndata: [DONE]\n\n', ANSWERED),
        (b'data: {"choices": [{}]}\n\ndata: {"error": {"code": "engine_restarts"}}\n\n', RETRYABLE),
        (b'data: {"choices": [{}]}\n\n', LOST),
        (b'data: {"error": {"code": "x"}}\n\ndata: [DONE]\n\n', DOUBLED),
        (b'data: {"type": "response.failed", "error": {}}\n\ndata: {"type": "error"}\n\n', RETRYABLE),
        (b'data: {"type": "message_stop"}\n\ndata: {"type": "message_stop"}\n\n', DOUBLED),
        (b'{"done": false}\n{"done": true}\n', ANSWERED),
        (b'{"done": false}\n{"error": "x"}\n', RETRYABLE),
    ],
)
def test_verdicts_of_the_soak(received: bytes, outcome: str) -> None:
    assert judge_stream(Kind("", "", {}), received).outcome == outcome


def run_script(module: str, model: str, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", module, "--model", model, *words]
    done = subprocess.run(
        [*command, "--timeout", "2", "--", *SERVED.split()[:-2], "-tp", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == bool(report["missed"])
    return report


def test_twelve_seconds_of_the_soak(model: str) -> None:
    report = run_script("scripts.programs.soak", model, "--minutes", "0.2", "--every", "4")
    assert not report["missed"], report
    assert (
        report["requests_wanted"] == 67
        and report["requests"] > 20
        and report["faults"]
        and report["outcomes"]["answered"]
    )


@pytest.mark.long
def test_two_minutes_of_the_soak(model: str) -> None:
    report = run_script("scripts.programs.soak", model, "--minutes", "2", "--every", "20")
    assert not report["missed"], report


@pytest.mark.long  # a minute or two: the other tests of this file show its parts
def test_twenty_faults(model: str) -> None:
    """The time to serve again is not judged: other tests run at the same time."""
    report = run_script("scripts.programs.soak.faults", model, "--faults", "20", "--seed", "1")
    assert set(report["missed"]) <= {"serves again in time"}, report
    assert report["faults"] == 20 and report["causes_judged"] > 10


@pytest.mark.long
def test_two_hundred_faults() -> None:
    report = run_script("scripts.programs.soak.faults", "demo", "--faults", "200")
    assert set(report["missed"]) <= {"serves again in time"}, report
