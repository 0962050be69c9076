"""Answers that began at another server: checks of `continue_token_ids`."""

from __future__ import annotations

from typing import Protocol

from starlette.requests import Request

from weft.api.service.openai_types import SamplingRequest
from weft.api.service.service import Service
from weft.engine.core.token_ids import NO_IDS, TokenIds
from weft.errors import RequestError
from weft.http.access import check_admin_key

PARAM = "continue_token_ids"


class Continuable(Protocol):
    """A request whose answer may have begun at another server."""

    continue_token_ids: list[int] | None


def answered_ids(body: SamplingRequest, vocab: int, prompts: int = 1) -> TokenIds:
    """The token ids of the answer so far; none for a request from its beginning. Raises RequestError."""
    ids = body.continue_token_ids
    if not ids:
        return NO_IDS
    if not body.stream or prompts > 1:
        raise RequestError(f"{PARAM} needs stream: true, and one prompt", param=PARAM, code="continuation-not-possible")
    if min(ids) < 0 or max(ids) >= vocab:
        raise RequestError(
            f"{PARAM} has a token id outside the vocabulary, 0 to {vocab - 1}",
            param=PARAM,
            code="token-id-out-of-range",
        )
    return TokenIds.pack(ids)


def check_continuation_key(request: Request, body: Continuable) -> None:
    """Let only the admin key continue answers on a server with API keys. Raises HttpError.

    A client that continues an answer chooses the model's words, so only an administrator of the server may.
    """
    service: Service = request.app.state.service
    if body.continue_token_ids and service.clients.required:
        check_admin_key(request)
