"""Calibration: what the engine is measured on, a few models with a few batches and lengths."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Literal

import msgspec

from weft.architectures.shape import ModelShape
from weft.core.params import SamplingParams
from weft.hardware.cpu import last_cache_bytes
from weft.hardware.gpus import GpuSpec
from weft.hardware.host import Host, probe_host
from weft.plan.quantization import precision_of
from weft.probes.memory import pss_bytes
from weft.probes.synthetic import TINY, SyntheticModel, synthetic_of_size

if TYPE_CHECKING:
    from weft.llm import LLM

LoadKind = Literal["decode", "prefill"]

STREAM_S = 0.003  # of weights in a step
CACHES = 4  # times the last level of them
# Tokens of the largest step: all prompts of a load are read in one, so that its answers begin and end together.
BATCHED_TOKENS = {"cpu": 8192, "gpu": 32_768}
# Of which the fastest counts, since what else the machine does only ever slows it: at least so many, and more until the
# two fastest agree within this share.
REPEATS, MOST_REPEATS, AGREE = 3, 6, 0.05
# Times what was expected of a measurement, beyond which it is made again before it is believed, and how often.
DOUBT, ANEW = 1.5, 2
PREFILL_OUTPUT = 2  # tokens; the first one is timed
QUANTISED = ("int4", "int8", "q4_0", "q8_0")  # what the engine makes of weights at load
UNRELIABLE_ERROR = 0.25  # a mean error from which the measurement is not to be believed


class CalibrationLoad(msgspec.Struct, frozen=True):
    """`batch` prompts of `length` tokens, and `output` tokens for each."""

    kind: LoadKind
    batch: int
    length: int
    output: int


WARM_UP = CalibrationLoad("decode", 1, 64, 24)
LOADS: dict[str, tuple[CalibrationLoad, ...]] = {
    "cpu": (
        *(
            CalibrationLoad("decode", batch, length, 24)
            for batch, length in ((1, 64), (1, 1024), (4, 64), (16, 64), (32, 64))
        ),
        CalibrationLoad("decode", 8, 768, 24),
        *(CalibrationLoad("prefill", 1, length, PREFILL_OUTPUT) for length in (64, 256, 1024, 2048)),
    ),
    "gpu": (
        *(CalibrationLoad("decode", batch, length, 64) for batch, length in ((1, 128), (1, 4096), (8, 128), (64, 128))),
        *(CalibrationLoad("decode", batch, length, 64) for batch, length in ((256, 128), (16, 2048))),
        *(CalibrationLoad("prefill", 1, length, PREFILL_OUTPUT) for length in (128, 512, 2048, 6144)),
    ),
}


class Subject(msgspec.Struct, frozen=True):
    """A model, and how its weights are held."""

    model: SyntheticModel
    quantization: str = "none"

    @property
    def name(self) -> str:
        return self.model.name if self.quantization == "none" else f"{self.model.name} {self.quantization}"


def subjects(gpu: GpuSpec) -> tuple[Subject, ...]:
    """A model that is hardly there, for what the host takes, and two that differ in what a layer streams: many thin
    layers, and few wide ones, these also quantised. Of both a step is long beside a launch, and the weights are far
    larger than caches."""
    smallest = CACHES * last_cache_bytes() if gpu.kind == "cpu" else 0
    nbytes = min(max(STREAM_S * gpu.bandwidth_Bps, smallest), gpu.memory_bytes / 16)
    thin = synthetic_of_size("thin", nbytes, layers=32, vocab=16_384)
    wide = synthetic_of_size("wide", 2 * nbytes, layers=8, vocab=65_536)
    return (Subject(TINY), Subject(thin), Subject(wide), *(Subject(wide, kind) for kind in QUANTISED))


def loads_of(gpu: GpuSpec, subject: Subject | None) -> tuple[CalibrationLoad, ...]:
    """Those of a subject, None for the user's own model. Of the one that is hardly there only short steps tell
    something; what is quantised differs in its products alone."""
    every = LOADS[gpu.kind]
    short = min(load.length for load in every if load.kind == "decode")
    if subject is None or (subject.model != TINY and subject.quantization == "none"):
        return every
    steps = [load for load in every if load.kind == "decode" and load.length == short]
    if subject.model == TINY:
        return tuple(steps)
    prompts = [load for load in every if load.kind == "prefill"]
    return steps[0], steps[-1], prompts[len(prompts) // 2]


class CalibrationPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: seconds of a step (decode) or to the first token (prefill)."""

    model: str
    shape: ModelShape
    precision: str
    load: CalibrationLoad
    seconds: float


def measure_loads(
    llm: LLM, name: str, asked: Sequence[CalibrationLoad], tell: Callable[[CalibrationPoint], object]
) -> list[CalibrationPoint]:
    """The loads that the engine has room for, each as `tell` hears of it. They take turns: what disturbs the machine
    for a second or two meets one measurement of each, and not all of one."""
    plan = llm.plan
    seconds_of(llm, WARM_UP, -1)
    times: dict[CalibrationLoad, list[float]] = {load: [] for load in asked if has_room(llm, load)}
    for turn in range(MOST_REPEATS):
        for number, (load, found) in enumerate(times.items()):
            if turn < REPEATS or not has_settled(found):
                found.append(seconds_of(llm, load, number * MOST_REPEATS + turn))
    points = [
        CalibrationPoint(
            model=name,
            shape=plan.shape,
            precision=precision_of(plan.shape, plan.quantization, plan.schemes, plan.dtype),
            load=load,
            seconds=min(found),
        )
        for load, found in times.items()
    ]
    for point in points:
        tell(point)
    return points


def has_room(llm: LLM, load: CalibrationLoad) -> bool:
    """Whether the engine can run a load: all prompts have to be read in one step, so that all answers begin and end
    together."""
    plan, longest = llm.plan, load.length + load.output
    if longest > plan.max_model_len or load.batch * (longest + plan.block_size) > llm.num_blocks * plan.block_size:
        return False
    return load.batch == 1 or (
        load.batch <= plan.max_num_seqs and load.batch * load.length <= plan.max_num_batched_tokens
    )


def has_settled(times: Sequence[float]) -> bool:
    """Whether the two fastest agree."""
    first, second = sorted(times)[:2]
    return second <= first * (1 + AGREE)


def doubtful_points(points: Sequence[CalibrationPoint], expected: Sequence[float]) -> list[CalibrationPoint]:
    """Those that took far longer than the planner expects of them, compared with the others of their kind: the law of
    it may be off for the machine, but not for one of them alone."""
    ratios = [point.seconds / seconds for point, seconds in zip(points, expected, strict=True)]
    usual = {
        kind: median(ratio for point, ratio in zip(points, ratios, strict=True) if point.load.kind == kind)
        for kind in {point.load.kind for point in points}
    }
    return [point for point, ratio in zip(points, ratios, strict=True) if ratio > DOUBT * usual[point.load.kind]]


def faster_points(points: Sequence[CalibrationPoint], again: Sequence[CalibrationPoint]) -> list[CalibrationPoint]:
    """The points, those that were measured again as fast as they were the faster time."""
    seconds = {(point.model, point.load): point.seconds for point in again}
    return [
        msgspec.structs.replace(it, seconds=min(it.seconds, seconds.get((it.model, it.load), it.seconds)))
        for it in points
    ]


def seconds_of(llm: LLM, load: CalibrationLoad, seed: int) -> float:
    """One run."""
    random, vocab = Random(f"weft {seed}"), llm.plan.shape.vocab
    prompts = [{"prompt_token_ids": [random.randrange(vocab) for _ in range(load.length)]} for _ in range(load.batch)]
    params = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True)
    answers = llm.generate(prompts, params, use_tqdm=False)
    times = [answer.metrics for answer in answers]
    first = max(it.first_token_s or 0.0 for it in times)
    if load.kind == "prefill":
        return first - min(it.arrival_s for it in times)
    return (max(it.finished_s or 0.0 for it in times) - first) / (load.output - 1)


def runtime_bytes(llm: LLM, before: Host) -> int:
    """What the engine takes beside weights, KV cache and a step's own. On a CPU it is this process; on a GPU what the
    driver has less of than `before`."""
    plan = llm.plan
    weights = sum(it.weight_bytes for it in llm.capacities)
    if plan.devices[0] == "cpu":
        return max(0, pss_bytes(os.getpid()) - weights)  # the cache takes no memory before it is written
    index = int(plan.devices[0].removeprefix("cuda:"))
    taken = before.gpus[index].free_bytes - probe_host().gpus[index].free_bytes
    steps = sum(it.activation_bytes for it in llm.capacities)
    return max(0, taken - weights - steps - llm.num_blocks * plan.block_bytes(0))
