"""The answer to a row of a batch, by the endpoints that answer over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from weft.api.batches.answers import answer
from weft.api.batches.attempts import Attempts, LinePlaces
from weft.api.batches.lines import LineLimits, decode_line, request_fault
from weft.api.batches.runner import LineError, LineResponse, LineResult, line_error
from weft.api.batches.store import new_id
from weft.api.batches.types import BatchLine
from weft.api.offline.rows import as_object, row_body
from weft.api.server.app import BATCH_ENDPOINTS
from weft.api.service.openai_types import ChatRequest, CompletionRequest
from weft.api.service.sampling import ACCEPTED_FIELDS
from weft.api.service.service import Service
from weft.engine.templates.limits import LIMITS
from weft.errors import RequestError
from weft.http.body import check_structure, field_names

# Status and body of the answer to a request.
Ask = Callable[[BatchLine], Awaitable[tuple[int, bytes]]]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class RowKind(msgspec.Struct, frozen=True):
    """The conversion of rows to requests.

    `is_requests`: they are requests as in OpenAI's batches; else each has a `prompt` or `messages`, and the fields of
    its request, for which `defaults` stand in. `sparse`: a field that is None counts as absent, as in Parquet files,
    whose rows all have the same fields.
    """

    is_requests: bool
    sparse: bool = False
    defaults: dict[str, Any] = {}


class AnsweredRow(msgspec.Struct, frozen=True):
    """The part of an answer that is kept: a line of the output, or the fields that are added to the row, as JSON."""

    number: int
    failed: bool
    row: bytes


class Generated(msgspec.Struct):
    """The fields that an answer adds to a plain row. `generated_text` is a list if the row asks for several."""

    generated_text: Any
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: Any = msgspec.UNSET


class RowError(msgspec.Struct):
    """The field that an error adds to a plain row."""

    error: LineError


class _Answer(msgspec.Struct):
    choices: list[dict[str, Any]]
    usage: dict[str, Any]


async def answer_row(
    service: Service,
    kind: RowKind,
    number: int,
    text: bytes,
    places: LinePlaces | None = None,
    attempts: Attempts | None = None,
) -> AnsweredRow:
    """Answer a row, which takes one of the `places`. Raises NotNowError if the engine has died."""

    async def ask(line: BatchLine) -> tuple[int, bytes]:
        return await answer(service, BATCH_ENDPOINTS[line.url], line, places, attempts)

    limits = LineLimits(service.body_bytes, service.json_values)
    if kind.is_requests:
        return await _answer_request(ask, kind, limits, number, text)
    try:
        line = plain_request(kind, limits, text)
    except RequestError as error:
        return _failed(number, line_error(error))
    status, body = await ask(line)
    if status != 200:
        return _failed(number, body_error(body))
    return AnsweredRow(number, False, msgspec.json.encode(generated(body)))


async def _answer_request(ask: Ask, kind: RowKind, limits: LineLimits, number: int, text: bytes) -> AnsweredRow:
    """The line of an output file of /v1/batches."""
    result = LineResult(new_id("batch_req_"), "", None)
    try:
        line = decode_line(_without_gaps(text) if kind.sparse else text, limits)
        result.custom_id = line.custom_id
        fault = request_fault(line, BATCH_ENDPOINTS)
        result.error = LineError(*fault) if fault else None
        if fault is None:
            status, body = await ask(line)
            result.response = LineResponse(status, new_id("req-"), msgspec.Raw(body))
    except RequestError as error:
        result.error = line_error(error)
    failed = result.response is None or result.response.status_code != 200
    return AnsweredRow(number, failed, msgspec.json.encode(result))


def _without_gaps(text: bytes) -> bytes:
    """A request's row of a Parquet file without the fields that it does not have; its body may be JSON text."""
    row = as_object(text) or {}
    return msgspec.json.encode(filled({**row, "body": row_body(row)}))


def plain_request(kind: RowKind, limits: LineLimits, text: bytes) -> BatchLine:
    """The request of a plain row. Raises RequestError for a row without a request."""
    if len(text) > limits.nbytes:
        raise RequestError(
            f"the row is longer than {limits.nbytes:,} bytes; send less, or raise --max-body-bytes", code="row-too-long"
        )
    if len(text) > LIMITS.small_bytes:
        check_structure(text, limits.values)
    row = as_object(text)
    if row is None:
        raise RequestError("the row is not a JSON object", code="row-not-object")
    row = {name: value for name, value in row.items() if value is not None}
    if ("prompt" in row) == ("messages" in row):
        raise RequestError("the row needs one of prompt and messages", code="row-without-prompt")
    if row.get("stream"):
        raise RequestError("stream is not possible in a batch; leave it out", code="row-streams")
    url, target = (CHAT, ChatRequest) if "messages" in row else (COMPLETIONS, CompletionRequest)
    known = field_names(target) | ACCEPTED_FIELDS
    # The row's other fields, such as an id, are kept in the output: they are not fields of a request, and cause no
    # warning.
    wanted = {name: value for name, value in (filled(row) if kind.sparse else row).items() if name in known}
    return BatchLine(custom_id="", method="POST", url=url, body={**kind.defaults, **wanted})


def filled(value: Any) -> Any:
    """The value without the fields of objects that are None."""
    if isinstance(value, dict):
        return {name: filled(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [filled(part) for part in value]
    return value


def generated(body: bytes) -> Generated:
    """The fields that an answer of the API adds to a row."""
    reply = msgspec.json.decode(body, type=_Answer)
    messages = [choice.get("message") or {"content": choice["text"]} for choice in reply.choices]
    texts = [message.get("content") for message in messages]
    first, usage = messages[0], reply.usage
    return Generated(
        generated_text=texts[0] if len(texts) == 1 else texts,
        finish_reason=reply.choices[0].get("finish_reason"),
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        reasoning=first.get("reasoning") or msgspec.UNSET,
        tool_calls=first.get("tool_calls") or msgspec.UNSET,
    )


def body_error(body: bytes) -> LineError:
    """The error in an answer with an error."""
    error = (as_object(body) or {}).get("error") or {}
    return LineError(str(error.get("code") or "error"), str(error.get("message") or "the request failed"))


def _failed(number: int, error: LineError) -> AnsweredRow:
    return AnsweredRow(number, True, msgspec.json.encode(RowError(error)))
