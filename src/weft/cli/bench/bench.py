"""weft bench latency MODEL and weft bench throughput MODEL: speed of an engine without a server."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from weft.cli import engine
from weft.cli.flags.command_flags import LatencyArguments, ThroughputArguments
from weft.engine.client.control import replica_rows
from weft.engine.client.progress import ProgressBar
from weft.errors import ConfigError
from weft.study.bench.measure import RunFigures, median_figures, run_batch
from weft.study.bench.predicted import comparison_lines, predict_batch
from weft.study.bench.workload import BenchRequest, nano_vllm, random_requests

if TYPE_CHECKING:
    from weft.engine.llm import LLM

logger = logging.getLogger("weft.cli")


def main(arguments: LatencyArguments | ThroughputArguments) -> int:
    """Measure, print each run on standard error, and one JSON object on standard output."""
    task = arguments.command.split()[1]
    with engine.start_engine(arguments, skip_tokenizer_init=True) as llm:
        plan = llm.plan
        workload = workload_of(arguments, plan.shape.vocab)
        runs: list[RunFigures] = []
        # Every run has other tokens, so that no run finds KV blocks of another.
        numbers = range(-arguments.num_iters_warmup, arguments.num_iters)
        with ProgressBar(len(numbers), True, "Runs", animated=False) as progress:
            for number in numbers:
                measured = run_batch(llm, workload(number))
                print(run_line("warm-up" if number < 0 else f"run {number + 1}", measured), file=sys.stderr)
                progress.advance()
                if number >= 0:
                    runs.append(measured)
        layout = [row for replica in llm.replicas for row in replica_rows(replica)]
        expected = predict_run(llm, workload(0))
    report: dict[str, Any] = {
        "task": task,
        "model": plan.model,
        "dtype": plan.dtype,
        "tensor_parallel_size": plan.tensor_parallel,
        "pipeline_parallel_size": plan.stages,
        "replicas": len({row["replica"] for row in layout}),
        "requests": len(workload(0)),
        "input_tokens": runs[0].input_tokens,
        "output_tokens": runs[0].output_tokens,
        **median_figures(runs),
        "predicted": expected,
        "runs": len(runs),
        "layout": layout,
    }
    for line in comparison_lines(report, expected) if expected else []:
        print(line, file=sys.stderr)
    print(json.dumps(report))
    return 0


def predict_run(llm: LLM, asks: Sequence[BenchRequest]) -> dict[str, float] | None:
    """The planner's predictions for a run; None with speculative decoding, or on hardware that it does not know."""
    if llm.plan.speculation:
        return None
    try:
        return predict_batch(llm.forecast(), asks)
    except ConfigError as error:
        logger.warning("nothing is predicted: %s", error)
        return None


def workload_of(flags: LatencyArguments | ThroughputArguments, vocab: int) -> Callable[[int], list[BenchRequest]]:
    """A function from a run's number to its requests; numbers below 0 are warm-ups."""
    return latency_workload(flags, vocab) if isinstance(flags, LatencyArguments) else throughput_workload(flags, vocab)


def latency_workload(flags: LatencyArguments, vocab: int) -> Callable[[int], list[BenchRequest]]:
    """A function from a run's number to its requests, a batch of equal lengths."""
    lengths = (flags.input_len, flags.input_len)
    return lambda seed: random_requests(
        seed, vocab=vocab, count=flags.batch_size, input_len=lengths, output_len=flags.output_len
    )


def throughput_workload(flags: ThroughputArguments, vocab: int) -> Callable[[int], list[BenchRequest]]:
    """A function from a run's number to its requests of different lengths."""

    def requests(number: int) -> list[BenchRequest]:
        if flags.workload == "nano-vllm" and number >= 0:
            return nano_vllm(vocab, number)
        return random_requests(
            number,
            vocab=vocab,
            count=flags.num_prompts,
            input_len=flags.input_len_range,
            output_len=flags.output_len,
        )

    return requests


def run_line(name: str, measured: RunFigures) -> str:
    """One run as text."""
    return (
        f"{name}: {measured.seconds:.3f} s, {1000 * measured.ttft_s:.1f} ms to the first token, "
        f"{measured.decode_tok_s:.1f} tokens/s per request after it, {measured.output_tok_s:.1f} output tokens/s in all"
    )
