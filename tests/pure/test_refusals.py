"""What the HTTP application refuses, all in one shape, and whom."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from tests.pure.worlds import World, refused

BAD_CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"n": 9}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"logit_bias": {"65": 1000}}, "logit_bias"),
    ({"seed": "x"}, "seed"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "logprobs"),
    ({"messages": "hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 100}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"best_of": 5}, "best_of"),
    ({"priority": 10**30}, "priority"),
    ({"structured_outputs": {"json": {}}}, "structured_outputs"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
async def test_bad_chats_are_a_clear_400(fields: dict[str, Any], param: str | None) -> None:
    world = World()
    refused(await world.chat(**fields), type="invalid_request_error", param=param)
    assert not world.engine.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [[97, "a"]]}, "prompt[0][1]"),
        ({"prompt": [9999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 99}, "logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt": ["a"] * 5, "n": 2}, "n"),
    ],
    ids=str,
)
async def test_bad_completions_are_a_clear_400(fields: dict[str, Any], param: str | None) -> None:
    refused(await World().complete(**fields), param=param)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b'"x"', "object"),
        (b'{"model": NaN}', "JSON"),
        (b'{"temperature": 1e999}', "JSON"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b"\xff\xfe", "JSON"),
        (b"[" * 100_000, "nested"),
        (b'{"model": "\\ud800"}', "JSON"),
    ],
    ids=repr,
)
async def test_broken_bodies_are_a_clear_400(content: bytes, words: str) -> None:
    assert words in refused(await World().post("/v1/chat/completions", content=content))


async def test_missing_fields_are_named() -> None:
    refused(await World().post("/v1/chat/completions", {"model": "tiny"}), param="messages")
    refused(await World().post("/v1/completions", {"model": "tiny"}), param="prompt")


async def test_what_asks_for_nothing_is_no_error() -> None:
    idle = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "n": None, "user": "me"}
    assert (await World().chat(**idle, best_of=1, store=False, stop=None, temperature=None)).status_code == 200


async def test_unknown_fields_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level(logging.WARNING, logger="weft.serving"):
        for _ in range(2):
            assert (await world.chat(wish="more", user="me", whim=1)).status_code == 200
    assert [record.getMessage() for record in caplog.records] == ["ignored unknown request fields: 'wish', 'whim'"]


async def test_the_frameworks_own_errors_have_our_shape() -> None:
    world = World()
    refused(await world.client.get("/v1/nothing"), 404, code="unknown_url")
    refused(await world.client.get("/v1/models/"), 404)
    answer = await world.client.get("/v1/completions")
    refused(answer, 405, code="method_not_allowed")
    assert answer.headers["allow"] == "POST"


async def test_a_bug_is_a_500_in_our_shape() -> None:
    world = World()
    world.engine.submit = None  # type: ignore[assignment, method-assign]
    world.client = httpx.AsyncClient(
        transport=httpx.ASGITransport(world.app, raise_app_exceptions=False), base_url="http://weft"
    )
    assert "TypeError" in refused(await world.chat(), 500, type="server_error")


async def test_too_long_a_body_is_a_413() -> None:
    world = World(max_body_bytes=200)
    assert "200 bytes" in refused(await world.chat(user="x" * 200), 413, type="invalid_request_error")

    async def pieces() -> AsyncGenerator[bytes, None]:
        for _ in range(100):
            yield b"x" * 10

    refused(await world.post("/v1/chat/completions", content=pieces()), 413)


async def test_a_full_queue_is_a_429_with_the_time_to_wait() -> None:
    world = World()
    world.engine.full = True
    for stream in (False, True):
        answer = await world.chat(stream=stream)
        refused(answer, 429, code="queue_full", type="rate_limit_error")
        assert answer.headers["retry-after"] == "3"
    assert not world.service.streams


async def test_while_draining_nothing_new_is_taken() -> None:
    world = World()
    world.service.draining = True
    answer = await world.chat()
    refused(answer, 503, code="shutting_down")
    assert "retry-after" in answer.headers
    refused(await world.client.get("/health/ready"), 503)
    assert (await world.client.get("/health")).status_code == 200
    assert (await world.client.get("/health/live")).status_code == 200


# Names and keys


async def test_names() -> None:
    world = World(served_model_name=("a", "b/c"))
    rows = (await world.client.get("/v1/models")).json()
    assert rows["object"] == "list" and [row["id"] for row in rows["data"]] == ["a", "b/c"]
    keys = {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"}
    assert all(set(row) == keys and (row["root"], row["max_model_len"]) == ("tiny", 64) for row in rows["data"])
    assert (await world.client.get("/v1/models/b/c")).json()["id"] == "b/c"
    assert (await world.chat(model="b/c")).json()["model"] == "b/c"
    assert (await world.chat(model=None)).json()["model"] == "a"
    refused(await world.chat(model="tiny"), 404, code="model_not_found", param="model")
    refused(await world.client.get("/v1/models/tiny"), 404, code="model_not_found")


async def test_keys_guard_everything_but_probes() -> None:
    world = World(api_key=("one", "two"))
    for path in ("/v1/models", "/health", "/metrics", "/load", "/version", "/ping", "/nothing"):
        answer = await world.client.get(path)
        refused(answer, 401, code="invalid_api_key", type="authentication_error")
        assert "one" not in answer.text
    for path in ("/health/live", "/health/ready"):
        assert (await world.client.get(path)).status_code == 200
    for key, status in (("one", 200), ("two", 200), ("three", 401), ("", 401), ("onetwo", 401), ("ö", 401)):
        headers = [(b"authorization", f"Bearer {key}".encode())]
        assert (await world.client.get("/v1/models", headers=headers)).status_code == status
    basic = {"Authorization": "Basic one"}
    assert (await world.client.get("/v1/models", headers=basic)).status_code == 401


async def test_request_ids_are_sent_back_where_enabled() -> None:
    world = World(enable_request_id_headers=True)
    assert (await world.chat()).headers["x-request-id"]
    named = await world.client.get("/nothing", headers={"X-Request-Id": "mine"})
    assert named.headers["x-request-id"] == "mine"
    assert "x-request-id" not in (await World().chat()).headers


async def test_origins() -> None:
    asks = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    world = World(allowed_origins=("http://page",), api_key=("k",))
    allowed = await world.client.options("/v1/chat/completions", headers=asks)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "http://page")
    closed = await World().client.get("/version", headers={"Origin": "http://page"})
    assert "access-control-allow-origin" not in closed.headers
