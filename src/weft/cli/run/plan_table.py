"""The layout of a running engine as a table."""

from __future__ import annotations

from typing import TextIO

from weft.plan.plan import Plan
from weft.planner.report.table import rank_rows

WIDE = 200  # columns: more than the table ever needs


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
