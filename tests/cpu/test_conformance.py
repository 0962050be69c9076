"""scripts/conformance against the demo's server, and against one that does all wrong."""

from __future__ import annotations

import asyncio
import json

import pytest

from scripts.conforming.__main__ import main
from tests.cpu.test_serve import Server
from tests.pure.gateways import answer_status, upstream

WORDS = ("demo", "--port", "0", "--max-model-len", "2048", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "128M")


def test_the_demo_passes_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    with Server(*WORDS) as server:
        status = main(["--base-url", server.url])
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert status == 0 and not report["failed"], printed.err
    names = [row["case"] for row in report["cases"]]
    assert len(set(names)) == len(names) and {name.partition(":")[0] for name in names} == {
        *("chat", "schema", "tools", "errors", "models", "completions", "responses", "messages", "ollama", "parser")
    }


async def test_a_server_of_other_shapes_fails(capsys: pytest.CaptureFixture[str]) -> None:
    body = b'{"data": [{"id": "m"}]}'
    async with upstream() as stub:
        stub.answer = answer_status("200 OK", "Content-Type: application/json", body=body)
        status = await asyncio.to_thread(main, ["--base-url", stub.url])
        report = json.loads(capsys.readouterr().out)
        assert status == 1 and len(report["failed"]) == len(report["cases"])
        stub.answer = answer_status("500 X")
        assert await asyncio.to_thread(main, ["--base-url", stub.url]) == 2
