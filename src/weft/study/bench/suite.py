"""The benchmark suite on this machine: one figure for each property that a change may make worse."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from weft.engine.llm import LLM
from weft.errors import ConfigError
from weft.study.bench import overhead
from weft.study.bench.arrivals import arrival_times
from weft.study.bench.http import HttpClient, ServerAddress
from weft.study.bench.load import LoadResult, RequestOptions, run_open_loop
from weft.study.bench.measure import median_figures, run_batch
from weft.study.bench.predicted import predict_batch
from weft.study.bench.prompts import random_prompts
from weft.study.bench.server import ServeProcess
from weft.study.bench.summary import summarise_load
from weft.study.bench.workload import BenchRequest, random_requests, shared_prefix
from weft.study.measure.memory import pss_bytes
from weft.study.measure.synthetic import TINY

if TYPE_CHECKING:
    from weft.plan.plan import Plan

QUIET_S = 0.3  # seconds between two runs, until threads that spin for work have gone to sleep
WARM_UPS = 2
RATE, REQUESTS = 4.0, 32  # of the open loop; requests per second
TINY_TOKENS = 128  # output of each request when Python is timed

# Run number and vocabulary size -> the requests of that run.
RequestMaker = Callable[[int, int], list[BenchRequest]]
Tasks = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class BenchBatch:
    """Requests that all arrive at the start; `requests` makes the requests of a run, with different tokens for each
    run.

    `share` is the share of the suite's runs that is enough for this batch.
    """

    name: str
    requests: RequestMaker
    share: float = 1.0


def random_batch(count: int, input_len: tuple[int, int], output_len: int) -> RequestMaker:
    """Maker of `count` random requests."""
    return lambda seed, vocab: random_requests(
        seed, vocab=vocab, count=count, input_len=input_len, output_len=output_len
    )


BATCHES = (
    BenchBatch("latency", random_batch(1, (128, 128), 128)),
    BenchBatch("prefill", random_batch(1, (1024, 1024), 1)),
    BenchBatch("throughput", random_batch(32, (32, 256), 128), 0.6),
    BenchBatch(
        "prefix",
        lambda seed, vocab: shared_prefix(seed, vocab=vocab, count=128, prefix=512, own=16, output_len=32),
        0.6,
    ),
)


def measure_batches(model: str, runs: int, report: Callable[[str], object]) -> tuple[Tasks, Plan]:
    """Measure every batch on one engine; return medians with the planner's predictions, and the engine's plan.

    With `runs` 0 only the plan is returned.
    """
    tasks: Tasks = {}
    with LLM(model, skip_tokenizer_init=True) as llm:
        for batch in BATCHES if runs else ():
            tasks[batch.name] = measure_batch(llm, batch, max(1, round(runs * batch.share)))
            report(batch.name)
        return tasks, llm.plan


def measure_batch(llm: LLM, batch: BenchBatch, runs: int) -> dict[str, Any]:
    """Medians of one batch over `runs` runs, and the planner's prediction."""
    vocab, measured = llm.plan.shape.vocab, []
    for number in range(-WARM_UPS, runs):
        time.sleep(QUIET_S)
        run = run_batch(llm, batch.requests(number, vocab))
        if number >= 0:
            measured.append(run)
    figures: dict[str, Any] = median_figures(measured)
    # The planner does not know of shared prefixes.
    predicted = None if batch.name == "prefix" else predict_requests(llm, batch.requests(0, vocab))
    if batch.name == "prefill":
        for result in (figures, predicted or {}):
            if "ttft_s" in result:
                result["prompt_tok_s"] = round(measured[0].input_tokens / result["ttft_s"], 1)
    return {"runs": runs, **figures, "predicted": predicted}


def predict_requests(llm: LLM, requests: list[BenchRequest]) -> dict[str, float] | None:
    """The planner's prediction for a batch; None on hardware that the planner does not know."""
    try:
        return predict_batch(llm.forecast(), requests)
    except ConfigError:
        return None


def measure_python() -> dict[str, Any]:
    """Processor time of the scheduler alone, of the core without ranks, and of a whole step of a tiny model.

    Processor time is the same on a busy machine as on an idle one.
    """
    requests, seconds = random_batch(overhead.BATCH, (8, 8), TINY_TOKENS), []
    # One thread for the kernels: the waiting of others would count as processor time.
    with one_thread(), TINY.folder() as folder, LLM(folder, load_format="dummy", skip_tokenizer_init=True) as llm:
        for number in range(WARM_UPS + 3):
            start = time.process_time()
            run_batch(llm, requests(number, TINY.vocab))
            seconds.append((time.process_time() - start) / TINY_TOKENS)
    return {**overhead.overhead_report(), "step_cpu_ms": round(1000 * median(seconds[WARM_UPS:]), 4)}


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which started ranks use one thread each."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def measure_server(model: str, plan: Plan, starts: int) -> Tasks:
    """Measure the start of `weft serve`, then an open loop on the last server, and its memory before and after."""
    seconds = []
    for _ in range(starts - 1):
        with ServeProcess([model]) as served:
            seconds.append(served.seconds)
    with ServeProcess([model]) as served:
        seconds.append(served.seconds)
        before = pss_bytes(served.pid)
        load = asyncio.run(_run_load(served.url, plan.shape.vocab))
        after = pss_bytes(served.pid)
    tokens = sum(record.input_tokens + record.output_tokens for record in load.records)
    # KV blocks that were never used take no memory.
    kv = tokens * sum(plan.block_bytes(place.rank) for place in plan.places) // plan.block_size
    memory = {"ready_pss_bytes": before, "loaded_pss_bytes": after, "kv": kv, "beyond_kv_bytes": max(0, after - kv)}
    return {
        "start": {"starts": starts, "ready_s": round(median(seconds), 3)},
        "serve": {"request_rate": RATE, **summarise_load(load)},
        "memory": memory,
    }


async def _run_load(url: str, vocab: int) -> LoadResult:
    prompts = random_prompts("suite", count=REQUESTS, vocab=vocab, input_len=(128, 128), output_len=(64, 64))
    client = HttpClient(ServerAddress(url))
    try:
        return await run_open_loop(client, RequestOptions(), prompts, arrival_times("suite", count=REQUESTS, rate=RATE))
    finally:
        client.close()


@dataclass(frozen=True)
class Headline:
    """A figure of the report: its task and key, name, unit, factor from the task's unit, and target."""

    task: str
    key: str
    words: str
    unit: str
    scale: float = 1.0
    target: str = ""


HEADLINES = (
    Headline("latency", "ttft_s", "batch 1, 128+128: time to first token", "ms", 1e3),
    Headline("latency", "decode_tok_s", "batch 1, 128+128: decode", "tokens/s"),
    Headline("prefill", "prompt_tok_s", "one prompt of 1,024: prefill", "tokens/s"),
    Headline("throughput", "output_tok_s", "32 requests of 32-256+128: output", "tokens/s"),
    Headline("prefix", "output_tok_s", "128 requests that share 512 tokens: output", "tokens/s"),
    Headline("start", "ready_s", "weft serve, start to ready", "s", target="2 or less"),
    Headline("serve", "median_ttft_ms", "4 requests/s of 128+64: median TTFT", "ms"),
    Headline("serve", "p95_ttft_ms", "4 requests/s of 128+64: p95 TTFT", "ms"),
    Headline("serve", "median_tpot_ms", "4 requests/s of 128+64: median TPOT", "ms"),
    Headline("serve", "failed", "4 requests/s of 128+64: failed", "requests", target="0"),
    Headline("memory", "beyond_kv_bytes", "memory beyond the KV in use", "GB", 1e-9, "0.9 or less"),
    Headline("python", "scheduled_per_s", "scheduler alone, 256 running", "requests/s", target="250,000 or more"),
    Headline("python", "core_step_ms", "core without ranks, batch 32: a step", "ms"),
    Headline("python", "step_cpu_ms", "step of a tiny model, batch 32: processor time", "ms", target="0.5 or less"),
)


def headline_rows(tasks: Mapping[str, Mapping[str, Any]]) -> list[list[float | str | None]]:
    """Rows of the report: name, unit, figure, prediction, ratio of the two, and target."""
    table: list[list[float | str | None]] = []
    for headline in HEADLINES:
        task = tasks.get(headline.task, {})
        value = task.get(headline.key)
        if value is None:
            continue
        predicted = (task.get("predicted") or {}).get(headline.key)
        ratio = value / predicted if predicted else None
        expected = predicted and predicted * headline.scale
        table.append([headline.words, headline.unit, value * headline.scale, expected, ratio, headline.target])
    return table
