"""A real `weft serve` that dies by kill -9 in the middle of streams of every API: another one ends the same answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.cpu.test_serve import PATIENCE_S, Server
from tests.pure.gateways import LiveGateway, gateway
from weft.fleet.upstreams.checks import read_models

COUNT = [{"role": "user", "content": "Count from one to twenty in words."}]
TOKENS = 24
CHAT: dict[str, Any] = {
    "messages": COUNT,
    "stream_options": {"include_usage": True},
    "max_tokens": TOKENS,
    "ignore_eos": True,
}
# So long that a call is still being written when the server dies.
WORDS = {"type": "object", "properties": {"words": {"type": "string", "minLength": 100, "maxLength": 130}}}
SCHEMA = {**WORDS, "required": ["words"], "additionalProperties": False}
# Greedy, and drawn by a seed with penalties, which another replica must know of; calls that a grammar enforces.
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, "temperature": 0}),
    ("/v1/chat/completions", {**CHAT, "temperature": 0.8, "seed": 11, "presence_penalty": 0.5}),
    (
        "/v1/messages",
        {
            "messages": COUNT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "tools": [{"name": "say", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    ),
    (
        "/v1/responses",
        {
            "input": COUNT,
            "max_output_tokens": TOKENS,
            "temperature": 0,
            "tools": [{"type": "function", "name": "say", "parameters": SCHEMA}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
    ("/api/chat", {"messages": COUNT, "options": {"temperature": 0, "num_predict": TOKENS}, "format": SCHEMA}),
]
BEGUN = 7  # parts of a stream that has begun: more than the first tokens' events


def objects(text: str) -> list[Any]:
    """The data of a stream's events, or its lines."""
    rows = [row.removeprefix("data: ") for row in text.split("\n") if row.startswith(("data: {", "{"))]
    return [json.loads(row) for row in rows]


def said(path: str, text: str) -> tuple[str, list[str]]:
    """Text of a stream, and the kinds of its events."""
    found = objects(text)
    assert not any("error" in row and row["error"] for row in found), text
    if path == "/v1/chat/completions":
        assert text.endswith("data: [DONE]\n\n") and found[-1]["usage"]["completion_tokens"] == CHAT["max_tokens"]
        return "".join(row["delta"].get("content") or "" for part in found for row in part["choices"]), []
    if path == "/api/chat":
        assert [part["done"] for part in found] == [False] * (len(found) - 1) + [True]
        return "".join(part["message"]["content"] for part in found), []
    deltas = [part.get("delta", "") for part in found]
    texts = [d if isinstance(d, str) else d.get("text") or d.get("partial_json") or "" for d in deltas]
    return "".join(texts), [part["type"] for part in found]


async def ask(live: LiveGateway, at: int, begun: asyncio.Event) -> str:
    path, fields = KINDS[at]
    text = ""
    body = {"model": "demo", "stream": True, **fields}
    async with live.client.stream("POST", path, json=body, timeout=60.0) as answer:
        async for piece in answer.aiter_text():
            text += piece
            if text.count("data: {") + text.count('"created_at"') > BEGUN:
                begun.set()
    return text


async def test_a_killed_server_s_streams_end_as_if_it_had_lived() -> None:
    # In 32 bits, so that the answered tokens, computed again as a prompt, give the same logits to the last few bits.
    words = ("demo", "--port", "0", "--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "64M")
    words += ("--dtype", "float32", "--quantization", "none")
    with Server(*words) as one, Server(*words) as two:
        async with gateway(one.url, two.url) as live:
            replicas = list(live.proxy.fleet.replicas.values())
            for replica in replicas:
                await read_models(replica, live.proxy.timeouts)
            whole = [await ask(live, at, asyncio.Event()) for at in range(len(KINDS))]
            replicas[1].connections += 10  # so that all come to the first one
            begun = [asyncio.Event() for _ in KINDS]
            asking = [asyncio.create_task(ask(live, at, begun[at])) for at in range(len(KINDS))]
            async with asyncio.timeout(PATIENCE_S):
                for event in begun:
                    await event.wait()
                assert len(replicas[0].movable) == len(KINDS)
                one.process.kill()
                answers = [await task for task in asking]
            replicas[1].connections -= 10
            for (path, _), answer, alone in zip(KINDS, answers, whole, strict=True):
                assert said(path, answer) == said(path, alone)
                if path == "/v1/responses":
                    numbers = [part["sequence_number"] for part in objects(answer)]
                    (call,) = objects(answer)[-1]["response"]["output"]
                    assert numbers == list(range(len(numbers))) and '"words"' in call["arguments"]
            page = (await live.client.get("/metrics")).text
            assert f'weft:gateway_continued_total{{upstream="{replicas[1].name}"}} {float(len(KINDS))}' in page
            live.assert_idle()
