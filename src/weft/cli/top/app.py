"""The live page of `weft top` on a terminal, with Textual: it follows the terminal's size, and scrolls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.widgets import Footer, Static

from weft.cli.top.sparks import Sparks
from weft.cli.top.tables import headline, sections
from weft.cli.top.watch import TopSnapshot

MARGIN = 6  # columns of borders, padding and the scroll bar
HEADLINE = "headline"


class TopApp(App[None]):
    """A headline, what is wrong, and the tables below; `q` and Ctrl-C end it, `p` holds it."""

    TITLE = "weft top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #headline { height: 1; padding: 0 2; background: $primary; color: $text; text-style: bold; }
    VerticalScroll { padding: 0 1; }
    .section { height: auto; border: round $primary-lighten-1; border-title-style: bold; padding: 0 1; }
    .section.faulty { border: heavy $error; border-title-color: $error; }
    .section.well { border: round $success; border-title-color: $success; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
        Binding("p", "hold", "Pause / resume"),
    ]

    def __init__(self, snapshots: AsyncIterator[TopSnapshot], stop: asyncio.Event) -> None:
        """`snapshots` end once `stop` is set, and `stop` is set once the page ends."""
        super().__init__()
        self._snapshots, self._end = snapshots, stop
        self._sparks = Sparks()
        self._held = False
        self.last: TopSnapshot | None = None

    def compose(self) -> ComposeResult:
        yield Static(Text("weft top  ·  looking …"), id=HEADLINE)
        yield VerticalScroll()
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        self.run_worker(self._watch(), exclusive=True)

    async def _watch(self) -> None:
        """Show every snapshot until they end."""
        async for snapshot in self._snapshots:
            self.last = snapshot
            self._sparks.add(snapshot)
            if not self._held:
                await self._show(snapshot)
        self.exit()

    async def on_resize(self, _: Resize) -> None:
        if self.last is not None:
            await self._show(self.last)

    async def _show(self, snapshot: TopSnapshot) -> None:
        """Draw a snapshot: problems come first, where nothing hides them."""
        self.query_one(f"#{HEADLINE}", Static).update(Text(f"weft top  ·  {headline(snapshot)}"))
        drawn = sections(snapshot, self._sparks, self.size.width - MARGIN)
        ordered = [*drawn[-1:], *drawn[:-1]]
        place = self.query_one(VerticalScroll)
        boxes = list(place.query(Static))
        if len(boxes) != len(ordered):
            await place.remove_children()
            boxes = [Static(classes="section") for _ in ordered]
            await place.mount(*boxes)
        for box, section in zip(boxes, ordered, strict=True):
            box.border_title = section.name
            box.set_class(section.faulty, "faulty")
            box.set_class(section is drawn[-1] and not section.faulty, "well")
            box.update(section.content)

    def action_hold(self) -> None:
        """Hold the page as it is, or go on."""
        self._held = not self._held
        held = "held: p goes on" if self._held else "looking …"
        self.query_one(f"#{HEADLINE}", Static).update(Text(f"weft top  ·  {held}"))

    async def action_quit(self) -> None:
        self._end.set()
        self.exit()
