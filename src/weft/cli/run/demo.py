"""weft demo [PROMPT]: a small real model on two ranks."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from weft.checkpoint.hub.demo import NAME
from weft.cli import engine
from weft.cli.flags.command_flags import DemoArguments
from weft.cli.flags.flags import sampling_options
from weft.machine.hardware import host
from weft.plan.plan import Plan
from weft.planner.report.table import rank_rows

PROMPT = "Why is the sky blue?"
MAX_TOKENS = 200
RANKS = 2
WIDE = 200  # columns: more than the table ever needs


def main(arguments: DemoArguments) -> int:
    """Print the layout, the answer while it grows, and its speed."""
    prompt = " ".join(arguments.argument) or PROMPT
    options = sampling_options(arguments, temperature=0.0, max_tokens=MAX_TOKENS)
    with engine.start_engine(arguments, model=NAME, **demo_layout(arguments)) as llm:
        print_plan(llm.plan, sys.stdout)
        print(f"> {prompt}\n", flush=True)
        params = llm.sampling_params(**options)
        answer = engine.print_stream(llm.stream(engine.conversation(prompt), params))
    if answer is not None:
        print(f"\n{engine.speed_text(answer)}")
    return 0


def demo_layout(arguments: DemoArguments) -> dict[str, Any]:
    """Engine options for two ranks, which share the GPU if there is only one; empty if the flags give a layout."""
    names = {"plan", "tensor_parallel_size", "tensor_split", "pipeline_parallel_size", "pipeline_split", "device_ids"}
    if names & arguments.given:
        return {}
    shared = arguments.engine.layout.device != "cpu" and len(host.probe_host().gpus) == 1
    return {"tensor_parallel_size": RANKS, **({"device_ids": (0,) * RANKS} if shared else {})}


def print_plan(plan: Plan, out: TextIO) -> None:
    """Print the model, and a line with device, layers, heads and bytes for each rank."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from weft.cli.plain_console import PlainConsole

    tp, stages = plan.tensor_parallel, plan.stages
    cut = [f"tensor parallel {tp}"] * (tp > 1) + [f"pipeline of {stages} stages"] * (stages > 1) or ["one rank"]
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("device")
    for name in ("layers", "query\nheads", "KV\nheads", "FFN\ncolumns", "vocab\nrows", "weights", "KV per\ntoken"):
        table.add_column(name, justify="right")
    for row in rank_rows(plan):
        table.add_row(
            str(row.rank),
            row.device,
            f"{row.first_layer}-{row.last_layer}",
            str(row.q_heads),
            str(row.kv_heads),
            f"{row.ffn_columns:,}",
            f"{row.vocab_rows:,}",
            megabytes(row.weight_bytes),
            f"{row.kv_token_bytes:,} B",
        )
    # The table fits 80 columns. On a narrower terminal broken lines are better than cells cut short.
    console = PlainConsole(out, width=WIDE)
    console.print(f"{plan.model}: {plan.shape.architecture}, {plan.dtype}, {', '.join(cut)}", soft_wrap=True)
    console.print(table)


def megabytes(count: int) -> str:
    """ "51.1 MB", "1.2 GB" in decimal units: 1 GB is 10**9 bytes."""
    return f"{count / 1e9:,.1f} GB" if count >= 10**9 else f"{count / 1e6:,.1f} MB"
