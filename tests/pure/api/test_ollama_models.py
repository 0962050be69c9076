"""Ollama's endpoints about models: its Python client, and the requests of its command line, over a hub of our own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import ollama
import pytest
from huggingface_hub import constants

from tests.pure.gateways import gateway
from tests.pure.hubs import Fault, Hub, running_hub
from tests.pure.servers import weft_server
from tests.pure.worlds import Wire, World, error_codes
from weft.api.ollama.models import API_VERSION
from weft.api.service.run_files import announced
from weft.checkpoint.hub import demo, local_models

REPOSITORY = "owner/tiny_gguf"
ADDRESS = f"hf.co/{REPOSITORY}:Q4_K_M"
WEIGHTS = bytes(range(256)) * 1000


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub on loopback, and an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(demo, "cached_demo", lambda: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # before the library tries again
    with running_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        server.repositories[REPOSITORY] = {
            "tiny-Q4_K_M.gguf": WEIGHTS,
            "tiny-Q8_0-00001-of-00002.gguf": WEIGHTS,
            "tiny-Q8_0-00002-of-00002.gguf": WEIGHTS[::-1],
            "README.md": b"text",
        }
        yield server


def client(world: World, **headers: str) -> ollama.AsyncClient:
    """The official client, whose requests go straight to the application."""
    host = "http://127.0.0.1:8000"
    return ollama.AsyncClient(host=host, headers=headers, transport=httpx.ASGITransport(world.app))


async def names(world: World) -> list[str | None]:
    return [model.model for model in (await client(world).list()).models]


async def test_the_root_and_the_version() -> None:
    world = World(api_key=("secret",))
    for method in ("GET", "HEAD"):
        answer = await world.client.request(method, "/")
        assert (answer.status_code, answer.text) == (200, "Ollama is running" if method == "GET" else "")
    answer = await world.client.get("/api/version", headers={"Authorization": "Bearer secret"})
    assert answer.json() == {"version": API_VERSION}


async def test_a_wrong_key_is_refused_in_ollama_s_shape() -> None:
    answer = await World(api_key=("secret",)).client.get("/api/version")
    assert answer.status_code == 401 and set(answer.json()) == {"error"}
    assert (await World(api_key=("secret",)).client.get("/api/ps", headers={"x-api-key": "secret"})).status_code == 200


async def test_the_served_model_is_listed_and_runs(hub: Hub) -> None:
    world = World()
    row = (await client(world).list()).models[0]
    assert row.model == "tiny:latest" and row.details and row.details.family == "llama" and row.size
    assert row.details.parameter_size == "134.52M" and row.details.quantization_level == "BF16"
    running = (await client(world).ps()).models[0]
    assert (running.model, running.context_length, running.size_vram) == ("tiny:latest", 64, 0)
    assert running.digest == row.digest and running.expires_at and running.expires_at.year > 2300


@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
async def test_show(name: str) -> None:
    shown = await client(World()).show(name)
    assert shown.modelinfo and shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.block_count"] == 30
    assert shown.capabilities and "completion" in shown.capabilities and shown.template
    assert shown.parameters and "num_ctx" in shown.parameters


async def test_an_unknown_model_is_a_404() -> None:
    with pytest.raises(ollama.ResponseError, match="other") as caught:
        await client(World()).show("other")
    assert caught.value.status_code == 404


@pytest.mark.parametrize("body", [{}, {"model": ""}, {"model": 5}])
async def test_a_body_without_a_model_is_a_400(body: dict[str, Any]) -> None:
    for path in ("/api/show", "/api/pull"):
        answer = await World().client.post(f"http://127.0.0.1{path}", json=body)
        assert answer.status_code == 400 and set(answer.json()) == {"error"}, path


async def test_a_pull_tells_of_its_bytes_and_lists_the_model(hub: Hub) -> None:
    world = World()
    states = [state async for state in await client(world).pull(ADDRESS, stream=True)]
    assert (states[0].status, states[-1].status) == ("pulling manifest", "success")
    told = [state for state in states if state.digest]
    assert told[-1].completed == told[-1].total == len(WEIGHTS)
    assert [state.completed for state in told] == sorted(state.completed or 0 for state in told)
    assert await names(world) == ["tiny:latest", ADDRESS]
    assert not hub.asked("GET", "README.md") and not hub.asked("GET", "Q8_0")
    assert not world.service.downloads


async def test_a_pull_without_a_stream(hub: Hub) -> None:
    world = World()
    assert (await client(world).pull(f"hf.co/{REPOSITORY}:q8_0")).status == "success"
    row = (await client(world).list()).models[1]
    assert (row.model, row.size) == (f"hf.co/{REPOSITORY}:Q8_0", 2 * len(WEIGHTS))


async def test_a_tag_of_ollama_s_is_pulled_from_the_repository_of_the_catalogue(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.checkpoint.names import gguf_reference

    row = gguf_reference.Listed(tag="small:1b", name=REPOSITORY, latest=True)
    monkeypatch.setattr(gguf_reference, "listed", lambda: (row,))
    world = World()
    await client(world).pull("small")
    assert await names(world) == ["tiny:latest", "small:1b"]
    await client(world).pull("small:1b-instruct-q8_0")
    assert set(await names(world)) == {"tiny:latest", "small:1b", "small:1b-q8_0"}
    await client(world).delete("small:1b")
    assert await names(world) == ["tiny:latest", "small:1b-q8_0"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nobody:13b", "hf.co/OWNER/REPO:QUANT"),
        ("llama3:9b", "hf.co/OWNER/REPO:QUANT"),
        ("hf.co/", "hf.co/OWNER/REPO:QUANT"),
        ("hf.co/../..", "hf.co/OWNER/REPO:QUANT"),
        ("hf.co/owner/repo:Q4;rm", "hf.co/OWNER/REPO:QUANT"),
    ],
)
async def test_names_that_mean_nothing_are_refused_with_the_form(hub: Hub, name: str, said: str) -> None:
    for stream in (False, True):
        answer = await World().client.post("http://127.0.0.1/api/pull", json={"model": name, "stream": stream})
        assert answer.status_code == 400 and said in answer.json()["error"]
    assert not hub.requests


async def test_a_pull_that_fails_says_why(hub: Hub) -> None:
    with pytest.raises(ollama.ResponseError, match="Q4_K_M, Q8_0"):
        await client(World()).pull(f"hf.co/{REPOSITORY}:Q6_K")
    wire = Wire(World(), "/api/pull", {"model": f"hf.co/{REPOSITORY}:Q6_K"})
    lines = (await wire.text(until="error")).splitlines()
    assert set(json.loads(lines[-1])) == {"error"}
    await wire.task
    assert not wire.whole  # the connection is cut: nobody takes this for a whole answer


async def test_a_pull_is_continued_after_a_break(hub: Hub) -> None:
    hub.faults = [Fault("Q4_K_M.gguf", bytes=100_000, times=1), Fault("Q4_K_M.gguf", status=404, times=9)]
    world = World()
    with pytest.raises(ollama.ResponseError):
        await client(world).pull(ADDRESS)
    hub.faults.clear()
    await client(world).pull(ADDRESS)
    assert await names(world) == ["tiny:latest", ADDRESS]


async def test_a_model_is_removed(hub: Hub) -> None:
    world = World()
    for quantization in ("Q4_K_M", "Q8_0"):
        await client(world).pull(f"hf.co/{REPOSITORY}:{quantization}")
    await client(world).delete(ADDRESS)
    assert await names(world) == ["tiny:latest", f"hf.co/{REPOSITORY}:Q8_0"]
    await client(world).delete(f"hf.co/{REPOSITORY}:Q8_0")
    assert await names(world) == ["tiny:latest"]
    assert not list(Path(constants.HF_HUB_CACHE).glob("models--*"))
    with pytest.raises(ollama.ResponseError) as caught:
        await client(world).delete(ADDRESS)
    assert caught.value.status_code == 404


async def test_a_gateway_fetches_and_removes_models_that_nobody_serves_yet(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go to one server, always the same, with the gateway's key for it."""
    one, another = World(admin_key="secret"), World(admin_key="other")
    async with weft_server(one) as server, weft_server(another) as other:
        # The first by its address gets them: the key is that of it.
        first, second = sorted((server, other), key=lambda each: each.url)
        monkeypatch.setenv("FIRST_KEY", "secret" if first is server else "other")
        upstreams = [{"url": first.url, "key_env": "FIRST_KEY"}, {"url": second.url}]
        async with gateway(upstreams=upstreams, admin_key="boss") as live:
            host = str(live.client.base_url)
            for _ in range(2):
                api = ollama.AsyncClient(host=host, headers={"x-api-key": "boss"})
                assert (await api.pull(ADDRESS)).status == "success"
                await api.delete(ADDRESS)
                with pytest.raises(ollama.ResponseError) as missing:
                    await api.delete(ADDRESS)
                assert missing.value.status_code == 404
                await api.close()


async def test_the_served_model_is_not_removed(hub: Hub) -> None:
    with pytest.raises(ollama.ResponseError, match="served") as caught:
        await client(World()).delete("tiny")
    assert caught.value.status_code == 409


async def test_the_files_that_a_server_reads_are_not_removed(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World()
    hub.repositories[REPOSITORY]["tiny-Q8_0-00001-of-00002.gguf"] = WEIGHTS[1:]
    for quantization in ("Q4_K_M", "Q8_0"):
        await client(world).pull(f"hf.co/{REPOSITORY}:{quantization}")
    model = local_models.find_model(ADDRESS)
    assert model is not None
    world.service.plan = msgspec.structs.replace(world.service.plan, checkpoint=model.files[0])
    with pytest.raises(ollama.ResponseError) as caught, error_codes() as codes:
        await client(world).delete(ADDRESS)
    assert (caught.value.status_code, codes) == (409, ["model-in-use"]) and Path(model.files[0]).exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with (
        announced(["another"], "http://here:9", model.files),
        pytest.raises(ollama.ResponseError, match="http://here:9"),
    ):
        await client(World()).delete(ADDRESS)
    await client(world).delete(f"hf.co/{REPOSITORY}:Q8_0")  # of the same repository
    assert Path(model.files[0]).exists()
    await client(World()).delete(ADDRESS)
    assert not Path(model.files[0]).exists()


@pytest.mark.parametrize("call", [("POST", "/api/pull"), ("DELETE", "/api/delete")], ids=str)
@pytest.mark.parametrize(
    ("headers", "host", "peer"),
    [
        ({}, "127.0.0.1", "10.0.0.9"),
        ({"X-Forwarded-For": "10.0.0.9"}, "127.0.0.1", "127.0.0.1"),
        ({"Origin": "http://elsewhere"}, "127.0.0.1", "127.0.0.1"),
        ({}, "weft.example", "127.0.0.1"),
    ],
    ids=str,
)
async def test_only_this_machine_changes_what_is_here(
    hub: Hub, call: tuple[str, str], headers: dict[str, str], host: str, peer: str
) -> None:
    world = World(api_key=("api",))
    transport = httpx.ASGITransport(world.app, client=(peer, 9))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
        key = {"Authorization": "Bearer api"}
        answer = await http.request(*call, json={"model": ADDRESS}, headers=headers | key)
    assert answer.status_code == 403 and "WEFT_ADMIN_KEY" in answer.json()["error"]
    assert not hub.requests


@pytest.mark.parametrize("options", [{"api_key": ("api",)}, {"root_path": "/weft"}, {"uds": "/tmp/s"}], ids=str)
async def test_behind_what_may_be_a_proxy_the_admin_key_is_needed(hub: Hub, options: dict[str, Any]) -> None:
    world = World(**options)
    with pytest.raises(ollama.ResponseError, match="WEFT_ADMIN_KEY") as caught:
        await client(world, Authorization="Bearer api").delete(ADDRESS)
    assert caught.value.status_code == 403


@pytest.mark.parametrize("host", ["[", "[::1", "localhost:x"])
async def test_a_host_that_is_none_is_refused(hub: Hub, host: str) -> None:
    transport = httpx.ASGITransport(World().app, client=("127.0.0.1", 9))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        for headers in ({"Host": host}, {"Origin": f"http://{host}"}):
            answer = await http.request("DELETE", "/api/delete", json={"model": ADDRESS}, headers=headers)
            assert answer.status_code in (403, 404)


async def test_the_admin_key_changes_what_is_here_from_anywhere(hub: Hub) -> None:
    world = World(admin_key="secret")
    transport = httpx.ASGITransport(world.app, client=("10.0.0.9", 9))
    async with httpx.AsyncClient(transport=transport, base_url="http://weft.example") as http:
        body = {"model": ADDRESS, "stream": False}
        assert (await http.post("/api/pull", json=body)).status_code == 401
        assert (await http.post("/api/pull", json=body, headers={"x-api-key": "secret"})).status_code == 200


@pytest.mark.parametrize("name", ["create", "copy", "push", "blobs/sha256:00"])
async def test_what_a_server_of_one_model_does_not_have_is_a_501_by_name(name: str) -> None:
    answer = await World().client.post(f"/api/{name}", json={})
    assert answer.status_code == 501 and f"/api/{name.partition('/')[0]} " in answer.json()["error"]


async def test_two_pulls_at_once_are_the_most(hub: Hub) -> None:
    world = World()
    world.service.downloads |= {object(), object()}
    with pytest.raises(ollama.ResponseError, match="2 models") as caught:
        await client(world).pull(ADDRESS)
    assert caught.value.status_code == 429


async def test_a_client_that_hangs_up_ends_the_pull(hub: Hub) -> None:
    world = World()
    async for _ in await client(world).pull(ADDRESS, stream=True):
        break
    while world.service.downloads:
        await asyncio.sleep(0.01)


# What `ollama` the command sends (cmd/cmd.go and api/client.go of github.com/ollama/ollama), in its order.


async def test_the_requests_of_ollama_run_and_ollama_rm(hub: Hub) -> None:
    world = World()
    http = httpx.AsyncClient(transport=httpx.ASGITransport(world.app), base_url="http://127.0.0.1:11434")
    assert (await http.head("/")).status_code == 200
    shown = await http.post(
        "/api/show", json={"model": ADDRESS, "system": "", "template": "", "verbose": False, "options": None}
    )
    assert shown.status_code == 404  # and the command pulls
    pulled = await http.post("/api/pull", json={"model": ADDRESS, "insecure": False, "name": ADDRESS})
    assert [json.loads(line) for line in pulled.text.splitlines()][-1] == {"status": "success"}
    assert pulled.headers["content-type"] == "application/x-ndjson"
    assert (await http.get("/api/tags")).status_code == (await http.get("/api/ps")).status_code == 200
    assert (await http.request("DELETE", "/api/delete", json={"model": ADDRESS, "name": ADDRESS})).status_code == 200
    assert (await http.get("/api/version")).status_code == 200


# `model`, `prompt`, `suffix`, `system`, `template` and `options` are sent even if they are empty; a duration is a text.
LOAD: dict[str, Any] = {
    "model": "tiny",
    "prompt": "",
    "suffix": "",
    "system": "",
    "template": "",
    "options": None,
}


@pytest.mark.parametrize("keep_alive", [None, "5m0s", "0s", "-1"])
async def test_the_requests_of_ollama_run_with_a_question_and_of_ollama_stop(keep_alive: str | None) -> None:
    """The command loads the model, asks in a chat or at once, and unloads it with `keep_alive` 0."""
    http = World().client
    http.base_url = httpx.URL("http://127.0.0.1:11434")  # of this machine's owner
    kept = {} if keep_alive is None else {"keep_alive": keep_alive}
    assert (await http.head("/")).status_code == 200
    shown = await http.post(
        "/api/show", json={"model": "tiny", "system": "", "template": "", "verbose": False, "options": None}
    )
    assert shown.status_code == 200 and "completion" in shown.json()["capabilities"]
    loaded = await http.post("/api/generate", json={**LOAD, **kept})
    reason = "unload" if keep_alive == "0s" else "load"
    assert [(row["done"], row["done_reason"]) for row in map(json.loads, loaded.text.splitlines())] == [(True, reason)]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "options": {}, **kept}
    once = {**LOAD, "prompt": "hi", "options": {}, **kept}
    for path, body in (("/api/chat", chat), ("/api/chat", {**chat, "format": ""}), ("/api/generate", once)):
        rows = [json.loads(line) for line in (await http.post(path, json=body)).text.splitlines()]
        assert "".join(row["message"]["content"] if "chat" in path else row["response"] for row in rows) == "hello"
        assert rows[-1]["done_reason"] == "stop" and rows[-1]["eval_count"] == 6
    listed = [row["name"] for row in (await http.get("/api/ps")).json()["models"]]
    assert listed == ([] if keep_alive == "0s" else ["tiny:latest"])
