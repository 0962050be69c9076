"""PrefixDebug: reports for each request how much of its prompt was cached, and where it differs from earlier prompts.

The header X-Weft-Prefix of an answer has positions and roles, never text: `hit=N; miss=M; at=P; where=ROLE`. N and M
are tokens of the prompt that the cache had, and had not. P is the first token that differs from every earlier prompt
and answer of the same key. ROLE is the role of its message: "tools" for their description, "template" for text of the
chat template, "prompt" for a completion. `where` is "new" if the key has said nothing alike, and "repeated" if all of
the prompt was there before. `evicted=K` follows if the cache has lost K tokens before P.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from starlette.requests import Request

from weft.engine.core.token_ids import TokenIds
from weft.engine.frontend.collector import Collector
from weft.engine.frontend.frontend import Frontend
from weft.http.keys import sent_key

PER_KEY = 16  # prompts of one key that are remembered
MAX_KEYS = 1000  # keys whose prompts are remembered
ENTRY_BYTES = 200  # least bytes of memory that a prompt takes in addition to its tokens
MAX_BYTES = 2**25  # bytes of all prompts that are remembered: 8 million tokens
TOKEN_BYTES = 4
ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # a header has no text of a client


class PrefixDebug:
    """Remembers the token ids of each key's last prompts, with their answers, for the keys used last."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, deque[bytes]] = OrderedDict()  # by key, in both the oldest first
        self._bytes = 0

    def common(self, key: bytes, ids: bytes) -> int:
        """Number of tokens with which an earlier prompt of the key begins like `ids`, at most."""
        return max((_common(ids, seen) for seen in self._seen.get(key, ())), default=0)

    def remember(self, key: bytes, ids: bytes) -> None:
        """Remember a prompt, in place of earlier prompts that it continues."""
        prompts = self._seen.pop(key, deque())
        self._bytes -= _size(prompts)
        if len(ids) + ENTRY_BYTES <= MAX_BYTES:
            kept = deque((seen for seen in prompts if not ids.startswith(seen)), PER_KEY)
            kept.append(ids)
            self._seen[key] = kept
            self._bytes += _size(kept)
        elif prompts:
            self._seen[key] = prompts
            self._bytes += _size(prompts)
        while len(self._seen) > MAX_KEYS or self._bytes > MAX_BYTES:
            self._bytes -= _size(self._seen.popitem(last=False)[1])


def _size(prompts: Iterable[bytes]) -> int:
    """Bytes that remembered prompts count for."""
    return sum(ENTRY_BYTES + len(ids) for ids in prompts)


class PrefixReport:
    """The header of one request, from its submission to its end."""

    def __init__(
        self,
        debug: PrefixDebug,
        frontend: Frontend,
        block_size: int,
        request: Request,
        collector: Collector,
        messages: Sequence[Mapping[str, Any]] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._debug, self._collector = debug, collector
        self._frontend, self._block_size = frontend, block_size
        sender = sent_key(request.headers).encode(errors="replace")
        self._key = blake2b(sender + collector.requests[0].identity.digest(), digest_size=16).digest()
        self._ids = collector.requests[0].prompt.packed
        self._at = self._debug.common(self._key, self._ids)
        self._where = self._place(messages, tools)
        self._debug.remember(self._key, self._ids)

    def header(self) -> str | None:
        """Value of the header; None before the engine has looked at the prompt."""
        output = self._collector.output
        if output.metrics.first_token_s is None:
            return None
        hit, length = output.num_cached_tokens, len(self._ids) // TOKEN_BYTES
        figures = f"hit={hit}; miss={length - hit}; at={self._at}; where={self._where}"
        # The cache has whole blocks only, and never the last token, from which the first one is sampled.
        most = min(self._at, length - 1)
        lost = most - hit
        return f"{figures}; evicted={lost}" if lost > self._block_size else figures

    def end(self) -> None:
        """Remember the answer too: the next turn of a conversation repeats it."""
        answer = self._collector.output.outputs[0].token_ids
        self._debug.remember(self._key, self._ids + TokenIds.pack(answer).packed)

    def _place(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        if not self._at:
            return "new"
        if self._at * TOKEN_BYTES == len(self._ids):
            return "repeated"
        if not messages or self._frontend.tokenizer is None:
            return "prompt"
        ids = list(TokenIds(self._ids))
        text = self._frontend.decode(ids)
        return place_of(len(self._frontend.decode(ids[: self._at])), text, messages, tools)


def place_of(at: int, text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """The role of the message that the character `at` of a rendered prompt belongs to.

    Characters between two messages belong to the second, except the description of tools before the first message that
    is no system message.
    """
    spans = list(_spans(text, messages))
    role = next((role for role, end in spans if at < end), "template")
    if not tools or role == "system":
        return role
    first = next((end for name, end in spans if name != "system"), len(text))
    mentions = [text.find(name) for name in map(_name_of, tools) if name]
    return "tools" if role != "template" and any(at <= place < first for place in mentions) else role


def _spans(text: str, messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
    """Role and end of each message whose text is found, in their order."""
    at = 0
    for message in messages:
        content = _text_of(message)
        begin = text.find(content, at) if content else -1
        if begin >= 0:
            at = begin + len(content)
            role = message.get("role")
            yield role if isinstance(role, str) and role in ROLES else "other", at


def _text_of(message: Mapping[str, Any]) -> str:
    """Text that a template shows of a message: its content, or the name of its last call."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = next((text for text in reversed(texts) if isinstance(text, str)), None)
    if isinstance(content, str) and content.strip():
        return content.strip()
    calls = message.get("tool_calls")
    return _name_of(calls[-1]) if isinstance(calls, list) and calls else ""


def _name_of(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _common(one: bytes, other: bytes) -> int:
    """Number of tokens with which two prompts begin alike."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * TOKEN_BYTES : middle * TOKEN_BYTES] == other[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
