"""Calibration: the engine is measured on a few models, batches and lengths, and the planner's constants are fitted.

The fit is least squares in the logarithm, on what `planner.cost` itself predicts: no figure belongs to a point.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from math import exp
from statistics import fmean
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from weft import __version__
from weft.bench.memory import pss_bytes
from weft.bench.synthetic import TINY, Synthetic, of_size
from weft.bench.workload import random_requests
from weft.core.params import SamplingParams
from weft.facts.calibration import Calibration, Measured
from weft.facts.cluster import Cluster, Node
from weft.facts.cpu import last_cache_bytes
from weft.facts.gpus import GpuSpec
from weft.facts.host import Host, probe
from weft.facts.shape import ModelShape
from weft.planner.cost import Replica
from weft.planner.deployment import Workload, deploy
from weft.planner.profiles import calibrated, profile

if TYPE_CHECKING:
    from weft.llm import LLM

Kind = Literal["decode", "prefill"]

STREAM_S = 0.003  # of weights in a step
CACHES = 4  # times the last level of them
# Tokens of the largest step: all prompts of a load are read in one, so that its answers begin and end together.
BATCHED_TOKENS = {"cpu": 8192, "gpu": 32_768}
# Of which the fastest counts, since what else the machine does only ever slows it: at least so many, and more until the
# two fastest agree within this share.
REPEATS, MOST_REPEATS, AGREE = 3, 6, 0.05
PREFILL_OUTPUT = 2  # tokens; the first one is timed
# The constants, and how far off the planner's own figures may be (natural logarithm) before a fit is held back: wide
# where the points tell them anyway. `overlap` is no logarithm, but the share itself.
WIDTHS = {
    "weights_Bps": 1.0,
    "cache_Bps": 1.0,
    "matmul_flops": 1.0,
    "attention_flops": 1.0,
    "layer_us": 1.5,
    "step_us": 1.5,
    "sequence_us": 1.5,
    "overlap": 0.5,
}
RIDGE = 0.02  # of an error in the logarithm, what a constant's whole width weighs
FLOOR = 0.05  # errors above this count by their size, below it by their square
ROUNDS = 20
NUDGE = 1e-3
FAR = 0.25  # a mean error from which the measurement is not to be believed


class Load(msgspec.Struct, frozen=True):
    """`batch` prompts of `length` tokens, and `output` tokens for each."""

    kind: Kind
    batch: int
    length: int
    output: int


WARM_UP = Load("decode", 1, 64, 24)
LOADS: dict[str, tuple[Load, ...]] = {
    "cpu": (
        *(Load("decode", batch, length, 24) for batch, length in ((1, 64), (1, 1024), (4, 64), (16, 64), (32, 64))),
        Load("decode", 8, 768, 24),
        *(Load("prefill", 1, length, PREFILL_OUTPUT) for length in (64, 256, 1024, 2048)),
    ),
    "gpu": (
        *(Load("decode", batch, length, 64) for batch, length in ((1, 128), (1, 4096), (8, 128), (64, 128))),
        *(Load("decode", batch, length, 64) for batch, length in ((256, 128), (16, 2048))),
        *(Load("prefill", 1, length, PREFILL_OUTPUT) for length in (128, 512, 2048, 6144)),
    ),
}


def loads(gpu: GpuSpec, model: Synthetic | None) -> tuple[Load, ...]:
    """Those of a model, None for the user's own. Of the one that is hardly there only short steps tell something."""
    every = LOADS[gpu.kind]
    shortest = min(load.length for load in every if load.kind == "decode")
    return tuple(it for it in every if it.kind == "decode" and it.length == shortest) if model == TINY else every


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: seconds of a step (decode) or to the first token (prefill)."""

    model: str
    shape: ModelShape
    precision: str
    load: Load
    seconds: float


class Fit(msgspec.Struct, frozen=True):
    """The constants by name, and each point's predicted seconds."""

    values: dict[str, float]
    predicted: tuple[float, ...]


def measure(llm: LLM, name: str, asked: Sequence[Load], tell: Callable[[Point], object]) -> list[Point]:
    """The loads that the engine has room for, each as `tell` hears of it."""
    plan, points = llm.plan, []
    room = llm.num_blocks * plan.block_size
    seconds_of(llm, WARM_UP, -1)
    for number, load in enumerate(asked):
        longest = load.length + load.output
        if longest > plan.max_model_len or load.batch * (longest + plan.block_size) > room:
            continue
        # All prompts have to be read in one step, so that all answers begin and end together.
        if load.batch > 1 and (
            load.batch > plan.max_num_seqs or load.batch * load.length > plan.max_num_batched_tokens
        ):
            continue
        times: list[float] = []
        while len(times) < REPEATS or (times[1] > times[0] * (1 + AGREE) and len(times) < MOST_REPEATS):
            times = sorted([*times, seconds_of(llm, load, number * MOST_REPEATS + len(times))])
        seconds = times[0]
        point = Point(model=name, shape=plan.shape, precision=precision_of(plan), load=load, seconds=seconds)
        points.append(point)
        tell(point)
    return points


def seconds_of(llm: LLM, load: Load, seed: int) -> float:
    """One run."""
    asks = random_requests(
        seed,
        vocab=llm.plan.shape.vocab,
        count=load.batch,
        input_len=(load.length, load.length),
        output_len=load.output,
    )
    params = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": ask.prompt} for ask in asks], params, use_tqdm=False)
    times = [answer.metrics for answer in answers]
    first = max(it.first_token_s or 0.0 for it in times)
    if load.kind == "prefill":
        return first - min(it.arrival_s for it in times)
    return (max(it.finished_s or 0.0 for it in times) - first) / (load.output - 1)


def models(gpu: GpuSpec) -> tuple[Synthetic, ...]:
    """One that is hardly there, for what the host takes, and two that differ in what a layer streams: many thin layers,
    and few wide ones. Of both a step is long beside a launch, and the weights are far larger than caches."""
    smallest = CACHES * last_cache_bytes() if gpu.kind == "cpu" else 0
    nbytes = min(max(STREAM_S * gpu.bandwidth_Bps, smallest), gpu.memory_bytes / 16)
    return (
        TINY,
        of_size("thin", nbytes, layers=32, vocab=16_384),
        of_size("wide", 2 * nbytes, layers=8, vocab=65_536),
    )


def runtime_bytes(llm: LLM, before: Host) -> int:
    """What the engine takes beside weights, KV cache and a step's own. On a CPU it is this process; on a GPU what the
    driver has less of than `before`."""
    plan = llm.plan
    weights = sum(it.weight_bytes for it in llm.capacities)
    if plan.devices[0] == "cpu":
        return max(0, pss_bytes(os.getpid()) - weights)  # the cache takes no memory before it is written
    index = int(plan.devices[0].removeprefix("cuda:"))
    taken = before.gpus[index].free_bytes - probe().gpus[index].free_bytes
    steps = sum(it.activation_bytes for it in llm.capacities)
    return max(0, taken - weights - steps - llm.num_blocks * plan.block_bytes(0))


class Planned:
    """What the planner expects of points on one device, given the constants."""

    def __init__(self, gpu: GpuSpec, points: Sequence[Point]) -> None:
        self.gpu, self.points = gpu, points
        self._own = profile("weft", on_cpu=gpu.kind == "cpu")
        self._layouts = {
            (point.model, point.precision): deploy(
                point.shape,
                tensor_weights=[1.0],
                stage_layers=[point.shape.layers],
                gpus=[0],
                precision=point.precision,
                kv_dtype="bf16",
            )
            for point in points
        }

    def start(self) -> dict[str, float]:
        """The constants as the planner has them without a measurement."""
        own, gpu = self._own, self._gpu
        kernels = own.kernels(gpu)
        flops = gpu.flops.get("bf16") or gpu.flops["fp16"]
        return {
            "weights_Bps": gpu.bandwidth_Bps * kernels.weights,
            "cache_Bps": gpu.bandwidth_Bps * kernels.decode_attention * own.attention_scale.value,
            "matmul_flops": flops * kernels.matmul * own.matmul_scale.value,
            "attention_flops": flops * kernels.prefill_attention,
            "layer_us": own.layer_us.value,
            "step_us": own.step_us.value,
            "sequence_us": own.sequence_us.value,
            "overlap": own.overlap.value,
        }

    def seconds(self, values: Mapping[str, float]) -> list[float]:
        """Of each point."""
        candidate = calibration(self._gpu.name, self._precision, values, runtime_MiB=0.0)
        gpu = msgspec.structs.replace(self._gpu, calibration=candidate)
        cluster, found = Cluster((Node((gpu,), "memory" if gpu.kind == "cpu" else "pcie"),), 1.0), []
        profile = calibrated(self._own, [gpu])
        shapes = {point.model: point.shape for point in self._points}
        replicas = {
            name: Replica(shapes[name], layout, cluster, profile, 0, {}) for name, layout in self._layouts.items()
        }
        for point in self._points:
            load, replica = point.load, replicas[point.model]
            work = Workload(input_len=load.length, output_len=load.output)
            if load.kind == "prefill":
                found.append(replica.prompt_s(work))
            else:
                found.append(replica.round_s(load.batch, work).total)
        return found


def fit(planned: Planned, points: Sequence[Point]) -> Fit:
    """The constants under which the planner comes nearest to the points."""
    start, names = planned.start(), list(WIDTHS)
    width = np.array([WIDTHS[name] for name in names])
    measured = np.log([point.seconds for point in points])

    def at(steps: np.ndarray) -> dict[str, float]:
        return {
            name: min(1.0, max(0.0, start[name] + step)) if name == "overlap" else start[name] * exp(step)
            for name, step in zip(names, steps.tolist(), strict=True)
        }

    def errors(steps: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.log(planned.seconds(at(steps))) - measured
        return found

    moved = np.zeros(len(names))
    lowest, highest = -start["overlap"], 1 - start["overlap"]
    for _ in range(ROUNDS):
        here = errors(moved)
        slopes = np.zeros((len(points), len(names)))
        for number, name in enumerate(names):
            nudged = moved.copy()
            # Inwards where it stands at its end.
            nudge = -NUDGE if name == "overlap" and moved[number] + NUDGE > highest else NUDGE
            nudged[number] += nudge
            slopes[:, number] = (errors(nudged) - here) / nudge
        weight = FLOOR / np.maximum(np.abs(here), FLOOR)
        normal = (slopes.T * weight) @ slopes + np.diag((RIDGE / width) ** 2)
        pull = (slopes.T * weight) @ here + (RIDGE / width) ** 2 * moved
        before, moved = moved, moved - np.clip(np.linalg.solve(normal, pull), -0.5, 0.5)
        last = names.index("overlap")
        moved[last] = min(highest, max(lowest, moved[last]))
        if np.abs(moved - before).max() < NUDGE:
            break
    values = at(moved)
    return Fit(values, tuple(planned.seconds(values)))


def errors(points: Sequence[Point], found: Fit) -> list[float]:
    """How far the fit is from each point, as a share of it."""
    return [predicted / point.seconds - 1 for point, predicted in zip(points, found.predicted, strict=True)]


def calibration(
    device: str,
    precision: str,
    values: Mapping[str, float],
    *,
    runtime_MiB: float,
    date: str = "",
    how: str = "",
    measured: Sequence[float] = (),
) -> Calibration:
    """The constants as they are kept; `measured` are the errors of the points that they come from."""
    sizes = [abs(error) for error in measured] or [0.0]
    return Calibration(
        device=device,
        precision=precision,
        date=date,
        weft=__version__,
        **{name: Measured(values[name], how) for name in WIDTHS},
        runtime_MiB=Measured(
            runtime_MiB,
            "resident memory of the engine's process, or the driver's figure, less weights, KV cache and a step's own",
        ),
        points=len(measured),
        error=fmean(sizes),
        worst=max(sizes),
    )
