"""Ranks that share no file: they find each other over TCP, and exchange tensors through sockets only."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_worker import HERE, make_plan, make_step, total

from tests.cpu import tiny
from tests.cpu.families import family
from tests.refusals import refuses
from weft import LLM, SamplingParams
from weft.engine.executors import processes
from weft.engine.executors.processes import ProcessExecutor
from weft.engine.executors.rendezvous import check_reachable, listen
from weft.errors import ConfigError, EngineError
from weft.plan.plan import Plan
from weft.plan.wiring import Network, Rendezvous, Tcp, Wiring

WAIT_S = 60
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1_000_000,
}
NOT_OURS = "203.0.113.7"  # reserved for documentation: no machine has it


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ProcessExecutor]]:
    """Starts executors of fake workers, and closes them."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    created: list[ProcessExecutor] = []

    def start(plan: Plan, kind: type[ProcessExecutor] = ProcessExecutor, *, network: bool = True) -> ProcessExecutor:
        created.append(kind(HERE, network=network))
        created[-1].start(plan)
        return created[-1]

    yield start
    for executor in created:
        executor.close()


def open_files(process: psutil.Process) -> set[str]:
    """Everything that a process has open, or mapped for others to write, and that another process could share."""
    folder = Path(f"/proc/{process.pid}")
    descriptors = {os.readlink(descriptor) for descriptor in (folder / "fd").iterdir()}
    maps = (line.split(maxsplit=5) for line in (folder / "maps").read_text().splitlines())
    names = descriptors | {fields[5] for fields in maps if len(fields) == 6 and fields[1].endswith("s")}
    return {name for name in names if not name.startswith(("/dev/null", "/usr/", "anon_inode:"))}


@pytest.mark.parametrize("network", [True, pytest.param(False, marks=pytest.mark.long)])
def test_ranks_on_the_network_share_no_file(start: Callable[..., ProcessExecutor], network: bool) -> None:
    plan = make_plan(tensor=2, stages=2)
    executor = start(plan, network=network)
    for number in range(5):
        step = make_step(number, [number, 2])
        assert executor.submit(step).result(WAIT_S).tokens == [total(plan, step.tokens)]
    files = [open_files(process) for process in family()]
    assert len(files) == 4
    shared = set().union(*(one & other for one, other in itertools.combinations(files, 2)))
    assert bool(shared) == (not network), shared
    assert any("memfd" in name for names in files for name in names) == (not network)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("network") / "tiny"))


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2, "async_scheduling": True},
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
    ],
    ids=["tp2", "pp2"],
)
def test_the_tokens_of_shared_memory(model: str, layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[3 + (7 * row + 3 * at) % 22 for at in range(1 + 5 * row)] for row in range(4)]
    params = [SamplingParams(temperature=0.8 * (row % 2), seed=row, max_tokens=8, ignore_eos=True) for row in range(4)]

    def tokens(*, network: bool) -> list[list[int]]:
        monkeypatch.setattr("weft.engine.replicas.local.create_executor", lambda *_: ProcessExecutor(network=network))
        with LLM(model, **COMMON, **layout) as llm:
            return [answer.outputs[0].token_ids for answer in llm.generate(prompts, params, use_tqdm=False)]

    assert tokens(network=True) == tokens(network=False)


# --- addresses that do not work, and peers that go ---


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with refuses(ConfigError, "cannot-listen") as raised:
        listen(Tcp(NOT_OURS, 0))
    assert f"{NOT_OURS}:0" in str(raised.value)


def test_a_port_that_is_taken_cannot_be_bound() -> None:
    with closing(listen(Tcp("127.0.0.1", 0))) as taken, refuses(ConfigError, "cannot-listen"):
        listen(Tcp("127.0.0.1", taken.getsockname()[1]))


def test_an_address_at_which_nobody_listens() -> None:
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))  # without listening
        with refuses(ConfigError, "cannot-reach"):
            check_reachable(Tcp("127.0.0.1", bound.getsockname()[1]))


def test_an_address_that_does_not_answer() -> None:
    """A full queue of connections is answered as little as a host behind a firewall."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        with socket.create_connection(address), refuses(ConfigError, "cannot-reach"):
            check_reachable(Tcp(*address), timeout_s=0.2)


def test_rank_0_that_cannot_listen_fails_the_start(
    start: Callable[..., ProcessExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LOOPBACK_ADDRESS", NOT_OURS)
    with refuses(EngineError, "cannot-listen") as raised:
        start(make_plan(tensor=2))
    assert isinstance(raised.value, EngineError)
    assert (raised.value.cause.rank, raised.value.cause.phase) == (0, "start")


class Misled(ProcessExecutor):
    """Tells rank 1 an address at which nobody listens."""

    def _send_launch(self, plan: Plan, rank: int, rendezvous: Rendezvous, wiring: Wiring) -> None:
        super()._send_launch(plan, rank, Tcp("127.0.0.1", 1) if rank == 1 else rendezvous, wiring)


def test_a_rank_that_does_not_reach_rank_0_fails_the_start(start: Callable[..., ProcessExecutor]) -> None:
    with refuses(EngineError, "cannot-reach") as raised:
        start(make_plan(tensor=2), Misled)
    assert isinstance(raised.value, EngineError)
    assert raised.value.cause.rank == 1 and "127.0.0.1:1" in raised.value.cause.cause


class Bereft(ProcessExecutor):
    """Kills rank 0 as soon as the others are told where it listens."""

    def _send_launch(self, plan: Plan, rank: int, rendezvous: Rendezvous, wiring: Wiring) -> None:
        assert wiring == Network()
        if rank == 1:
            self._processes._children[0].kill()
        super()._send_launch(plan, rank, rendezvous, wiring)


def test_rank_0_that_goes_before_the_others_come(start: Callable[..., ProcessExecutor]) -> None:
    with pytest.raises(EngineError) as raised:
        start(make_plan(tensor=2), Bereft)
    assert (raised.value.cause.rank, raised.value.code) == (0, "process-killed")
    assert "SIGKILL" in raised.value.cause.cause


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"stages": 2}], ids=["tp2", "pp2"])
def test_a_peer_that_goes_away_is_the_cause(start: Callable[..., ProcessExecutor], layout: dict[str, int]) -> None:
    executor = start(make_plan("kill 0 step", **layout))
    error = executor.submit(make_step(0, [1])).exception(WAIT_S)
    assert isinstance(error, EngineError)
    assert (error.cause.rank, error.cause.phase, error.code) == (0, "step", "process-killed")
    assert "SIGKILL" in error.cause.cause
