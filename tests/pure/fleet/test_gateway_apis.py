"""All APIs through a gateway, in front of servers of two models."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import ollama
import pytest

from tests.pure.gateways import LiveGateway, gateway, hang_up, upstream
from tests.pure.servers import weft_server
from tests.pure.worlds import HI, FakeEngine, World, refused, saying
from weft.fleet.accounts.ledger import Ledger
from weft.fleet.gateway.request_reader import owner_of
from weft.fleet.upstreams.checks import read_models

CHAT = {"messages": HI}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "tiny", **CHAT}}


@asynccontextmanager
async def two_models(**config: Any) -> AsyncIterator[tuple[LiveGateway, World, World]]:
    """A gateway before a server of "one", which says "uno", and one of "two", which says "due"."""
    one = World(FakeEngine(saying("uno")), served_model_name=("one",))
    two = World(FakeEngine(saying("due")), served_model_name=("two",))
    async with weft_server(one) as first, weft_server(two) as second:
        upstreams = [{"url": first.url, "models": ["one"]}, {"url": second.url, "models": ["two"]}]
        async with gateway(upstreams=upstreams, **config) as live:
            yield live, one, two


def keys_file(folder: Path) -> str:
    """A file with the keys of a client and of an administrator."""
    file = folder / "keys.yaml"
    file.write_text("- {name: client, key: k}\n- {name: boss, key: b, admin: true}\n")
    return str(file)


def address(live: LiveGateway) -> str:
    return str(live.client.base_url).rstrip("/")


async def test_ollama_s_client() -> None:
    async with two_models() as (live, _, two):
        api = ollama.AsyncClient(host=address(live))
        assert [row.model for row in (await api.list()).models] == ["one:latest", "two:latest"]
        for name in ("two", "two:latest"):
            assert (await api.chat(name, HI)).message.content == "due"
            parts = [part async for part in await api.generate(name, "hi", stream=True)]
            assert "".join(part.response or "" for part in parts) == "due" and parts[-1].done
        assert (await api.show("one:latest")).modelinfo
        assert len(two.engine.requests) == 4
        with pytest.raises(ollama.ResponseError, match="three") as caught:
            await api.chat("three", HI)
        assert caught.value.status_code == 404
        assert (await live.client.get("/")).text == "Ollama is running"
        old = await live.client.post("/api/show", json={"name": "two"})
        assert old.status_code == 200, old.text
        await api.close()


async def test_anthropic_s_client() -> None:
    async with (
        two_models() as (live, *_),
        anthropic.AsyncAnthropic(base_url=address(live), api_key="none", max_retries=0) as api,
    ):
        asked: dict[str, Any] = {"model": "two", "max_tokens": 20, "messages": HI}
        assert (await api.messages.create(**asked)).content[0].text == "due"  # type: ignore[union-attr]
        async with api.messages.stream(**asked) as stream:
            assert (await stream.get_final_message()).stop_reason == "end_turn"
        with pytest.raises(anthropic.NotFoundError) as caught:
            await api.messages.create(**{**asked, "model": "three"})
        body: Any = caught.value.body
        assert body["type"] == "error" and body["error"]["type"] == "not_found_error"


async def test_responses_and_the_description() -> None:
    async with two_models() as (live, *_):
        answer = await live.client.post("/v1/responses", json={"model": "one", "input": "hi"})
        assert answer.json()["output"][0]["content"][0]["text"] == "uno"
        streamed = await live.client.post("/v1/responses", json={"model": "one", "input": "hi", "stream": True})
        assert "event: response.completed" in streamed.text
        assert "/v1/responses" in (await live.client.get("/openapi.json")).json()["paths"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/messages", {"type", "error"}), ("/api/chat", {"error"}), ("/v1/responses", {"error"})],
)
async def test_errors_of_the_gateway_have_the_shape_of_the_api(path: str, fields: set[str], tmp_path: Path) -> None:
    async with upstream() as stub, gateway(stub.url, keys=keys_file(tmp_path)) as live:
        for key, status in (("", 401), ("k", 502)):
            stub.answer = hang_up
            headers = {"x-api-key": key} if key else {}
            answer = await live.client.post(path, json={"model": "m", **CHAT}, headers=headers)
            assert answer.status_code == status and set(answer.json()) == fields, answer.text
            assert isinstance(answer.json()["error"], str) == (path == "/api/chat")


async def test_files_and_batches_stay_at_one_server(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    worlds = [World(storage_directory=str(folder)) for folder in folders]
    async with weft_server(worlds[0]) as first, weft_server(worlds[1]) as second:
        async with gateway(first.url, second.url) as live:
            ids = []
            for _ in range(4):
                files = {"file": ("in.jsonl", json.dumps(LINE).encode())}
                made = await live.client.post("/v1/files", files=files, data={"purpose": "batch"})
                ids.append(made.json()["id"])
            for id in ids:
                assert (await live.client.get(f"/v1/files/{id}")).status_code == 200
            body = {"input_file_id": ids[0], "endpoint": "/v1/chat/completions", "completion_window": "1h"}
            batch = (await live.client.post("/v1/batches", json=body)).json()["id"]
            while (found := await live.client.get(f"/v1/batches/{batch}")).json()["status"] != "completed":
                pass
            content = await live.client.get(f"/v1/files/{found.json()['output_file_id']}/content")
            assert json.loads(content.text)["custom_id"] == "a"
        await first.server.batches.close()
        await second.server.batches.close()


KEYS = """
- {name: one, key: k1}
- {name: two, key: k2}
- {name: some, key: k3, models: [tiny]}
- {name: few, key: k4, tpm: 1000000}
- {name: slow, key: k5, rpm: 1000}
- {name: one-at-a-time, key: k6, concurrent: 1}
- {name: boss, key: b, admin: true}
"""


@pytest.mark.parametrize("upstream_keys", [False, True])
async def test_each_key_has_files_and_batches_of_its_own(
    tmp_path: Path, upstream_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys.yaml").write_text(KEYS)
    monkeypatch.setenv("UPSTREAM_KEY", "u")
    options = {"api_key": ("u", "other")} if upstream_keys else {}
    world = World(storage_directory=str(tmp_path / "storage"), **options)
    async with weft_server(world) as server:
        one: dict[str, Any] = {"url": server.url, **({"key_env": "UPSTREAM_KEY"} if upstream_keys else {})}
        async with gateway(upstreams=[one], keys=str(tmp_path / "keys.yaml")) as live:
            (replica,) = live.proxy.fleet.replicas.values()
            await read_models(replica, live.proxy.timeouts)

            async def ask(method: str, path: str, key: str, **how: Any) -> Any:
                return await live.client.request(method, path, headers={"x-api-key": key, **how.pop("head", {})}, **how)

            upload: dict[str, Any] = {"files": {"file": ("in.jsonl", json.dumps(LINE).encode())}}
            upload["data"] = {"purpose": "batch"}
            made = await ask("POST", "/v1/files", "k1", **upload)
            file = made.json()["id"]
            assert "x-weft-owner" not in made.headers
            body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "1h"}
            assert (await ask("POST", "/v1/batches", "k2", json=body)).status_code == 404
            batch = (await ask("POST", "/v1/batches", "k1", json=body)).json()["id"]
            # Nobody names another's owner: the gateway does not pass a client's own header on.
            stolen = {"x-weft-owner": owner_of("one").decode()}
            for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", f"/v1/batches/{batch}"):
                assert (await ask("GET", path, "k1")).status_code == 200
                assert (await ask("GET", path, "k2", head=stolen)).status_code == 404
                assert (await ask("GET", path, "b", head=stolen)).status_code == 404
            for path, id in (("/v1/files", file), ("/v1/batches", batch)):
                found = {
                    key: [row["id"] for row in (await ask("GET", path, key)).json()["data"]] for key in ("k1", "k2")
                }
                assert id in found["k1"] and not found["k2"]
            while (told := (await ask("GET", f"/v1/batches/{batch}", "k1")).json())["status"] != "completed":
                pass
            assert (await ask("GET", f"/v1/files/{told['output_file_id']}/content", "k2")).status_code == 404
            assert (await ask("DELETE", f"/v1/files/{file}", "k2")).status_code == 404
            assert (await ask("DELETE", f"/v1/files/{file}", "k1")).json()["deleted"]
            for key in ("k3", "k4"):  # whose limits nobody would compare with the lines
                assert (await ask("POST", "/v1/files", key, **upload)).status_code == 403
                assert (await ask("GET", "/v1/files", key)).json()["data"] == []
            for key in ("k5", "k6"):  # whose files are requests like others, but not the lines of a batch
                theirs = {**body, "input_file_id": (await ask("POST", "/v1/files", key, **upload)).json()["id"]}
                refused(await ask("POST", "/v1/batches", key, json=theirs), 403, code="batch_not_counted")
            live.proxy.accounts.ledger = Ledger(str(tmp_path / "ledger"))  # from here on each key's tokens count
            refused(await ask("POST", "/v1/batches", "k1", json=body), 403, code="batch_not_counted")
            assert (await ask("POST", "/v1/batches", "b", json=body)).status_code == 404  # that is another's file
            for path in ("/v1/files/a%2Fb", "/v1/files/../../sleep", "/v1/files/a/b", "/v1/filesystem"):
                assert (await ask("GET", path, "k1")).status_code in (403, 404), path
            assert (await ask("POST", "/api/pull", "k1", json={"model": "a"})).status_code == 403
        await server.server.batches.close()


async def test_files_of_keys_need_an_upstream_that_keeps_them_apart(tmp_path: Path) -> None:
    async with upstream() as stub, gateway(stub.url, keys=keys_file(tmp_path)) as live:
        for path in ("/v1/files", "/v1/batches", "/v1/files/file-1/content"):
            assert (await live.client.get(path, headers={"x-api-key": "k"})).status_code == 403
            assert (await live.client.get(path, headers={"x-api-key": "b"})).status_code == 200
        assert all("x-weft-owner" not in seen.headers for seen in stub.seen)
        live.replica(stub).listed = {"m": {"id": "m", "owned_by": "weft"}}  # an older one, which does not know owners
        answer = await live.client.get("/v1/files", headers={"x-api-key": "k"})
        assert answer.status_code == 502 and "ok" not in answer.json()
        assert stub.seen[-1].headers["x-weft-owner"] == owner_of("client").decode()
        live.assert_idle()
