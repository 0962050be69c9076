"""A plan on a terminal: each GPU's memory as a bar, the best candidates, rejected layouts, and advice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from weft.cli import tables
from weft.cli.plan import plan_text
from weft.cli.plan.columns import MARK, Cell, Column, PlanJson, columns, fullest, shown_and_others
from weft.cli.plan.picture import NAMES, GpuBar, Rack, parts_of, picture
from weft.formatting import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

MAX_BARS = 24  # bars drawn; --json and --html have the others
PIPE = 80  # columns of a pipe, which has no width of its own
LONGEST_BAR = 60
FIGURE = 9  # columns of a figure
FIGURE_NAME = 16  # columns of the name of a figure
STYLES = {"weight": "bright_blue", "kv": "green", "other": "yellow", "held": "red", "free": "bright_black"}
# Different shades, for a pipe without colours.
SHADES = {"weight": "█", "kv": "▓", "other": "▒", "held": "▚", "free": "░"}
TRUNKS = {"nvlink": ("╠═ ", "╚═ ", "║  "), "pcie": ("├─ ", "└─ ", "│  "), "memory": ("├─ ", "└─ ", "│  ")}
ASCII = str.maketrans("█▓▒▚░╠╚║═├└│─·", "#=+x.|`|=|`|-,") | {ord("±"): "+-"}


def print_plan_text(plan: PlanJson, out: TextIO | None = None) -> None:
    """Print the whole plan on `out` (default: standard output); `plan` is the JSON of
    `planner.report.plan_json.plan_json`."""
    console = tables.console(out, pipe=PIPE)
    best = plan["best"]
    style = "bold green" if best else "bold red"
    say(console, plan["summary"], style=style)
    print_promise(console, plan["promise"])
    say(console, "", plan_text.model_line(plan), plan_text.hardware_line(plan), *plan_text.remarks(plan), "")
    say(console, plan_text.verdict(plan), style=style)
    if plan["why"]:
        say(console, plan["why"])
    if best:
        draw(console, picture(plan))
        say(console, *plan_text.traffic(plan))
        console.print()
        console.print(comparison(plan, console.width))
        say(console, "", plan_text.table_legend(plan), *plan_text.speeds(plan), *plan_text.steps(plan))
    elif plan["advice"]:
        say(console, "", *help_lines(plan))
    print_rejections(console, plan_text.rejections(plan))
    if bottleneck := plan_text.bottleneck(plan):
        say(console, "", f"bottleneck: {bottleneck}")
    if best and plan["advice"]:
        say(console, *help_lines(plan))


def print_promise(console: Console, promise: Mapping[str, Any] | None) -> None:
    """Print the verdict on the promise, if there is one, and the replicas that would keep it."""
    if promise:
        say(console, promise["text"], style="bold green" if promise["kept"] else "bold red")
        if promise["needed"]:
            say(console, promise["needed"]["text"])


def print_rejections(console: Console, reasons: Sequence[str]) -> None:
    """Print the reasons of the rejected layouts, if there are any."""
    if reasons:
        say(console, "", "rejected:", *(f"  {reason}" for reason in reasons[: plan_text.REJECTED]))
    if len(reasons) > plan_text.REJECTED:
        say(console, f"  and {len(reasons) - plan_text.REJECTED} more")


def help_lines(plan: PlanJson) -> list[str]:
    """The advice under its heading."""
    return ["what would help:", *(f"  {change}" for change in plan["advice"])]


def say(console: Console, *lines: str, style: str = "") -> None:
    """Print sentences: broken between words on a terminal, whole on a pipe."""
    from rich.padding import Padding

    for line in lines:
        if console.is_terminal:
            text = line.lstrip()
            # The following lines of a sentence keep its indentation.
            console.print(Padding(text, (0, 0, 0, len(line) - len(text))), style=style)
        else:
            console.print(line, style=style, soft_wrap=True)


def draw(console: Console, racks: Sequence[Rack]) -> None:
    """Draw every node with its GPUs and their links."""
    left, parts = MAX_BARS, parts_of(racks)
    drawn = [shades_legend(parts, console.width)]
    for rack in racks:
        bars, left = rack.bars[:left], max(0, left - len(rack.bars))
        if bars and rack.title:
            drawn.append(plain(rack.title))
        for bar in bars:
            drawn += bar_lines(bar, parts, trunk(rack), last=bar is bars[-1], width=console.width)
    hidden = sum(len(rack.bars) for rack in racks) - MAX_BARS
    if hidden > 0:
        drawn.append(plain(f"and {hidden} more that hold other parts; --html and --json have all of them"))
    _print_lines(console, drawn)


def _print_lines(console: Console, lines: Iterable[Text]) -> None:
    """Print lines, in ASCII on a console that shows nothing else."""
    readable = can_draw(console)
    for line in lines:
        if not readable:
            line.plain = line.plain.translate(ASCII)
        console.print(line, soft_wrap=True)


def trunk(rack: Rack) -> tuple[str, str, str]:
    """The line along a node's GPUs: its signs at each GPU, at the last one, and between them."""
    return TRUNKS[rack.link] if rack.link_Bps else ("", "", "")


def can_draw(console: Console) -> bool:
    """True if the output's encoding has the signs of the picture."""
    try:
        "".join([*SHADES.values(), *TRUNKS["nvlink"], *TRUNKS["pcie"], "·"]).encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def plain(text: str) -> Text:
    from rich.text import Text

    return Text(text)


def bar_width(parts: Sequence[str], width: int) -> int:
    """Columns of a bar, with room left for the line before it and the figures behind it."""
    return max(8, min(LONGEST_BAR, width - len(parts) * FIGURE - 4))


def shades_legend(parts: Sequence[str], width: int) -> Text:
    """The meaning of the shades, above the columns of their figures."""
    text = plain(" " * (3 + bar_width(parts, width)))
    for part in parts:
        name = f"{SHADES[part]} {NAMES[part]}"
        text.append(" " * (FIGURE - len(name)))
        text.append(name, STYLES[part])
    return text


def bar_lines(bar: GpuBar, parts: Sequence[str], trunk: tuple[str, str, str], *, last: bool, width: int) -> list[Text]:
    """The GPU with its part of the model, then its memory as a bar with the figures next to it."""
    branch, end, through = trunk
    below = " " * len(through) if last else through
    ranks, *what = bar.holds
    lines = [plain(f"{end if last else branch}{bar.title}, {format_bytes(bar.memory_bytes)} · {ranks}")]
    share = " · ".join(what)
    if share and len(lines[0]) + 3 + len(share) <= width:
        lines[0].append(f" · {share}")
    elif share:
        lines.append(plain(f"{below}{share}"))
    drawn, length = plain(below), bar_width(parts, width) + 3 - len(below)
    for part, cells in zip(parts, shares([bar.parts[part] for part in parts], length), strict=True):
        drawn.append(SHADES[part] * cells, STYLES[part])
    for part in parts:
        drawn.append(f"{format_bytes(bar.parts[part]):>{FIGURE}}")
    return [*lines, drawn]


def shares(parts: Sequence[int], length: int) -> list[int]:
    """`length` cells in proportion to the parts; a part above 0 gets at least one."""
    parts = [max(0, part) for part in parts]
    total, cells = sum(parts) or 1, [0] * len(parts)
    for number, part in enumerate(parts):
        cells[number] = max(int(part > 0), round(part / total * length))
    # The longest part absorbs the rounding.
    cells[cells.index(max(cells))] += length - sum(cells)
    return cells


def comparison(plan: PlanJson, width: int) -> Table:
    """The table of the best candidates, `width` columns wide at most.

    A row for each candidate, with ranges; if that is too wide, a column for each, and ranges only if they fit.
    """
    shown, figures = shown_and_others(plan)[0], columns(plan)
    cells = [[column.cell(candidate) for column in figures] for candidate in shown]
    names = [candidate["name"] for candidate in shown]
    heads = [_head(column) for column in figures]
    lines = [[head, *map(_two_lines, column)] for head, *column in zip(heads, *cells, strict=True)]
    if sum(_widest(column) + 2 for column in lines) + max(map(len, names)) <= width:
        table = _empty_table("layout,\nfullest GPU", *heads)
        for candidate, row in zip(shown, cells, strict=True):
            table.add_row(f"{candidate['name']}\n{fullest(candidate)}", *map(_two_lines, row))
        return table
    return _transposed(shown, figures, cells, width)


def _transposed(
    shown: Sequence[PlanJson], figures: Sequence[Column], cells: Sequence[Sequence[Cell]], width: int
) -> Table:
    """The table with a column for each candidate."""
    names = [candidate["name"] for candidate in shown]
    widths = [
        _widest([*map(_two_lines, row), fullest(candidate)]) + 2 for candidate, row in zip(shown, cells, strict=True)
    ]
    ranged = FIGURE_NAME + sum(widths) <= width
    table = _empty_table("", *names)
    if ranged:
        table.add_row("fullest GPU", *map(fullest, shown))
    for column, *row in zip(figures, *cells, strict=True):
        head = _head(column).replace("\n", " ")
        table.add_row(head, *(_two_lines(cell) if ranged else cell.text for cell in row))
    return table


def _empty_table(first: str, *heads: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    table.add_column(first, overflow="fold")
    for head in heads:
        table.add_column(head, justify="right")
    return table


def _head(column: Column) -> str:
    return column.head + MARK * column.decides


def _two_lines(cell: Cell) -> str:
    return f"{cell.text}\n{cell.band}" if cell.band else cell.text


def _widest(cells: Sequence[str]) -> int:
    return max(len(line) for cell in cells for line in cell.split("\n"))
