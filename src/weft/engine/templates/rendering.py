"""The rendering of conversations in a child process: what goes in, what comes out, and the handler between."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from weft.engine.templates.call_forms import HERMES, CallForm
from weft.engine.templates.template import ChatTemplate
from weft.errors import ModelError, RequestError


class Settings(msgspec.Struct, frozen=True):
    """Settings of one rendering.

    `opens` begins the answer after the last message, `unfinished` ends the text where the last message ends. Calls of
    tools that the template does not show become text of `call_form`. `variables` are passed to the template.
    """

    opens: bool
    unfinished: bool = False
    call_form: CallForm = HERMES
    variables: Mapping[str, Any] = {}


def encode_setup(template: ChatTemplate) -> bytes:
    """Return what a handler needs to know of a template."""
    return json.dumps([template.source, template.special_tokens, template.tool_source]).encode()


def encode_rendering(messages: Sequence[Mapping[str, Any]], settings: Settings) -> bytes:
    """Return a rendering as a job. Raises RequestError for what is no data."""
    form = msgspec.structs.asdict(settings.call_form)
    values = [messages, settings.opens, settings.unfinished, form, settings.variables]
    try:
        with suppress(UnicodeEncodeError):  # of halves of surrogate pairs, which only Python's own encoder knows
            return msgspec.json.encode(values, enc_hook=_plain)
        return json.dumps(values, default=_plain).encode()
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError, NotImplementedError) as error:
        raise RequestError(
            f"messages and variables of a chat template must be plain data, as JSON has it: {error!s:.200}",
            param="messages",
            code="messages-not-data",
        ) from None


def _decode(job: bytes) -> Any:
    try:
        return msgspec.json.decode(job)
    except msgspec.DecodeError:
        return json.loads(job)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is none")


def decode_text(answer: bytes) -> str:
    """Return the text of an answer."""
    return answer.decode("utf-8", "surrogatepass")


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the handler of a template's renderings. The template is compiled by the process that renders it."""
    template = ChatTemplate(*json.loads(setup))

    def render(job: bytes) -> bytes:
        messages, opens, unfinished, form, variables = _decode(job)
        settings = {"add_generation_prompt": opens, "unfinished": unfinished, "call_form": CallForm(**form)}
        try:
            text = template.render(messages, **{**variables, **settings})
        except ModelError as error:
            raise RequestError(str(error), param="messages", code=error.code) from None
        return text.encode("utf-8", "surrogatepass")

    return render
