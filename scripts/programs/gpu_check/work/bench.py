"""An engine with random weights: seed 0 of the nano-vllm workload after a warm-up, one request, or decode steps of
several numbers of rows; with `profile`, what decode steps consist of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from scripts.programs.gpu_check.bounds import batch_roofline, context_tokens
from scripts.programs.gpu_check.shapes import Shape, shape_of, write_config
from scripts.programs.gpu_check.work import Figure, Options
from scripts.programs.gpu_check.work.profile import profiled_steps
from weft import LLM
from weft.ranks.worker.graphs import CudaGraphs, Replay
from weft.study.bench.measure import RunFigures, run_batch
from weft.study.bench.workload import BenchRequest, nano_vllm, random_requests

ONE_INPUT, ONE_OUTPUT, ONE_RUNS = 128, 256, 3
QUIET_S = 1.0
STEP_ROWS, STEP_CONTEXT, STEP_TOKENS = (1, 32, 256), 1024, 48
# On a stand-in for a card: what an engine needs there.
REHEARSED: dict[str, Any] = {
    "dtype": "float32",
    "executor": "inline",
    "max_model_len": 32,
    "kv_cache_memory_bytes": 100_000,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
}


def engine_settings(options: Options) -> dict[str, Any]:
    """Arguments of LLM beside the model."""
    common = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "max_model_len": 4096}
    return {**common, **options.get("engine", {}), **(REHEARSED if options["rehearse"] else {})}


@contextmanager
def started(options: Options) -> Iterator[tuple[LLM, Shape]]:
    """An engine on random weights of options["model"]'s shape."""
    quantization = options.get("engine", {}).get("quantization")
    shape = shape_of(options["model"], quantization=quantization, rehearse=options["rehearse"])
    with TemporaryDirectory() as folder:
        path = write_config(Path(folder) / options["model"], shape)
        with LLM(path, **engine_settings(options)) as llm:
            yield llm, shape


def bench(options: Options) -> Iterator[Figure]:
    name = str(options.get("name", options["model"]))
    with started(options) as (llm, shape):
        kind = {"nano": nano, "one": one_request, "steps": steps}[options["kind"]]
        yield from kind(llm, shape, name, options)
        if options.get("profile"):
            yield from profiled_steps(llm, name, shape.vocab, options)


def nano_asks(shape: Shape, options: Options, seed: int) -> list[BenchRequest]:
    """The workload with that seed; on a stand-in one short request."""
    if options["rehearse"]:
        return random_requests(seed, vocab=shape.vocab, count=1, input_len=(3, 5), output_len=2)
    return nano_vllm(shape.vocab, seed)


def nano(llm: LLM, shape: Shape, name: str, options: Options) -> Iterator[Figure]:
    """Tokens/s of seed 0. The warm-up is seed 1, whose batches shrink from all requests to none as well and have every
    graph captured on the way or after, and whose tokens are others, so that no prefix is found again."""
    asks = nano_asks(shape, options, 0)
    with captures_counted() as captured:
        run_batch(llm, nano_asks(shape, options, 1))
        wait_for_captures(captured)
        captured.clear()
        done = run_batch(llm, asks)
    bound = None if in_8_bits(options) else batch_roofline(shape, asks, options["copy_Bps"])
    yield Figure(f"{name}: nano-vllm seed 0", round(done.output_tok_s, 1), "tok/s", bound and round(bound, 1))
    yield Figure(f"{name}: graphs captured during seed 0", len(captured), "graphs", ok=not captured)
    yield Figure(f"{name}: time to first token, median", round(1000 * done.ttft_s, 2), "ms")


def one_request(llm: LLM, shape: Shape, name: str, options: Options) -> Iterator[Figure]:
    """Tokens/s of one request after its first, the median of three runs after a warm-up."""
    tokens, output, runs = (4, 2, 1) if options["rehearse"] else (ONE_INPUT, ONE_OUTPUT, ONE_RUNS)
    ask = partial(random_requests, vocab=shape.vocab, count=1, input_len=(tokens, tokens), output_len=output)
    run_batch(llm, ask(-1))
    done: list[RunFigures] = [run_batch(llm, ask(seed)) for seed in range(runs)]
    bound = None
    if not in_8_bits(options):
        cached = context_tokens(tokens, output) / (output - 1)
        bound = options["copy_Bps"] / shape.step_bytes(1, cached)
    speed = median(each.decode_tok_s for each in done)
    yield Figure(f"{name}: one request", round(speed, 2), "tok/s", bound and round(bound, 2))
    yield Figure(f"{name}: one request, time to first token", round(1000 * median(r.ttft_s for r in done), 2), "ms")


def steps(llm: LLM, shape: Shape, name: str, options: Options) -> Iterator[Figure]:
    """Milliseconds of a decode step of each number of rows, beside those of a copy of what it reads. A run before has
    left the prompts in the prefix cache, so that all rows begin together."""
    batches, context, tokens = ((2,), 5, 2) if options["rehearse"] else (STEP_ROWS, STEP_CONTEXT, STEP_TOKENS)
    for rows in batches:
        asks = random_requests(rows, vocab=shape.vocab, count=rows, input_len=(context, context), output_len=tokens)
        with captures_counted() as captured:
            run_batch(llm, asks)
            wait_for_captures(captured)
        took = run_batch(llm, asks).tpot_s
        bound = shape.step_bytes(rows, context + tokens / 2) / options["copy_Bps"]
        title = f"{name}: step of {rows} row{'s' * (rows > 1)} over {context:,} tokens"
        yield Figure(title, round(1000 * took, 3), "ms", round(1000 * bound, 3))
        if options.get("kernels"):
            yield from profiled_steps(llm, title, shape.vocab, options, rows, context)


def wait_for_captures(captured: list[None]) -> None:
    """Wait until no graph has been captured for QUIET_S seconds: those that are missing come while nothing runs."""
    seen = -1
    while seen < len(captured):
        seen = len(captured)
        time.sleep(QUIET_S)


def in_8_bits(options: Options) -> bool:
    """True if the KV cache takes other bytes than `Shape.kv_bytes` has."""
    return "kv_cache_dtype" in options.get("engine", {})


@contextmanager
def captures_counted() -> Iterator[list[None]]:
    """A list that grows by one with every CUDA graph that an engine of this process captures."""
    captured: list[None] = []
    capture = CudaGraphs.__call__

    def counted(graphs: CudaGraphs, run: Callable[[], None]) -> Replay:
        captured.append(None)
        return capture(graphs, run)

    with mock.patch.object(CudaGraphs, "__call__", counted):
        yield captured
