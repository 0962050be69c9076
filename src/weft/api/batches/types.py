"""Request and response types of /v1/files and /v1/batches, as in OpenAI's API. Times are seconds since 1970."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field, json


class ExpiresAfter(Struct, kw_only=True):
    """Seconds after the creation of a file in which it is kept; `anchor` is "created_at"."""

    anchor: str
    seconds: int


class FileObject(Struct, kw_only=True):
    """An uploaded file, or an output file of a batch. `expires_at`: when it is deleted; None for never."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"
    expires_at: int | None = None


class FileList(Struct, kw_only=True):
    object: str = "list"
    data: list[FileObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None


class DeletedFile(Struct, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


class BatchRequest(Struct, kw_only=True):
    """A request to answer the lines of a file. `completion_window` is a number of hours, such as "24h"."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(Struct, kw_only=True):
    """A fault of the input file, in a line that counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct, kw_only=True):
    object: str = "list"
    data: list[BatchError]


class RequestCounts(Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(Struct, kw_only=True):
    """A batch. `model` is the model that its first line names."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchList(Struct, kw_only=True):
    object: str = "list"
    data: list[BatchObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None


class BatchLine(Struct, kw_only=True):
    """One request of an input file."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


# Made here, in one thread: msgspec 0.22 crashes if several threads use a type for the first time.
FILE, BATCH, LINE = json.Decoder(FileObject), json.Decoder(BatchObject), json.Decoder(BatchLine)
