"""A plan on a terminal: each GPU's memory as a bar, the best candidates, what was rejected, what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from weft.cli import plan_text, tables
from weft.cli.plan_columns import MARK, Cell, Column, Told, columns, fullest, rows
from weft.cli.plan_picture import NAMES, Bar, Rack, parts_of, picture
from weft.formatting import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

MOST_BARS = 24  # that are drawn; a plan with more unlike GPUs than that is for --json or --html to tell
PIPE = 80  # columns of a pipe, which has no width of its own
LONGEST_BAR = 60
FIGURE = 9  # columns of one
FIGURE_NAME = 16  # columns of the name of a figure
STYLES = {"weight": "bright_blue", "kv": "green", "other": "yellow", "held": "red", "free": "bright_black"}
# Shades, so that a pipe without colours tells them apart as well.
SHADES = {"weight": "█", "kv": "▓", "other": "▒", "held": "▚", "free": "░"}
TRUNKS = {"nvlink": ("╠═ ", "╚═ ", "║  "), "pcie": ("├─ ", "└─ ", "│  "), "memory": ("├─ ", "└─ ", "│  ")}
ASCII = str.maketrans("█▓▒▚░╠╚║═├└│─·", "#=+x.|`|=|`|-,")


def print_answer(told: Told, out: TextIO | None = None) -> None:
    """Everything, on standard output; `told` is what `planner.plan_json.plan_json` tells."""
    console = tables.console(out, pipe=PIPE)
    best = told["best"]
    style = "bold green" if best else "bold red"
    say(console, told["summary"], style=style)
    if promise := told["promise"]:
        say(console, promise["text"], style="bold green" if promise["kept"] else "bold red")
        if promise["needed"]:
            say(console, promise["needed"]["text"])
    say(console, "", plan_text.model_line(told), plan_text.hardware_line(told), *plan_text.remarks(told), "")
    say(console, plan_text.verdict(told), style=style)
    if told["why"]:
        say(console, told["why"])
    if best:
        draw(console, picture(told))
        say(console, *plan_text.traffic(told))
        console.print()
        console.print(comparison(told, console.width))
        say(console, "", plan_text.legend(told), *plan_text.speeds(told), *plan_text.steps(told))
    elif told["advice"]:
        say(console, "", *help_lines(told))
    reasons = plan_text.rejections(told)
    if reasons:
        say(console, "", "rejected:", *(f"  {reason}" for reason in reasons[: plan_text.REJECTED]))
        if len(reasons) > plan_text.REJECTED:
            say(console, f"  and {len(reasons) - plan_text.REJECTED} more")
    if binds := plan_text.binds(told):
        say(console, "", f"bottleneck: {binds}")
    if best and told["advice"]:
        say(console, *help_lines(told))


def help_lines(told: Told) -> list[str]:
    """What would help; first of all if nothing fits."""
    return ["what would help:", *(f"  {change}" for change in told["advice"])]


def say(console: Console, *lines: str, style: str = "") -> None:
    """Sentences: broken between words on a terminal, and whole on a pipe."""
    from rich.padding import Padding

    for line in lines:
        if console.is_terminal:
            text = line.lstrip()
            # What goes on in the next line stands below what it belongs to.
            console.print(Padding(text, (0, 0, 0, len(line) - len(text))), style=style)
        else:
            console.print(line, style=style, soft_wrap=True)


def draw(console: Console, racks: Sequence[Rack]) -> None:
    """Every node with its GPUs, beside what joins them."""
    left, parts = MOST_BARS, parts_of(racks)
    drawn = [legend(parts, console.width)]
    for rack in racks:
        bars, left = rack.bars[:left], max(0, left - len(rack.bars))
        if bars and rack.title:
            drawn.append(plain(rack.title))
        for bar in bars:
            drawn += bar_lines(bar, parts, trunk(rack), last=bar is bars[-1], width=console.width)
    hidden = sum(len(rack.bars) for rack in racks) - MOST_BARS
    if hidden > 0:
        drawn.append(plain(f"and {hidden} more that hold something else; --html and --json have them all"))
    readable = can_draw(console)
    for line in drawn:
        if not readable:
            line.plain = line.plain.translate(ASCII)
        console.print(line, soft_wrap=True)


def trunk(rack: Rack) -> tuple[str, str, str]:
    """What is drawn along a node's GPUs: at each, at the last, and between them."""
    return TRUNKS[rack.link] if rack.link_Bps else ("", "", "")


def can_draw(console: Console) -> bool:
    """Whether the output's encoding has the signs of the picture."""
    try:
        "".join([*SHADES.values(), *TRUNKS["nvlink"], *TRUNKS["pcie"], "·"]).encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def plain(text: str) -> Text:
    from rich.text import Text

    return Text(text)


def bar_width(parts: Sequence[str], width: int) -> int:
    """Columns of a bar that leave room for the trunk before and the figures behind it."""
    return max(8, min(LONGEST_BAR, width - len(parts) * FIGURE - 4))


def legend(parts: Sequence[str], width: int) -> Text:
    """What the shades mean, above the columns of their figures."""
    text = plain(" " * (3 + bar_width(parts, width)))
    for part in parts:
        name = f"{SHADES[part]} {NAMES[part]}"
        text.append(" " * (FIGURE - len(name)))
        text.append(name, STYLES[part])
    return text


def bar_lines(bar: Bar, parts: Sequence[str], trunk: tuple[str, str, str], *, last: bool, width: int) -> list[Text]:
    """Which GPU it is and what it holds, then its memory as a bar with the figures beside it."""
    branch, end, through = trunk
    below = " " * len(through) if last else through
    who, *what = bar.holds
    lines = [plain(f"{end if last else branch}{bar.title}, {format_bytes(bar.memory_bytes)} · {who}")]
    held = " · ".join(what)
    if held and len(lines[0]) + 3 + len(held) <= width:
        lines[0].append(f" · {held}")
    elif held:
        lines.append(plain(f"{below}{held}"))
    drawn, length = plain(below), bar_width(parts, width) + 3 - len(below)
    for part, cells in zip(parts, shares([bar.parts[part] for part in parts], length), strict=True):
        drawn.append(SHADES[part] * cells, STYLES[part])
    for part in parts:
        drawn.append(f"{format_bytes(bar.parts[part]):>{FIGURE}}")
    return [*lines, drawn]


def shares(parts: Sequence[int], length: int) -> list[int]:
    """`length` cells in proportion to the parts; what is there at all gets one."""
    parts = [max(0, part) for part in parts]
    total, cells = sum(parts) or 1, [0] * len(parts)
    for number, part in enumerate(parts):
        cells[number] = max(int(part > 0), round(part / total * length))
    # Rounding is paid by, or given to, the longest.
    cells[cells.index(max(cells))] += length - sum(cells)
    return cells


def comparison(told: Told, width: int) -> Table:
    """The best candidates with the ranges of their figures, a row for each; a column for each, with ranges if there is
    room for them, if `width` leaves the names of the layouts none."""
    shown, figures = rows(told)[0], columns(told)
    cells = [[column.cell(candidate) for column in figures] for candidate in shown]
    names = [candidate["name"] for candidate in shown]
    heads = [_head(column) for column in figures]
    lines = [[head, *map(_two_lines, column)] for head, *column in zip(heads, *cells, strict=True)]
    if sum(_widest(column) + 2 for column in lines) + max(map(len, names)) <= width:
        made = _table("layout,\nfullest GPU", *heads)
        for candidate, row in zip(shown, cells, strict=True):
            made.add_row(f"{candidate['name']}\n{fullest(candidate)}", *map(_two_lines, row))
        return made
    ranged = FIGURE_NAME + sum(
        _widest([*map(_two_lines, row), fullest(it)]) + 2 for it, row in zip(shown, cells, strict=True)
    )
    made = _table("", *names)
    if ranged <= width:
        made.add_row("fullest GPU", *map(fullest, shown))
    for column, *row in zip(figures, *cells, strict=True):
        head = _head(column).replace("\n", " ")
        made.add_row(head, *(_two_lines(cell) if ranged <= width else cell.text for cell in row))
    return made


def _table(first: str, *heads: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    made.add_column(first, overflow="fold")
    for head in heads:
        made.add_column(head, justify="right")
    return made


def _head(column: Column) -> str:
    return column.head + MARK * column.decides


def _two_lines(cell: Cell) -> str:
    return f"{cell.text}\n{cell.band}" if cell.band else cell.text


def _widest(cells: Sequence[str]) -> int:
    return max(len(line) for cell in cells for line in cell.split("\n"))
