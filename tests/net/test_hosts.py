"""One engine on two hosts: the tokens of one host, and an end with its cause for every fault."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cpu import tiny
from tests.net import head as head_program
from tests.net.namespaces import HOSTS, Cable, obstacle
from weft import LLM

pytestmark = pytest.mark.skipif(bool(reason := obstacle()), reason=reason)

ROOT = Path(__file__).parents[2]
WAIT_S = 90  # at most, for something that takes seconds
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1_000_000,
}
PORT = 29701


class Program:
    """A process on one of the hosts, with what it prints."""

    def __init__(self, cable: Cable, host: int, words: list[str], log: Path, **environment: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [*cable.inside(host), sys.executable, *words],
                env={**inherited, "PYTHONPATH": f"{ROOT}/src:{ROOT}", **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def ask(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"it has ended:\n{self.printed}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def printed(self) -> str:
        return self.log.read_text()

    def until(self, pattern: str) -> None:
        """Wait until the program has printed a line with this pattern."""
        deadline = time.monotonic() + WAIT_S
        while not re.search(pattern, self.printed):
            assert self.process.poll() is None and time.monotonic() < deadline, self.printed
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        """Wait for the end; return status and last line."""
        status = self.process.wait(WAIT_S)
        return status, self.printed.strip().splitlines()[-1]

    def ranks(self) -> list[psutil.Process]:
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [member for member in family if "weft.worker.process" in member.cmdline()]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    cable = Cable()
    yield cable
    cable.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("nodes") / "tiny"))


@pytest.fixture(scope="module")
def alone(model: str) -> list[list[int]]:
    """Tokens of one rank on one host."""
    with LLM(model, **COMMON) as llm:
        return head_program.answers(llm)


class Pair:
    """Starts the head on the first host, and the other node on the second."""

    def __init__(self, cable: Cable, model: str, folder: Path) -> None:
        self._cable, self._model, self._folder = cable, model, folder
        self.key = self.write_key("right.key", "7" * 64)
        self.programs: list[Program] = []

    def write_key(self, name: str, text: str) -> str:
        file = self._folder / name
        file.write_text(text)
        file.chmod(0o600)
        return str(file)

    def head(self, **options: Any) -> Program:
        address = {"nnodes": 2, "master_addr": HOSTS[0], "master_port": PORT, "cluster_key_file": self.key}
        words = [str(ROOT / "tests/net/head.py"), self._model, json.dumps({**COMMON, **address, **options})]
        return self._start(0, words, "head.log")

    def other(self, key: str = "", **environment: str) -> Program:
        words = f"-m weft serve {self._model} --load-format dummy --dtype float32 --headless --nnodes 2 --node-rank 1"
        words += f" --master-addr {HOSTS[0]} --master-port {PORT} --cluster-key-file {key or self.key}"
        return self._start(1, words.split(), "other.log", **environment)

    def _start(self, host: int, words: list[str], log: str, **environment: str) -> Program:
        self.programs.append(Program(self._cable, host, words, self._folder / log, **environment))
        return self.programs[-1]


@pytest.fixture
def pair(cable: Cable, model: str, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(cable, model, tmp_path)
    yield pair
    for program in pair.programs:
        program.close()
    cable.join()


def test_pipeline_over_a_link_that_is_cut(pair: Pair, cable: Cable, alone: list[list[int]]) -> None:
    """The other node comes later. A second without the link costs time only; a link that stays cut ends both sides."""
    head = pair.head(pipeline_parallel_size=2)
    head.until("waiting at .* for 1 other")
    other = pair.other()
    assert [row["node"] for row in head.answer()["layout"]] == ["0", "1"]
    head.ask()
    assert head.answer()["tokens"] == alone
    cable.cut()
    head.ask()
    time.sleep(1)
    cable.join()
    assert head.answer()["tokens"] == alone
    cable.cut()
    head.ask()
    status, last = head.end()
    assert status == 1 and "node 1" in last and "silent" in last, head.printed
    assert "Current thread" in head.printed, "the stacks of the other ranks"
    status, last = other.end()
    assert status == 1 and "the head" in last and "silent" in last, other.printed


def test_a_rank_that_is_killed_on_the_other_host(pair: Pair, alone: list[list[int]]) -> None:
    """A tensor-parallel group over the cable: a warning with a way out, the tokens of one host, and one cause."""
    head, other = pair.head(tensor_parallel_size=2), pair.other()
    assert [row["node"] for row in head.answer()["layout"]] == ["0", "1"]
    assert re.search(r"spans nodes.*ms.*--pipeline-parallel-size 2", head.printed)
    head.ask()
    assert head.answer()["tokens"] == alone
    [rank] = other.ranks()
    rank.send_signal(signal.SIGKILL)
    for program in (head, other):
        if program is head:
            head.ask()
        status, last = program.end()
        assert status == 1 and "rank 1" in last and "SIGKILL" in last, program.printed


def test_a_node_that_does_not_come_is_named(pair: Pair) -> None:
    status, last = pair.head(pipeline_parallel_size=2, start_timeout=1).end()
    assert status == 1 and "node 1 did not come" in last and "--node-rank 1" in last


def test_another_key(pair: Pair) -> None:
    """Both sides say so; the head goes on waiting for a node with the right one."""
    head = pair.head(pipeline_parallel_size=2)
    status, last = pair.other(pair.write_key("other.key", "8" * 64)).end()
    assert status == 1 and "another cluster key" in last
    head.until(f"{HOSTS[1]} has another cluster key")


def wrong_interface(pair: Pair) -> tuple[Program, str]:
    return pair.other(GLOO_SOCKET_IFNAME="eth7"), "GLOO_SOCKET_IFNAME=eth7"


def missing_route(pair: Pair) -> tuple[Program, str]:
    return pair.other(VLLM_HOST_IP="10.9.9.9"), "10.9.9.9"


@pytest.mark.parametrize("start", [wrong_interface], ids=["interface"])
def test_a_node_that_fails_the_preflight(pair: Pair, start: Callable[[Pair], tuple[Program, str]]) -> None:
    """Both sides name the node and the value."""
    head = pair.head(pipeline_parallel_size=2)
    other, value = start(pair)
    for program in (head, other):
        status, last = program.end()
        assert status == 1 and "node 1" in last and value in last, program.printed


def test_an_address_of_another_machine(pair: Pair) -> None:
    status, last = missing_route(pair)[0].end()
    assert status == 1 and "10.9.9.9 is no address of this machine" in last
