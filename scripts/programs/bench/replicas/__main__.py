"""`scripts/bench replicas`: two replicas on two cores beside one engine with both, and a rank that is killed.

First the throughput of two replicas and of one rank with two threads, which take turns. Then `weft serve` with two
replicas gets requests, half of them sampled, half of them streamed; a rank is killed in the middle. Every answer is
compared with that of one engine which has nothing else to do. Prints one JSON object. With `--deterministic`, which is
the default here, an answer depends neither on other requests nor on threads; `--no-deterministic` shows the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from scripts.programs.bench.net.program import Program

ENGINE = Path(__file__).parents[1] / "net" / "engine.py"
START_S, BACK_S, LOOK_S = 180.0, 120.0, 0.05
LAYOUTS: dict[str, dict[str, int]] = {"two threads": {}, "two replicas": {"data_parallel_size": 2}}
Body = dict[str, Any]


def compare_speed(model: str, requests: int, pairs: int) -> dict[str, Any]:
    """Tokens per second of both layouts in turns, and the ratio of every pair."""
    options = {"max_model_len": 512, "kv_cache_memory_bytes": 100_000_000}
    work = {"requests": requests, "input": 32, "output": 48}
    speeds: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        programs = {}
        for name, layout in LAYOUTS.items():
            words = [sys.executable, str(ENGINE), model, json.dumps(options | layout)]
            programs[name] = Program(words, Path(folder, f"{name}.log"))
            stack.callback(programs[name].close)
            programs[name].read_line()
        for _ in range(pairs + 1):
            for name, program in programs.items():
                speeds[name].append(requests * work["output"] / program.ask(work)["seconds"])
    rounds = list(zip(*(found[1:] for found in speeds.values()), strict=True))
    return {
        **{f"{name}, tokens/s": round(median(found[1:])) for name, found in speeds.items()},
        "ratios": [round(two / one, 2) for one, two in rounds],
    }


@contextmanager
def served(model: str, *flags: str) -> Iterator[tuple[str, psutil.Process]]:
    """A server's URL and process, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "weft", "serve", model, "--port", str(port), "--max-model-len", "512", *flags]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not _answers(f"{url}/health/ready"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"bench replicas: the server does not start: {' '.join(words)}")
            time.sleep(LOOK_S)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url).status_code == 200
    return False


def bodies(requests: int) -> list[Body]:
    """Prompts and answers of many lengths, every second one sampled with a seed of its own."""
    return [
        {
            "prompt": [3 + (7 * number + 3 * at) % 2000 for at in range(20 + number % 30)],
            "max_tokens": 40 + number % 25,
            "temperature": number % 2,
            "seed": number,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": number % 4 < 2,
        }
        for number in range(requests)
    ]


async def answer(client: httpx.AsyncClient, body: Body) -> list[int]:
    """Token ids of an answer, streamed or not."""
    if not body["stream"]:
        whole = (await client.post("/v1/completions", json=body)).raise_for_status().json()
        return list(whole["choices"][0]["token_ids"])
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as events:
        events.raise_for_status()
        async for line in events.aiter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
    return tokens


async def answers_alone(url: str, work: list[Body]) -> list[list[int]]:
    """Answers one after the other."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        return [await answer(client, body) for body in work]


async def answers_beside_a_death(url: str, server: psutil.Process, work: list[Body]) -> tuple[list[list[int]], float]:
    """Answers of all at once, of which some lose their rank; the seconds until both replicas run again."""
    limits = httpx.Limits(max_connections=len(work))
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        tasks = [asyncio.create_task(answer(client, body)) for body in work]
        half = sum(body["max_tokens"] for body in work) / 2
        while await metric(client, "vllm:generation_tokens_total") < half:
            await asyncio.sleep(LOOK_S)
        rank = next(one for one in server.children(recursive=True) if "weft.worker.process" in one.cmdline())
        rank.kill()
        killed_s = time.monotonic()
        while await metric(client, "weft:replica_up") > 1:
            await asyncio.sleep(LOOK_S)
        while await metric(client, "weft:replica_up") < 2:
            if time.monotonic() - killed_s > BACK_S:
                raise SystemExit(f"bench replicas: the replica is not back after {BACK_S:g} s")
            await asyncio.sleep(LOOK_S)
        back_s = time.monotonic() - killed_s
        return [await task for task in tasks], back_s


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """The sum of a metric over all replicas."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def compare_answers(model: str, requests: int, flags: list[str]) -> dict[str, Any]:
    """Answers during a kill beside those of one engine without company."""
    work = bodies(requests)
    with served(model, *flags) as (url, _):
        alone = asyncio.run(answers_alone(url, work))
    with served(model, "--data-parallel-size", "2", *flags) as (url, server):
        found, back_s = asyncio.run(answers_beside_a_death(url, server, work))
    same = sum(one == other for one, other in zip(found, alone, strict=True))
    whole = sum(len(tokens) == body["max_tokens"] for tokens, body in zip(found, work, strict=True))
    return {"requests": requests, "whole": whole, "as alone": same, "two replicas again after s": round(back_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench replicas", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="what is served (default: demo)")
    parser.add_argument("--pairs", type=int, default=6, help="of both layouts (default: 6; 0 leaves the speed out)")
    parser.add_argument("--requests", type=int, default=32, help="at the same time, for the speed (default: 32)")
    parser.add_argument("--answers", type=int, default=60, help="while a rank is killed (default: 60)")
    parser.add_argument("--kills", type=int, default=1, help="runs with a killed rank (default: 1)")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    report: dict[str, Any] = {"task": "replicas", "deterministic": options.deterministic}
    if options.pairs:
        report["speed"] = compare_speed(options.model, options.requests, options.pairs)
    flags = ["--deterministic"] * options.deterministic
    report["kills"] = [compare_answers(options.model, options.answers, flags) for _ in range(options.kills)]
    report["load"] = os.getloadavg()[0]
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
