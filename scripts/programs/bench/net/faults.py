"""`scripts/bench net --faults`: seconds from a fault between two hosts to the end of both sides, with their last lines.

The hosts are network namespaces, and the engine is a tiny model's pipeline with a rank on each, without Ray.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cpu import tiny
from tests.net.namespaces import Cable
from tests.net.programs import Pair, Program

LATE_S = 20.0
SHORT_CUTS_S = (1.0, 5.0)
Row = dict[str, Any]


class Faults:
    """An engine for each fault, on the hosts of a cable."""

    def __init__(self, cable: Cable, model: str, folder: Path) -> None:
        self._cable, self._model, self._folder = cable, model, folder

    @contextmanager
    def pair(self) -> Iterator[Pair]:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            pair = Pair(self._cable, self._model, Path(folder))
            try:
                yield pair
            finally:
                pair.close()
                self._cable.join()

    def end_after(
        self, event: str, fault: Callable[[Program, Program], None], sides: Sequence[str] = ("head", "node 1")
    ) -> Row:
        """Start, have requests run, do something, and wait for the ends of these sides."""
        with self.pair() as pair:
            head, other = pair.head(pipeline_parallel_size=2), pair.other()
            head.answer()
            for _ in range(50):
                head.say()
            head.answer()
            began = time.monotonic()
            fault(head, other)
            row: Row = {"event": event}
            for name in sides:
                _, line = (head if name == "head" else other).end()
                row[f"{name}, s"], row[f"{name} says"] = round(time.monotonic() - began, 1), line
            return row

    def short_cut(self, seconds: float) -> Row:
        """Cut the link and join it again while requests run; the time until they are answered, with the same tokens."""
        with self.pair() as pair:
            head, _ = pair.head(pipeline_parallel_size=2), pair.other()
            head.answer()
            head.say()
            expected = head.answer()
            self._cable.cut()
            head.say()
            time.sleep(seconds)
            self._cable.join()
            joined = time.monotonic()
            assert head.answer() == expected
            return {"event": f"the link is cut for {seconds:g} s", "answered, s": round(time.monotonic() - joined, 1)}

    def late_node(self) -> Row:
        with self.pair() as pair:
            head = pair.head(pipeline_parallel_size=2)
            head.until("waiting at .* for 1 other")
            time.sleep(LATE_S)
            came = time.monotonic()
            pair.other()
            head.answer()
            return {"event": f"a node comes {LATE_S:g} s late", "ready, s": round(time.monotonic() - came, 1)}

    def refused(self, event: str, **how: str) -> Row:
        """A node that the head does not take; the head itself waits on if the key is wrong."""
        with self.pair() as pair:
            head = pair.head(pipeline_parallel_size=2)
            head.until("waiting at .* for 1 other")
            began = time.monotonic()
            key = pair.write_key("other.key", "8" * 64) if "key" in how else ""
            variables = {name: value for name, value in how.items() if name != "key"}
            _, line = pair.other(key=key, **variables).end()
            return {"event": event, "node 1, s": round(time.monotonic() - began, 1), "node 1 says": line}

    def all(self) -> Iterator[Row]:
        yield from map(self.short_cut, SHORT_CUTS_S)
        yield self.end_after("the link stays cut", lambda head, other: self._cable.cut())
        yield self.end_after("a rank of node 1 is killed", lambda head, other: other.ranks()[0].kill())
        yield self.end_after("a rank of the head is killed", lambda head, other: head.ranks()[0].kill())
        yield self.end_after("the process of node 1 is killed", lambda head, other: other.kill(), ["head"])
        yield self.end_after("the process of node 1 is stopped", lambda head, other: _stop(other), ["head"])
        yield self.end_after("the head is killed", lambda head, other: head.kill(), ["node 1"])
        yield self.late_node()
        yield self.refused("a wrong interface", GLOO_SOCKET_IFNAME="eth7")
        yield self.refused("a wrong cluster key", key="wrong")


def _stop(program: Program) -> None:
    program.process.send_signal(signal.SIGSTOP)


def measure_faults() -> list[Row]:
    """A row for each fault."""
    cable = Cable()
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = str(tiny.write(Path(folder) / "tiny"))
            return list(Faults(cable, model, Path(folder)).all())
    finally:
        cable.close()


def faults_table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| event | seconds | last line |", "|---|---:|---|"]
    for row in rows:
        seconds = {name: value for name, value in row.items() if name.endswith(", s")}
        figures = ", ".join(f"{name.removesuffix(', s')} {value}" for name, value in seconds.items())
        says = "; ".join(f"{name.removesuffix(' says')}: {value}" for name, value in row.items() if " says" in name)
        lines.append(f"| {row['event']} | {figures} | {says} |")
    return "\n".join(lines)
