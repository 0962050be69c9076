"""The agent on a node: one server for each engine, secrets for its owner alone, an end for what was given up."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from weft.engine.cluster.agent import Agent, Input, Server
from weft.engine.cluster.agent_messages import (
    Ended,
    Examine,
    Examined,
    Leave,
    ProgressLine,
    Pull,
    Ready,
    Reply,
    Start,
    Started,
    Stop,
    Stopped,
    TaskFailed,
)

# A server that runs on is nobody's child any more once the agent has left.
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")

WAIT_S = 30
KEY = "k" * 64
FOUND = '{"ok": false, "checks": [{"name": "disk", "status": "fail", "value": "1 GB", "limit": "", "remedy": "x"}]}'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache of a node whose server is a shell script: it logs its words, and ends with a line at `fail`."""
    server = tmp_path / "python"
    server.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--long*) printf "%200000s" "";; esac\n'
        f'case "$*" in *--wrong*) echo "no such flag" >&2; exit 2;; *" doctor "*) echo \'{FOUND}\'; exit 1;; esac\n'
        'echo "words $@"\necho "key $WEFT_CLUSTER_KEY" "given $GIVEN"\n'
        'case "$*" in *" pull "*) echo "half" >&2; echo /models/m; exit;; *fail*) echo "it failed"; exit 1;; esac\n'
        '[ "$5" = stubborn ] && trap "" TERM\n'
        "while :; do sleep 0.05; done\n"
    )
    server.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(server))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("WEFT_CLUSTER_KEY", "somebody's")
    yield tmp_path / "cache/weft/cluster"
    for record in (tmp_path / "cache/weft/cluster").glob("*/record.json"):
        Server(*_names(record.parent.name)).end(0, 0)


def _names(folder: str) -> tuple[str, int]:
    name, _, node = folder.rpartition("-")
    return name, int(node)


class Side:
    """The side that asks: it has a pipe to an agent, which runs in a thread."""

    def __init__(self, task: msgspec.Struct | bytes, find_url: Callable[[int], str | None] = lambda pid: None) -> None:
        read, self.write = os.pipe()
        self._read = read
        self.replies: list[Reply] = []
        agent = Agent(find_url, Input(read), self.replies.append)
        self.send(task)
        self.thread = threading.Thread(target=agent.do_task)
        self.thread.start()

    def send(self, message: msgspec.Struct | bytes) -> None:
        line = message if isinstance(message, bytes) else msgspec.json.encode(message)
        os.write(self.write, line + b"\n")

    def until(self, kind: type[Reply]) -> Reply:
        deadline = time.monotonic() + WAIT_S
        while not (found := [reply for reply in self.replies if isinstance(reply, kind)]):
            assert time.monotonic() < deadline and self.thread.is_alive(), self.replies
            time.sleep(0.01)
        return found[0]

    def end(self) -> Reply:
        """End the input; return the last reply once the agent has ended."""
        os.close(self.write)
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        os.close(self._read)
        return self.replies[-1]


def start(words: str = "m", **fields: object) -> Start:
    values = {"name": "e", "node": 1, "words": (words,), "key": KEY, "environment": {"GIVEN": "x"}} | fields
    return msgspec.convert(values, Start)


def left_running(task: Start) -> Started:
    side = Side(task)
    started = side.until(Started)
    assert isinstance(started, Started)
    side.send(Leave())
    side.end()
    return started


def test_a_server_runs_on_and_is_found(home: Path) -> None:
    started = left_running(start())
    assert not started.was_running and psutil.pid_exists(started.pid)
    others = (start(), True), (start("other"), False), (start(environment={"CUDA_VISIBLE_DEVICES": "1"}), False)
    for task, same in others:
        again = left_running(task)
        assert (again.was_running, again.same, again.pid) == (True, same, started.pid)
    # Another engine or node is another server.
    assert not left_running(start(name="f")).was_running and not left_running(start(node=2)).was_running
    assert Side(Stop(name="e", node=1, grace_s=0, term_s=WAIT_S)).end() == Stopped(started.pid)
    assert Side(Stop(name="e", node=1, grace_s=0, term_s=0)).end() == Stopped(None)
    assert psutil.pid_exists(left_running(start()).pid)


def test_secrets_are_in_files_of_their_owner(home: Path) -> None:
    """Not among the server's words, not in its environment, and gone after its end."""
    started = left_running(start(certificate="PEM"))
    folder = home / "e-1"
    words = Path(f"/proc/{started.pid}/cmdline").read_text()
    assert KEY not in words and str(folder / "key") in words and str(folder / "certificate.pem") in words
    assert KEY not in Path(f"/proc/{started.pid}/environ").read_text()
    assert (folder / "key").read_text() == KEY and (folder / "certificate.pem").read_text() == "PEM"
    for path in (folder, *folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    deadline = time.monotonic() + WAIT_S
    while "given" not in (log := (folder / "log").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "key  given x" in log, "the agent's own key is not handed on"
    assert Side(Stop(name="e", node=1, grace_s=0, term_s=WAIT_S)).end() == Stopped(started.pid)
    assert not (folder / "key").exists() and not (folder / "certificate.pem").exists()


def test_a_start_that_is_given_up_ends_the_server(home: Path) -> None:
    """But not one that ran before."""
    side = Side(start())
    started = side.until(Started)
    assert isinstance(started, Started)
    side.end()
    assert not Server("e", 1).is_running() and not (home / "e-1/key").exists()
    before = left_running(start())
    side = Side(start())
    assert side.until(Started) == msgspec.structs.replace(before, was_running=True)
    side.end()
    assert Server("e", 1).is_running()


def test_a_server_that_ends_at_once_is_quoted(home: Path) -> None:
    side = Side(start("fail"))
    assert side.until(Ended) == Ended("it failed")
    side.end()


def test_a_server_that_is_ready_is_said_once(home: Path) -> None:
    side = Side(start(), lambda pid: f"http://here/{pid}")
    started, ready = side.until(Started), side.until(Ready)
    assert isinstance(started, Started) and ready == Ready(f"http://here/{started.pid}")
    time.sleep(0.5)
    side.end()
    assert side.replies.count(ready) == 1


def test_a_server_that_ignores_the_signal_is_killed(home: Path) -> None:
    started = left_running(start("stubborn"))
    deadline = time.monotonic() + WAIT_S
    while "words" not in (home / "e-1/log").read_text():  # its trap comes next
        assert time.monotonic() < deadline
    time.sleep(0.3)
    assert Side(Stop(name="e", node=1, grace_s=0, term_s=0.5)).end() == Stopped(started.pid, killed=True)
    assert not Server("e", 1).is_running()


def test_a_model_is_fetched_with_progress(home: Path) -> None:
    side = Side(Pull(model="-x y", flags=("--download-dir=d",), environment={"GIVEN": "token"}))
    side.thread.join(WAIT_S)
    assert side.replies[0] == ProgressLine("half")
    printed = json.loads(msgspec.json.encode(side.end()))["path"]
    assert printed.endswith("/models/m") and "pull --download-dir=d -x y" in printed and "given token" in printed


def test_a_machine_is_examined(home: Path) -> None:
    """A check that fails is an answer; a doctor that says nothing is none."""
    before_s = time.time()
    side = Side(Examine(flags=("--no-measure", "--long")))  # longer than what a pipe holds
    side.thread.join(WAIT_S)
    reply = side.end()
    assert isinstance(reply, Examined) and before_s <= reply.clock_s <= time.time()
    assert [(check.name, check.status, check.remedy) for check in reply.checks] == [("disk", "fail", "x")]
    side = Side(Examine(flags=("--wrong",)))
    side.thread.join(WAIT_S)
    assert side.end() == TaskFailed("no such flag")


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (b'{"weft": "0.0.1", "type": "Dance"}', "this machine has 0.0.1"),
        (b"no json", "does not know"),
        (msgspec.json.encode(start()).replace(b'"Start"', b'"Dance"'), "does not know"),
    ],
)
def test_tasks_of_another_version(home: Path, task: bytes, reason: str) -> None:
    last = Side(task).end()
    assert isinstance(last, TaskFailed) and reason in last.reason
