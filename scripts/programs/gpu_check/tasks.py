"""Tasks: the steps of a part, each with a name, a limit in seconds, and the rows that it yields."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from scripts.programs.gpu_check.bounds import LOWER_IS_BETTER, PROFILE_BELOW, target_of
from scripts.programs.gpu_check.children import PYTEST, PYTHON, ChildError, Children
from scripts.programs.gpu_check.results import Results, Row, judged
from scripts.programs.gpu_check.traces import keep_trace
from scripts.programs.gpu_check.work import Figure

SANITIZED_STATUS = 86  # of a program in which compute-sanitizer found errors
SUMMARY = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
SANITIZER_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


@dataclass
class Setup:
    """Values that the tasks of one part share."""

    part: str
    children: Children
    results: Results
    card: str
    copy_Bps: float
    rehearse: bool
    vllm: Path | None = None

    @property
    def traces(self) -> Path:
        """The archive of this part's traces and profiles."""
        return self.results.path.with_name(f"{self.part}-traces.tar")

    def row(self, task: str, figure: Figure) -> Row:
        """A figure with its target for this card."""
        row = Row(
            task, figure.name, figure.value, figure.unit, roofline=figure.roofline, ok=figure.ok, note=figure.note
        )
        target = None if self.rehearse else target_of(figure.name, self.card, figure.roofline)
        return judged(row, target=target, lower_is_better=figure.unit in LOWER_IS_BETTER)


class Task(Protocol):
    """`seconds` is the most that it takes."""

    @property
    def name(self) -> str: ...

    @property
    def seconds(self) -> float: ...

    def rows(self, setup: Setup, limit_s: float) -> Iterator[Row]:
        """Rows as they are measured. Raises ChildError for a child that failed."""
        ...


@dataclass(frozen=True)
class Work:
    """A measurement of `scripts.programs.gpu_check.work`."""

    name: str
    seconds: float
    measurement: str
    options: dict[str, Any] = field(default_factory=dict)

    def rows(self, setup: Setup, limit_s: float) -> Iterator[Row]:
        options = {**self.options, "copy_Bps": setup.copy_Bps, "rehearse": setup.rehearse}
        if setup.vllm is not None:
            options["vllm"] = str(setup.vllm)
        if "trace_value" in options:
            options["traces"] = str(setup.traces)
        for figure in setup.children.figures(self.measurement, options, setup.part, limit_s):
            yield setup.row(self.name, figure)


@dataclass(frozen=True)
class Together:
    """Tasks that run side by side: most of their time one core compiles. One that fails leaves the others alone."""

    name: str
    seconds: float
    tasks: tuple[Task, ...]

    def rows(self, setup: Setup, limit_s: float) -> Iterator[Row]:
        for rows in side_by_side(self.tasks, setup, limit_s):
            yield from (replace(row, task=self.name) for row in rows)


@dataclass(frozen=True)
class GpuTests:
    """Tests of tests/gpu: those of `files` that pytest's -k `selection` leaves."""

    name: str
    seconds: float
    files: tuple[str, ...]
    selection: str = ""

    def rows(self, setup: Setup, limit_s: float) -> Iterator[Row]:
        status, output = setup.children.tests(self.files, self.selection, f"{setup.part}-{self.name}", limit_s)
        counts = {word: int(number) for number, word in SUMMARY.findall(output[-1] if output else "")}
        passed, skipped = counts.get("passed", 0), counts.get("skipped", 0)
        note = failures(output) if status else f"{skipped} skipped" if skipped else ""
        yield Row(self.name, f"{self.name}: passed", passed, "tests", ok=status == 0 and passed > 0, note=note)


@dataclass(frozen=True)
class Sanitize:
    """Tests under one tool of compute-sanitizer. Memory comes from the driver piece by piece meanwhile: within a block
    of torch's allocator the tool sees no bounds."""

    tool: str
    case: str
    test: str
    seconds: float = 120  # of which the import of torch and the driver's context take up to 40 under the tool

    @property
    def name(self) -> str:
        return f"{self.tool} {self.case}"

    def rows(self, setup: Setup, limit_s: float) -> Iterator[Row]:
        if setup.rehearse:
            status, output = setup.children.tests([self.test], "", setup.part, limit_s)
            if status:
                yield Row(self.name, f"{self.name}: collected", None, "tests", ok=False, note=failures(output))
                return
        command = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--tool", self.tool]
        command += ["--error-exitcode", str(SANITIZED_STATUS), "--target-processes", "all", "--print-limit", "20"]
        command += [*PYTHON, "-m", "pytest", *PYTEST, "-q", self.test]
        status, output = setup.children.finished(command, setup.part, limit_s)
        errors = sanitizer_errors(output)
        note = "" if status == 0 else failures(output) or (output[-1] if output else "no word")
        yield Row(self.name, f"{self.name}: errors", errors, "errors", ok=status == 0 and errors == 0, note=note)


@dataclass(frozen=True)
class Profile:
    """One launch of `kernel` under ncu, if rows of the task `of` are below PROFILE_BELOW of their roofline. The clocks
    stay as they are: the card may be somebody else's too."""

    kernel: str
    of: str
    measurement: str
    options: dict[str, Any]
    seconds: float = 60
    skip: int = 2  # launches that compile and warm up
    value: int = 1  # of the report among the traces

    @property
    def name(self) -> str:
        return f"ncu {self.kernel}"

    def slow(self, setup: Setup) -> list[tuple[float, str]]:
        """Shares of the roofline that call for a profile, with the names of their rows, the smallest first."""
        rows = [(row.ratio, row.name) for row in setup.results.of_task(self.of) if row.ratio is not None]
        return sorted(each for each in rows if each[0] < PROFILE_BELOW)

    def rows(self, setup: Setup, limit_s: float) -> Iterator[Row]:
        slow = self.slow(setup)
        if not slow and not setup.rehearse:
            return
        worst = f": {slow[0][1]}" if slow else ""
        title = f"{self.name}, since rows are below {PROFILE_BELOW:.0%} of the roofline{worst}"
        if shutil.which("ncu") is None:
            yield Row(self.name, title, None, "", note="ncu is not on PATH: CUDA's toolkit has it")
            return
        with TemporaryDirectory() as folder:
            report = Path(folder) / "report"
            options = {**self.options, "copy_Bps": setup.copy_Bps, "rehearse": setup.rehearse}
            if slow:
                options["only"] = slow[0][1]
            command = ["ncu", "--set", "full", "--clock-control", "none", "--kernel-name", f"regex:^{self.kernel}$"]
            command += ["--launch-skip", str(self.skip), "--launch-count", "1", "--kill", "yes"]
            command += ["--export", str(report)]
            command += [*PYTHON, "-m", "scripts.programs.gpu_check.work", self.measurement, json.dumps(options)]
            _, output = setup.children.finished(command, setup.part, limit_s)
            written = report.with_suffix(".ncu-rep")
            if written.exists():
                note = keep_trace({"traces": str(setup.traces), "trace_value": self.value}, self.name, written)
                yield Row(self.name, title, len(slow), "rows", note=note)
            else:  # no right to the counters, mostly: nothing of ours that failed
                yield Row(self.name, title, None, "", note=f"ncu failed: {output[-1] if output else 'no word'}")


@dataclass(frozen=True)
class Worst:
    """The `count` of these profiles whose rows are the furthest from their roofline."""

    name: str
    seconds: float
    profiles: tuple[Profile, ...]
    count: int = 2

    def rows(self, setup: Setup, limit_s: float) -> Iterator[Row]:
        ordered = sorted(self.profiles, key=lambda profile: min(profile.slow(setup), default=(PROFILE_BELOW, "")))
        for profile in ordered[: self.count]:
            yield from (replace(row, task=self.name) for row in attempted(profile, setup, limit_s / self.count))


def side_by_side(tasks: Sequence[Task], setup: Setup, limit_s: float) -> Iterator[list[Row]]:
    """The rows of each task as it ends; rehearsed, one after the other: this thread has the stand-in for a card."""
    if setup.rehearse:
        yield from (attempted(task, setup, limit_s) for task in tasks)
        return
    with ThreadPoolExecutor(len(tasks)) as pool:
        for done in as_completed([pool.submit(attempted, task, setup, limit_s) for task in tasks]):
            yield done.result()


def attempted(task: Task, setup: Setup, limit_s: float) -> list[Row]:
    """The rows of one of several tasks; of a failed one a row that says so."""
    try:
        return list(task.rows(setup, min(limit_s, task.seconds)))
    except ChildError as error:
        return [Row(task.name, task.name, None, "", ok=False, note=str(error))]


def failures(output: list[str]) -> str:
    """Names of tests that failed, three at most, and their number."""
    lines = [line for line in output if line.startswith(("FAILED", "ERROR"))]
    names = [line.split(" - ")[0].removeprefix("FAILED ").removeprefix("ERROR ")[-120:] for line in lines]
    return "; ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def sanitizer_errors(output: list[str]) -> int | None:
    """Errors or hazards of all summaries, None if there is no summary."""
    counts = [int(first or second) for line in output for first, second in SANITIZER_SUMMARY.findall(line)]
    return sum(counts) if counts else None
