"""run_job(): the rows of a file are answered, kept as they come, and written at the end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from weft.api.batches.answers import NotNowError
from weft.api.batches.attempts import Attempts, LinePlaces
from weft.api.offline.answering import AnsweredRow, RowKind, answer_row
from weft.api.offline.journal import Journal
from weft.api.offline.outputs import failed_path, write_outputs
from weft.api.offline.rows import RowFile, import_arrow, is_parquet, open_rows
from weft.api.service.embedded import OpenedModel, open_for_service, run_service
from weft.api.service.service import Service
from weft.config import EngineConfig
from weft.engine.client.progress import ProgressBar
from weft.errors import ConfigError, EngineError, error_reason
from weft.http.options import ServeOptions

log = logging.getLogger("weft.serving")

Rows = Iterator[tuple[int, bytes]]
Keep = Callable[[AnsweredRow], None]
AttemptsOf = Callable[[int], Attempts]


class BatchJob(msgspec.Struct, frozen=True):
    """A batch: its input, the path of its output, its engine, and the fields of plain rows that do not have them."""

    rows: RowFile
    out: str
    config: EngineConfig
    options: ServeOptions
    defaults: dict[str, Any] = {}

    @property
    def kind(self) -> RowKind:
        return RowKind(self.rows.is_requests, self.rows.is_parquet, self.defaults)

    @property
    def about(self) -> dict[str, str]:
        """Everything that the answers of this batch depend on."""
        return {
            "input (SHA-256)": self.rows.digest,
            "model": self.config.model,
            "sampling": msgspec.json.encode(self.defaults, order="sorted").decode(),
        }


# Answers rows, and passes each answer to the first function in the order of arrival. The second function returns the
# attempts to answer a row, including attempts before a kill.
Answer = Callable[[BatchJob, Rows, Keep, AttemptsOf], None]


def open_job(source: str, out: str, model: str | None) -> tuple[RowFile, str]:
    """The rows of a batch and the name of its model. Raises ConfigError before anything is loaded."""
    path = Path(out)
    if is_parquet(out):
        import_arrow()
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory {path.parent} for {path.name}; make it", code="no-output-directory")
    _check_outputs(source, out)
    rows = open_rows(source)
    name = model or rows.model
    if not name:
        raise ConfigError(f"which model? {source} names none: give --model NAME", code="batch-without-model")
    return rows, name


def _check_outputs(source: str, out: str) -> None:
    """Raise ConfigError if a file that the batch writes is its input, or exists and is not from this batch."""
    written = (Path(out), failed_path(out))
    for path in (*written, journal_path(out)):
        if Path(source).resolve() == path.resolve():
            raise ConfigError(
                f"{source} is the input, and the batch would write to it; give another output file",
                code="output-is-input",
            )
    if journal_path(out).exists():
        return
    for path in written:
        if path.exists():
            raise ConfigError(f"{path} is there already; remove it, or write to another file", code="output-exists")


def journal_path(out: str) -> Path:
    """Path of the answers up to now."""
    return Path(f"{out}.progress")


def run_job(job: BatchJob, answer: Answer) -> tuple[int, int]:
    """Answer the rows that have no answer yet, and write the output; return the numbers of answers and of errors.

    After a kill, a full disk or Ctrl-C the same job goes on. Raises ConfigError, and what `answer` raises.
    """
    journal = Journal(journal_path(job.out), job.about)
    try:
        done = journal.answered()
        with ProgressBar(job.rows.count, bar=True, description="Rows, loading the model") as progress:
            for _ in done:
                progress.advance()

            def keep(answered: AnsweredRow) -> None:
                journal.add(answered)
                progress.describe("Rows")
                progress.advance()

            rows = ((number, text) for number, text in job.rows.rows() if number not in done)
            first = next(rows, None)
            if first is not None:
                if done:
                    log.info("%d of %d rows have answers; going on", len(done), job.rows.count)
                answer(job, chain([first], rows), keep, journal.attempts)
        counts = journal.counts()
        if sum(counts) != job.rows.count:
            raise ConfigError(
                f"{sum(counts)} of the {job.rows.count} rows of {job.rows.path} have answers: was it changed?",
                code="rows-missing",
            )
        _write_output(job, journal)
        journal.remove()
    finally:
        journal.close()
    return counts


def _write_output(job: BatchJob, journal: Journal) -> None:
    """Write the output. Raises ConfigError."""
    try:
        write_outputs(job.rows, journal, job.out)
    except OSError as error:
        raise ConfigError(
            f"cannot write {job.out}: {error_reason(error)}; the answers are in {journal.path}, and with room the same "
            "command goes on",
            code="cannot-write-output",
        ) from None


def answer_here(job: BatchJob, rows: Rows, keep: Keep, attempts: AttemptsOf) -> None:
    """Answer rows with an engine of this machine, until SIGTERM or Ctrl-C, each of which raises KeyboardInterrupt.

    Raises EngineError if the engine dies, ConfigError, ModelError, PlanError.
    """
    opened = open_for_service(job.config)
    with asyncio.Runner() as runner:
        try:
            runner.run(_answer_all(job, opened, rows, keep, attempts))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _answer_all(job: BatchJob, opened: OpenedModel, rows: Rows, keep: Keep, attempts: AttemptsOf) -> None:
    task = asyncio.current_task()
    assert task is not None
    # Ctrl-C is not a death: the running rows are not its cause.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with run_service(job.config, job.options, opened) as service:
        await answer_rows(service, job.kind, rows, keep, attempts)


async def answer_rows(service: Service, kind: RowKind, rows: Rows, keep: Keep, attempts: AttemptsOf) -> None:
    """Answer rows, as many at once as the engine runs. Raises EngineError."""
    places = LinePlaces(min(service.capacity, service.plan.max_running * len(service.engine.replicas) + 1))

    async def take_rows() -> None:
        for number, text in rows:
            keep(await answer_row(service, kind, number, text, places, attempts(number)))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(places.most):
                group.create_task(take_rows())
    except ExceptionGroup as group_error:
        error = group_error.exceptions[0]
        if isinstance(error, NotNowError):
            raise service.engine.failure or _ended() from None
        raise error from None


def _ended() -> EngineError:
    from weft.engine.executors.ranks import CLOSED

    return EngineError(CLOSED)


def summary(job: BatchJob, counts: tuple[int, int]) -> str:
    """The outcome of a batch, in a line."""
    answered, failed = counts
    line = f"{job.out}: {answered} of {job.rows.count} rows answered"
    return f"{line}; {failed_path(job.out)}: {failed} failed" if failed else line
