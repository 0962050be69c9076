"""scripts/conformance: a model without sense and the demo pass, a server that always answers the same does not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from scripts.programs.conformance.__main__ import main
from tests.cpu.test_agents import write_long
from tests.cpu.test_serve import Server
from tests.pure.gateways import answer_status, upstream

# What a cache has changes the last bits of the rest, and so at times a greedy answer.
WORDS = ("--port", "0", "--max-model-len", "2048", "--max-num-seqs", "8", "--no-enable-prefix-caching")
GROUPS = ["chat", "schema", "tools", "errors", "models", "completions", "responses", "messages", "ollama", "parser"]
GROUPS.append("history")


def check_conformance(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with Server(*words, *WORDS) as server:
        status = main(["--base-url", server.url])
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert status == 0 and not report["failed"], printed.err
    names = [row["case"] for row in report["cases"]]
    assert len(set(names)) == len(names) and {name.partition(":")[0] for name in names} == set(GROUPS)


def test_a_tiny_model_passes_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_long(tmp_path / "tiny", 2048)
    said = ("--load-format", "dummy", "--dtype", "float32", "--kv-cache-memory-bytes", "16M")
    check_conformance((model, *said, "--served-model-name", "tiny"), capsys)


@pytest.mark.long
def test_the_demo_passes_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    check_conformance(("demo", "--kv-cache-memory-bytes", "128M"), capsys)


async def test_a_server_of_other_shapes_fails(capsys: pytest.CaptureFixture[str]) -> None:
    async with upstream() as stub:
        stub.answer = answer_status("200 OK", "Content-Type: application/json", body=b'{"data": [{"id": "m"}]}')
        status = await asyncio.to_thread(main, ["--base-url", stub.url])
        report = json.loads(capsys.readouterr().out)
        assert status == 1 and len(report["failed"]) == len(report["cases"])
        stub.answer = answer_status("500 X")
        assert await asyncio.to_thread(main, ["--base-url", stub.url]) == 2
