"""X-Weft-Prefix: hits, and where a prompt leaves the earlier ones of its key."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

from tests.pure.letters import END, output
from tests.pure.worlds import HI, FakeEngine, Wire, World, events
from weft.api.observe import prefix_debug
from weft.api.observe.prefix_debug import ENTRY_BYTES, PER_KEY, TOKEN_BYTES, PrefixDebug, place_of
from weft.engine.core.request import Output, Request
from weft.http.sse import PREFIX_HEADER as HEADER

CALL = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
LONG = "You are a coding agent. " * 4


def cached(count: int) -> Any:
    """Says "ok"; the cache had `count` tokens of the prompt."""

    def script(request: Request) -> Iterable[Output]:
        for letter in "ok":
            yield output(request.id, letter, cached_tokens=count)
        yield output(request.id, END, "stop")

    return script


def told(answer: Any) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    value = answer.headers[HEADER]
    assert re.fullmatch(r"hit=\d+; miss=\d+; at=\d+; where=[a-z]+(; evicted=\d+)?", value)
    return dict(pair.split("=") for pair in value.split("; "))


def world(count: int = 0) -> World:
    return World(FakeEngine(cached(count)), max_model_len=4096, enable_prefix_debug=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation(stream: bool) -> None:
    made = world(2)
    history: list[dict[str, Any]] = [{"role": "system", "content": LONG}, {"role": "user", "content": "one"}]
    first = told(await made.chat(messages=history, stream=stream))
    assert first["where"] == "new" and first["at"] == "0" and first["hit"] == "2"
    length = len(made.engine.requests[-1].prompt)
    assert int(first["miss"]) == length - 2
    history += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "two"}]
    second = told(await made.chat(messages=history, stream=stream))
    # The template ends a turn as the model did, so that only what is new differs.
    assert int(second["at"]) == length + len("ok") + 1 and second["where"] == "user"
    assert int(second["evicted"]) == int(second["at"]) - 2
    changed = [{"role": "system", "content": LONG.replace("coding", "careful", 1)}, *history[1:]]
    third = told(await made.chat(messages=changed, stream=stream))
    assert third["where"] == "system" and int(third["at"]) == 2 + len("system:You are a c")
    again = told(await made.chat(messages=changed, stream=stream))
    assert again["where"] == "repeated"


async def test_other_keys_and_salts_are_others() -> None:
    made = world()
    for fields in ({}, {"cache_salt": "a"}):
        assert told(await made.chat(messages=HI, **fields))["where"] == "new"
        assert told(await made.chat(messages=HI, **fields))["where"] == "repeated"
    answer = await made.post("/v1/chat/completions", {"messages": HI}, headers={"x-api-key": "b"})
    assert told(answer)["where"] == "new"


async def test_every_api_tells() -> None:
    for path, body in {
        "/v1/completions": {"prompt": "hello"},
        "/v1/messages": {"model": "tiny", "max_tokens": 9, "messages": HI},
        "/v1/responses": {"input": "hi"},
        "/api/chat": {"model": "tiny", "messages": HI},
        "/api/generate": {"model": "tiny", "prompt": "hi"},
    }.items():
        for stream in (False, True):
            made = world()
            found = [told(await made.post(path, {**body, "stream": stream}))["where"] for _ in range(2)]
            assert found == ["new", "repeated"], path
    made = world()
    await made.complete(prompt="hello")
    assert told(await made.complete(prompt="help"))["where"] == "prompt"


async def test_a_stream_is_as_without_the_header() -> None:
    asked: dict[str, Any] = {"messages": HI, "stream": True}
    plain, debugged = events(await World().chat(**asked)), events(await World(enable_prefix_debug=True).chat(**asked))
    assert [chunk["choices"] for chunk in plain] == [chunk["choices"] for chunk in debugged]
    assert HEADER not in (await World().chat()).headers


async def test_a_stream_that_breaks_before_its_first_token_says_so() -> None:
    engine = FakeEngine(lambda request: ())
    engine.breaks = True
    wire = Wire(World(engine, enable_prefix_debug=True), "/v1/chat/completions", {"messages": HI, "stream": True})
    assert "engine_dead" in await wire.text(until="engine_dead")
    assert (HEADER.lower().encode(), b"") in wire.sent[0]["headers"]
    await wire.task


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " be brief \n"},
    {"role": "user", "content": [{"type": "text", "text": "find it"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "found"},
]
TEXT = "<s>system be brief # tools: look_up <e><s>user find it<e><s>call look_up<e><s>tool found<e><s>"


@pytest.mark.parametrize(
    ("before", "role"),
    [
        ("brief", "system"),
        ("tools: look", "tools"),
        ("<s>user", "user"),
        ("it<e>", "user"),
        ("call", "assistant"),
        ("found", "tool"),
        ("<e><s>!", "template"),
    ],
)
def test_the_place_of_a_character(before: str, role: str) -> None:
    at = (TEXT + "!").index(before)
    assert place_of(at, TEXT, MESSAGES, [TOOL]) == role


def test_roles_are_known_words() -> None:
    assert place_of(1, "a\r\nX: y", [{"role": "a\r\nX: y", "content": "a\r\nX: y"}], []) == "other"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    debug = PrefixDebug()
    for number in range(3 * PER_KEY):
        debug.remember(b"a", number.to_bytes(TOKEN_BYTES) * 10)
    assert len(debug._seen[b"a"]) == PER_KEY
    assert debug.common(b"a", (0).to_bytes(TOKEN_BYTES) * 10) == 0
    newest = (3 * PER_KEY - 1).to_bytes(TOKEN_BYTES)
    assert debug.common(b"a", newest * 20) == 10 and debug.common(b"b", newest * 20) == 0
    debug.remember(b"a", newest * 20)
    assert len(debug._seen[b"a"]) == PER_KEY
    assert debug._bytes == PER_KEY * ENTRY_BYTES + TOKEN_BYTES * (10 * (PER_KEY - 1) + 20)
    monkeypatch.setattr(prefix_debug, "MAX_BYTES", 4 * (ENTRY_BYTES + 40))
    for number in range(50):
        debug.remember(number.to_bytes(), bytes(40))
    assert len(debug._seen) == 4 and debug._bytes == 4 * (ENTRY_BYTES + 40)
    debug.remember(b"a", bytes(4 * (ENTRY_BYTES + 40)))
    assert debug._bytes <= 4 * (ENTRY_BYTES + 40)


def test_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_debug, "MAX_KEYS", 3)
    debug = PrefixDebug()
    for key in (b"a", b"b", b"c", b"a", b"d"):
        debug.remember(key, b"abcd")
    assert [debug.common(key, b"abcd") for key in (b"a", b"b", b"c", b"d")] == [1, 0, 1, 1]
    assert debug._bytes == 3 * (ENTRY_BYTES + TOKEN_BYTES)
