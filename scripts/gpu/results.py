"""Results of a part: a JSON file that is written again with every row."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

IDENTITY = ("card", "driver", "torch", "triton", "commit", "rehearsed")  # files that differ in one are not mixed


@dataclass(frozen=True)
class Row:
    """One measured figure. `roofline` is in `unit`; `ratio` is the share of the roofline, or of the target if there is
    no roofline. `ok` is None for a figure that nothing is asked of."""

    task: str
    name: str
    value: float | None
    unit: str
    target: float | None = None
    roofline: float | None = None
    ratio: float | None = None
    ok: bool | None = None
    note: str = ""

    @property
    def failed(self) -> bool:
        """True for a test or a command that failed, False for a missed target."""
        return self.ok is False and self.target is None


class Results:
    """Rows and finished tasks of one part, in `folder`/PART.json.

    Results of an earlier run of the same commit on the same card are kept, unless `again` is true. A file of another
    commit, card or version is moved aside to PART.COMMIT.json.
    """

    def __init__(self, folder: Path, part: str, about: dict[str, Any], *, again: bool = False) -> None:
        self.path = folder / f"{part}.json"
        self.about = {"part": part, **about}
        self.rows: list[Row] = []
        self.done: list[str] = []
        self._lock = threading.Lock()
        earlier = load_results(self.path)
        if earlier is not None and any(earlier.get(key) != self.about.get(key) for key in IDENTITY):
            self.path.rename(folder / f"{part}.{earlier.get('commit') or 'unknown'}.json")
            earlier = None
        if earlier is not None and not again:
            self.done = list(earlier["done"])
            self.rows = [Row(**row) for row in earlier["rows"] if row["task"] in self.done]
        self._write_file()

    def begin(self, task: str) -> None:
        """Forget what an unfinished run of `task` left."""
        with self._lock:
            self.rows = [row for row in self.rows if row.task != task]
            self._write_file()

    def add(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
            self._write_file()

    def finish(self, task: str) -> None:
        """Mark `task` as measured."""
        with self._lock:
            self.done.append(task)
            self._write_file()

    def of_task(self, task: str) -> list[Row]:
        return [row for row in self.rows if row.task == task]

    def _write_file(self) -> None:
        whole = {**self.about, "rows": [asdict(row) for row in self.rows], "done": self.done}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path)


def load_results(path: Path) -> dict[str, Any] | None:
    """The content of a result file; None for one that is absent or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and {"part", "rows", "done"} <= content.keys() else None


def judged(row: Row, *, target: float | None, lower_is_better: bool) -> Row:
    """`row` with its target, its ratio and whether the target is met. A row that is judged keeps its verdict."""
    if row.value is None:
        return row
    against = row.roofline if row.roofline is not None else target
    ratio = None
    if against and row.value > 0:
        ratio = round(against / row.value if lower_is_better else row.value / against, 4)
    ok = row.ok
    if target is not None and ok is None:
        ok = row.value <= target if lower_is_better else row.value >= target
    return replace(row, target=target, ratio=ratio, ok=ok)


def exit_status(rows: Iterable[Row]) -> int:
    """1 if a test or command failed; a missed target is no failure."""
    return int(any(row.failed for row in rows))
