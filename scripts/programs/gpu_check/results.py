"""Results of a part: a file of JSON lines that grows with every row."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

SUFFIX = ".jsonl"
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
    """Rows and finished tasks of one part, in `folder`/PART.jsonl, to which a line is added the moment something is
    known: what was measured (`about`), a task that began, a row, a task that is done. A run that is cut off leaves what
    it had.

    Results of an earlier run of the same commit on the same card are kept, unless `again` is true. A file of another
    commit, card or version is moved aside to PART.COMMIT.jsonl.
    """

    def __init__(self, folder: Path, part: str, about: dict[str, Any], *, again: bool = False) -> None:
        self.path = folder / f"{part}{SUFFIX}"
        self.about = {"part": part, **about}
        self.rows: list[Row] = []
        self.done: list[str] = []
        self._lock = threading.Lock()
        earlier = load_results(self.path)
        if earlier is not None and any(earlier.about.get(key) != self.about.get(key) for key in IDENTITY):
            self.path.rename(folder / f"{part}.{earlier.about.get('commit') or 'unknown'}{SUFFIX}")
            earlier = None
        if earlier is not None and not again:
            self.done = earlier.done
            self.rows = [row for row in earlier.rows if row.task in self.done]
        kept = [
            ("about", self.about),
            *(("row", asdict(row)) for row in self.rows),
            *(("done", it) for it in self.done),
        ]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps({kind: value}) + "\n" for kind, value in kept), encoding="utf-8")
        os.replace(partial, self.path)

    def begin(self, task: str) -> None:
        """Forget what an unfinished run of `task` left."""
        with self._lock:
            self.rows = [row for row in self.rows if row.task != task]
            self._append("begun", task)

    def add(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
            self._append("row", asdict(row))

    def finish(self, task: str) -> None:
        """Mark `task` as measured."""
        with self._lock:
            self.done.append(task)
            self._append("done", task)

    def of_task(self, task: str) -> list[Row]:
        return [row for row in self.rows if row.task == task]

    def _append(self, kind: str, value: object) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({kind: value}) + "\n")


@dataclass(frozen=True)
class Loaded:
    """The content of a result file."""

    about: dict[str, Any]
    rows: list[Row]
    done: list[str]


def load_results(path: Path) -> Loaded | None:
    """The content of a result file; None for one that is absent or begins otherwise. A last line that was cut off is
    left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    about: dict[str, Any] = {}
    rows: list[Row] = []
    done: list[str] = []
    for line in lines:
        try:
            ((kind, value),) = json.loads(line).items()
        except (ValueError, AttributeError):
            break
        match kind:
            case "about":
                about = value
            case "begun":
                rows, done = [row for row in rows if row.task != value], [task for task in done if task != value]
            case "row":
                rows.append(Row(**value))
            case "done":
                done.append(value)
    return Loaded(about, rows, done) if about else None


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
