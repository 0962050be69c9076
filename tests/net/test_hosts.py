"""One engine on two hosts: the tokens of one host, and an end with its cause for every fault."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.cpu import tiny
from tests.net import head as head_program
from tests.net.namespaces import HOSTS, Cable, obstacle
from tests.net.programs import COMMON, Pair, Program, ask, complete, until_health
from weft import LLM

pytestmark = pytest.mark.skipif(bool(reason := obstacle()), reason=reason)

LATE_S = 20  # for a node that comes late


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


@pytest.fixture
def pair(cable: Cable, model: str, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(cable, model, tmp_path)
    yield pair
    pair.close()
    cable.join()


def test_pipeline_over_a_link_that_is_cut(pair: Pair, cable: Cable, alone: list[list[int]]) -> None:
    """The other node comes later. A second without the link costs time only; a link that stays cut ends both sides."""
    head = pair.head(pipeline_parallel_size=2)
    head.until("waiting at .* for 1 other")
    other = pair.other()
    assert [row["node"] for row in head.answer()["layout"]] == ["0", "1"]
    head.say()
    assert head.answer()["tokens"] == alone
    cable.cut()
    head.say()
    time.sleep(1)
    cable.join()
    assert head.answer()["tokens"] == alone
    cable.cut()
    head.say()
    status, last = head.end()
    assert status == 1 and "node 1" in last and "silent" in last, head.printed
    assert "Current thread" in head.printed, "the stacks of the other ranks"
    status, last = other.end()
    assert status == 1 and "the head" in last and "silent" in last, other.printed


def test_a_rank_that_is_killed_on_the_other_host(pair: Pair, alone: list[list[int]]) -> None:
    """A tensor-parallel group over the cable: a warning with a way out, the tokens of one host, and one cause."""
    head, other = pair.head(tensor_parallel_size=2), pair.other()
    assert [row["node"] for row in head.answer()["layout"]] == ["0", "1"]
    assert re.search(r"\bms .*--pipeline-parallel-size 2", head.printed)
    head.say()
    assert head.answer()["tokens"] == alone
    [rank] = other.ranks()
    rank.send_signal(signal.SIGKILL)
    for program in (head, other):
        if program is head:
            head.say()
        status, last = program.end()
        assert status == 1 and "rank 1" in last and "SIGKILL" in last, program.printed


def test_groups_inside_nodes_and_a_head_that_is_killed(pair: Pair, alone: list[list[int]]) -> None:
    """Tensor parallel inside each node, stages across; the other node ends at once when the head is killed."""
    head, other = pair.head(tensor_parallel_size=2, pipeline_parallel_size=2), pair.other()
    rows = head.answer()["layout"]
    assert [(row["stage"], row["node"]) for row in rows] == [(0, "0"), (0, "0"), (1, "1"), (1, "1")]
    assert "--pipeline-parallel-size" not in head.printed, "no group spans nodes"
    head.say()
    assert head.answer()["tokens"] == alone
    ranks = other.ranks()
    head.kill()
    status, last = other.end()
    assert status == 1 and "the head has closed the connection" in last, other.printed
    assert not psutil.wait_procs(ranks, 10)[1]


def test_an_engine_starts_again_with_its_nodes(pair: Pair, model: str) -> None:
    """After a rank and a node: /health says so meanwhile, and the answers are the same afterwards."""
    server, other = pair.server("-pp", "2"), pair.other()
    until_health(pair.socket, 200)
    prompt = [3, 5, 7, 11]
    expected = complete(pair.socket, model, prompt, 12)
    [rank] = other.ranks()
    rank.kill()
    assert complete(pair.socket, model, prompt, 12) == expected  # it waits for the engine
    assert other.process.poll() is None and "SIGKILL" in other.printed
    other.kill()
    # The lost node, or its rank, whichever was noticed first.
    assert re.search(r"(node|rank) 1\b", str(until_health(pair.socket, 503)["error"]))
    assert ask(pair.socket, "/health/live")[0] == 200
    again = pair.other()
    until_health(pair.socket, 200)
    assert complete(pair.socket, model, prompt, 12) == expected
    server.process.terminate()
    assert server.end()[0] == 0, server.printed
    assert again.end()[0] == 0, again.printed


@pytest.mark.long  # ten seconds of silence; the same with other faults above
def test_an_engine_starts_again_with_its_link(pair: Pair, cable: Cable, model: str) -> None:
    pair.server("-pp", "2")
    other = pair.other()
    until_health(pair.socket, 200)
    prompt = [3, 5, 7, 11]
    expected = complete(pair.socket, model, prompt, 12)
    cable.cut()
    until_health(pair.socket, 503)
    other.until("silent for 8 s.* joins again")
    cable.join()
    until_health(pair.socket, 200)
    assert complete(pair.socket, model, prompt, 12) == expected


def test_replicas_on_different_nodes(pair: Pair, alone: list[list[int]]) -> None:
    """One in each node; answers go on elsewhere if one is lost, and it comes back."""
    head, other = pair.head(data_parallel_size=2), pair.other("-dp", "2")
    rows = head.answer()["layout"]
    assert [(row["replica"], row["node"]) for row in rows] == [(0, "0"), (1, "1")]
    head.say()
    assert head.answer()["tokens"] == alone
    [rank] = other.ranks()
    rank.kill()
    head.say()
    assert head.answer()["tokens"] == alone
    head.until("replica 1 is back")
    head.say()
    assert head.answer()["tokens"] == alone
    assert head.process.stdin
    head.process.stdin.close()
    assert head.end()[0] == other.end()[0] == 0, other.printed


def test_a_node_that_does_not_come_is_named(pair: Pair) -> None:
    status, last = pair.head(pipeline_parallel_size=2, start_timeout=1).end()
    assert status == 1 and "node 1" in last and "--node-rank 1" in last


def test_another_key(pair: Pair) -> None:
    """Both sides say so; the head goes on waiting for a node with the right one."""
    head = pair.head(pipeline_parallel_size=2)
    status, last = pair.other(key=pair.write_key("other.key", "8" * 64)).end()
    assert status == 1 and "another cluster key" in last
    head.until(f"{HOSTS[1]} has another cluster key")


def wrong_interface(pair: Pair) -> tuple[Program, str]:
    return pair.other(GLOO_SOCKET_IFNAME="eth7"), "GLOO_SOCKET_IFNAME=eth7"


def other_version(pair: Pair) -> tuple[Program, str]:
    return pair.changed_other("weft._version.__version__ = '0.0.9'"), "has Weft 0.0.9, and node 0 has"


def other_torch(pair: Pair) -> tuple[Program, str]:
    change = "import weft.engine.cluster.facts; weft.engine.cluster.facts.torch_version = lambda: '1.2.3'"
    return pair.changed_other(change), "has torch 1.2.3, and node 0 has"


def wrong_clock(pair: Pair) -> tuple[Program, str]:
    change = "import time; now = time.time; time.time = lambda: now() + 95"
    return pair.changed_other(change), "95 s ahead; set it there"


def missing_route(pair: Pair) -> tuple[Program, str]:
    return pair.other(VLLM_HOST_IP="10.9.9.9"), "10.9.9.9"


FAULTS = [wrong_interface, other_version, other_torch, wrong_clock]


@pytest.mark.parametrize("start", FAULTS, ids=["interface", "version", "torch", "clock"])
def test_a_node_that_fails_the_preflight(pair: Pair, start: Callable[[Pair], tuple[Program, str]]) -> None:
    """Both sides name the node and the value."""
    head = pair.head(pipeline_parallel_size=2)
    other, value = start(pair)
    for program in (head, other):
        status, last = program.end()
        assert status == 1 and "node 1" in last and value in last, program.printed


def test_an_address_of_another_machine(pair: Pair) -> None:
    status, last = missing_route(pair)[0].end()
    assert status == 1 and "10.9.9.9" in last


@pytest.mark.long  # tests/pure/engine/test_nodes.py has the variables
def test_one_command_under_torchrun(pair: Pair, model: str) -> None:
    """torchrun's variables tell the nodes apart. Both end with the head."""
    with LLM(model, **COMMON) as llm:
        prompt = [3, 5, 7, 11]
        params = llm.sampling_params(temperature=0, max_tokens=12, ignore_eos=True)
        (alone,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    runs = [pair.under_torchrun(host, "-pp", "2") for host in (1, 0)]
    until_health(pair.socket, 200)
    assert complete(pair.socket, model, prompt, 12) == list(alone.outputs[0].token_ids)
    [server] = psutil.Process(runs[1].process.pid).children()
    server.terminate()
    assert [run.process.wait(60) for run in runs] == [0, 0], [run.printed for run in runs]


@pytest.mark.long  # the test of a link that is cut has a node that comes later
def test_a_node_that_comes_late(pair: Pair, alone: list[list[int]]) -> None:
    """The head names it meanwhile, and the order of the starts does not matter."""
    head = pair.head(pipeline_parallel_size=2)
    head.until("still missing: node 1")
    time.sleep(LATE_S / 2)
    pair.other()
    assert [row["node"] for row in head.answer()["layout"]] == ["0", "1"]
    head.say()
    assert head.answer()["tokens"] == alone


LAYOUTS = {
    "pp2": ({"pipeline_parallel_size": 2}, ["0", "1"]),
    "tp2": ({"tensor_parallel_size": 2}, ["0", "1"]),
    "tp2pp2": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, ["0", "0", "1", "1"]),
    "dp2tp2": ({"data_parallel_size": 2, "tensor_parallel_size": 2}, ["0", "0", "1", "1"]),
}


@pytest.mark.long  # the tests above run the same layouts with a tiny model
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_demo_over_nodes(cable: Cable, tmp_path: Path, name: str) -> None:
    """SmolLM2-135M in every layout, with the tokens of one rank. Groups stay inside nodes but for tp2."""
    layout, nodes = LAYOUTS[name]
    options = {"dtype": "float32", "load_format": "auto", "kv_cache_memory_bytes": 50_000_000, "max_model_len": 256}
    with LLM("demo", **options) as llm:
        expected = head_program.answers(llm)
    demo = Pair(cable, "demo", tmp_path)
    try:
        head = demo.head(**options, **layout)
        demo.other("--load-format", "auto", *("-dp", "2") * ("data_parallel_size" in layout))
        assert [row["node"] for row in head.answer()["layout"]] == nodes
        head.say()
        assert head.answer()["tokens"] == expected
    finally:
        demo.close()
