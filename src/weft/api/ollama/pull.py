"""/api/pull: fetch a model from the hub, and report progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from threading import Thread

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.api.ollama.names import requested_name
from weft.api.ollama.stream import NDJSON, encode_line
from weft.api.ollama.types import PullRequest, PullStatus
from weft.api.service.service import Service
from weft.checkpoint.hub import pull
from weft.checkpoint.hub.fetch_progress import FetchProgress
from weft.checkpoint.hub.files import Commit
from weft.checkpoint.names import gguf_reference
from weft.errors import ModelError, RequestError
from weft.http.access import check_owner
from weft.http.errors import HttpError, JsonResponse
from weft.http.sse import send_reply

MAX_DOWNLOADS = 2  # downloads at once
STATUS_INTERVAL_S = 0.2  # seconds between two reports about one file

Report = Callable[[PullStatus], None]


async def answer_pull(request: Request) -> Response:
    """Answer /api/pull.

    If the client disconnects, the download stops (except `demo`); a later pull of the same model resumes it.
    """
    check_owner(request)
    service: Service = request.app.state.service
    body = await service.prepare(request, decode_pull)
    download = Download(service, requested_name(body))
    return await send_reply(
        request,
        download,
        streaming=body.stream is not False,
        events=download.lines,
        whole=download.whole,
        keepalive_s=service.options.keepalive_interval,
        stream_format=NDJSON,
    )


def decode_pull(service: Service, content: bytes) -> PullRequest:
    """Decode a body, and check that the model's name can be resolved, before the response begins."""
    body = service.decode_body(content, PullRequest)
    name = requested_name(body).removesuffix(":latest")
    try:
        if name != "demo" and pull.hub_id(name) is None:
            gguf_reference.require(name)
    except ModelError as error:
        raise RequestError(str(error), param="model", code=error.code) from None
    return body


class Download:
    """One download, in a thread of its own, and the states that it reports."""

    def __init__(self, service: Service, name: str) -> None:
        """Start the download. Raises HttpError 429 while MAX_DOWNLOADS others run."""
        if len(service.downloads) >= MAX_DOWNLOADS:
            raise HttpError(
                429,
                f"{MAX_DOWNLOADS} models are being fetched already; wait for one",
                code="too-many-pulls",
                retry_after_s=60,
            )
        self._service, self._name = service, name
        self._states: asyncio.Queue[PullStatus | Exception | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._progress: FetchProgress | None = None
        self._stopped = False
        service.downloads.add(self)
        Thread(target=self._fetch, name="weft-pull", daemon=True).start()

    def _fetch(self) -> None:
        try:
            pull.pull_model(self._name, create_progress=self._create_progress)
            self._report(None)
        except Exception as error:  # of the hub's library too
            self._report(error)

    def _create_progress(self, commit: Commit) -> FetchProgress:
        progress = StatusProgress(commit, self._report)
        self._progress = progress
        if self._stopped:  # the client left before the list of files was known
            progress.stop()
        return progress

    def _report(self, state: PullStatus | Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take, state)
        except RuntimeError:  # the server has ended
            return

    def _take(self, state: PullStatus | Exception | None) -> None:
        if not isinstance(state, PullStatus):
            self._service.downloads.discard(self)
        self._states.put_nowait(state)

    async def _statuses(self) -> AsyncGenerator[PullStatus, None]:
        yield PullStatus(status="pulling manifest")
        while (state := await self._states.get()) is not None:
            if isinstance(state, Exception):
                raise state
            yield state
        # Ollama's clients expect these; the files are verified and in place already.
        for status in ("verifying sha256 digest", "writing manifest", "success"):
            yield PullStatus(status=status)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Body of a streamed response: each state as a line of JSON."""
        async for status in self._statuses():
            yield encode_line(status)

    async def whole(self) -> Response:
        """The response that is not streamed: the last state."""
        last = PullStatus(status="")
        async for status in self._statuses():
            last = status
        return JsonResponse(last)

    async def aclose(self) -> None:
        """Stop the download, even within a file, unless it is complete."""
        self._stopped = True
        if self._progress is not None:
            self._progress.stop()


class StatusProgress(FetchProgress):
    """Progress that is reported as PullStatus, at most every STATUS_INTERVAL_S for each file."""

    def __init__(self, commit: Commit, report: Report) -> None:
        super().__init__(commit.repository, {file.name: file.size for file in commit.files})
        self._report = report
        self._files = {file.name: file for file in commit.files}
        self._bytes = dict.fromkeys(self._files, 0)
        self._reported_s = dict.fromkeys(self._files, 0.0)

    def add(self, file: str, nbytes: int) -> None:
        super().add(file, nbytes)
        self._bytes[file] += nbytes
        now, about = time.monotonic(), self._files[file]
        if self._bytes[file] < about.size and now - self._reported_s[file] < STATUS_INTERVAL_S:
            return
        self._reported_s[file] = now
        hashed = about.sha256
        self._report(
            PullStatus(
                status=f"pulling {hashed[:12] if hashed else file}",
                digest=f"sha256:{hashed}" if hashed else msgspec.UNSET,
                total=about.size,
                completed=self._bytes[file],
            )
        )
