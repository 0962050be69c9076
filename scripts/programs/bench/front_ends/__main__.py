"""`scripts/bench front-ends`: requests and streamed tokens per second of Weft's HTTP server and of vLLM's.

Each runs over an engine that answers at once, in a process of its own on the first core; the clients are on the second
one. Both are asked in turns, and the medians are compared; figures per second of the server's CPU time hold on a busy
machine too, and count the processes that a server has. Prints one JSON object. `--vllm PYTHON FOLDER` is a Python
that has vLLM, and a folder with the demo's tokenizer and a config.json (`scripts/bench peers` makes both); `--checkout
FOLDER` is another checkout of Weft, such as an earlier commit. Without either Weft is measured alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import uvloop

from scripts.programs.bench.front_ends import load

HERE = Path(__file__).parent
START_S = 180.0
SHORT, LONG = 16, 128  # tokens of an answer for requests per second, and for streamed tokens per second


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def pin(number: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and of those that it has started."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


async def measure(port: int, process: psutil.Process, seconds: float) -> dict[str, float]:
    before = cpu_s(process)
    whole, whole_s = await load.saturate(port, seconds, stream=False, tokens=SHORT)
    between = cpu_s(process)
    streams, streams_s = await load.saturate(port, seconds, stream=True, tokens=LONG)
    return {
        "requests_per_s": len(whole.seconds) / whole_s,
        "requests_per_cpu_s": len(whole.seconds) / (between - before),
        "streamed_tokens_per_s": streams.tokens / streams_s,
        "streamed_tokens_per_cpu_s": streams.tokens / (cpu_s(process) - between),
        "events_per_token": streams.events / streams.tokens,
    }


async def measure_ends(ends: dict[str, tuple[int, psutil.Process]], rounds: int, seconds: float) -> dict[str, Any]:
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in ends}
    for _ in range(rounds):
        for name, (port, process) in ends.items():
            taken[name].append(await measure(port, process, seconds))
    rows = {
        name: {key: round(median(row[key] for row in found), 3) for key in found[0]} for name, found in taken.items()
    }
    # The same rate for all: half of what the slowest one can do.
    rate = min(row["requests_per_s"] for row in rows.values()) / 2
    for _ in range(rounds):
        for name, (port, _) in ends.items():
            figures = await load.paced(port, seconds, rate, tokens=SHORT)
            taken[name].append({"p50": figures.percentile(0.5), "p99": figures.percentile(0.99)})
    for name, row in rows.items():
        paced = taken[name][rounds:]
        row["half_load_requests_per_s"] = round(rate, 1)
        row["p50_ms"] = round(1000 * median(found["p50"] for found in paced), 2)
        row["p99_ms"] = round(1000 * median(found["p99"] for found in paced), 2)
    for other in rows.keys() - {"weft"}:
        for key in [key for key in rows[other] if key.endswith("_s") and "half" not in key]:
            ratios = [
                ours[key] / theirs[key] for ours, theirs in zip(taken["weft"], taken[other], strict=True) if key in ours
            ]
            rows["weft"][f"{key}_ratio_to_{other}"] = round(median(ratios), 2)
        rows["weft"][f"p99_ms_ratio_to_{other}"] = round(rows["weft"]["p99_ms"] / rows[other]["p99_ms"], 2)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench front-ends", description=__doc__.split("\n")[0])
    parser.add_argument("--vllm", nargs=2, metavar=("PYTHON", "FOLDER"))
    parser.add_argument("--checkout", metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    given = parser.parse_args()
    ports = {"weft": free_port()}
    commands = {"weft": [sys.executable, str(HERE / "weft_end.py"), str(ports["weft"])]}
    if given.vllm:
        python, folder = given.vllm
        ports["vllm"] = free_port()
        commands["vllm"] = [python, str(HERE / "vllm_end.py"), str(ports["vllm"]), folder]
    folders = {}
    if given.checkout:
        folders["checkout"] = Path(given.checkout).absolute()
        ports["checkout"] = free_port()
        script = next(folders["checkout"].glob("scripts/**/front_ends/weft_end.py"), None)
        if script is None:
            parser.error(
                f"--checkout {given.checkout}: no front_ends/weft_end.py below scripts; name a checkout of Weft"
            )
        commands["checkout"] = [sys.executable, str(script), str(ports["checkout"])]
    running = []
    try:
        for name, command in commands.items():
            folder = folders.get(name, HERE.parents[3])
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (folder / "src", folder)))}
            running.append(
                subprocess.Popen(command, cwd=folder, env=environment, stdout=sys.stderr, preexec_fn=lambda: pin(0))
            )
        pin(1)
        for process, port in zip(running, ports.values(), strict=True):
            asyncio.run(load.wait_until_served(port, START_S, lambda process=process: process.poll() is None))  # type: ignore[misc]
        ends = {
            name: (port, psutil.Process(process.pid))
            for (name, port), process in zip(ports.items(), running, strict=True)
        }
        print(json.dumps(uvloop.run(measure_ends(ends, given.rounds, given.seconds)), indent=1))
    finally:
        for process in running:
            process.kill()


if __name__ == "__main__":
    main()
