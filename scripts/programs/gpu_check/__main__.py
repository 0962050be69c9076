"""The command line of `scripts/gpu_check`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from scripts.programs.gpu_check import needs, rehearsal, report, wheels
from scripts.programs.gpu_check.card import ROOT, about, first_card, version_of
from scripts.programs.gpu_check.children import ChildError, Children, CutError
from scripts.programs.gpu_check.parts import PARTS, Part
from scripts.programs.gpu_check.results import Results, Row, exit_status
from scripts.programs.gpu_check.tasks import Setup, Task

MIN_LEFT_S = 5.0  # seconds left that a task needs to begin
FAILED, REFUSED, UNFINISHED = 1, 2, 3


def main(words: Sequence[str]) -> int:
    began = time.monotonic()
    if words and words[0] == "report":
        return report.main(words[1:], results_folder())
    if words and words[0] == "wheels":
        return wheels.main(words[1:])
    arguments = parsed(words)
    if arguments.list or not arguments.part:
        print("\n".join(listed()))
        return 0
    unknown = [name for name in arguments.part if name not in PARTS]
    if unknown:
        return refused(f"{unknown[0]!r} is no part; parts are {' '.join(PARTS)}, and report, wheels")
    folder = results_folder()
    parts = [PARTS[name] for name in arguments.part]
    if arguments.rehearse:
        rehearsal.programs_first()
    obstacle = needs.first_obstacle(static_obstacles(parts, folder, arguments))
    if obstacle:
        return refused(obstacle)
    with ExitStack() as stack:
        if arguments.rehearse:
            stack.enter_context(rehearsal.stand_in())
        card = first_card()
        obstacle = needs.first_obstacle(
            partial(needs.obstacle_of_card, part.name, part.needs, card, version_of("torch")) for part in parts
        )
        if obstacle or card is None:
            return refused(str(obstacle))
        facts = about(card, rehearse=arguments.rehearse)
        print(f"{facts['card']}, copies at {facts['copy_GBps']:,.0f} GB/s, torch {facts['torch']}; into {folder}")
        try:
            children = rehearsal.RehearsedChildren(folder) if arguments.rehearse else Children(folder)
            statuses = list(measured(parts, children, facts, arguments, began))
        except OSError as error:
            return refused(f"{error.strerror} ({error.filename or folder}): what was measured before is kept")
    return next((status for status in (FAILED, UNFINISHED) if status in statuses), 0)


def measured(
    parts: Sequence[Part], children: Children, facts: dict[str, object], arguments: argparse.Namespace, began: float
) -> Iterator[int]:
    """Statuses of the parts, one after the other. The time of the first one counts from `began`."""
    for part in parts:
        yield measure(part, children, facts, arguments, began + part.seconds)
        began = time.monotonic()


def results_folder() -> Path:
    return Path(os.environ.get("RESULTS") or ROOT / "results").absolute()


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description="What only a GPU can show; `quarter` comes first. Each part takes less than nine minutes, adds "
        "its rows to $RESULTS/PART.jsonl as they come, and goes on where an earlier run of the same commit stopped. "
        "Exit status: 0, also if a target is missed; 1 if a test or command failed; 2 for a wrong argument or a "
        "missing need; 3 if time ran out before all was measured.",
        epilog="scripts/gpu_check report --help, scripts/gpu_check wheels --help: the other two commands.",
    )
    parser.add_argument("part", nargs="*", help=f"one or more of {' '.join(PARTS)}; none lists them")
    parser.add_argument("--list", action="store_true", help="list the parts with their minutes and needs")
    parser.add_argument("--again", action="store_true", help="measure again what an earlier run has measured")
    parser.add_argument("--rehearse", action="store_true", help="run on a stand-in for a card, with tiny shapes")
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="vLLM's packages, for the part peers")
    return parser.parse_args(words)


def listed() -> list[str]:
    """A line per part."""
    width = max(map(len, PARTS))
    return [
        f"{part.name:{width}}  {part.minutes:g} min  {part.what}; needs {part.needs.described()}"
        for part in PARTS.values()
    ]


def refused(words: str) -> int:
    print(f"gpu_check: {words}", file=sys.stderr)
    return REFUSED


def static_obstacles(
    parts: Sequence[Part], folder: Path, arguments: argparse.Namespace
) -> list[Callable[[], str | None]]:
    """Checks before anything of Weft is imported. Where torch is, a card that is absent is named before packages."""
    checks: list[Callable[[], str | None]] = [partial(needs.obstacle_of_folder, folder)]
    if not arguments.rehearse and find_spec("torch") is not None:
        checks.append(lambda: None if first_card() else no_card())
    for part in parts:
        checks.append(partial(needs.obstacle_of_packages, part.name, part.needs, sys.executable))
        checks.append(partial(needs.obstacle_of_files, part.name, part.needs, arguments.vllm))
    return checks


def no_card() -> str | None:
    return needs.obstacle_of_card("", needs.Needs(), None, version_of("torch"))


def measure(
    part: Part, children: Children, facts: dict[str, object], arguments: argparse.Namespace, deadline: float
) -> int:
    """Run what is left of a part until the monotonic clock reads `deadline`, and print a line per row."""
    results = Results(children.folder, part.name, facts, again=arguments.again)
    setup = Setup(
        part.name,
        children,
        results,
        card=str(facts["card"]),
        copy_Bps=float(str(facts["copy_GBps"])) * 1e9,
        rehearse=arguments.rehearse,
        vllm=arguments.vllm and arguments.vllm.absolute(),
    )
    left = [task for task in part.tasks if task.name not in results.done]
    print(f"== {part.name}: {len(left)} of {len(part.tasks)} tasks to do")
    if part.together and not arguments.rehearse:
        with ThreadPoolExecutor(len(left) or 1) as pool:
            complete = list(pool.map(lambda task: run_task(task, setup, deadline), left))
    else:
        complete = [run_task(task, setup, deadline) for task in left]
    if exit_status(results.rows):
        return FAILED
    return 0 if all(complete) else UNFINISHED


def run_task(task: Task, setup: Setup, deadline: float) -> bool:
    """True if `task` ran to its end, also to a failed one. False if the part's time was up."""
    left = deadline - time.monotonic()
    if left < MIN_LEFT_S:
        print(f"  {task.name}: no time left; run the part again to go on")
        return False
    setup.results.begin(task.name)
    failed = False
    try:
        for row in task.rows(setup, min(left, task.seconds)):
            setup.results.add(row)
            failed = failed or row.failed
            print(f"  {shown(row)}", flush=True)
    except CutError as error:
        if left < task.seconds:
            print(f"  {task.name}: no time left; run the part again to go on")
            return False
        add_failure(setup, task, error)
    except ChildError as error:
        add_failure(setup, task, error)
    else:
        if not failed:
            setup.results.finish(task.name)
    return True


def add_failure(setup: Setup, task: Task, error: ChildError) -> None:
    row = Row(task.name, task.name, None, "", ok=False, note=str(error))
    setup.results.add(row)
    print(f"  {shown(row)}", flush=True)


def shown(row: Row) -> str:
    """A row as a line for a person."""
    words = [row.name + ":", "-" if row.value is None else f"{report.figure(row.value)} {row.unit}"]
    if row.roofline is not None and row.ratio is not None:
        words.append(f"({row.ratio:.0%} of the roofline)")
    if row.target is not None:
        words.append(f"target {report.figure(row.target)}: {'met' if row.ok else 'missed'}")
    elif row.ok is not None:
        words.append("ok" if row.ok else "FAILED")
    return " ".join([*words, f"[{row.note}]"] if row.note else words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
