"""The plan as a table for a person."""

from __future__ import annotations

import sys
from typing import TextIO

from weft.planner.plan import Plan
from weft.planner.table import rows


def print_plan(plan: Plan, out: TextIO = sys.stderr) -> None:
    """Which rank holds which layers, heads and bytes."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    tp, stages = plan.tensor_parallel, plan.stages
    cut = [f"tensor parallel {tp}"] * (tp > 1) + [f"pipeline of {stages} stages"] * (stages > 1) or ["one rank"]
    table = Table(
        title=f"{plan.model}: {plan.shape.architecture}, {plan.dtype}, {', '.join(cut)}",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("rank", justify="right")
    table.add_column("device")
    for name in ("layers", "query heads", "KV heads", "FFN columns", "vocab rows", "weights", "KV per token"):
        table.add_column(name, justify="right")
    for row in rows(plan):
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
    # A pipe is no terminal and has no width of its own: wide enough for every column there.
    width = None if out.isatty() else 120
    Console(file=out, width=width, highlight=False).print(table)


def megabytes(count: int) -> str:
    """Decimal units: 1 GB is 10**9 bytes."""
    return f"{count / 1e9:,.1f} GB" if count >= 10**9 else f"{count / 1e6:,.1f} MB"
