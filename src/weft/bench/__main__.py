"""`python -m weft.bench`: Weft and Transformers side by side on this machine, on the demo's weights in bfloat16.

The runs take turns, so that what else the machine does meets both alike; every figure is a median. Prints a
Markdown table, and one JSON object on the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from statistics import median

import msgspec

from weft.bench.measure import Run, run
from weft.bench.peer import Peer, Timing, decode_tok_s
from weft.bench.startup import seconds_to_ready
from weft.bench.workload import Ask, random_requests
from weft.facts import demo, host
from weft.llm import LLM

QUIET_S = 0.3  # between two runs: threads that spin for work have gone to sleep by then
INPUT, OUTPUT, REQUESTS, INPUT_RANGE = 128, 128, 32, (32, 256)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. `ratio` is above 1 where Weft is better; None where there is nothing to compare."""

    name: str
    unit: str
    weft: float
    transformers: float | None
    ratio: float | None


def compare(name: str, unit: str, ours: float, theirs: float, *, higher_is_better: bool) -> Figure:
    ratio = ours / theirs if higher_is_better else theirs / ours
    return Figure(name=name, unit=unit, weft=round(ours, 2), transformers=round(theirs, 2), ratio=round(ratio, 3))


def side_by_side(llm: LLM, peer: Peer, works: Sequence[list[Ask]]) -> tuple[list[Run], list[Timing]]:
    """Each work on both, in turns, whoever was second being the first next time."""
    ours: list[Run] = []
    theirs: list[Timing] = []
    for number, asks in enumerate(works):
        for first in (True, False) if number % 2 else (False, True):
            time.sleep(QUIET_S)
            if first:
                ours.append(run(llm, asks))
            else:
                theirs.append(peer.run(asks))
        print(f"  {ours[-1].seconds:.2f} s, Transformers {theirs[-1].seconds:.2f} s", file=sys.stderr)
    return ours, theirs


def works(seed: int, vocab: int, *, runs: int, count: int, input_len: tuple[int, int]) -> list[list[Ask]]:
    """One workload per run, each of other tokens: no run finds another's KV blocks."""
    return [
        random_requests(seed + n, vocab=vocab, count=count, input_len=input_len, output_len=OUTPUT) for n in range(runs)
    ]


def measure(runs: int, starts: int) -> list[Figure]:
    checkpoint, machine = demo.fetch(), host.probe()
    device = "cuda" if machine.gpus else "cpu"
    figures = []
    with Peer(checkpoint, device) as peer, LLM(demo.NAME, dtype="bfloat16", skip_tokenizer_init=True) as llm:
        print(f"Transformers runs with {peer.threads} threads, Weft on {llm.plan.threads(0)}", file=sys.stderr)
        vocab = llm.plan.shape.vocab
        side_by_side(llm, peer, works(0, vocab, runs=2, count=4, input_len=(INPUT, INPUT)))  # warm-up
        ours, theirs = side_by_side(llm, peer, works(100, vocab, runs=runs, count=1, input_len=(INPUT, INPUT)))
        shape = f"batch 1, {INPUT}+{OUTPUT}"
        first = [1000 * median(r.ttft_s for r in ours), 1000 * median(t.ttft_s for t in theirs)]
        rate = [median(r.decode_tok_s for r in ours), decode_tok_s(theirs, OUTPUT)]
        figures.append(compare(f"{shape}: time to first token", "ms", *first, higher_is_better=False))
        figures.append(compare(f"{shape}: decode", "tokens/s", *rate, higher_is_better=True))
        ours, theirs = side_by_side(llm, peer, works(200, vocab, runs=runs, count=REQUESTS, input_len=INPUT_RANGE))
        made = REQUESTS * OUTPUT
        rate = [median(r.output_tok_s for r in ours), median(made / t.seconds for t in theirs)]
        shape = f"{REQUESTS} requests of {INPUT_RANGE[0]}-{INPUT_RANGE[1]}+{OUTPUT}"
        figures.append(compare(f"{shape}: output", "tokens/s", *rate, higher_is_better=True))
    ready = median(seconds_to_ready() for _ in range(starts))
    figures.append(
        Figure(name="weft serve demo, start to ready", unit="s", weft=round(ready, 2), transformers=None, ratio=None)
    )
    return figures


def markdown(figures: Sequence[Figure]) -> str:
    lines = ["| | unit | Weft | Transformers | ratio |", "|---|---|---:|---:|---:|"]
    for f in figures:
        theirs = ("", "") if f.transformers is None else (f"{f.transformers:,.2f}", f"{f.ratio:.2f}")
        lines.append(f"| {f.name} | {f.unit} | {f.weft:,.2f} | {theirs[0]} | {theirs[1]} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m weft.bench", description="Weft beside Transformers.")
    parser.add_argument("--runs", type=int, default=5, help="measured runs of each workload (default: 5)")
    parser.add_argument("--starts", type=int, default=3, help="starts of weft serve demo (default: 3)")
    said = parser.parse_args()
    machine = host.probe()
    figures = measure(said.runs, said.starts)
    device = machine.gpus[0].name if machine.gpus else f"{len(machine.cores)} CPU cores"
    print(f"SmolLM2-135M-Instruct in bfloat16 on {device}; medians of {said.runs} runs.\n")
    print(markdown(figures) + "\n")
    print(json.dumps({"device": device, "runs": said.runs, "figures": msgspec.to_builtins(figures)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
