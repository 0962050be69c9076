"""ForwardedCompletion: the parameters of a client's completion, and the bodies that replicas get for it."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from weft.fleet.accounts.prices import has_price
from weft.fleet.gateway.fingerprint import NOTHING, RoutedFields, check_spelling
from weft.fleet.gateway.stream_apis import APIS, StreamApi
from weft.http.errors import HttpError

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = (CHATS, COMPLETIONS)
# Embeddings and scores, for which only prompt tokens are counted.
POOLED = (
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/api/embed",
    "/api/embeddings",
)
# Paths whose tokens are counted; streams of APIS can be continued by another replica, as streams of PATHS can.
COUNTED = (*PATHS, *APIS, *POOLED)
LIMITS = ("max_tokens", "max_completion_tokens")
WHOLE_NUMBERS = ("n", "best_of", "max_output_tokens", *LIMITS)
USAGE_OPTIONS = frozenset(("include_usage",))
MAX_TOKENS = 2**31 - 1  # largest limit of tokens, number of choices and token id that a request may have
MAX_HELD_IDS = 2**18  # token ids held of an answer, about 36 bytes each; a longer answer is not continued


class ForwardedCompletion:
    """A request for a completion; or for embeddings or scores, with `answers` False.

    `streams`: its answer is a stream of events. `single`: it has one prompt and one choice. `choices`: number of
    choices. `begun`: token ids of the beginning of the answer that the client gave. `max_tokens`: the larger of the
    client's `max_tokens` and `max_completion_tokens`, or None. `has_tools`: it describes tools. `api`: an API whose
    stream has no room for token ids; None for OpenAI's completions.
    """

    def __init__(self, fields: RoutedFields, path: str) -> None:
        self.api = APIS.get(path)
        self.streams = fields.stream is True or (
            self.api is not None and self.api.streams_unasked and fields.stream is not False
        )
        self.keeps_ids = fields.return_token_ids is True
        options = fields.stream_options
        self.keeps_usage = isinstance(options, dict) and options.get("include_usage") is True
        self.choices = fields.n if type(fields.n) is int and 0 < fields.n < MAX_TOKENS else 1
        self.single = self.api is not None or (
            fields.n in (None, 1) and fields.best_of in (None, 1) and _is_one_prompt(fields.prompt)
        )
        begun = fields.continue_token_ids
        self.begun: list[int] = begun if is_id_list(begun) else []
        self.max_tokens, self._is_bounded = _read_limits(fields, self.api)
        self.has_tools = bool(bytes(fields.tools) or bytes(fields.functions))
        self._seeds = fields.seed in (None, -1)
        self._seed: int | None = None
        self._path = path
        self._state = fields.stream_state if isinstance(fields.stream_state, dict) else {}
        self.answers = path in PATHS or self.api is not None
        self._priced: bool | None = None

    def is_priced(self, body: bytes) -> bool:
        """Return True if the tokens of the request bound its price; with several prompts they do not."""
        if self._priced is None:
            self._priced = self._path in PATHS and self.single and self._is_bounded and has_price(body)
        return self._priced

    def token_fields(self, answered: list[int] | None, events: int = 0) -> dict[str, Any]:
        """Fields that ask for token ids and a continuation of `answered` (None: a new answer), with a common seed.

        `events`: number of events that the client has.
        """
        fields: dict[str, Any] = {"return_token_ids": True}
        if self.api is not None:
            fields["stream_state"] = self._stream_state(events)
        if not self.keeps_ids or answered or self.begun:
            # Even an empty list keeps the prompt's ids, which are not needed, out of the answer.
            fields["continue_token_ids"] = self.begun if answered is None else answered
        if self._seeds:
            self._seed = secrets.randbits(53) if self._seed is None else self._seed
            fields["seed"] = self._seed
        return fields

    def _stream_state(self, events: int) -> dict[str, Any]:
        """The state of the stream that is sent to replicas; another gateway in front of this one may have begun it."""
        if not self._state:
            self._state = {"id": secrets.token_hex(16), "created": int(time.time()), "events": 0}
        begun = self._state.get("events", 0)
        return {**self._state, "events": events + (begun if type(begun) is int else 0)}

    def usage_fields(self) -> dict[str, Any]:
        """Fields that ask a stream for its usage. The client's other stream options concern that usage."""
        return (
            {}
            if self.api is not None or not self.streams or self.keeps_usage
            else {"stream_options": {"include_usage": True}}
        )

    def limit_fields(self, most: int, only: str | None) -> dict[str, Any]:
        """Fields that limit the answer to `most` tokens, under the name `only`, else under all names of the path.

        A server ignores a name that it does not know, and would answer without a limit.
        """
        if only is not None:
            return {name: most if name == only else msgspec.UNSET for name in LIMITS}
        return dict.fromkeys(LIMITS if self._path == CHATS else LIMITS[:1], most)


def check_counted(fields: RoutedFields) -> None:
    """Raise HttpError 400 for fields by which tokens would be counted wrongly.

    Many servers convert 1 to true and "8" to 8; the gateway reads only what the API defines.
    """
    if fields.stream is not None and type(fields.stream) is not bool:
        raise _wrong_type("stream", "true or false", fields.stream)
    for name in WHOLE_NUMBERS:
        value = getattr(fields, name)
        if value is not None and type(value) is not int:
            raise _wrong_type(name, "an integer", value)
    if isinstance(fields.stream_options, dict):
        check_spelling(fields.stream_options, USAGE_OPTIONS)


def _wrong_type(name: str, kind: str, value: Any) -> HttpError:
    return HttpError(400, f"{name} must be {kind}, not {value!r:.100}", code="invalid-value", param=name)


def with_fields(body: bytes, changes: dict[str, Any], *, rewrites: bool = False) -> bytes:
    """The body with changed fields; UNSET removes a field. A repeated field stays once, as its last value.

    With `rewrites` also within nested objects. Raises HttpError.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any] if rewrites else dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}", code="not-json") from None
    for name, value in changes.items():
        if value is msgspec.UNSET:
            fields.pop(name, None)
        else:
            fields[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)


def is_id_list(value: Any) -> bool:
    """Return True for a list of token ids that is not too long to be held."""
    if not isinstance(value, list) or len(value) > MAX_HELD_IDS:
        return False
    return all(type(id) is int and 0 <= id <= MAX_TOKENS for id in value)


def _read_limits(fields: RoutedFields, api: StreamApi | None) -> tuple[int | None, bool]:
    """The larger limit of the answer; None without a limit, or if a limit is not a number of tokens."""
    largest = 0
    for limit in (fields.max_tokens, fields.max_completion_tokens) if api is None else (api.read_limit(fields),):
        if limit is None:
            continue
        if type(limit) is not int or not 0 < limit <= MAX_TOKENS:
            return None, False
        largest = max(largest, limit)
    return largest or None, True


def _is_one_prompt(prompt: msgspec.Raw) -> bool:
    """Return True for a text, a list of ids, or no prompt: chats have none."""
    if prompt is NOTHING:
        return True
    text = bytes(prompt)
    return not text.startswith(b"[") or text[1:].lstrip()[:1].isdigit()
