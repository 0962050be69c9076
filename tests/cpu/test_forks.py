"""Processes that a fork server forks: what a direct start gives them, their ends, and a server that cannot."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cpu import tiny
from tests.cpu.families import family
from weft import LLM, SamplingParams
from weft.engine.processes import fork_client, forks
from weft.engine.processes.fork_client import AdoptedServer, ForkClient, ForkedProcess, ForkError
from weft.engine.processes.fork_server import find_problem
from weft.engine.processes.forks import ChildProcess, ServerPool, start_process

WAIT_S = 60
DEEDS = ("exit", "raise", "abort", "wait", "use torch")
pytestmark = pytest.mark.skipif(not forks.can_fork({}), reason="needs Linux with pidfds")


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Variables with which the module that processes run is found."""
    path = os.pathsep.join(str(Path(__file__).parents[at] / folder) for at, folder in ((2, "src"), (0, "")))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def shared(environment: dict[str, str]) -> Iterator[ForkClient]:
    server = ForkClient(environment)
    yield server
    server.end()


@pytest.fixture
def own(environment: dict[str, str]) -> Iterator[ForkClient]:
    """A server for a test to end."""
    server = ForkClient(environment)
    yield server
    server.end()


def run(deed: str, environment: dict[str, str], server: ForkClient | None) -> tuple[ChildProcess, dict[str, Any], int]:
    """Start a process; return it, what it tells, and the number of the descriptor that it told it through."""
    reading, writing = os.pipe()
    numbers = (writing, DEEDS.index(deed))
    process = start_process("forked", numbers, (writing,), environment, server)
    os.close(writing)
    with open(reading) as pipe:
        assert select.select([pipe], [], [], WAIT_S)[0]
        return process, json.loads(pipe.readline()), writing


def end(process: ChildProcess) -> bytes:
    """Wait for the end of a process; return what it has printed."""
    assert process.stdout
    with process.stdout as pipe:
        printed = b"".join(iter(lambda: pipe.read(1 << 16), b""))
    process.wait(WAIT_S)
    return printed


def test_a_fork_is_given_what_a_direct_start_gives(shared: ForkClient, environment: dict[str, str]) -> None:
    told: list[dict[str, Any]] = []
    for server in (shared, None):
        process, facts, number = run("use torch", environment, server)
        assert isinstance(process, ForkedProcess) == (server is not None)
        assert end(process) == b"printed\n" and process.returncode == 7
        assert facts.pop("pid") == process.pid
        assert facts.pop("parent") == (server.process.pid if server else os.getpid())
        assert facts.pop("arguments") == [str(number), "4"]
        # Beside the three of every process and the pipe: the folder that is listed.
        assert len(facts.pop("descriptors")) == 5
        told.append(facts)
    for name in ("random", "torch"):
        assert told[0].pop(name) != told[1].pop(name)
    assert told[0] == told[1]
    wanted = ("leads", "same output", "interrupt", "terminate", "child", "collects", "server")
    assert all(told[0][name] for name in wanted) and told[0]["threads"] == 1 and not told[0]["cuda"]
    assert told[0]["environment"] == environment


def test_forks_draw_other_random_numbers(shared: ForkClient, environment: dict[str, str]) -> None:
    drawn = set()
    for _ in range(2):
        process, facts, _ = run("use torch", environment, shared)
        end(process)
        drawn |= {facts["random"], facts["torch"]}
    assert len(drawn) == 4


@pytest.mark.parametrize(
    ("deed", "status", "words"),
    [("raise", 1, b"ValueError: it fails"), ("abort", -signal.SIGABRT, b"")],
)
def test_an_end_is_that_of_a_direct_start(
    shared: ForkClient, environment: dict[str, str], deed: str, status: int, words: bytes
) -> None:
    for server in (shared, None):
        process, _, _ = run(deed, environment, server)
        assert words in end(process)
        assert process.returncode == status


def test_names_in_ps(shared: ForkClient, environment: dict[str, str]) -> None:
    process, _, number = run("wait", environment, shared)
    line = [word for word in psutil.Process(process.pid).cmdline() if word]
    assert line[1:] == ["-P", "-m", "forked", str(number), "3"]
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    process.kill()
    end(process)
    assert process.returncode == -signal.SIGKILL
    process.kill()


def test_a_process_is_killed_while_a_thread_waits_for_it(shared: ForkClient, environment: dict[str, str]) -> None:
    process, _, _ = run("wait", environment, shared)
    waiting = threading.Thread(target=process.wait)
    waiting.start()
    process.kill()
    waiting.join(WAIT_S)
    assert not waiting.is_alive() and process.returncode == -signal.SIGKILL
    end(process)


def test_nothing_is_left_of_processes_that_have_ended(shared: ForkClient, environment: dict[str, str]) -> None:
    end(run("exit", environment, shared)[0])
    before = [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), shared.process.pid)]
    for deed in ("exit", "abort"):
        end(run(deed, environment, shared)[0])
    assert [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), shared.process.pid)] == before
    assert family(shared.process.pid) == []  # no zombie either
    assert shared._statuses == {}


def test_a_status_of_an_earlier_process_is_not_that_of_a_later_one(
    shared: ForkClient, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody stopped waiting for the earlier one, and the system gives its number again."""
    converse = shared._converse

    def converse_later(*asked: Any) -> tuple[int, int]:
        pid, pidfd = converse(*asked)
        shared._statuses[pid] = 99
        return pid, pidfd

    monkeypatch.setattr(shared, "_converse", converse_later)
    process, _, _ = run("exit", environment, shared)
    end(process)
    assert process.returncode == 7 and shared._statuses == {}


@pytest.mark.parametrize("how", ["environment", "descriptors"])
def test_others_are_started_directly(shared: ForkClient, environment: dict[str, str], how: str) -> None:
    if how == "environment":
        environment = {**environment, "OMP_NUM_THREADS": "2"}
    files = tuple(range(300)) if how == "descriptors" else ()
    with pytest.raises(ForkError):
        shared.fork("forked", (0, 0), files, environment)
    if how == "environment":
        process, facts, _ = run("exit", environment, shared)
        end(process)
        assert facts["parent"] == os.getpid() and facts["environment"]["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("when", [pytest.param("while it imports", marks=pytest.mark.long), "later"])
def test_a_server_that_is_killed(own: ForkClient, environment: dict[str, str], when: str) -> None:
    """Its processes go on; nobody knows their status. New ones are started directly."""
    before = None if when == "while it imports" else run("wait", environment, own)[0]
    own.process.kill()
    own.process.wait()
    process, facts, _ = run("exit", environment, own)
    end(process)
    assert facts["parent"] == os.getpid() and not own.alive
    if before:
        assert psutil.Process(before.pid).is_running()
        before.kill()
        end(before)
        assert before.returncode is None


def test_signals_are_the_parents_to_answer(shared: ForkClient, environment: dict[str, str]) -> None:
    end(run("exit", environment, shared)[0])
    for number in (signal.SIGINT, signal.SIGTERM):
        shared.process.send_signal(number)
    process, facts, _ = run("exit", environment, shared)
    end(process)
    assert facts["parent"] == shared.process.pid


def test_a_server_that_must_not_fork_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    assert "thread" in find_problem()
    release.set()
    thread.join()


def test_a_server_is_adopted_by_one_process_after_the_other(own: ForkClient, environment: dict[str, str]) -> None:
    """Its words to the one before, which did not listen, are dropped."""
    pool = ServerPool()
    pool.adopt(os.dup(own.descriptor), own.pid)
    first = pool.acquire(environment, 1)
    assert first
    left = run("exit", environment, first)[0]
    pool.release(first)
    os.kill(own.pid, signal.SIGSTOP)  # while a second one greets it
    second = AdoptedServer(os.dup(own.descriptor), own.pid)
    os.kill(own.pid, signal.SIGCONT)
    process, facts, _ = run("exit", environment, second)
    end(process)
    assert facts["parent"] == own.pid and process.returncode == 7
    with left.stdout or nullcontext():
        assert left.wait(WAIT_S) is None, "its status was among what is dropped"
    second.end()
    first.end()
    assert own.alive, "it is its starter's to end"
    own.reclaim()
    process, facts, _ = run("exit", environment, own)
    end(process)
    assert facts["parent"] == own.pid and process.returncode == 7


# Stops the server between its fork and its answer.
STOPS_AFTER_FORK = """
import os, signal
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGSTOP))
"""


def test_a_fork_whose_server_does_not_answer_never_runs(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The client starts another process with the same sockets: two would share each stream."""
    monkeypatch.setattr(fork_client, "STOPPED_S", 0.5)
    (tmp_path / "sitecustomize.py").write_text(STOPS_AFTER_FORK)
    environment = {**environment, "PYTHONPATH": os.pathsep.join((str(tmp_path), environment["PYTHONPATH"]))}
    server = ForkClient(environment)
    reading, writing = os.pipe()
    process = start_process("forked", (writing, DEEDS.index("exit")), (writing,), environment, server)
    os.close(writing)
    with open(reading) as pipe:
        told = [json.loads(line) for line in pipe]  # until both have ended
    end(process)
    assert [one["pid"] for one in told] == [process.pid] and told[0]["parent"] == os.getpid()
    server.process.wait(WAIT_S)
    server.end()


def test_a_server_that_does_nothing_is_given_up(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client, "SILENT_S", 0.5)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with subprocess.Popen(["sleep", "600"]) as idle, theirs:
        server = AdoptedServer(ours.detach(), idle.pid)
        with pytest.raises(ForkError):
            server.fork("forked", (), (), environment)
        assert idle.wait(WAIT_S) == -signal.SIGKILL
        server.end()


def test_engines_share_a_server(environment: dict[str, str]) -> None:
    pool = ServerPool()
    assert pool.acquire(environment, 1) is None, "it would not pay"
    first = pool.acquire(environment, 2)
    assert first and pool.acquire({**environment, "PYTEST_CURRENT_TEST": "another"}, 1) is first
    assert pool.acquire({**environment, "OMP_PROC_BIND": "true"}, 2) is None
    other = pool.acquire({**environment, "OMP_NUM_THREADS": "2"}, 2)
    assert other and other is not first
    pool.release(first)
    assert first.alive
    pool.release(first)
    pool.release(other)
    assert not first.alive and not other.alive
    pool.keep = True
    kept = pool.acquire(environment, 2)
    assert kept
    pool.release(kept)
    assert kept.alive
    pool.close()
    assert not kept.alive


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("forks") / "tiny"))


def tokens(model: str) -> list[list[int]]:
    how: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 20}
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True)
    with LLM(model, **how, executor="processes", tensor_parallel_size=2) as llm:
        parents = {member.ppid() for member in family()}
        assert (os.getpid() in parents) == (not forks.can_fork({}))
        return [answer.outputs[0].token_ids for answer in llm.generate([[3, 4, 5], [6]], params, use_tqdm=False)]


def test_forked_ranks_give_the_tokens_of_those_started_directly(model: str, request: pytest.FixtureRequest) -> None:
    forked = tokens(model)
    request.getfixturevalue("direct_starts")
    assert tokens(model) == forked
