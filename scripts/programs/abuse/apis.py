"""Attacks on the APIs beside completions: tools, schemas and expressions, streams that nobody reads, large batches."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from scripts.programs.abuse.bodies import CHAT, HI, MEGA, body, many
from scripts.programs.abuse.case import Attack, Served
from scripts.programs.abuse.target import Answer, Target

MESSAGES, RESPONSES, OLLAMA = "/v1/messages", "/v1/responses", "/api/chat"
STORAGE = Path(tempfile.gettempdir()) / f"weft-abuse-{os.getpid()}"
BATCH_BYTES = 100 * MEGA
BATCH_MEMORY = 64 * 2**20  # that the API's process may take for it, for which it needs one line at a time
UNREAD_S = 60.0  # after which a server has let go of clients that read nothing
ASKING = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({**HI, **fields}).encode()


def tool(parameters: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def wide(count: int) -> dict[str, Any]:
    """A schema with many fields, each of three kinds."""
    kinds = {"anyOf": [{"type": "string", "maxLength": 999}, {"type": "integer"}, {"enum": ["a", "b"]}]}
    return {"type": "object", "properties": {f"field_{n}": kinds for n in range(count)}}


def deep(depth: int) -> dict[str, Any]:
    """A schema of objects within objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(levels: int) -> dict[str, Any]:
    """A schema whose size doubles with each level, if references are copied."""
    rules: dict[str, Any] = {"s0": {"type": "string"}}
    for level in range(levels):
        both = {name: {"$ref": f"#/$defs/s{level}"} for name in "ab"}
        rules[f"s{level + 1}"] = {"type": "object", "properties": both, "required": ["a", "b"]}
    return {"$defs": rules, "$ref": f"#/$defs/s{levels}"}


def formatted(schema: Any) -> bytes:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def calling(*parameters: Any) -> bytes:
    tools = [tool(given, f"f{number}") for number, given in enumerate(parameters)]
    return chat(tools=tools, tool_choice="required")


def expression(pattern: str) -> bytes:
    return chat(structured_outputs={"regex": pattern})


def nested_input(depth: int) -> bytes:
    """/v1/messages with a call whose input is nested."""
    nested = b'{"a":' * depth + b"1" + b"}" * depth
    use = b'{"type":"tool_use","id":"a","name":"f","input":' + nested + b"}"
    return b'{"model":"demo","max_tokens":2,"messages":[{"role":"assistant","content":[' + use + b"]}]}"


async def unread(path: str, fields: dict[str, Any], target: Target) -> None:
    """Streams that nobody reads, from clients that stay; afterwards the server serves others as before."""
    content = json.dumps({"model": "demo", **fields}).encode()
    before = target.server.memory_bytes()
    held = [target.connection() for _ in range(target.size.clients // 10)]
    clients = [await one.__aenter__() for one in held]
    for client in clients:
        client.stop_reading()
        await client.pour(target.head(path, len(content)) + content, 5)
    await asyncio.sleep(target.size.flood_s)
    now = target.server.memory_bytes()
    if before is not None and now is not None:
        most = 2**20 * len(clients) + 32 * 2**20
        target.check(now - before <= most, f"{len(clients)} unread streams take {now - before:,} bytes")
    for client in clients:
        client.hang_up()
    target.record("beside them", await target.post(CHAT, HI), ("200",))


async def stalled_readers(target: Target) -> None:
    """Readers of lines who read a little and stop, one after the other."""
    content = json.dumps({"model": "demo", "messages": ASKING, "options": {"num_predict": 400}}).encode()
    for _ in range(target.size.clients // 10):
        async with target.connection() as client:
            await client.pour(target.head(OLLAMA, len(content)) + content, 5)
            await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), UNREAD_S)
            client.stop_reading()
            await asyncio.sleep(0.05)
    began, running = time.monotonic(), 2
    while running > 1 and time.monotonic() < began + UNREAD_S:  # one is the neighbour's
        running = json.loads((await target.get("/load")).body)["server_load"]
        await asyncio.sleep(0.2)
    target.check(running <= 1, f"{running} requests run after their clients have left")


def upload_of(lines: bytes) -> tuple[bytes, bytes]:
    """Head fields and body of a form with a file."""
    head = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head += b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    return b"Content-Type: multipart/form-data; boundary=x\r\n", head + lines + b"\r\n--x--\r\n"


async def send(target: Target, path: str, fields: bytes, content: bytes) -> Answer:
    head = target.head(path, len(content))
    async with target.connection() as client:
        await client.pour(head[:-2] + fields + b"\r\n" + content, 100)
        return await client.answer()


async def large_batch(make_line: bytes, status: str, target: Target) -> None:
    """A file of 100 MB, a batch of it that is cancelled or fails, and their end."""
    atexit.register(shutil.rmtree, STORAGE, ignore_errors=True)
    size = BATCH_BYTES * target.size.endless_bytes // (64 * 2**20)
    fields, content = await asyncio.to_thread(lambda: upload_of(make_line * (size // len(make_line))))
    before = target.server.memory_bytes()
    answer = target.record(f"{len(content):,} bytes", await send(target, "/v1/files", fields, content), ("200",))
    if answer.label != "200":
        return
    file = json.loads(answer.body)["id"]
    asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    batch = json.loads(target.record("the batch", await target.post("/v1/batches", asked), ("200",)).body)["id"]
    found: dict[str, Any] = {"status": "validating"}
    while found["status"] == "validating":
        await asyncio.sleep(0.2)
        found = json.loads((await target.get(f"/v1/batches/{batch}")).body)
    target.check(found["status"] == status, f"the batch is {found['status']}, not {status}")
    now = target.server.memory_bytes()
    if before is not None and now is not None:
        target.check(now - before <= BATCH_MEMORY, f"a batch of {size:,} bytes takes {now - before:,} bytes")
    if found["status"] == "in_progress":
        target.record("its end", await target.post(f"/v1/batches/{batch}/cancel", b""), ("200",))
        while found["status"] in ("in_progress", "cancelling"):
            await asyncio.sleep(0.2)
            found = json.loads((await target.get(f"/v1/batches/{batch}")).body)


def nested_schema(depth: int) -> bytes:
    """A schema that is nested too deeply for Python to write."""
    inner = b'{"type":"array","items":' * depth + b"{}" + b"}" * depth
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": 0}}).replace(
        b'"schema": 0', b'"schema": ' + inner
    )


START = b'{"model":"demo","max_tokens":2,"messages":['
PARTS = b'{"input":[{"role":"user","content":['
PART = b'{"type":"input_text","text":""}'
ANTHROPIC_400 = ("400", "400 not JSON")  # whose errors have no code
TURN = b'{"role":"user","content":"a"}'
ITEMS = {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}
LINE = b'{"custom_id":"%b","method":"POST","url":"/v1/chat/completions","body":{"messages":[],"max_tokens":1}}\n'
STORED = Served(words=("--storage-directory", str(STORAGE)))
LONG_CHAT = {"messages": ASKING, "stream": True}
ATTACKS = (
    body("tool-of-2MB", "schemas", CHAT, lambda: calling(wide(15_000)), "400"),
    body("tool-of-1000-fields", "schemas", CHAT, lambda: calling(wide(1000)), "400", "200"),
    body("tools-5000", "schemas", CHAT, lambda: calling(*[{"type": "object"}] * 5000), "400"),
    body("tools-100-wide", "schemas", CHAT, lambda: calling(*[wide(100)] * 100), "400", "200"),
    body("tool-deep-300", "schemas", CHAT, lambda: calling(deep(300)), "400", "200"),
    body("schema-deep-30000", "schemas", CHAT, lambda: nested_schema(30_000), "400"),
    body("schema-doubling-40", "schemas", CHAT, lambda: formatted(doubling(40)), "400", "200"),
    body("schema-enum-100000", "schemas", CHAT, lambda: formatted({"enum": [f"v{n}" for n in range(100_000)]}), "400"),
    body("schema-items-10^9", "schemas", CHAT, lambda: formatted(ITEMS), "400", "200"),
    body("regex-nested", "schemas", CHAT, lambda: expression("((a+)+)+b"), "400", "200"),
    body("regex-repeats", "schemas", CHAT, lambda: expression("((a{1,1000}){1,1000}){1,1000}"), "400", "200"),
    body("regex-lookback", "schemas", CHAT, lambda: expression("(.*a.{40}){9}"), "400", "200"),
    body("regex-1MB", "schemas", CHAT, lambda: expression("(ab|cd)" * 150_000), "400"),
    body("choices-50000", "schemas", CHAT, lambda: chat(structured_outputs={"choice": ["ab" * 20] * 50_000}), "400"),
    body("messages-of-200000", "apis", MESSAGES, lambda: many(START, TURN, 200_000, b"]}"), *ANTHROPIC_400),
    body("messages-nested", "apis", MESSAGES, lambda: nested_input(100_000), *ANTHROPIC_400),
    body("responses-of-200000", "apis", RESPONSES, lambda: many(b'{"input":[', TURN, 200_000, b"]}"), "400"),
    body("responses-parts", "apis", RESPONSES, lambda: many(PARTS, PART, 200_000, b"]}]}"), "400"),
    Attack("ollama-unread", "apis", partial(unread, OLLAMA, {"messages": ASKING, "options": {"num_predict": 4000}})),
    Attack("messages-unread", "apis", partial(unread, MESSAGES, {**LONG_CHAT, "max_tokens": 4000})),
    Attack("responses-unread", "apis", partial(unread, RESPONSES, {"input": "hi", "stream": True})),
    Attack("ollama-stalled", "apis", stalled_readers),
    Attack("batch-100MB-broken", "batches", partial(large_batch, b"x" * 999 + b"\n", "failed"), STORED),
    Attack("batch-100MB-lines", "batches", partial(large_batch, b"\n" * 9999 + LINE % b"a", "failed"), STORED),
)
