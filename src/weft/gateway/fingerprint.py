"""The parts of an HTTP request that routing reads: model, beginning of the prompt, session."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from weft.gateway.policy import PIECE_TOKENS, Fingerprint

PIECE_BYTES = 4 * PIECE_TOKENS  # of JSON; English text has about 4 bytes per token
PIECES = 1024  # of a prompt's beginning that are compared; of a longer one the rest counts as unknown
SESSION_HEADER = "x-session-id"
SESSION_CHARACTERS = 256

NOTHING = msgspec.Raw()


class RoutedFields(msgspec.Struct):
    """The fields that the gateway reads, of any API: OpenAI's, Anthropic's or Ollama's."""

    model: Any = None
    name: Any = None  # what old clients of Ollama call it
    tools: msgspec.Raw = NOTHING
    system: msgspec.Raw = NOTHING
    messages: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING
    session_id: Any = None
    prompt_cache_key: Any = None
    user: Any = None
    stream: Any = None
    stream_options: Any = None
    n: Any = None
    best_of: Any = None
    seed: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    return_token_ids: Any = None
    continue_token_ids: Any = None


DECODER = msgspec.json.Decoder(RoutedFields)


def read_fields(body: bytes) -> RoutedFields:
    """The fields of a body; those of an empty object if it is none, which the upstream has to refuse."""
    if body.lstrip()[:1] != b"{":
        return RoutedFields()
    try:
        return DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return RoutedFields()


def model_of(fields: RoutedFields) -> str:
    """The model that a request asks for; "" if it names none."""
    return fields.model if isinstance(fields.model, str) else ""


def fingerprint(fields: RoutedFields, headers: Mapping[str, str], *, reads_prefix: bool) -> Fingerprint:
    """The fingerprint of a request. The session is that of the header X-Session-Id, else of a field of the body."""
    named = (headers.get(SESSION_HEADER), fields.session_id, fields.prompt_cache_key, fields.user)
    session = next((name for name in named if isinstance(name, str) and name), "")[:SESSION_CHARACTERS]
    if not reads_prefix:
        return Fingerprint(session=session)
    text = bytes(fields.messages) or bytes(fields.prompt) or bytes(fields.input)
    # The template puts these before the messages.
    opening = b"\0".join((model_of(fields).encode(errors="replace"), bytes(fields.tools), bytes(fields.system)))
    digest = blake2b(opening, digest_size=8)
    digests = []
    for end in range(PIECE_BYTES, min(len(text), PIECES * PIECE_BYTES) + 1, PIECE_BYTES):
        digest.update(text[end - PIECE_BYTES : end])
        digests.append(int.from_bytes(digest.digest()))
    return Fingerprint(digests, len(text) // 4, session)
