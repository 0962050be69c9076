"""weft bench latency MODEL, weft bench throughput MODEL."""

from __future__ import annotations

import json
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from weft.bench.measure import BatchRun, median_figures, run_batch
from weft.bench.predicted import comparison_lines, predict_batch
from weft.bench.workload import BenchRequest, nano_vllm, random_requests
from weft.cli import engine
from weft.errors import ConfigError
from weft.planner.table import layout_json

if TYPE_CHECKING:
    from weft.llm import LLM

logger = logging.getLogger("weft.cli")


def main(arguments: Namespace) -> int:
    """Measure, tell each run on standard error, and print one JSON object."""
    task = arguments.command.split()[1]
    with engine.start(arguments, skip_tokenizer_init=True) as llm:
        plan = llm.plan
        work = (latency if task == "latency" else throughput)(arguments, plan.shape.vocab)
        runs: list[BatchRun] = []
        # Every run has other tokens: none finds another's KV blocks.
        for number in range(-arguments.num_iters_warmup, arguments.num_iters):
            done = run_batch(llm, work(number))
            print(line("warm-up" if number < 0 else f"run {number + 1}", done), file=sys.stderr)
            if number >= 0:
                runs.append(done)
        layout = layout_json(plan, llm.num_blocks)
        expected = predicted_of(llm, work(0))
    report: dict[str, Any] = {
        "task": task,
        "model": plan.model,
        "dtype": plan.dtype,
        "tensor_parallel_size": plan.tensor_parallel,
        "pipeline_parallel_size": plan.stages,
        "requests": len(work(0)),
        "input_tokens": runs[0].input_tokens,
        "output_tokens": runs[0].output_tokens,
        **median_figures(runs),
        "predicted": expected,
        "runs": len(runs),
        "layout": layout,
    }
    for told in comparison_lines(report, expected) if expected else []:
        print(told, file=sys.stderr)
    print(json.dumps(report))
    return 0


def predicted_of(llm: LLM, asks: Sequence[BenchRequest]) -> dict[str, float] | None:
    """What the planner expects of these requests; None on hardware of which it knows nothing, and with guesses."""
    if llm.plan.speculation:
        return None
    try:
        return predict_batch(llm.forecast(), asks)
    except ConfigError as error:
        logger.warning("nothing is predicted: %s", error)
        return None


def latency(arguments: Namespace, vocab: int) -> Callable[[int], list[BenchRequest]]:
    """A batch of equal lengths; numbers below 0 are warm-ups."""
    lengths = (arguments.input_len, arguments.input_len)
    return lambda seed: random_requests(
        seed, vocab=vocab, count=arguments.batch_size, input_len=lengths, output_len=arguments.output_len
    )


def throughput(arguments: Namespace, vocab: int) -> Callable[[int], list[BenchRequest]]:
    """Many requests of many lengths; numbers below 0 are warm-ups."""

    def work(number: int) -> list[BenchRequest]:
        if arguments.workload == "nano-vllm" and number >= 0:
            return nano_vllm(vocab, number)
        return random_requests(
            number,
            vocab=vocab,
            count=arguments.num_prompts,
            input_len=arguments.input_len_range,
            output_len=arguments.output_len,
        )

    return work


def line(name: str, done: BatchRun) -> str:
    """One run for a person."""
    return (
        f"{name}: {done.seconds:.3f} s, {1000 * done.ttft_s:.1f} ms to the first token, "
        f"{done.decode_tok_s:.1f} tokens/s per request after it, {done.output_tok_s:.1f} output tokens/s in all"
    )
