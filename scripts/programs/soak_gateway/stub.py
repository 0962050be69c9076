"""A stand-in for another vendor's server: answers that follow from the prompt, and a bill that survives kill -9.

`python -m ...soak_gateway.stub NAME PORT BILL SECONDS`: the file BILL gets a letter p for each token of a prompt, and a
letter c for each token of an answer, before it is sent. SECONDS pass between two tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import zlib
from typing import Any

MODEL = "theirs"


def answer_of(name: str, prompt: str, count: int) -> list[str]:
    """The words of an answer of `count` tokens, the name of the server first."""
    number = zlib.crc32(f"{name}\0{prompt}".encode())
    return [f"{name}:", *(f" {(number >> at % 24) % 97}" for at in range(1, count))][:count]


def prompt_of(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


class Stub:
    def __init__(self, name: str, bill: str, pause_s: float) -> None:
        self._name, self._pause_s = name, pause_s
        self._bill = os.open(bill, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(x[15:]) for x in head.lower().split("\r\n") if x.startswith("content-length:")), 0)
                body = await reader.readexactly(length)
                await self._answer(head.split()[1], json.loads(body) if body else {}, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            _send(writer, {"data": [{"id": MODEL, "owned_by": "stub"}]})
        elif path == "/v1/chat/completions":
            await self._complete(body, writer)
        else:
            _send(writer, {})
        await writer.drain()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompt = prompt_of(body)
        words = answer_of(self._name, prompt, body["max_tokens"])
        usage = {"prompt_tokens": len(prompt.split()) + 4, "completion_tokens": len(words)}
        os.write(self._bill, b"p" * usage["prompt_tokens"])
        streams = body.get("stream") is True
        if streams:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for word in words:
            os.write(self._bill, b"c")
            await asyncio.sleep(self._pause_s)
            if streams:
                _event(writer, {"model": MODEL, "choices": [{"index": 0, "delta": {"content": word}}]})
                await writer.drain()
        choice = {"index": 0, "finish_reason": "length"}
        if not streams:
            message = {"role": "assistant", "content": "".join(words)}
            _send(writer, {"model": MODEL, "choices": [{**choice, "message": message}], "usage": usage})
            return
        _event(writer, {"model": MODEL, "choices": [{**choice, "delta": {}}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            _event(writer, {"model": MODEL, "choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _send(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def _event(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(content).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def main(name: str, port: str, bill: str, pause_s: str) -> None:
    server = await asyncio.start_server(Stub(name, bill, float(pause_s)).serve, "127.0.0.1", int(port))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
