"""Runner: cases one after the other, each measured beside a neighbour's stream, and judged by the goals."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import psutil

from scripts.programs.abuse.case import Attack, Case, Life, Served
from scripts.programs.abuse.host import HostTimes
from scripts.programs.abuse.neighbour import Lap, Neighbour
from scripts.programs.abuse.server import KEY, Server, StartError, Stranger
from scripts.programs.abuse.target import Size, Target

CASE_S = 300.0  # after which a case is given up
POLL_S = 0.5
# A host on which the stream has gaps of half the goal undisturbed, or other processes have a tenth of the CPU time,
# does not show whether the server holds the goal.
QUIET_SHARE, OTHERS_SHARE = 0.5, 0.1


@dataclass(frozen=True)
class Goals:
    """Bounds that are judged: gaps of a neighbour's stream in seconds, memory of the API's process after a case over
    that before the first, `memory_s` seconds after the client left at the latest, and seconds from SIGTERM to the
    end."""

    stall_s: float = 0.25
    memory_ratio: float = 1.2
    memory_s: float = 30.0
    sigterm_s: float = 35.0


@dataclass(frozen=True)
class Result:
    """One case's figures; None is what the case does not measure. The stall is the neighbour's longest gap between
    two tokens while the case ran, undisturbed in the seconds before it. `stall_stolen_s` are CPU seconds of all cores
    that the host took away during the longest gap; the shares are of all CPU time during the case: what the host took
    away, and what processes used that are not part of this."""

    case: str
    finding: str
    statuses: dict[str, int]
    unexpected: list[str]
    worst_stall_s: float | None = None
    undisturbed_stall_s: float | None = None
    stall_stolen_s: float | None = None
    steal_share: float | None = None
    others_share: float | None = None
    neighbour_per_s: float | None = None  # events of the neighbour's stream
    undisturbed_per_s: float | None = None
    memory_before_bytes: int | None = None
    memory_after_bytes: int | None = None
    sigterm_s: float | None = None
    seconds: float = 0.0

    @property
    def memory_ratio(self) -> float | None:
        if self.memory_before_bytes is None or self.memory_after_bytes is None:
            return None
        return round(self.memory_after_bytes / self.memory_before_bytes, 3)

    def undecided(self, goals: Goals) -> str | None:
        """Reason why this host cannot show that the goal for stalls is met; None if the goal is met or missed."""
        worst, quiet = self.worst_stall_s or 0.0, self.undisturbed_stall_s or 0.0
        stolen, others = self.stall_stolen_s or 0.0, self.others_share or 0.0
        if worst <= goals.stall_s:
            return None
        if worst - stolen <= goals.stall_s:
            return f"the host took {stolen:.2f} s of CPU time away during the gap"
        if quiet > QUIET_SHARE * goals.stall_s:
            return f"gaps of {quiet:.2f} s undisturbed"
        return f"other processes used {others:.0%} of the CPU time" if others > OTHERS_SHARE else None

    def misses(self, goals: Goals) -> list[str]:
        """Names of the goals that this case misses, by the server's doing as far as the host shows it."""
        stall = None if self.undecided(goals) else self.worst_stall_s
        figures = (
            ("stall", stall, goals.stall_s),
            ("memory", self.memory_ratio, goals.memory_ratio),
            ("SIGTERM", self.sigterm_s, goals.sigterm_s),
        )
        over = [name for name, value, most in figures if value is not None and value > most]
        return over + (["unexpected"] if self.unexpected else [])


@dataclass
class Runner:
    """Runs cases against servers of `words`, the model and flags of all. `quiet_s` is how long the neighbour is
    watched before each case; `stranger` takes the place of own servers."""

    words: tuple[str, ...]
    goals: Goals = field(default_factory=Goals)
    size: Size = field(default_factory=Size)
    quiet_s: float = 2.0
    stranger: Stranger | None = None
    key: str | None = KEY
    results: list[Result] = field(default_factory=list)

    def run_cases(self, cases: Sequence[Case]) -> None:
        """Run them in order; those in a row that are served alike share a server."""
        for served, group in groupby(cases, key=lambda case: case.served if isinstance(case, Attack) else None):
            if served is None:
                for life in group:
                    self._live(life)  # type: ignore[arg-type]
            else:
                self._attack_all(served, list(group))  # type: ignore[arg-type]

    def _live(self, life: Life) -> None:
        began = time.monotonic()
        try:
            outcome = life.live(self.words)
        except StartError as error:
            self._add(Result(life.name, life.finding, {}, [f"no server: {str(error)[-500:]}"]))
            return
        self._add(
            Result(
                life.name,
                life.finding,
                outcome.statuses,
                outcome.unexpected,
                sigterm_s=outcome.sigterm_s,
                seconds=round(time.monotonic() - began, 1),
            )
        )

    def _attack_all(self, served: Served, attacks: list[Attack]) -> None:
        with ExitStack() as stack:
            server = stack.enter_context(self._server(served))
            length = asyncio.run(_warm_up(Target(server, self.key, self.size)))
            assert not isinstance(server.address, str)
            neighbour = Neighbour(server.address, self.key, length)
            stack.callback(neighbour.close)
            time.sleep(self.quiet_s)
            before = server.memory_bytes()
            for attack in attacks:
                self._add(self._attack(attack, server, neighbour, before))

    @contextmanager
    def _server(self, served: Served) -> Iterator[Server | Stranger]:
        template = ("--chat-template", served.template) if served.template else ()
        with self.stranger or Server(*self.words, *served.words, *template, files=served.files) as server:
            yield server

    def _attack(self, attack: Attack, server: Server | Stranger, neighbour: Neighbour, before: int | None) -> Result:
        neighbour.lap()
        time.sleep(self.quiet_s)
        quiet = neighbour.lap()
        began, ours = time.monotonic(), [psutil.Process(), neighbour.process]
        host = HostTimes.now([*ours, *server.processes()])
        target = Target(server, self.key, self.size)
        try:
            asyncio.run(asyncio.wait_for(attack.attack(target), CASE_S))
        except (TimeoutError, OSError) as error:
            target.unexpected.append(f"the case did not end as it should: {error!r}")
        time.sleep(self.quiet_s / 4)
        lap = neighbour.lap()
        seconds = time.monotonic() - began
        steal_share, others_share = HostTimes.now([*ours, *server.processes()]).shares_since(host)
        target.unexpected.extend(_beside(lap, target))
        return Result(
            attack.name,
            attack.finding,
            dict(target.statuses),
            target.unexpected,
            worst_stall_s=round(lap.worst_stall_s, 4),
            undisturbed_stall_s=round(quiet.worst_stall_s, 4),
            stall_stolen_s=round(lap.stolen_s, 2),
            steal_share=round(steal_share, 3),
            others_share=round(others_share, 3),
            neighbour_per_s=round(lap.events / lap.seconds, 1),
            undisturbed_per_s=round(quiet.events / quiet.seconds, 1),
            memory_before_bytes=before,
            memory_after_bytes=self._memory_afterwards(server, before),
            seconds=round(seconds, 1),
        )

    def _memory_afterwards(self, server: Server | Stranger, before: int | None) -> int | None:
        """Memory once it is within the goal, or when the time for that is over."""
        deadline = time.monotonic() + self.goals.memory_s
        while (now := server.memory_bytes()) is not None and before is not None:
            if now <= before * self.goals.memory_ratio or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        return now

    def _add(self, result: Result) -> None:
        self.results.append(result)
        print(_row(result, self.goals), file=sys.stderr, flush=True)

    def report(self) -> dict[str, Any]:
        """The JSON object."""
        rows = [
            asdict(result)
            | {
                "memory_ratio": result.memory_ratio,
                "misses": result.misses(self.goals),
                "undecided": result.undecided(self.goals),
            }
            for result in self.results
        ]
        for row in rows:
            row["ok"] = not row["misses"] and not row["undecided"]
        worst = {name: _largest(row[name] for row in rows) for name in ("worst_stall_s", "memory_ratio", "sigterm_s")}
        unexpected = sum(len(result.unexpected) for result in self.results)
        return {
            "goals": asdict(self.goals),
            **worst,
            "unexpected_statuses": unexpected,
            "missed": [row["case"] for row in rows if row["misses"]],
            "undecided": [row["case"] for row in rows if row["undecided"]],
            "ok": all(row["ok"] for row in rows),
            "cases": rows,
        }


def _largest(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


async def _warm_up(target: Target) -> int:
    """Ask for one of each kind, so that what a server loads at the first is not taken for a case's; the number of
    tokens that a neighbour may ask for."""
    await target.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "zz": 1})
    await target.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    await target.post("/tokenize", {"prompt": "hello " * 20_000})
    await target.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "structured_outputs": {"regex": "a+"}})
    models = json.loads((await target.get("/v1/models")).body)
    return int(models["data"][0]["max_model_len"]) - 16


def _beside(lap: Lap, target: Target) -> list[str]:
    """Remarks of the neighbour and of the log."""
    said = [f"{failure} ({lap.failures.count(failure)} times)" for failure in dict.fromkeys(lap.failures)]
    traceback = target.log().partition("Traceback")[2]
    return said + ([f"a traceback in the log: ...{traceback[-600:]}"] if traceback else [])


HEADINGS = (
    f"{'case':26} {'finding':>7} {'s':>5} {'stall':>6} {'quiet':>6} {'stolen':>6} {'steal':>5} {'others':>6} "
    f"{'memory':>7} {'SIGTERM':>7}  statuses"
)


def _row(result: Result, goals: Goals) -> str:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    ratio = result.memory_ratio
    statuses = ", ".join(f"{number} x {label}" for label, number in result.statuses.items())
    misses, undecided = result.misses(goals), result.undecided(goals)
    row = (
        f"{result.case:26} {result.finding:>7} {result.seconds:5.0f} {shown(result.worst_stall_s, '.3f'):>6} "
        f"{shown(result.undisturbed_stall_s, '.3f'):>6} {shown(result.stall_stolen_s, '.2f'):>6} "
        f"{shown(result.steal_share, '.0%'):>5} {shown(result.others_share, '.0%'):>6} "
        f"{shown(ratio, '.2f'):>7} {shown(result.sigterm_s, '.1f'):>7}  "
        f"{statuses}{'  MISSED: ' + ', '.join(misses) if misses else ''}"
        f"{'  NOT DECIDED: stall (' + undecided + ')' if undecided else ''}"
    )
    return "\n".join([row, *(f"    {line}" for line in result.unexpected[:3])])
