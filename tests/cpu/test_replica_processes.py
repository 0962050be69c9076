"""Several engines with processes of their own: over ranks that are fakes, and with a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from counting_worker import COUNTING
from fake_worker import make_plan

from tests.cpu import tiny
from tests.cpu.families import command_line, family
from weft import LLM, SamplingParams
from weft.config import EngineConfig
from weft.engine.core.params import SamplingParams as Params
from weft.engine.core.request import Output, Request
from weft.engine.core.token_ids import TokenIds
from weft.engine.replicas.replicas import ReplicaSet
from weft.machine.hardware import host
from weft.planner.execution.replicas import ReplicaPlan

WAIT_S = 60


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fakes are found, and no process is left."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    yield
    assert family() == []


async def collect(stream: AsyncIterator[Output]) -> list[int]:
    tokens: list[int] = []
    async with asyncio.timeout(WAIT_S):
        async for output in stream:
            tokens += output.tokens
    return tokens


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not check():
            await asyncio.sleep(0.02)


def members(module: str) -> list[psutil.Process]:
    return [member for member in family() if module in command_line(member)]


# tests/cpu/test_serve.py kills a rank of two replicas.
@pytest.mark.parametrize(
    "victim",
    [pytest.param("weft.worker", marks=pytest.mark.long), "weft.engine.replicas.process"],
    ids=["rank", "core"],
)
async def test_no_caller_notices_a_death(victim: str) -> None:
    planned = [ReplicaPlan(make_plan(), host.probe_host())] * 2
    engine = await ReplicaSet.start(planned, EngineConfig(model="fine"), COUNTING)
    try:
        assert len(members("weft.worker")) == len(members("weft.engine.replicas.process")) == 2
        requests = [
            Request(id=str(n), prompt=TokenIds.pack([n, n]), params=Params(max_tokens=30 + n % 7)) for n in range(20)
        ]
        answers = [asyncio.create_task(collect(engine.submit([request]))) for request in requests]
        await until(lambda: engine.stats.generation_tokens > 20)
        members(victim)[0].kill()
        assert await asyncio.gather(*answers) == [[n + 1 + k for k in range(30 + n % 7)] for n in range(20)]
        await until(lambda: len(engine.replicas) == 2)
        assert len(members("weft.worker")) == len(members("weft.engine.replicas.process")) == 2
        assert engine.failure is None
        assert sum(stats.generation_tokens for stats in engine.replica_stats) >= sum(30 + n % 7 for n in range(20))
    finally:
        await engine.close()


@pytest.mark.parametrize(
    "precision",
    [{"dtype": "float32"}, pytest.param({"dtype": "bfloat16", "deterministic": True}, marks=pytest.mark.long)],
    ids=["float32", "deterministic"],
)
def test_an_llm_of_two_replicas_answers_as_one(two_cores: None, tmp_path: Path, precision: dict[str, Any]) -> None:
    """In the order of the prompts, also if a rank is killed. In 16 bits only sums of one order give the same tokens:
    replicas have other batches, and other numbers of threads."""
    model = str(tiny.write(tmp_path / "tiny"))
    options = {"load_format": "dummy", "max_model_len": 512, "kv_cache_memory_bytes": 16 << 20, **precision}
    prompts = [[5 + n % 50] * (3 + n % 11) for n in range(24)]
    params = [
        SamplingParams(max_tokens=200, ignore_eos=True, temperature=n % 2, seed=n, n=1 + n % 3 // 2) for n in range(24)
    ]

    def tokens(llm: LLM) -> list[list[list[int]]]:
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [[list(choice.token_ids) for choice in answer.outputs] for answer in answers]

    with LLM(model, **options) as one:
        alone = tokens(one)
    with LLM(model, data_parallel_size=2, **options) as two:
        rows = two.layout()
        assert [(row["rank"], row["replica"], row["stage"]) for row in rows] == [(0, 0, 0), (1, 1, 0)]
        assert [replica.plan.cores for replica in two.replicas] == [((0,),), ((1,),)]
        assert tokens(two) == alone
        assert all(report["steps"] for report in two.rank_stats())
        stream = two.stream({"prompt_token_ids": prompts[0]}, params[0])
        next(stream)
        members("weft.worker")[0].kill()
        *_, last = stream
        assert [list(choice.token_ids) for choice in last.outputs] == alone[0]
        assert tokens(two) == alone
        assert two.reset_prefix_cache()
