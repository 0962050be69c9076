"""The parts of an HTTP request that routing and accounts read: model, beginning of the prompt, session, limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Annotated, Any, get_type_hints

import msgspec

from weft.fleet.upstreams.policy import PIECE_TOKENS, Fingerprint
from weft.http.errors import HttpError

PIECE_BYTES = 4 * PIECE_TOKENS  # bytes of JSON; English text has about 4 bytes per token
PIECES = 1024  # pieces of a prompt's beginning that are compared; the rest of a longer prompt counts as unknown
SESSION_HEADER = "x-session-id"
SESSION_CHARACTERS = 256

NOTHING = msgspec.Raw()
Guarded = Annotated[Any, "keys and accounts rely on it"]


class RoutedFields(msgspec.Struct):
    """The fields that the gateway reads, of any API: OpenAI's, Anthropic's or Ollama's."""

    model: Guarded = None
    name: Guarded = None  # the field of old clients of Ollama
    tools: msgspec.Raw = NOTHING
    functions: msgspec.Raw = NOTHING
    system: msgspec.Raw = NOTHING
    messages: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING
    session_id: Any = None
    prompt_cache_key: Any = None
    user: Any = None
    stream: Guarded = None
    stream_options: Guarded = None
    n: Guarded = None
    best_of: Guarded = None
    seed: Any = None
    max_tokens: Guarded = None
    max_completion_tokens: Guarded = None
    return_token_ids: Any = None
    continue_token_ids: Guarded = None
    stream_state: Any = None
    max_output_tokens: Guarded = None
    options: msgspec.Raw = NOTHING
    keep_alive: Guarded = None


DECODER = msgspec.json.Decoder(RoutedFields)
NAMES_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
KINDS = get_type_hints(RoutedFields, include_extras=True)
GUARDED = frozenset(name for name, kind in KINDS.items() if kind == Guarded)
PLAIN = frozenset(RoutedFields.__struct_fields__) | {"temperature", "top_p"}  # frequent names without another spelling


def read_fields(body: bytes) -> RoutedFields:
    """The fields of a body of any kind; none if `read_object` refuses it."""
    try:
        return read_object(body)
    except HttpError:
        return RoutedFields()


def read_object(body: bytes) -> RoutedFields:
    """The fields of a JSON object.

    Raises HttpError 400 for bodies that an upstream might read differently: numbers, texts and encodings that Python
    accepts but JSON does not, and names of `GUARDED` in another case, which Go treats as equal.
    """
    if body.lstrip(b" \t\r\n")[:1] != b"{":
        raise HttpError(400, "the body is not a JSON object in UTF-8 without a byte order mark", code="not-json")
    try:
        fields = DECODER.decode(body)
        names = NAMES_DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}", code="not-json") from None
    check_spelling(names, GUARDED)
    return fields


def check_spelling(names: Iterable[str], guarded: frozenset[str]) -> None:
    """Raise HttpError 400 for a name that differs from a guarded name only in its case."""
    for name in names:
        if name in PLAIN:
            continue
        meant = name.casefold()
        if meant in guarded and name != meant:
            raise HttpError(
                400,
                f"the field {name!r} may be read as {meant!r}; spell it {meant!r}",
                code="misspelt-field",
                param=meant,
            )


def model_of(fields: RoutedFields) -> str:
    """The model that a request asks for; "" if it names none."""
    return fields.model if isinstance(fields.model, str) else ""


def fingerprint(fields: RoutedFields, headers: Mapping[str, str], *, reads_prefix: bool) -> Fingerprint:
    """The fingerprint of a request. The session is the header X-Session-Id, else a field of the body."""
    named = (headers.get(SESSION_HEADER), fields.session_id, fields.prompt_cache_key, fields.user)
    session = next((name for name in named if isinstance(name, str) and name), "")[:SESSION_CHARACTERS]
    if not reads_prefix:
        return Fingerprint(session=session)
    text = bytes(fields.messages) or bytes(fields.prompt) or bytes(fields.input)
    # The template puts tools before the messages.
    opening = b"\0".join((model_of(fields).encode(errors="replace"), bytes(fields.tools), bytes(fields.system)))
    digest = blake2b(opening, digest_size=8)
    digests = []
    for end in range(PIECE_BYTES, min(len(text), PIECES * PIECE_BYTES) + 1, PIECE_BYTES):
        digest.update(text[end - PIECE_BYTES : end])
        digests.append(int.from_bytes(digest.digest()))
    return Fingerprint(digests, len(text) // 4, session)
