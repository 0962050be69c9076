"""Weft and vLLM on one card: both loaded, the same token ids, by turns. vLLM's packages lie in a folder apart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from scripts.programs.bench.peers.engine import ENGINES, Engine, Round
from scripts.programs.gpu_check.shapes import Shape, shape_of, write_config
from scripts.programs.gpu_check.work import Figure, Options
from weft.study.bench.workload import nano_vllm

SHARE = 0.42  # of the card's memory for each, since both are loaded
ROUNDS = 3
STAND_IN = """
import sys, time
sys.path.insert(0, {engines!r})
from protocol import Answer, lengths, serve
def generate(prompts, new):
    answers = [Answer() for _ in prompts]
    for answer, count in zip(answers, lengths(new, len(prompts))):
        for token in range(count):
            answer.add([token], time.perf_counter())
    return answers
serve(generate, 1)
"""


@dataclass(frozen=True)
class Load:
    """Prompts and lengths of the answers of one round, and the figure that counts."""

    told: str
    figure: str
    unit: str
    prompts: list[list[int]]
    new: int | list[int]


def loads(shape: Shape, number: int, *, rehearse: bool) -> list[Load]:
    """Requests of round `number`, with other tokens in each round."""
    random = Random(f"peers {number}")

    def ids(length: int) -> list[int]:
        return [random.randrange(shape.vocab) for _ in range(length)]

    if rehearse:
        return [Load("256 requests", "output", "tok/s", [ids(3), ids(5)], [3, 4])]
    asks = nano_vllm(shape.vocab, number + 1)
    return [
        Load("256 requests", "output", "tok/s", [a.prompt for a in asks], [a.output_len for a in asks]),
        Load("one request", "decode", "tok/s", [ids(128)], 256),
        Load("one prompt of 2,048", "prompt", "tok/s", [ids(2048)], 1),
        Load("32 at once, time to first token", "first", "ms", [ids(512) for _ in range(32)], 2),
    ]


def peers(options: Options) -> Iterator[Figure]:
    """Figures of both engines for each load, and their ratio, above 1 if Weft is better."""
    model, rehearse = options["model"], options["rehearse"]
    shape = shape_of(model)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        path = write_config(Path(folder) / model, shape)
        engines = {}
        for name, command in commands(path, options).items():
            engines[name] = Engine(name, command)
            stack.callback(engines[name].close)
        rounds = measured(engines, lambda number: loads(shape, number, rehearse=rehearse), 1 if rehearse else ROUNDS)
    for load in loads(shape, 0, rehearse=rehearse):
        yield from figures(model, load, {name: rounds[name, load.told] for name in engines})


def commands(path: str, options: Options) -> dict[str, list[str]]:
    """By engine, its process: an interpreter, a script of scripts/programs/bench/peers/engines and its arguments."""
    if options["rehearse"]:
        source = STAND_IN.format(engines=str(ENGINES))
        return {name: [sys.executable, "-S", "-c", source] for name in ("weft", "vllm")}
    memory = f"gpu_memory_utilization={SHARE}"
    common = [path, "dtype=bfloat16", "load_format=dummy", "max_model_len=4096", memory]
    theirs = f"PYTHONPATH={options['vllm']}"
    return {
        "weft": [sys.executable, str(ENGINES / "weft_engine.py"), *common, "tensor_parallel_size=1"],
        "vllm": ["env", theirs, sys.executable, str(ENGINES / "vllm_cuda_engine.py"), *common],
    }


def measured(
    engines: dict[str, Engine], asked: Callable[[int], Sequence[Load]], rounds: int
) -> dict[tuple[str, str], list[Round]]:
    """Rounds by engine and load. The first round warms up; whoever was first in one round is last in the next."""
    done: dict[tuple[str, str], list[Round]] = {}
    for number in range(-1, rounds):
        for load in asked(number):
            order = list(engines) if number % 2 else list(engines)[::-1]
            for name in order:
                finished = engines[name].answer(load.prompts, load.new)
                if number >= 0:
                    done.setdefault((name, load.told), []).append(finished)
    return done


def figures(model: str, load: Load, rounds: dict[str, list[Round]]) -> Iterator[Figure]:
    values = {name: median(each.figure(load.figure) for each in done) for name, done in rounds.items()}
    for name, value in values.items():
        yield Figure(f"{model}: {load.told}, {name}", round(value, 2), load.unit)
    ratio = values["weft"] / values["vllm"] if load.unit != "ms" else values["vllm"] / values["weft"]
    yield Figure(f"{model}: {load.told}, Weft to vLLM", round(ratio, 3), "times")
