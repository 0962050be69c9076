"""A real `weft serve` that dies by kill -9 in the middle of a stream: another one ends the same text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from tests.cpu.test_serve import PATIENCE_S, Server
from tests.pure.gateways import LiveGateway, gateway
from weft.gateway.checks import read_models

ASKED: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Count from one to twenty in words."}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 48,
    "ignore_eos": True,
}
# Greedy, and drawn by a seed with penalties, which another replica must know of.
KINDS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 11, "presence_penalty": 0.5}]


async def pieces(live: LiveGateway, fields: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The chunks of an answer, and {} for its end mark."""
    async with live.client.stream("POST", "/v1/chat/completions", json={**ASKED, **fields}, timeout=60.0) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield {} if line == "data: [DONE]" else json.loads(line[6:])


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", ()))


async def test_a_killed_server_s_streams_end_as_if_it_had_lived() -> None:
    # In 32 bits, so that the answered tokens, computed again as a prompt, give the same logits to the last few bits.
    words = ("demo", "--port", "0", "--max-model-len", "512", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "64M")
    words += ("--dtype", "float32", "--quantization", "none")
    with Server(*words) as one, Server(*words) as two:
        async with gateway(one.url, two.url) as live:
            replicas = list(live.proxy.fleet.replicas.values())
            for replica in replicas:
                await read_models(replica, live.proxy.timeouts)
            whole = [text_of([chunk async for chunk in pieces(live, fields)]) for fields in KINDS]
            assert len(set(whole)) == len(KINDS)
            replicas[1].connections += 10  # so that all come to the first one
            begun = [asyncio.Event() for _ in KINDS]

            async def ask(at: int) -> list[dict[str, Any]]:
                seen = []
                async for chunk in pieces(live, KINDS[at]):
                    seen.append(chunk)
                    if len(seen) == 8:
                        begun[at].set()
                return seen

            asking = [asyncio.create_task(ask(at)) for at in range(len(KINDS))]
            async with asyncio.timeout(PATIENCE_S):
                for event in begun:
                    await event.wait()
                assert len(replicas[0].movable) == len(KINDS)
                one.process.kill()
                answers = [await task for task in asking]
            replicas[1].connections -= 10
            assert [text_of(answer) for answer in answers] == whole
            for answer in answers:
                assert answer[-1] == {} and answer.count({}) == 1
                assert answer[-2]["usage"]["completion_tokens"] == ASKED["max_tokens"]
                assert not any("error" in chunk for chunk in answer)
            page = (await live.client.get("/metrics")).text
            assert f'weft:gateway_continued_total{{upstream="{replicas[1].name}"}} {float(len(KINDS))}' in page
            live.assert_idle()
