"""Measurements for `weft bench calibrate`: a few models on the engine, with a few batch sizes and lengths."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Literal

import msgspec

from weft.checkpoint.architectures.shape import ModelShape
from weft.engine.core.params import SamplingParams
from weft.machine.hardware.cpu import last_cache_bytes
from weft.machine.hardware.gpus import GpuSpec
from weft.machine.hardware.host import Host, probe_host
from weft.plan.quantization import precision_of
from weft.study.measure.memory import pss_bytes
from weft.study.measure.synthetic import TINY, SyntheticModel, synthetic_of_size

if TYPE_CHECKING:
    from weft.engine.llm import LLM

LoadKind = Literal["decode", "prefill"]

STREAM_S = 0.003  # time in which a step streams its weights
CACHES = 4  # the weights are at least this multiple of the last-level cache
# Tokens of the largest step: one step takes all prompts of a load, so that its requests begin and end together.
BATCHED_TOKENS = {"cpu": 8192, "gpu": 32_768}
# Runs of each load: REPEATS, and up to MAX_REPEATS until the two fastest agree within this share. The fastest counts,
# since other work on the machine only ever slows a run down.
REPEATS, MAX_REPEATS, AGREE = 3, 6, 0.05
# A measurement that takes DOUBT times the expected time is repeated before it is believed, up to ANEW times.
DOUBT, ANEW = 1.5, 2
PREFILL_OUTPUT = 2  # tokens; the first one is timed
QUANTISED = ("int4", "int8", "q4_0", "q8_0")  # quantised while loading
UNRELIABLE_ERROR = 0.25  # mean error of a fit from which a calibration is not to be trusted


class CalibrationLoad(msgspec.Struct, frozen=True):
    """`batch` prompts of `length` tokens each, and `output` tokens generated for each."""

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
    """A synthetic model and the quantisation of its weights."""

    model: SyntheticModel
    quantization: str = "none"

    @property
    def name(self) -> str:
        """The model's name, and its quantisation if there is one."""
        return self.model.name if self.quantization == "none" else f"{self.model.name} {self.quantization}"


def subjects(gpu: GpuSpec) -> tuple[Subject, ...]:
    """Models to measure on a device: a tiny one for the time of the host, and two that differ in the bytes of a layer.

    "thin" has many narrow layers, "wide" few wide ones; "wide" is also measured quantised. A step of both is long
    compared with a kernel launch, and their weights are far larger than caches.
    """
    smallest = CACHES * last_cache_bytes() if gpu.kind == "cpu" else 0
    nbytes = min(max(STREAM_S * gpu.bandwidth_Bps, smallest), gpu.memory_bytes / 16)
    thin = synthetic_of_size("thin", nbytes, layers=32, vocab=16_384)
    wide = synthetic_of_size("wide", 2 * nbytes, layers=8, vocab=65_536)
    return (Subject(TINY), Subject(thin), Subject(wide), *(Subject(wide, kind) for kind in QUANTISED))


def _loads_of_kind(loads: Sequence[CalibrationLoad], kind: str) -> list[CalibrationLoad]:
    return [load for load in loads if load.kind == kind]


def loads_of(gpu: GpuSpec, subject: Subject | None) -> tuple[CalibrationLoad, ...]:
    """Loads for a subject, or for the user's own model (None).

    The tiny model gets short decode steps only. A quantised model gets three loads, as it differs in products alone.
    """
    all_loads = LOADS[gpu.kind]
    if subject is None or (subject.model != TINY and subject.quantization == "none"):
        return all_loads
    decodes = _loads_of_kind(all_loads, "decode")
    shortest = min(load.length for load in decodes)
    steps = [load for load in decodes if load.length == shortest]
    if subject.model == TINY:
        return tuple(steps)
    prompts = _loads_of_kind(all_loads, "prefill")
    return steps[0], steps[-1], prompts[len(prompts) // 2]


class CalibrationPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: seconds of a step (decode), or seconds to the first token (prefill)."""

    model: str
    shape: ModelShape
    precision: str
    load: CalibrationLoad
    seconds: float


def measure_loads(
    llm: LLM,
    name: str,
    loads: Sequence[CalibrationLoad],
    report: Callable[[CalibrationPoint], object],
    advance: Callable[[], object] = lambda: None,
) -> list[CalibrationPoint]:
    """Measure the loads that the engine has room for; `report` gets each result, `advance` is called after every run of
    MAX_REPEATS for each of `loads`.

    The loads take turns, so that a disturbance of a second or two affects a run of each and not all runs of one load.
    """
    plan = llm.plan
    seconds_of(llm, WARM_UP, -1)
    times: dict[CalibrationLoad, list[float]] = {load: [] for load in loads if has_room(llm, load)}
    for turn in range(MAX_REPEATS):
        for number, (load, runs) in enumerate(times.items()):
            if turn < REPEATS or not has_settled(runs):
                runs.append(seconds_of(llm, load, number * MAX_REPEATS + turn))
            advance()
    points = [
        CalibrationPoint(
            model=name,
            shape=plan.shape,
            precision=precision_of(plan.shape, plan.quantization, plan.schemes, plan.dtype),
            load=load,
            seconds=min(runs),
        )
        for load, runs in times.items()
    ]
    for point in points:
        report(point)
    return points


def has_room(llm: LLM, load: CalibrationLoad) -> bool:
    """Return True if the engine can run a load with all prompts in one step, so that all requests begin and end
    together."""
    plan, longest = llm.plan, load.length + load.output
    room = plan.kv_layout.requests(llm.num_blocks, longest + plan.block_size)
    if longest > plan.max_model_len or load.batch > room:
        return False
    return load.batch == 1 or (
        load.batch <= plan.max_num_seqs and load.batch * load.length <= plan.max_num_batched_tokens
    )


def has_settled(times: Sequence[float]) -> bool:
    """Return True if the two fastest times agree within AGREE."""
    first, second = sorted(times)[:2]
    return second <= first * (1 + AGREE)


def doubtful_points(points: Sequence[CalibrationPoint], expected: Sequence[float]) -> list[CalibrationPoint]:
    """Points that took far longer than expected, compared with the others of their kind.

    The planner's formula may be off for this machine, but then for all points of a kind and not for one alone.
    """
    ratios = [point.seconds / seconds for point, seconds in zip(points, expected, strict=True)]
    usual = {
        kind: median(ratio for point, ratio in zip(points, ratios, strict=True) if point.load.kind == kind)
        for kind in {point.load.kind for point in points}
    }
    return [point for point, ratio in zip(points, ratios, strict=True) if ratio > DOUBT * usual[point.load.kind]]


def faster_points(points: Sequence[CalibrationPoint], again: Sequence[CalibrationPoint]) -> list[CalibrationPoint]:
    """The points, each with the faster of its two times if it was measured again."""
    seconds = {(point.model, point.load): point.seconds for point in again}
    return [
        msgspec.structs.replace(
            point, seconds=min(point.seconds, seconds.get((point.model, point.load), point.seconds))
        )
        for point in points
    ]


def seconds_of(llm: LLM, load: CalibrationLoad, seed: int) -> float:
    """Seconds of one run of a load: of a decode step, or to the first token; its prompts are random."""
    prompts = _random_prompts(load, llm.plan.shape.vocab, seed)
    params = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True)
    answers = llm.generate(prompts, params, use_tqdm=False)
    times = [answer.metrics for answer in answers]
    first_token_s = max(request.first_token_s or 0.0 for request in times)
    if load.kind == "prefill":
        return first_token_s - min(request.arrival_s for request in times)
    return (max(request.finished_s or 0.0 for request in times) - first_token_s) / (load.output - 1)


def _random_prompts(load: CalibrationLoad, vocab: int, seed: int) -> list[dict[str, list[int]]]:
    random = Random(f"weft {seed}")
    return [{"prompt_token_ids": random.choices(range(vocab), k=load.length)} for _ in range(load.batch)]


def runtime_bytes(llm: LLM, before: Host) -> int:
    """Bytes that the engine takes besides weights, KV cache and activations.

    On a CPU this is from the memory of this process, on a GPU from the driver's free memory now and `before`.
    """
    plan = llm.plan
    weights = sum(rank.weight_bytes for rank in llm.capacities)
    if plan.on_cpu:
        return max(0, pss_bytes(os.getpid()) - weights)  # the KV cache takes no memory before it is written
    index = plan.devices[0].index
    taken = before.gpus[index].free_bytes - probe_host().gpus[index].free_bytes
    activations = sum(rank.activation_bytes for rank in llm.capacities)
    return max(0, taken - weights - activations - llm.num_blocks * plan.block_bytes(0))
