"""/v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
import shutil
import time
from collections.abc import Sequence
from typing import BinaryIO

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from weft.api.batches.answers import Endpoint
from weft.api.batches.keeper import BatchKeeper
from weft.api.batches.store import UNFINISHED, Page, new_id
from weft.api.batches.store_thread import storage_failed
from weft.api.batches.types import BatchList, BatchObject, BatchRequest, DeletedFile, ExpiresAfter, FileList, FileObject
from weft.api.batches.uploads import Form, Reserve, boundary_of, read_form, receive_body
from weft.api.service.service import Service
from weft.errors import RequestError
from weft.http.access import check_page
from weft.http.clients import current
from weft.http.errors import HttpError, JsonResponse
from weft.http.keys import sent_key

PURPOSE = "batch"
OWNER_HEADER = "x-weft-owner"
MAX_WINDOW_H = 24 * 30
MAX_ROWS = 10_000  # rows of a list
METADATA = 16, 64, 512  # most entries, and characters of a key and of a value
ANCHOR = "created_at"
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 24 * 3600


def _keeper(request: Request) -> BatchKeeper:
    keeper: BatchKeeper = request.app.state.batches
    return keeper


def _owner(request: Request) -> str:
    """The name under which a client's files are kept: clients with other keys do not see them.

    A gateway distinguishes its clients by the header X-Weft-Owner. They share the gateway's key: no client can name an
    owner under another key.
    """
    service: Service = request.app.state.service
    key = sent_key(request.headers) if service.clients.required else ""
    part = request.headers.get(OWNER_HEADER, "") if _heeds_owner(request) else ""
    if not key and not part:
        return ""
    return hashlib.sha256(f"{key}\0{part}".encode() if part else key.encode()).hexdigest()[:32]


def _heeds_owner(request: Request) -> bool:
    """Return True if X-Weft-Owner may name an owner.

    Each name has its own quota of files. If keys have limits, only the admin key may.
    """
    service: Service = request.app.state.service
    return service.options.api_key_file is None or current.get().admin


def by_owner(endpoint: Endpoint) -> Endpoint:
    """The endpoint, with answers that confirm X-Weft-Owner: servers that do not would show files to all clients."""

    @functools.wraps(endpoint)
    async def answer(request: Request) -> Response:
        response = await endpoint(request)
        if OWNER_HEADER in request.headers and _heeds_owner(request):
            response.headers[OWNER_HEADER] = "heeded"
        return response

    return answer


async def upload_file(request: Request) -> Response:
    """POST /v1/files: keep a file of requests."""
    check_page(request)
    boundary, owner = boundary_of(request), _owner(request)
    keeper = _keeper(request)
    await keeper.store.call(lambda store: store.delete_expired(time.time()))
    await keeper.store.call(lambda store: store.check_room(owner, 0))  # before the body is taken
    received = 0

    async def reserve(size: int) -> None:
        nonlocal received
        received += size
        own, others = keeper.uploads.add(owner, size)
        await keeper.store.call(lambda store: store.check_room(owner, own, others))

    try:
        file = await _receive_file(request, keeper, boundary, owner, reserve)
    except OSError as error:
        raise storage_failed(error) from error
    finally:
        keeper.uploads.add(owner, -received)
    keeper.start()
    return JsonResponse(file)


async def _receive_file(
    request: Request, keeper: BatchKeeper, boundary: bytes, owner: str, reserve: Reserve
) -> FileObject:
    """Receive an upload, and keep the file in it."""
    store = await keeper.store.call(lambda store: store)
    with store.new_content() as body:
        await receive_body(request, body, reserve)
        form = await asyncio.to_thread(read_form, body, boundary)
        _check_form(form)
        lifetime_s = keeper.store.lifetime_s(form_expiry(form))
        with store.new_content() as content:
            await asyncio.to_thread(_copy, body, form, content)
            return await keeper.store.call(
                lambda store: store.add_file(owner, content, form.filename, PURPOSE, lifetime_s=lifetime_s)
            )


def _check_form(form: Form) -> None:
    if form.start < 0:
        raise RequestError("the form has no file", param="file", code="file-missing")
    purpose = form.fields.get("purpose")
    if purpose != PURPOSE:
        raise RequestError(
            f"purpose is {purpose!r:.60}; files are kept for {PURPOSE!r} only", param="purpose", code="unknown-purpose"
        )


def _copy(body: BinaryIO, form: Form, content: BinaryIO) -> None:
    """Copy the uploaded file's bytes out of a body."""
    body.seek(form.start)
    left = form.end - form.start
    while left > 0:
        piece = body.read(min(left, shutil.COPY_BUFSIZE))  # type: ignore[attr-defined]
        content.write(piece)
        left -= len(piece)


async def list_files(request: Request) -> Response:
    """GET /v1/files."""
    owner, purpose = _owner(request), request.query_params.get("purpose")
    newest_first = request.query_params.get("order", "desc") == "desc"
    page = _page(request, MAX_ROWS, newest_first=newest_first)
    rows = await _keeper(request).store.call(lambda store: store.files(owner, page, purpose, time.time()))
    shown, more = rows[: page.limit - 1], len(rows) == page.limit
    return JsonResponse(FileList(data=shown, has_more=more, first_id=_id(shown, 0), last_id=_id(shown, -1)))


async def get_file(request: Request) -> Response:
    """GET /v1/files/ID."""
    return JsonResponse(await _find_file(request, request.path_params["id"]))


async def file_content(request: Request) -> Response:
    """GET /v1/files/ID/content."""
    file = await _find_file(request, request.path_params["id"])
    path = await _keeper(request).store.call(lambda store: store.content(file.id))
    if not path.exists():  # deleted concurrently, or lost with a disk
        raise _no_file(file.id)
    return FileResponse(path, media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    """DELETE /v1/files/ID, unless an unfinished batch reads it."""
    file = await _find_file(request, request.path_params["id"])
    keeper = _keeper(request)
    if not await keeper.store.call(lambda store: store.delete_file(file.id)):
        raise HttpError(409, f"a batch that is not finished reads {file.id}; cancel it first", code="file-in-use")
    return JsonResponse(DeletedFile(id=file.id))


async def _find_file(request: Request, id: str) -> FileObject:
    owner = _owner(request)
    file = await _keeper(request).store.call(lambda store: store.file(owner, id))
    if file is None or _is_expired(file):
        raise _no_file(id)
    return file


def _is_expired(file: FileObject) -> bool:
    return file.expires_at is not None and file.expires_at <= time.time()


def _no_file(id: str) -> HttpError:
    return HttpError(404, f"there is no file {id!r:.100}", code="file-not-found", param="file_id")


async def create_batch(request: Request) -> Response:
    """POST /v1/batches: answer the lines of a file."""
    service: Service = request.app.state.service
    keeper, owner = _keeper(request), _owner(request)
    body = await service.prepare(request, decode_batch)
    if body.endpoint not in keeper.endpoints:
        known = ", ".join(keeper.endpoints)
        raise RequestError(
            f"endpoint is {body.endpoint!r:.100}; batches have {known}", param="endpoint", code="unknown-endpoint"
        )
    file = await _find_file(request, body.input_file_id)
    now = int(time.time())
    batch = BatchObject(
        id=new_id("batch_"),
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + _window_s(body.completion_window),
        metadata=body.metadata,
        output_expires_after=body.output_expires_after,
    )
    key = service.clients.key_of(request.headers)
    if not await keeper.store.call(lambda store: store.add_batch(owner, batch, key)):
        raise _no_file(file.id)
    keeper.start()
    return JsonResponse(batch)


def decode_batch(service: Service, content: bytes) -> BatchRequest:
    """Decode and check a body of POST /v1/batches."""
    body = service.decode_body(content, BatchRequest)
    _window_s(body.completion_window)
    if body.output_expires_after is not None:
        check_expiry(body.output_expires_after, "output_expires_after")
    entries, key_length, value_length = METADATA
    given = body.metadata or {}
    if len(given) > entries or any(len(k) > key_length or len(v) > value_length for k, v in given.items()):
        raise RequestError(
            f"metadata has at most {entries} entries, of {key_length} characters and values of {value_length}",
            param="metadata",
            code="too-many-items",
        )
    return body


def _window_s(window: str) -> int:
    """Seconds of a completion window. Raises RequestError."""
    match = re.fullmatch(r"(\d{1,4})h", window, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= MAX_WINDOW_H:
        raise RequestError(
            f"completion_window is {window!r:.60}; it must be a number of hours from 1h to {MAX_WINDOW_H}h",
            param="completion_window",
            code="invalid-window",
        )
    return 3600 * int(match[1])


async def list_batches(request: Request) -> Response:
    """GET /v1/batches: the newest first."""
    owner = _owner(request)
    page = _page(request, 20, newest_first=True)
    rows = await _keeper(request).store.call(lambda store: store.batches(owner, page))
    shown, more = rows[: page.limit - 1], len(rows) == page.limit
    return JsonResponse(BatchList(data=shown, has_more=more, first_id=_id(shown, 0), last_id=_id(shown, -1)))


async def get_batch(request: Request) -> Response:
    """GET /v1/batches/ID."""
    return JsonResponse(await _find_batch(request))


async def cancel_batch(request: Request) -> Response:
    """POST /v1/batches/ID/cancel: the answers so far stay."""
    batch, keeper = await _find_batch(request), _keeper(request)

    def cancel(row: BatchObject) -> None:
        if row.status in ("validating", "in_progress"):
            row.status, row.cancelling_at = "cancelling", int(time.time())

    if batch.status not in UNFINISHED:
        raise HttpError(409, f"{batch.id} is {batch.status} already", code="batch-finished")
    await keeper.store.call(lambda store: store.change_batch(batch.id, cancel))
    keeper.start()
    return JsonResponse(await _find_batch(request))


async def _find_batch(request: Request) -> BatchObject:
    owner, id = _owner(request), request.path_params["id"]
    batch = await _keeper(request).store.call(lambda store: store.batch(owner, id))
    if batch is None:
        raise HttpError(404, f"there is no batch {id!r:.100}", code="batch-not-found", param="batch_id")
    return batch


def _page(request: Request, default: int, *, newest_first: bool) -> Page:
    """The rows of a requested list, plus one row if there are more. Raises RequestError."""
    text = request.query_params.get("limit", str(default))
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII) or not 1 <= int(text) <= MAX_ROWS:
        raise RequestError(
            f"limit is {text!r:.60}; it must be a number from 1 to {MAX_ROWS}", param="limit", code="invalid-limit"
        )
    return Page(int(text) + 1, request.query_params.get("after"), newest_first)


def _id(rows: Sequence[FileObject] | Sequence[BatchObject], at: int) -> str | None:
    return rows[at].id if rows else None


def check_expiry(expiry: ExpiresAfter, param: str) -> None:
    """Raise RequestError for an expiry that OpenAI's API does not have."""
    if expiry.anchor != ANCHOR:
        raise RequestError(
            f"{param}.anchor is {expiry.anchor!r:.60}; it must be {ANCHOR!r}", param=param, code="unknown-anchor"
        )
    if not MIN_EXPIRY_S <= expiry.seconds <= MAX_EXPIRY_S:
        raise RequestError(
            f"{param}.seconds is {expiry.seconds}; it must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}",
            param=param,
            code="invalid-expiry",
        )


def form_expiry(form: Form) -> ExpiresAfter | None:
    """The expiry that the fields of an upload ask for; None if they leave that to the server. Raises RequestError."""
    anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    if seconds is None or not seconds.isascii() or not seconds.isdigit() or len(seconds) > 9:
        raise RequestError(
            f"expires_after[seconds] is {seconds!r:.60}; it must be a number",
            param="expires_after",
            code="invalid-expiry",
        )
    given = ExpiresAfter(anchor=anchor or "", seconds=int(seconds))
    check_expiry(given, "expires_after")
    return given
