"""Keys of the gateway's clients: the paths that they open, and the requests that they forbid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.pure.gateways import answer_status, gateway, upstream
from tests.pure.servers import Exchange
from tests.pure.worlds import refused
from weft.fleet.upstreams.paths import PUBLIC, is_public
from weft.http.keys import digest_key, matching_index, sent_key

KEYS = "[{name: a, key: one}, {name: b, key: two, admin: true}]"


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "Content-Length: 0", "", ""]).encode()


@pytest.fixture
def keys(tmp_path: Path) -> str:
    (tmp_path / "keys.yaml").write_text(KEYS)
    return str(tmp_path / "keys.yaml")


@pytest.mark.parametrize(
    "path",
    [
        "/sleep?level=2",
        "/v1/load_lora_adapter",
        "/v1/files",
        "/api/delete",
        "/load/../sleep",
        "/v1/../sleep",
        "/v1/%2e%2e/sleep",
        "/tokenize/..%2fsleep",
        "/%73leep",
        "//sleep",
        "/tokenize/",
        "/%74okenize",
    ],
)
async def test_clients_do_not_reach_what_changes_an_upstream(
    keys: str, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("THEIR_KEY", "theirs")
    async with upstream() as one:
        upstreams = [{"url": one.url, "key_env": "THEIR_KEY"}]
        async with gateway(upstreams=upstreams) as live:  # whose clients need no keys
            client = await live.connect()
            await client.send(head("POST", path))
            assert (await client.answer())[0] == 403 and not one.seen
            live.assert_idle()
        async with gateway(upstreams=upstreams, keys=keys) as live:
            for key, status in (("one", 403), ("two", 200)):
                client = await live.connect()
                await client.send(head("POST", path, f"Authorization: Bearer {key}"))
                assert (await client.answer())[0] == status
            assert [seen.headers["authorization"] for seen in one.seen] == ["Bearer theirs"]


async def test_with_keys_of_clients_the_paths_of_upstreams_without_keys_are_closed_too(keys: str) -> None:
    async with upstream() as one, gateway(one.url, keys=keys) as live:
        live.client.headers = httpx.Headers({"Authorization": "Bearer one"})
        refused(await live.client.post("/sleep"), 403, code="path_not_public")
        assert (await live.client.post("/tokenize", json={"prompt": "a"})).status_code == 200


async def test_without_keys_every_path_is_the_upstream_s() -> None:
    async with upstream() as one, gateway(one.url) as live:
        assert (await live.client.post("/sleep")).status_code == 200
        assert one.seen[0].path == "/sleep"


async def test_clients_with_keys_do_not_see_where_others_prompts_are(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("[{name: a, key: one}, {name: b, key: two, admin: true}]")

    async def answer(exchange: Exchange) -> None:
        exchange.head("200 OK", "Content-Length: 2", "X-Weft-Prefix: hit=16; miss=3")
        exchange.writer.write(b"{}")

    async with upstream() as stub, gateway(stub.url, keys=str(keys)) as live:
        stub.answer = answer
        for key, told in (("one", None), ("two", "hit=16; miss=3")):
            made = await live.client.post("/v1/completions", json={"model": "m"}, headers={"x-api-key": key})
            assert made.status_code == 200 and made.headers.get("x-weft-prefix") == told


def test_public_paths() -> None:
    assert all(is_public(path, path.encode()) for path in PUBLIC)
    assert {"/v1/chat/completions", "/tokenize", "/api/chat", "/version", "/v1/messages"} <= PUBLIC
    assert not any(is_public(path, path.encode()) for path in ("", "/v1", "/sleep", "/api/pull", "/v1/models/x/../y"))


async def test_names_of_models_have_a_longest(keys: str) -> None:
    async with upstream() as one, gateway(one.url) as live:
        refused(await live.chat(model="m" * 513), 400, code="model_name_too_long")
        assert (await live.chat(model="m" * 512)).status_code == 200
        live.assert_idle()


async def test_an_upstream_that_lists_nothing_of_a_model_answers_as_the_gateway_does() -> None:
    async with upstream() as one, gateway(upstreams=[{"url": one.url, "models": ["m"]}]) as live:
        one.answer = answer_status("200 OK")
        asked, got = await live.chat(model="x"), await live.client.get("/v1/models/x")
        assert asked.json() == got.json() and asked.status_code == got.status_code == 404


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, ""),
        ({"Authorization": "Bearer  k "}, "k"),
        ({"authorization": "bearer k", "x-api-key": "other"}, "k"),
        ({"authorization": "Basic k", "x-api-key": "other"}, "other"),
        ({"x-api-key": "schlüssel".encode().decode("latin-1")}, "schlüssel"),
    ],
    ids=str,
)
def test_a_key_that_is_sent(headers: dict[str, str], key: str) -> None:
    from starlette.datastructures import Headers

    assert sent_key(Headers(headers)) == key
    digests = [digest_key("first"), digest_key(key)]
    assert matching_index(digests, key) == (1 if key else None)
    assert matching_index(digests[:1], key) is None


async def test_clients_do_not_unload_ollama_s_models(keys: str) -> None:
    async with upstream() as one, gateway(one.url, keys=keys) as live:
        for key, status in (("one", 403), ("two", 200)):
            live.client.headers = httpx.Headers({"Authorization": f"Bearer {key}"})
            for path in ("/api/chat", "/api/generate"):
                answer = await live.client.post(path, json={"model": "m", "keep_alive": 0})
                assert answer.status_code == status, answer.text
        assert len(one.seen) == 2
        live.assert_idle()


async def test_a_key_for_one_model_names_no_other_in_other_letters(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("[{name: a, key: one, models: [m]}]")
    async with upstream() as one, gateway(one.url, keys=str(tmp_path / "keys.yaml")) as live:
        live.client.headers = httpx.Headers({"Authorization": "Bearer one"})
        refused(await live.chat(Model="other"), 400, code="misspelt_field")
        answer = await live.client.post("/api/chat", json={"model": "m", "NAME": "other"})
        assert answer.status_code == 400 and not one.seen
        assert (await live.chat()).status_code == 200


async def test_a_client_with_a_key_says_no_beginning_that_is_no_list(keys: str) -> None:
    """The gateway reads only lists of ids; an upstream might read more."""
    async with upstream() as one, gateway(one.url, keys=keys) as live:
        live.client.headers = httpx.Headers({"Authorization": "Bearer one"})
        for begun in ([1.0, 2.0], "12", [-1], {"a": 1}):
            fields: dict[str, Any] = {"continue_token_ids": begun}
            refused(await live.chat(**fields), 403, code="not_admin")
        assert not one.seen
