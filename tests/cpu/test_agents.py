"""Coding agents: the prefix cache has what an earlier turn had, beside other users."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cpu import agents, tiny
from tests.cpu.test_serve import Server

USERS = 4
MIN_HIT_SHARE = 0.98
PATHS = {"/v1/responses": agents.responses_log, "/v1/messages": agents.messages_log}


def write_long(folder: Path, length: int) -> str:
    """The tiny model, with a longer context."""
    path = tiny.write(folder)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": length}))
    return str(path)


@contextmanager
def other_users(server: Server, model: str, most: int) -> Iterator[None]:
    """Users who send one text after the other meanwhile; each ends with `most` tokens."""
    ended = threading.Event()

    def use(number: int) -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            prompt = agents.text(f"user {number} {turn}", 20)
            asked = {"model": model, "prompt": prompt, "max_tokens": most, "ignore_eos": True}
            httpx.post(f"{server.url}/v1/completions", json=asked, timeout=120.0, verify=False).raise_for_status()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(USERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def replay(server: Server, model: str, path: str, turns: int, size: int, tokens: int) -> tuple[int, int]:
    """Tokens of all turns that an earlier one had, and those of them that the cache had."""
    reusable = hit = 0
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    # Its own key, so that the others' prompts are not its earlier ones.
    with httpx.Client(base_url=server.url, timeout=120.0, verify=False, headers={"x-api-key": path}) as client:
        for turn, body in enumerate(PATHS[path]("a", turns, size)):
            asked: dict[str, Any] = {"model": model, "stream": bool(turn % 2), limit: tokens, "temperature": 0, **body}
            answer = client.post(path, json=asked)
            assert answer.status_code == 200, answer.text
            told = dict(pair.split("=") for pair in answer.headers["x-weft-prefix"].split("; "))
            assert turn == 0 or told["where"] == "assistant", told
            assert turn > 0 or told["where"] == "new", told
            reusable += int(told["at"])
            hit += min(int(told["hit"]), int(told["at"]))
    return reusable, hit


def serve_tiny(folder: Path, cache: str) -> Server:
    """A server of the tiny model, which takes a token for each letter. The cache has 2,048 tokens per MiB."""
    words = (write_long(folder / "tiny", 16384), "--load-format", "dummy", "--dtype", "float32", "--port", "0")
    words += ("--kv-cache-memory-bytes", cache, "--max-num-seqs", "8", "--served-model-name", "tiny")
    return Server(*words, "--enable-prefix-debug")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve_tiny(tmp_path_factory.mktemp("agents"), "7M") as server:
        yield server


@pytest.mark.parametrize("path", PATHS)
def test_turns_of_an_agent_hit_the_cache(path: str, server: Server) -> None:
    """The short form of the one below."""
    with other_users(server, "tiny", 700):
        reusable, hit = replay(server, "tiny", path, turns=12, size=150, tokens=8)
        assert reusable > 10_000 and hit >= MIN_HIT_SHARE * reusable, hit / reusable


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS)
def test_fifty_turns_of_an_agent_hit_the_cache_beside_preemptions(path: str, tmp_path: Path) -> None:
    """The last turns and the others' answers, together, sometimes need more than the cache of 16,384 tokens has."""
    with serve_tiny(tmp_path, "8M") as server, other_users(server, "tiny", 1500):
        reusable, hit = replay(server, "tiny", path, turns=50, size=150, tokens=120)
        assert reusable > 300_000 and hit >= MIN_HIT_SHARE * reusable, hit / reusable
        assert server.metric("vllm:num_preemptions_total") > 0
