"""The layout of an engine as a table: the part of the model and the memory of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft.cli.tables import figures_table
from weft.formatting import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

# Heading, and the fields of the first index and of the number of what a rank has.
SPANS = (
    ("layers", "first_layer", "layers"),
    ("query heads", "first_q_head", "q_heads"),
    ("KV heads", "first_kv_head", "kv_heads"),
    ("experts", "first_expert", "experts"),
)
BYTES = (("weights", "weight_bytes"), ("KV cache", "kv_bytes"), ("allocated", "allocated_bytes"))


def layout_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each rank of `LLM.layout`; models without experts have no column of them."""
    spans = [span for span in SPANS if any(row[span[2]] for row in rows)]
    table = figures_table("rank", "stage", *(name for name, *_ in spans), *(name for name, _ in BYTES))
    for row in rows:
        table.add_row(
            f"{row['rank']} on {row['node']} {row['device']}",
            str(row["stage"]),
            *(_span(row[first], row[count]) for _, first, count in spans),
            *(_bytes(row[field]) for _, field in BYTES),
        )
    return table


def _span(first: int, count: int) -> str:
    """First and last index, and the number of them."""
    return f"{first}-{first + count - 1} ({count})" if count else "-"


def _bytes(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)
