"""StreamMarks: marks between the parts of a stream that another server may continue.

The chunks of OpenAI's completions have room for token ids; the events of Anthropic's API, of /v1/responses and the
lines of Ollama's have none. There a mark follows each part of the stream. It names the tokens of the part, so that a
gateway, which removes the marks, knows where another server has to continue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from weft.api.conversation.chat_answer import AnswerDelta


class Mark(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The tokens of the part before the mark; `last`: the stream is complete."""

    token_ids: list[int] = []
    last: bool = False


def event_mark(content: bytes) -> bytes:
    """A mark between events: a comment, which clients skip."""
    return b": weft %b\n\n" % content


def line_mark(content: bytes) -> bytes:
    """A mark between lines of JSON."""
    return b'{"weft":%b}\n' % content


class StreamMarks:
    """The marks of one stream; none unless a gateway `wants` them.

    The part with an answer's last token and everything after it is one part: a server that continued after the last
    token would have nothing to sample.
    """

    def __init__(self, form: Callable[[bytes], bytes], *, wants: bool) -> None:
        self._form, self._wants = form, wants
        self._held = b""
        self._held_ids: list[int] = []

    def __call__(self, token_ids: Sequence[int] = (), *, last: bool = False) -> bytes:
        """A mark after the part of `token_ids`."""
        if not self._wants:
            return b""
        return self._form(msgspec.json.encode(Mark(token_ids=list(token_ids), last=last)))

    def part(self, made: bytes, delta: AnswerDelta) -> bytes:
        """The bytes to send for a delta, of which `made` is made."""
        if not self._wants:
            return made
        if delta.finish_reason is not None:
            self._held, self._held_ids = made, list(delta.token_ids)
            return b""
        return made + self(delta.token_ids)

    def end(self, made: bytes) -> bytes:
        """The bytes to send behind the last delta, of which `made` are the last."""
        return self._held + made + self(self._held_ids, last=True)
