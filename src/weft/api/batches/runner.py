"""BatchRun: one batch from its validation to its output files, or from the point where an earlier server stopped."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec

from weft.api.batches.answers import Endpoint, NotNowError, answer
from weft.api.batches.attempts import Attempts, LinePlaces
from weft.api.batches.lines import LineLimits, batch_error, check_lines, decode_line, numbered_lines
from weft.api.batches.results import LineChange
from weft.api.batches.store import Store, new_id
from weft.api.batches.store_thread import StoreThread
from weft.api.batches.types import BatchErrors, BatchLine, BatchObject
from weft.api.service.service import Service
from weft.errors import RequestError

log = logging.getLogger("weft.serving")


class LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    code: str
    message: str


class LineResult(msgspec.Struct):
    """A line of an output file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None = None


class BatchRun:
    """The work on one batch that this server has claimed. Without `answers` it is only validated, and ended in time."""

    def __init__(
        self,
        service: Service,
        store: StoreThread,
        endpoints: Mapping[str, Endpoint],
        places: LinePlaces,
        owner: str,
        batch: BatchObject,
        *,
        answers: bool = True,
    ) -> None:
        self._service, self._store, self._endpoints, self._places = service, store, endpoints, places
        self._owner, self._batch = owner, batch
        self._answers = answers
        self._limits = LineLimits(service.body_bytes, service.json_values)
        self._deaths: dict[int, int] = {}  # deaths with lines, of earlier servers and of this server
        self.news = asyncio.Event()  # the batch may have been cancelled

    async def finish(self) -> None:
        """Continue the batch; return early if the server shuts down, or only another server has the model or key."""
        path = await self._store.call(lambda store: store.content(self._batch.input_file_id))
        if not path.exists():
            await self._change(fail_without_input)
        if self._batch.status == "validating":
            await self._validate()
        if self._batch.status == "in_progress":
            if time.time() >= self._batch.expires_at:
                await self._change(finalize)  # whichever model it means
            elif self._answers and (self._batch.model is None or self._batch.model in self._service.names):
                await self._answer_lines()
            else:
                return
        if self._batch.status in ("cancelling", "finalizing"):
            await self._finish()

    async def _change(self, change: Callable[[BatchObject], None]) -> None:
        id = self._batch.id
        self._batch = await self._store.call(lambda store: store.change_batch(id, change))

    async def _validate(self) -> None:
        batch = self._batch
        path = await self._store.call(lambda store: store.content(batch.input_file_id))
        total, model, errors = await asyncio.to_thread(check_lines, path, batch.endpoint, self._limits)

        def begin(row: BatchObject) -> None:
            row.model, row.request_counts.total = model, total
            if row.status != "validating":
                return  # cancelled since
            if errors:
                row.status, row.failed_at, row.errors = "failed", _now(), BatchErrors(data=errors)
            else:
                row.status, row.in_progress_at = "in_progress", _now()

        await self._change(begin)
        log.info("batch %s: %s, %d lines", batch.id, self._batch.status, total)

    async def _answer_lines(self) -> None:
        """Answer the lines without an answer. Return when all are answered, or the batch or the server is to end."""
        batch = self._batch
        answered = await self._store.call(lambda store: store.answered(batch.id))
        self._deaths = await self._store.call(lambda store: store.deaths(batch.id))
        path = await self._store.call(lambda store: store.content(batch.input_file_id))
        lines = (numbered for numbered in numbered_lines(path, self._limits) if numbered[0] not in answered)
        workers = [asyncio.create_task(self._take_lines(lines)) for _ in range(self._places.most)]
        try:
            async with asyncio.timeout(max(0.0, batch.expires_at - time.time())):
                await self._until_done(workers)
        except TimeoutError:
            log.warning("batch %s has expired", batch.id)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        for worker in workers:
            if not worker.cancelled() and (error := worker.exception()) is not None:
                if isinstance(error, NotNowError):
                    return
                raise error

        if not self._service.draining:
            await self._change(finalize)

    async def _until_done(self, workers: list[asyncio.Task[None]]) -> None:
        """Wait until all lines are answered, a worker fails, or a client cancels the batch.

        If the server is to end, every worker ends with its line.
        """
        while not all(worker.done() for worker in workers):
            news = asyncio.create_task(self.news.wait())
            running = {worker for worker in workers if not worker.done()}
            await asyncio.wait({*running, news}, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            errors = [worker.exception() for worker in workers if worker.done()]
            if any(error is not None and not isinstance(error, NotNowError) for error in errors):
                return
            if self.news.is_set():
                self.news.clear()
                await self._change(lambda row: None)
                if self._batch.status != "in_progress":
                    return

    async def _take_lines(self, lines: Iterator[tuple[int, bytes]]) -> None:
        """Answer one line after the other. Raises NotNowError."""
        for number, text in lines:
            if self._service.draining:
                raise NotNowError
            try:
                line = decode_line(text, self._limits)
            except RequestError as error:  # an earlier server had larger limits
                await self._keep(number, LineResult(new_id("batch_req_"), "", None, line_error(error)))
                continue
            await self._answer_line(number, line)

    async def _answer_line(self, number: int, line: BatchLine) -> None:
        store, id = self._store, self._batch.id

        async def note(deaths: int) -> None:
            await store.write_line(LineChange(id, number, deaths))

        attempts = Attempts(self._deaths.get(number, 0), note)
        status, body = await answer(self._service, self._endpoints[line.url], line, self._places, attempts)
        response = LineResponse(status, new_id("req-"), msgspec.Raw(body))
        await self._keep(number, LineResult(new_id("batch_req_"), line.custom_id, response))

    async def _keep(self, number: int, result: LineResult) -> None:
        row, id = msgspec.json.encode(result), self._batch.id
        failed = result.response is None or result.response.status_code != 200
        status = await self._store.write_line(LineChange(id, number, row=row, failed=failed))
        if status != "in_progress":  # another server was asked to cancel it
            self.news.set()

    async def _finish(self) -> None:
        """Write the output files, and end the batch."""
        owner, batch = self._owner, self._batch
        cancelled, expired = batch.status == "cancelling", False
        if not cancelled:
            expired = await self._store.call(lambda store: add_expired(store, batch, self._limits))
        lifetime_s = self._store.lifetime_s(batch.output_expires_after)
        output, errors = await self._store.call(lambda store: write_outputs(store, owner, batch, lifetime_s))

        def end(row: BatchObject) -> None:
            row.output_file_id, row.error_file_id = output, errors
            row.status = "cancelled" if cancelled else "expired" if expired else "completed"
            setattr(row, f"{row.status}_at", _now())

        await self._change(end)
        log.info("batch %s: %s", batch.id, self._batch.status)


def fail_without_input(row: BatchObject) -> None:
    """Note that a batch's input is missing, as after damage of the disk."""
    row.status, row.failed_at = "failed", _now()
    row.errors = BatchErrors(data=[batch_error("missing_file", "the input file is not there any more")])


def finalize(row: BatchObject) -> None:
    """Note that no more lines are to be answered."""
    if row.status == "in_progress":
        row.status, row.finalizing_at = "finalizing", _now()


def add_expired(store: Store, batch: BatchObject, limits: LineLimits) -> bool:
    """Note an error for each line that was not answered in time; return True if there are any."""
    answered, expired = store.answered(batch.id), False
    for number, text in numbered_lines(store.content(batch.input_file_id), limits):
        if number not in answered:
            error = LineError("batch_expired", "the line was not answered within the completion window")
            row = msgspec.json.encode(LineResult(new_id("batch_req_"), custom_id(text, limits), None, error))
            store.add_result(batch.id, number, row, failed=True)
            expired = True
    return expired


def custom_id(text: bytes, limits: LineLimits) -> str:
    """The custom_id of a line; "" for a line that only a server with larger limits reads."""
    try:
        return decode_line(text, limits).custom_id
    except RequestError:
        return ""


def line_error(error: RequestError) -> LineError:
    """The error of a line that this server does not read."""
    return LineError("invalid_json_line", str(error))


def write_outputs(
    store: Store, owner: str, batch: BatchObject, lifetime_s: int | None
) -> tuple[str | None, str | None]:
    """Write the answers and the errors of a batch to a file each; return their ids, None for an empty file.

    Writing them again changes nothing.
    """
    ids: list[str | None] = []
    for failed, kind in ((False, "output"), (True, "error")):
        with store.new_content() as content:
            for row in store.results(batch.id, failed=failed):
                content.write(row + b"\n")
            empty = not content.tell()
            if not empty:
                name = f"{batch.id}_{kind}.jsonl"
                store.add_file(owner, content, name, "batch_output", output_id(batch, kind), lifetime_s)
        ids.append(None if empty else output_id(batch, kind))
    return ids[0], ids[1]


def output_id(batch: BatchObject, kind: str) -> str:
    """The id of a batch's output file: the same if it is written again."""
    return f"file-{batch.id.removeprefix('batch_')}-{kind}"


def _now() -> int:
    return int(time.time())
