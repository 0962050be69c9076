"""Clients of Ollama's API that load and unload the model of a server by `keep_alive`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.pure.worlds import HI, World
from weft.engine.core.commands import Sleep, Wake

HERE = "http://127.0.0.1:8000"  # as this machine's owner writes it
ASKING: list[tuple[str, dict[str, Any]]] = [("/api/generate", {"prompt": "hi"}), ("/api/chat", {"messages": HI})]


async def post(world: World, path: str, **fields: Any) -> httpx.Response:
    return await world.client.post(f"{HERE}{path}", json={"model": "tiny", **fields})


async def listed(world: World) -> list[str]:
    await asyncio.sleep(0)  # the command to the engine
    return [row["name"] for row in (await world.client.get("/api/ps")).json()["models"]]


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
@pytest.mark.parametrize("zero", [0, 0.0, "0", "0s", "0m"])
async def test_without_a_prompt_it_unloads_and_the_next_request_wakes_it(path: str, zero: object) -> None:
    world = World()
    assert await listed(world) == ["tiny:latest"]
    assert (await post(world, path, keep_alive=zero)).json()["done_reason"] == "unload"
    assert await listed(world) == [] and world.engine.called == [Sleep(1)]
    assert (await post(world, path, keep_alive=zero)).json()["done_reason"] == "unload", "it is"
    assert world.engine.called == [Sleep(1)]
    assert (await world.client.post("/v1/chat/completions", json={"messages": HI})).status_code == 200
    assert await listed(world) == ["tiny:latest"] and world.engine.called == [Sleep(1), Wake()]


@pytest.mark.parametrize(("path", "fields"), ASKING)
@pytest.mark.parametrize("stream", [False, True])
async def test_with_a_prompt_it_unloads_after_the_answer(path: str, fields: dict[str, Any], stream: bool) -> None:
    world = World()
    for _ in range(2):
        answer = await post(world, path, keep_alive=0, stream=stream, **fields)
        assert json.loads(answer.text.splitlines()[-1])["done_reason"] == "stop"
        assert await listed(world) == []
    assert world.engine.called == [Sleep(1), Wake(), Sleep(1)]


async def test_a_request_for_nothing_loads_it_again() -> None:
    world = World(refuse_while_asleep=True)
    await post(world, "/api/generate", keep_alive=0)
    assert await listed(world) == []
    assert (await post(world, "/api/generate", keep_alive="5m")).json()["done_reason"] == "load"
    assert await listed(world) == ["tiny:latest"]


async def test_a_request_wakes_it_also_if_others_are_refused_while_it_sleeps() -> None:
    world = World(refuse_while_asleep=True)
    await post(world, "/api/generate", keep_alive=0)
    assert await listed(world) == []
    assert (await post(world, "/api/chat", messages=HI)).status_code == 200


async def test_clients_that_do_not_own_the_server_unload_nothing() -> None:
    """They would take the model from each other; the answer does not say that it has happened."""
    world = World(admin_key="secret")
    assert (await post(world, "/api/generate", keep_alive=0)).json()["done_reason"] == "load"
    assert await listed(world) == ["tiny:latest"] and world.engine.called == []


async def test_a_model_that_an_administrator_has_sent_to_sleep_is_left_to_him() -> None:
    world = World()
    await world.client.post(f"{HERE}/sleep")
    assert (await post(world, "/api/generate", keep_alive=0)).json()["done_reason"] == "unload"
    assert (await post(world, "/api/generate")).json()["done_reason"] == "load"
    assert world.engine.called == [Sleep(1)]


async def test_what_is_no_time_is_refused() -> None:
    answer = await post(World(), "/api/generate", keep_alive="soon")
    assert answer.status_code == 400
