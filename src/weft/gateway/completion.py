"""Completion: what a client asks of a completion, and the bodies that replicas get for it."""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec

from weft.gateway.fingerprint import RoutedFields
from weft.serving.errors import HttpError

UNPRICED = re.compile(rb'"(image_url|input_image|input_audio|video_url|file|web_search_options)"')
PATHS = ("/v1/chat/completions", "/v1/completions")


class Completion:
    """A request for a completion.

    `streams`: its answer is a stream of events. `single`: it is one choice of one prompt. `choices`: their number.
    `begun`: token ids that the client gave as the beginning of the answer. `max_tokens`: None if the client leaves it
    out. `is_priced`: its tokens bound its price, which those of pictures and of several prompts do not. `seed`: sent to
    replicas if the client gives none.
    """

    def __init__(self, fields: RoutedFields, body: bytes) -> None:
        self.streams = fields.stream is True
        self.keeps_ids = fields.return_token_ids is True
        options = fields.stream_options
        self.stream_options: dict[str, Any] = options if isinstance(options, dict) else {}
        self.keeps_usage = self.stream_options.get("include_usage") is True
        self.choices = fields.n if isinstance(fields.n, int) and fields.n > 0 else 1
        self.single = fields.n in (None, 1) and fields.best_of in (None, 1) and _is_one_prompt(bytes(fields.prompt))
        begun = fields.continue_token_ids
        self.begun: list[int] = begun if isinstance(begun, list) and all(type(id) is int for id in begun) else []
        given = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
        self.max_tokens = given if isinstance(given, int) and given > 0 else None
        self.is_priced = self.single and UNPRICED.search(body) is None
        self.seed = secrets.randbits(53) if fields.seed in (None, -1) else None

    def token_fields(self, answered: list[int] | None) -> dict[str, Any]:
        """Fields that ask for token ids, and to go on behind `answered`; None begins the answer."""
        fields: dict[str, Any] = {"return_token_ids": True}
        if not self.keeps_ids or answered or self.begun:
            # Even an empty list keeps the prompt's ids, which nobody wants, out of the answer.
            fields["continue_token_ids"] = self.begun if answered is None else answered
        if self.seed is not None:
            fields["seed"] = self.seed
        return fields

    def usage_fields(self) -> dict[str, Any]:
        """Fields that ask a stream for its usage."""
        if not self.streams or self.keeps_usage:
            return {}
        return {"stream_options": {**self.stream_options, "include_usage": True}}


def with_fields(body: bytes, changes: dict[str, Any]) -> bytes:
    """The body with other fields. Of a field that is there twice, only the last stays. Raises HttpError."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}", code="not-json") from None
    fields.update({name: msgspec.Raw(msgspec.json.encode(value)) for name, value in changes.items()})
    return msgspec.json.encode(fields)


def _is_one_prompt(prompt: bytes) -> bool:
    """Return True for a text, a list of ids, or no prompt: chats have none."""
    if not prompt.startswith(b"["):
        return True
    return prompt[1:].lstrip()[:1].isdigit()
