"""Embeddings and scores through a gateway: routed by their model, and counted by their prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest

from tests.pure.engine.test_pooling import BODIES, EMBEDS, expected
from tests.pure.fleet.test_gateway_accounts import write_keys
from tests.pure.gateways import LiveGateway, gateway, upstream
from tests.pure.servers import Exchange, weft_server
from tests.pure.worlds import FakeEngine, World, error_codes, pools, refused

OLD_OLLAMA = "/api/embeddings"  # whose answers say nothing of tokens


@asynccontextmanager
async def two_models(**config: Any) -> AsyncIterator[tuple[LiveGateway, World]]:
    """A gateway before a server of "chats", and one of "embeds"."""
    chats = World(served_model_name=("chats",))
    embeds = World(FakeEngine(pools), pooling=EMBEDS, served_model_name=("embeds",))
    async with weft_server(chats) as first, weft_server(embeds) as second:
        upstreams = [{"url": first.url, "models": ["chats"]}, {"url": second.url, "models": ["embeds"]}]
        async with gateway(upstreams=upstreams, **config) as live:
            yield live, embeds


async def test_clients() -> None:
    async with two_models() as (live, _):
        url = str(live.client.base_url).rstrip("/")
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
            made = await api.embeddings.create(model="embeds", input=["ab", "c"])
            assert np.allclose([row.embedding for row in made.data], [expected("ab"), expected("c")], atol=1e-6)
            with pytest.raises(openai.BadRequestError), error_codes() as codes:
                await api.embeddings.create(model="chats", input="a")
            assert codes == ["model-does-not-embed"]
            with pytest.raises(openai.NotFoundError):
                await api.embeddings.create(model="others", input="a")
        llama = ollama.AsyncClient(host=url)
        assert np.allclose((await llama.embed("embeds:latest", "ab")).embeddings, [expected("ab")], atol=1e-6)
        await llama.close()
        for path, body in BODIES.items():
            answer = await live.client.post(path, json={**body, "model": "embeds"})
            assert answer.status_code == 200, (path, answer.text)


@pytest.mark.parametrize("path", BODIES)
async def test_a_quota_counts_prompts(path: str, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, "[{name: a, key: one, quota: {hour: 600}}]")
    async with two_models(keys=keys, ledger=str(tmp_path / "ledger")) as (live, embeds):
        headers = {"Authorization": "Bearer one"}
        answer = await live.client.post(path, json={**BODIES[path], "model": "embeds"}, headers=headers)
        assert answer.status_code == 200, answer.text
        tokens = sum(len(request.prompt) for request in embeds.engine.requests)
        ledger = live.proxy.accounts.ledger
        assert ledger is not None
        told = int(answer.request.headers["content-length"]) // 4 if path == OLD_OLLAMA else tokens
        assert ledger.tokens("a", 1) == told


async def test_an_upstream_without_a_count_of_answers(tmp_path: Path) -> None:
    """OpenAI's usage of embeddings has none."""

    async def answer(exchange: Exchange) -> None:
        body = b'{"object": "list", "data": [], "usage": {"prompt_tokens": 7, "total_tokens": 7}}'
        exchange.head("200 OK", "Content-Type: application/json", f"Content-Length: {len(body)}")
        exchange.writer.write(body)

    keys = write_keys(tmp_path, "[{name: a, key: one, quota: {hour: 30}}]")
    async with upstream() as stub, gateway(stub.url, keys=keys, ledger=str(tmp_path / "ledger")) as live:
        stub.answer = answer
        live.client.headers["Authorization"] = "Bearer one"
        for _ in range(2):
            assert (await live.client.post("/v1/embeddings", json={"model": "m", "input": "a"})).status_code == 200
        ledger = live.proxy.accounts.ledger
        assert ledger is not None and ledger.tokens("a", 1) == 14
        refused(
            await live.client.post("/v1/embeddings", json={"model": "m", "input": "a" * 80}), 429, code="quota_exceeded"
        )
