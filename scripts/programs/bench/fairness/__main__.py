"""`scripts/bench fairness`: seconds until a client's first token beside another one that keeps the server busy.

The demo is served with `--scheduling-policy fair` and a key for each client. The first client asks for short answers,
alone, then beside one request of the second with `n: 1280`, then beside its 500 prompts; each time after a random
pause, so that it comes at any moment of a step. Prints one JSON object: medians and longest times in seconds, and their
ratios to the median alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx

START_S, BUSY_S = 180.0, 2.0
SMALL, LARGE = "first-client-0001", "second-client-0002"  # keys
KEYS = f"- {{name: small, key: {SMALL}}}\n- {{name: large, key: {LARGE}}}\n"
PROMPTS = (10, 100, 400)  # tokens
WORDS = range(3, 2000)  # token ids of random prompts

Body = dict[str, Any]


class Clients:
    """Both clients of a server."""

    def __init__(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        self._client, self._draw = client, draw

    def prompt(self, tokens: int) -> list[int]:
        return self._draw.choices(WORDS, k=tokens)

    def loads(self) -> dict[str, Body]:
        """Bodies of the requests that keep the server busy, by name."""
        return {
            "n=1280": {"prompt": self.prompt(32), "n": 1280, "max_tokens": 60, "temperature": 1.0, "ignore_eos": True},
            "500 prompts": {"prompt": [self.prompt(200) for _ in range(500)], "max_tokens": 40, "ignore_eos": True},
        }

    async def first_token_s(self, tokens: int) -> float:
        """Seconds until the first event of the first client's stream."""
        body = {"prompt": self.prompt(tokens), "max_tokens": 8, "stream": True, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {SMALL}"}
        began = time.perf_counter()
        async with self._client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data:"):
                    return time.perf_counter() - began
        raise SystemExit("fairness: a stream ended without an event")

    async def first_tokens_s(self, tokens: int, times: int) -> list[float]:
        found = []
        for _ in range(times):
            await asyncio.sleep(self._draw.uniform(0.25, 0.75))
            found.append(await self.first_token_s(tokens))
        return found

    async def beside(self, load: Body, tokens: int, times: int) -> list[float]:
        """The same while the second client's request is being answered."""
        headers = {"Authorization": f"Bearer {LARGE}"}
        busy = asyncio.create_task(self._client.post("/v1/completions", json=load, headers=headers))
        await asyncio.sleep(BUSY_S)
        found = await self.first_tokens_s(tokens, times)
        if busy.done():
            raise SystemExit(f"fairness: the large request ended too early: {busy.result().text[:200]}")
        busy.cancel()
        with suppress(asyncio.CancelledError):
            await busy
        await asyncio.sleep(BUSY_S)  # until the server has seen that
        return found


async def measure(url: str, times: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=8)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        clients = Clients(client, random.Random(1))
        await clients.first_tokens_s(100, 3)
        report: dict[str, Any] = {}
        for tokens in PROMPTS:
            alone = await clients.first_tokens_s(tokens, times)
            rows = {"alone": alone}
            for name, load in clients.loads().items():
                rows[name] = await clients.beside(load, tokens, times)
            report[f"prompt of {tokens} tokens"] = {
                name: {
                    "median_s": round(median(found), 3),
                    "longest_s": round(max(found), 3),
                    "median_ratio": round(median(found) / median(alone), 2),
                }
                for name, found in rows.items()
            }
        return report


def wait_until_served(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if httpx.get(url + "/health/ready").status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit("fairness: the server does not answer; its log is above")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench fairness", description=__doc__)
    parser.add_argument("--model", default="demo", help="what is served (default: demo)")
    parser.add_argument("--times", type=int, default=9, help="first tokens in each state (default: 9)")
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys.yaml")
        keys.touch(mode=0o600)
        keys.write_text(KEYS)
        words = ["serve", options.model, "--port", str(port), "--scheduling-policy", "fair", "--max-model-len", "2048"]
        words += ["--api-key-file", str(keys), "--no-enable-prefix-caching"]
        server = subprocess.Popen([sys.executable, "-m", "weft", *words], stdout=sys.stderr, env=dict(os.environ))
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_served(url, server)
            print(json.dumps(asyncio.run(measure(url, options.times)), indent=1))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
