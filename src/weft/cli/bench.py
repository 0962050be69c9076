"""weft bench latency MODEL, weft bench throughput MODEL."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from weft.bench.measure import Run, run, typical
from weft.bench.workload import Ask, nano_vllm, random_requests
from weft.cli import engine
from weft.cli.commands import COMMANDS
from weft.planner.table import layout_json


def main(arguments: Namespace) -> int:
    """Measure, tell each run on standard error, and print one JSON object."""
    for flag in COMMANDS[arguments.command].flags:
        if flag.default is not None and not hasattr(arguments, flag.dest):
            text = flag.default
            setattr(arguments, flag.dest, flag.parse(text) if isinstance(text, str) and flag.parse else text)
    task = arguments.command.split()[1]
    with engine.start(arguments, skip_tokenizer_init=True) as llm:
        plan = llm.plan
        work = (latency if task == "latency" else throughput)(arguments, plan.shape.vocab)
        warmup = arguments.num_iters_warmup if task == "latency" else 1
        runs: list[Run] = []
        for number in range(warmup + arguments.num_iters):
            # The first ones run on other tokens, so that no measured run finds their KV blocks.
            done = run(llm, work(number))
            measured = number >= warmup
            print(line(f"run {number - warmup + 1}" if measured else "warm-up", done), file=sys.stderr)
            runs += [done] * measured
        layout = layout_json(plan, llm.num_blocks)
    report: dict[str, Any] = {
        "task": task,
        "model": arguments.model,
        "dtype": plan.dtype,
        "tensor_parallel_size": plan.tensor_parallel,
        "pipeline_parallel_size": plan.stages,
        "requests": len(work(0)),
        "input_tokens": runs[0].input_tokens,
        "output_tokens": runs[0].output_tokens,
        **typical(runs),
        "runs": len(runs),
        "layout": layout,
    }
    print(json.dumps(report))
    return 0


def latency(arguments: Namespace, vocab: int) -> Callable[[int], list[Ask]]:
    """A batch of equal lengths."""
    lengths = (arguments.input_len, arguments.input_len)
    return lambda seed: random_requests(
        seed, vocab=vocab, count=arguments.batch_size, input_len=lengths, output_len=arguments.output_len
    )


def throughput(arguments: Namespace, vocab: int) -> Callable[[int], list[Ask]]:
    """Many requests of many lengths."""
    if arguments.workload == "nano-vllm":
        return lambda seed: nano_vllm(vocab)
    return lambda seed: random_requests(
        seed,
        vocab=vocab,
        count=arguments.num_prompts,
        input_len=arguments.input_len_range,
        output_len=arguments.output_len,
    )


def line(name: str, done: Run) -> str:
    """One run for a person."""
    return (
        f"{name}: {done.seconds:.3f} s, {1000 * done.ttft_s:.1f} ms to the first token, "
        f"{done.decode_tok_s:.1f} tokens/s per request after it, {done.output_tok_s:.1f} output tokens/s in all"
    )
