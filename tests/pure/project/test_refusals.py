"""Refusals of the HTTP application, all in one shape."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import httpx
import pytest

from tests.log_events import logged
from tests.pure.bad_bodies import BAD_CHATS, BAD_COMPLETIONS, BROKEN_BODIES, TOO_MANY
from tests.pure.worlds import World, error_codes, refused
from tests.refusals import has_values


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
async def test_bad_chats_are_a_clear_400(fields: dict[str, Any], param: str | None) -> None:
    world = World()
    refused(await world.chat(**fields), type="invalid_request_error", param=param)
    assert not world.engine.requests


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=str)
async def test_bad_completions_are_a_clear_400(fields: dict[str, Any], param: str | None) -> None:
    refused(await World().complete(**fields), param=param)


@pytest.mark.parametrize(("content", "code"), BROKEN_BODIES, ids=lambda value: repr(value)[:40])
async def test_broken_bodies_are_a_clear_400(content: bytes, code: str) -> None:
    with error_codes() as codes:
        refused(await World().post("/v1/chat/completions", content=content))
    assert codes == [code]


async def test_the_words_of_refusals(golden: Callable[[str, str], None]) -> None:
    """The request; below it the code, the parameter at fault and the message."""
    world = World()
    asks = [(fields, partial(world.chat, **fields)) for fields, *_ in (*BAD_CHATS, *TOO_MANY)]
    asks += [(fields, partial(world.complete, **fields)) for fields, _ in BAD_COMPLETIONS]
    asks += [(body, partial(world.post, "/v1/chat/completions", content=body)) for body, _ in BROKEN_BODIES]
    lines = []
    for sent, ask in asks:
        with error_codes() as codes:
            error = (await ask()).json()["error"]
        lines += [f"{sent!r:.100}", f"  {codes[0]} ({error['param']}): {error['message']}"]
    golden("errors/http.txt", "\n".join(lines) + "\n")


async def test_missing_fields_are_named() -> None:
    refused(await World().post("/v1/chat/completions", {"model": "tiny"}), param="messages")
    refused(await World().post("/v1/completions", {"model": "tiny"}), param="prompt")


async def test_fields_without_effect_are_no_error() -> None:
    idle = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "n": None, "user": "me"}
    assert (await World().chat(**idle, best_of=1, store=False, stop=None, temperature=None)).status_code == 200


async def test_unknown_fields_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level(logging.WARNING, logger="weft.serving"):
        for _ in range(2):
            assert (await world.chat(wish="more", user="me", whim=1)).status_code == 200
    assert logged(caplog, "unknown-fields") == [{"names": ["wish", "whim"]}] and len(caplog.records) == 1
    has_values(caplog.text, "'wish'", "'whim'")


async def test_the_frameworks_own_errors_have_our_shape() -> None:
    world = World()
    refused(await world.client.get("/v1/nothing"), 404, code="unknown_url")
    refused(await world.client.get("/v1/models/none"), 404)
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
