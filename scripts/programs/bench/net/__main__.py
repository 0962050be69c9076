"""`scripts/bench net`: pipeline and tensor parallel over a slow link between two namespaces, beside shared memory.

Two ranks with a core each, in four engines that take turns: pp2 and tp2, each on one machine and over the link. Prints
a Markdown table with the planner's predictions, and one JSON object on the last line. With `--sums` it measures sums of
vectors alone, through gloo's all-reduce and through Weft's. Needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from scripts.programs.bench.net.faults import faults_table, measure_faults
from scripts.programs.bench.net.links import ADDRESSES, SlowLink, remove_leftovers
from scripts.programs.bench.net.program import Program
from scripts.programs.bench.net.sums import measure_sums, sums_table
from weft.machine.hardware.host import probe_host
from weft.probes.stored_speeds import cpu_speed_of

HERE = Path(__file__).parent
CORES = (0, 1)
PORT = 29731
LAYOUTS = {"pp2": "pipeline_parallel_size", "tp2": "tensor_parallel_size"}
MEASURED = re.compile(r"network 1-0: ([\d.]+) Gb/s, (\d+) us")


class Bench:
    """The engines, and what they have in common."""

    def __init__(self, model: str, link: SlowLink, folder: Path, stack: ExitStack) -> None:
        self._model, self._link, self._folder, self._stack = model, link, folder, stack
        self._key = folder / "cluster.key"
        self._key.touch(mode=0o600)
        self._key.write_text(secrets.token_hex(32))
        self._options = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 100_000_000}

    def start(self, layout: str, port: int) -> tuple[Program, Program]:
        """The engines of a layout: on one machine, and over the link."""
        options = {**self._options, LAYOUTS[layout]: 2}
        nodes = {"nnodes": 2, "master_addr": ADDRESSES[0], "master_port": port, "cluster_key_file": str(self._key)}
        # The other node first: it ends with the head, which is closed before.
        flags = f"-m weft serve {self._model} --dtype float32 --headless --nnodes 2 --node-rank 1 --master-addr "
        flags += f"{ADDRESSES[0]} --master-port {port} --cluster-key-file {self._key}"
        self._program(self._inside(1), flags.split(), f"{layout}-other")
        head = self._program(self._inside(0), self._engine({**options, **nodes}), f"{layout}-head")
        here = self._program([], self._engine(options), f"{layout}-here")
        for program in (here, head):
            program.read_line()
        return here, head

    def _inside(self, side: int) -> list[str]:
        """Words that run a command on a node, which has one core."""
        return [*self._link.inside(side), "taskset", "-c", str(CORES[side])]

    def _engine(self, options: dict[str, Any]) -> list[str]:
        return [str(HERE / "engine.py"), self._model, json.dumps(options)]

    def _program(self, prefix: list[str], words: list[str], name: str) -> Program:
        program = Program([*prefix, sys.executable, *words], self._folder / f"{name}.log")
        self._stack.callback(program.close)
        return program


def measure(here: Program, head: Program, works: Sequence[dict[str, int]], runs: int) -> list[dict[str, Any]]:
    """Run every work on both engines in turns; return the figures of each."""
    found = MEASURED.search(head.log)
    assert found, head.log
    network = [float(found[1]) * 1e9 / 8, int(found[2]) * 1e-6 / 2]
    rows = []
    for work in works:
        seconds: dict[str, list[float]] = {"memory": [], "network": []}
        answers = []
        for _ in range(runs + 1):
            for name, program in (("memory", here), ("network", head)):
                answer = program.ask(work)
                seconds[name].append(answer["seconds"])
                answers.append(answer["tokens"])
        assert all(tokens == answers[0] for tokens in answers), "the engines give different tokens"
        predicted = here.ask({**work, "network": network})["predicted"]
        tokens = work["requests"] * work["output"]
        speeds = {name: tokens / median(times[1:]) for name, times in seconds.items()}
        rows.append({**work, "tok_s": speeds, "predicted_tok_s": predicted, "network": network, "seconds": seconds})
    return rows


def results_table(results: dict[str, list[dict[str, Any]]]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| layout | requests | shared memory, tokens/s | over the link, tokens/s | ratio | predicted ratio |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for layout, rows in results.items():
        for row in rows:
            speeds, predicted = row["tok_s"], row["predicted_tok_s"]
            ratio = speeds["network"] / speeds["memory"]
            planned = f"{predicted['network'] / predicted['memory']:.2f}" if isinstance(predicted, dict) else "none"
            lines.append(
                f"| {layout} | {row['requests']} x {row['input']} + {row['output']} | {speeds['memory']:,.0f} | "
                f"{speeds['network']:,.0f} | {ratio:.2f} | {planned} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench net", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rate", default="1gbit", help="of the link, in tc's words (default: 1gbit)")
    parser.add_argument("--latency-ms", type=float, default=0.5, help="time that each packet is held (default: 0.5)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--sums", type=int, metavar="RANKS", help="measure sums alone, of this many ranks on two nodes")
    parser.add_argument("--faults", action="store_true", help="measure how long faults between two hosts take to end")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        print("scripts/bench net: error: network namespaces need root", file=sys.stderr)
        return 1
    if arguments.sums:
        return print_sums(arguments)
    if arguments.faults:
        return print_faults()
    # Before the engines compute: they read the figures, and would measure a busy machine.
    speed = cpu_speed_of(probe_host(), refresh=True)
    works = [{"requests": 16, "input": 32, "output": 48}, {"requests": 1, "input": 32, "output": 48}]
    results: dict[str, list[dict[str, Any]]] = {}
    remove_leftovers()
    with tempfile.TemporaryDirectory() as folder, SlowLink(arguments.rate, arguments.latency_ms / 1000) as link:
        for number, layout in enumerate(arguments.layouts):
            with ExitStack() as stack:
                here, head = Bench(arguments.model, link, Path(folder), stack).start(layout, PORT + number)
                results[layout] = measure(here, head, works, arguments.runs)
    load = os.getloadavg()
    bytes_per_s, seconds = next(iter(results.values()))[0]["network"]
    print(f"{arguments.model}, two ranks with a core each. The link by Weft's own measurement: ", end="")
    print(f"{8 * bytes_per_s / 1e9:.2f} Gb/s, {2e6 * seconds:.0f} us there and back. Load at the end: {load[0]:.1f}.")
    print("Other processes computed while the planner's figures were measured.\n" if speed.busy else "")
    print(results_table(results))
    settings = {"task": "net", "rate": arguments.rate, "latency_ms": arguments.latency_ms, "busy": speed.busy}
    print(json.dumps({**settings, "layouts": results}))
    return 0


def print_sums(arguments: argparse.Namespace) -> int:
    """Measure sums of vectors over the link, and print a table and the figures."""
    remove_leftovers()
    with SlowLink(arguments.rate, arguments.latency_ms / 1000) as link:
        figures = measure_sums(link, arguments.sums, PORT)
    print(sums_table(figures))
    settings = {"task": "sums", "rate": arguments.rate, "latency_ms": arguments.latency_ms, "ranks": arguments.sums}
    print(json.dumps({**settings, **figures}))
    return 0


def print_faults() -> int:
    """Measure faults between two hosts, and print a table and the figures."""
    rows = measure_faults()
    print(faults_table(rows))
    print(json.dumps({"task": "faults", "rows": rows, "load": os.getloadavg()[0]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
