"""The requests of an Infernet node, each as its code sends them, and what it reads of the answers."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from typing import Any

import httpx
import pytest

from tests.pure.commands import HERE
from tests.pure.servers import Live, weft_server
from tests.pure.worlds import FakeEngine, World, endless, in_pieces, saying
from weft.cli.flags.flags import engine_config, serve_options
from weft.cli.parser import find_command, parse_command

NAMES = ("qwen2.5:7b", "Qwen/Qwen2.5-7B-Instruct")
MESSAGES = [{"role": "user", "content": "hi"}]


async def job(live: Live, **fields: Any) -> tuple[str, str | None, str]:
    """Text, finish reason and echoed model of a job, read as the node's adapter for OpenAI's API reads it."""
    body = {"model": NAMES[0], "messages": MESSAGES, "stream": True, **fields}
    text, reason, model = "", None, ""
    async with (
        httpx.AsyncClient(base_url=live.url) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        raw = b"".join([piece async for piece in answer.aiter_bytes()])
    assert b"\r" not in raw
    for line in raw.decode().split("\n"):
        payload = line.removeprefix("data:").strip()
        if not line.startswith("data:"):
            continue
        if payload == "[DONE]":
            return text, reason, model
        chunk = json.loads(payload)
        model = chunk["model"]
        text += chunk["choices"][0]["delta"].get("content") or ""
        reason = chunk["choices"][0]["finish_reason"] or reason
    raise AssertionError("the stream has no [DONE]")


def world(engine: FakeEngine | None = None, **options: Any) -> World:
    return World(engine, served_model_name=NAMES, **options)


async def test_a_job_by_each_name() -> None:
    async with weft_server(world()) as live:
        for name in NAMES:
            assert await job(live, model=name, temperature=0.5, max_tokens=3) == ("hel", "length", name)
        assert await job(live) == ("hello", "stop", NAMES[0])
        twice = await asyncio.gather(*(job(live) for _ in range(2)))  # the node delivers long jobs again
        assert twice == [("hello", "stop", NAMES[0])] * 2


async def test_one_chunk_per_token_after_the_role() -> None:
    async with weft_server(world(FakeEngine(in_pieces("he", "l", "lo")))) as live:
        lines = (await httpx_post(live, "/v1/chat/completions", {"messages": MESSAGES, "stream": True})).text
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines.split("\n") if line.startswith("data: {")]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta["content"] for delta in deltas if delta.get("content")] == ["he", "l", "lo"]


async def httpx_post(live: Live, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=live.url) as http:
        return await http.post(path, json={"model": NAMES[0], **body})


async def test_a_job_of_the_ollama_adapter() -> None:
    options = {"temperature": 0.5, "num_predict": 3, "num_thread": 4}
    async with weft_server(world()) as live:
        answer = await httpx_post(live, "/api/chat", {"messages": MESSAGES, "stream": True, "options": options})
    rows = [json.loads(line) for line in answer.text.split("\n") if line]
    assert "".join(row["message"]["content"] for row in rows) == "hel"
    assert all({"model", "created_at", "message", "done"} <= row.keys() for row in rows)
    assert {row["model"] for row in rows} == {NAMES[0]} and rows[-1]["done"] and rows[-1]["done_reason"] == "length"


async def test_lines_of_json_are_kept_alive() -> None:
    async with weft_server(world(FakeEngine(endless_after_silence()), keepalive_interval=0.01)) as live:
        client = await live.connect()
        body = json.dumps({"model": NAMES[0], "messages": MESSAGES}).encode()
        await client.send(b"POST /api/chat HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await client.reader.readuntil(b"\r\n\r\n")
        await client.reader.readline()
        row = json.loads(await asyncio.wait_for(client.reader.readline(), 10))
    assert row["message"]["content"] == "" and row["done"] is False and row["model"] == NAMES[0]


def endless_after_silence() -> Any:
    return lambda request: ()


async def test_a_full_server_is_listed_and_says_why_it_takes_no_more() -> None:
    engine = FakeEngine(endless)
    async with weft_server(world(engine)) as live, httpx.AsyncClient(base_url=live.url) as http:
        jobs = [asyncio.create_task(job(live)) for _ in range(8)]
        while len(engine.open) < 8:
            await asyncio.sleep(0.001)
        engine.full = True
        listed = (await http.get("/v1/models")).json()["data"]
        tags = (await http.get("/api/tags")).json()["models"]
        refused = await http.post("/v1/chat/completions", json={"model": NAMES[0], "messages": MESSAGES})
        for task in jobs:
            task.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        while engine.open:  # the KV blocks of clients that have gone are free
            await asyncio.sleep(0.001)
    assert [row["id"] for row in listed] == list(NAMES)
    assert [row["name"] for row in tags][:2] == [NAMES[0], f"{NAMES[1]}:latest"]
    assert all(isinstance(row["size"], int) and row["model"] == row["name"] for row in tags)
    assert refused.status_code in (429, 503) and int(refused.headers["retry-after"]) > 0


async def test_a_model_is_listed_only_while_it_serves() -> None:
    made = world(list_served_only=True)
    for change in ({"draining": True}, {}):
        vars(made.service).update(draining=False) if not change else vars(made.service).update(change)
        rows = (await made.client.get("/v1/models")).json()["data"]
        tags = (await made.client.get("/api/tags")).json()["models"]
        assert (len(rows), len(tags)) == ((0, 0) if change else (2, 2))


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({"model": "m" * 500}, 404, "does not exist"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"messages": "x" * 900}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 900}]}, 400, "64"),
    ],
    ids=["model", "max_tokens", "messages", "length"],
)
async def test_the_first_200_characters_hold_the_cause(fields: dict[str, Any], status: int, word: str) -> None:
    answer = await world().post("/v1/chat/completions", {"model": NAMES[0], "messages": MESSAGES, **fields})
    assert answer.status_code == status and word in answer.text[:200]


async def broken_stream(path: str, **options: Any) -> tuple[bytes, BaseException | None]:
    """Bytes that a client reads of a stream that fails after some tokens, and the error of its socket."""
    engine = FakeEngine(saying("hello"))
    engine.script = lambda request: list(saying("hello")(request))[:3]
    engine.breaks = True
    async with weft_server(world(engine, **options)) as live:
        client = await live.connect()
        fields = {"messages": MESSAGES, "input": "hi", "max_tokens": 9, "stream": True}
        body = json.dumps({"model": NAMES[0], **fields}).encode()
        await client.send(
            b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
        )
        read = b""
        try:
            while piece := await asyncio.wait_for(client.reader.read(65536), 10):
                read += piece
        except ConnectionResetError as error:
            return read, error
        return read, None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/messages", "/v1/responses"])
async def test_a_stream_that_fails_is_reset_if_asked(path: str) -> None:
    read, error = await broken_stream(path, reset_on_error=True)
    assert isinstance(error, ConnectionResetError) and b"engine_dead" not in read
    read, error = await broken_stream(path)
    assert error is None and b"rank 1 failed" in read and not read.endswith(b"0\r\n\r\n")


async def test_localhost_is_both_addresses() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    async with weft_server(world()) as live, httpx.AsyncClient() as http:
        port = live.url.rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]"):
            assert (await http.get(f"http://{host}:{port}/v1/models")).status_code == 200
        with pytest.raises(OSError):
            socket.create_server(("::1", int(port)), family=socket.AF_INET6)
    socket.create_server(("::1", int(port)), family=socket.AF_INET6).close()


async def test_a_managed_endpoint_is_checked() -> None:
    async with weft_server(world()) as live, httpx.AsyncClient(base_url=f"{live.url}/v1") as http:
        assert {row["id"] for row in (await http.get("/models")).json()["data"]} == set(NAMES)
        body: dict[str, Any] = {"model": NAMES[1], "messages": MESSAGES, "max_tokens": 1}
        assert (await http.post("/chat/completions", json=body)).json()["model"] == NAMES[1]
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        text = (await http.post("/chat/completions", json=streamed)).text
    assert json.loads(text.strip().split("\n\n")[-2][6:])["usage"]["completion_tokens"] == 1


def test_the_command_with_which_a_node_starts_a_server() -> None:
    words = (
        "serve Qwen/Qwen2.5-7B-Instruct --host 0.0.0.0 --port 8123 --served-model-name qwen2.5:7b "
        "--max-model-len 16384 --gpu-memory-utilization 0.90 --enforce-eager"
    )
    arguments = parse_command(*find_command(words.split()))
    config, options = engine_config(arguments), serve_options(arguments, {})
    assert (config.model, config.max_model_len, config.enforce_eager) == ("Qwen/Qwen2.5-7B-Instruct", 16384, True)
    assert (options.host, options.port, options.served_model_name) == ("0.0.0.0", 8123, ("qwen2.5:7b",))
    assert config.tensor_parallel_size is None and config.pipeline_parallel_size is None, "the planner chooses them"


def test_the_module_of_the_book() -> None:
    words = ["-m", "weft.entrypoints.openai.api_server", "--model", "/no/such/model", "--tensor-parallel-size", "2"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, env=HERE)
    assert done.returncode == 1 and "/no/such/model" in done.stderr.splitlines()[-1]
