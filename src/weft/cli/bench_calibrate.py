"""weft bench calibrate [MODEL]: measure the engine here, and keep what the planner reckons with."""

from __future__ import annotations

import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

import msgspec

from weft.bench import fit
from weft.bench.fit import Fit, PointPredictor
from weft.cli.bench_view import aligned, number
from weft.cli.flags import engine_config
from weft.cli.parser import UsageError
from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.hardware import calibration, host
from weft.hardware.calibration import Calibration
from weft.hardware.gpus import GpuSpec
from weft.hardware.host import Host
from weft.plan.plan import Plan
from weft.probes import engine_speed, speeds
from weft.probes.engine_speed import BATCHED_TOKENS, UNRELIABLE_ERROR, CalibrationLoad, CalibrationPoint, Subject
from weft.probes.machine import host_cluster
from weft.probes.tuning import RaceResult, TunedSizes, tune_attention

logger = logging.getLogger("weft.cli")

BUSY = 0.5  # of a machine's cores
UNITS = {  # of the constants: what a person reads, and how many of the kept unit make one
    "weights_Bps": ("GB/s of weights in decode", 1e9),
    "cache_Bps": ("GB/s of keys and values in decode", 1e9),
    "matmul_flops": ("TFLOPS of matrix products", 1e12),
    "attention_flops": ("TFLOPS of a prompt's attention", 1e12),
    "overlap": ("of the shorter of the two hides behind the longer", 1.0),
    "layer_us": ("us of a layer beside its products", 1.0),
    "step_us": ("us of a step", 1.0),
    "sequence_us": ("us of a step for each request in it", 1.0),
    "runtime_MiB": ("MiB of memory beside weights and cache", 1.0),
}
TUNED = ("auto", "triton", "varlen")  # attention backends that our kernels are part of


@dataclass(frozen=True)
class Found:
    """All measurements on one device, what fits them, and the sizes of attention that were the fastest there."""

    result: Calibration
    points: list[CalibrationPoint]
    fit: Fit
    tuned: list[TunedSizes]


def main(arguments: Namespace) -> int:
    """Measure every kind of device that is here; 1 where the figures fit too badly to be kept."""
    here = host.probe_host()
    config = settings(arguments)
    if config.device == "cpu" or not here.gpus:
        here = msgspec.structs.replace(here, gpus=(), pairs=())
    found = [one(arguments, config, here, gpu, index) for index, gpu in devices(here, config)]
    results = [it.result for it in found]
    bad = [it for it in results if it.error > UNRELIABLE_ERROR]
    keeping = getattr(arguments, "save", not bad)
    if getattr(arguments, "json", False):
        print(json.dumps([as_json(it) for it in found]))
    else:
        print("\n\n".join("\n".join(report(it)) for it in found))
    # Kept where the planner looks for it: under the machine's own fingerprint, GPUs or not.
    machine = speeds.calibrated_machine(host.probe_host())
    for result in results if keeping else []:
        print(
            f"kept in {calibration.store_calibration(machine, result)}; weft plan uses it from now on", file=sys.stderr
        )
    for result in bad:
        print(
            f"{result.device}: the planner's formulas miss the measurements by {100 * result.error:.0f} %: was the "
            "machine busy with something else? " + ("" if keeping else "Nothing is kept (--save keeps it anyway)"),
            file=sys.stderr,
        )
    return 1 if bad and not keeping else 0


def settings(arguments: Namespace) -> EngineConfig:
    """What the flags say of the engine; the model may be left out. Raises UsageError for several ranks."""
    config = engine_config(arguments, **({} if getattr(arguments, "model", "") else {"model": "synthetic"}))
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (getattr(config, name) or 1) > 1:
            raise UsageError(f"--{name.replace('_', '-')}: one rank is measured, alone on each kind of device")
    if config.tensor_split or config.pipeline_split:
        raise UsageError("one rank is measured, alone on each kind of device; leave the splits out")
    return config


def devices(here: Host, config: EngineConfig) -> list[tuple[int | None, GpuSpec]]:
    """One of each kind, with its number; the CPU has none."""
    known = speeds.load_speeds(here)
    if not here.gpus:
        known = msgspec.structs.replace(known, cpu=speeds.known_cpu_speed(here))
        (spec,) = host_cluster(here, known).gpus
        return [(None, spec)]
    specs = host_cluster(here, known).gpus
    kinds: dict[str, tuple[int | None, GpuSpec]] = {}
    for index in config.device_ids or range(len(specs)):
        if not 0 <= index < len(specs):
            raise ConfigError(f"device_ids names GPU {index}; visible here are 0 to {len(specs) - 1}")
        kinds.setdefault(specs[index].name, (index, specs[index]))
    return list(kinds.values())


def one(arguments: Namespace, config: EngineConfig, here: Host, gpu: GpuSpec, index: int | None) -> Found:
    """Measure on one device."""
    from weft.llm import LLM

    points: list[CalibrationPoint] = []
    runtime: list[int] = []
    asked = {
        "tensor_parallel_size": 1,
        "device": gpu.kind.replace("gpu", "cuda"),
        "device_ids": None if index is None else (index,),
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": config.max_num_batched_tokens or BATCHED_TOKENS[gpu.kind],
    }

    def measure(subject: Subject | None, loads: Sequence[CalibrationLoad]) -> tuple[Plan, list[CalibrationPoint]]:
        """None is the user's own model."""
        with subject.model.folder() if subject else nullcontext(config.model) as model:
            held = {"load_format": "dummy", "quantization": subject.quantization} if subject else {}
            before = host.probe_host()
            with LLM(**{**asdict(config), **asked, "model": model, **held}) as llm:
                runtime.append(engine_speed.runtime_bytes(llm, before))
                name = subject.name if subject else config.model
                return llm.plan, engine_speed.measure_loads(llm, name, loads, tell)

    print(f"measuring {gpu.name}; it should have nothing else to do", file=sys.stderr)
    busy = os.getloadavg()[0]
    if busy > BUSY * len(here.cores):
        logger.warning(
            "the machine is busy (a load of %.1f on %d cores): the figures will be too low", busy, len(here.cores)
        )
    plain = msgspec.structs.replace(gpu, calibration=None)
    subjects: dict[str, Subject | None] = {it.name: it for it in engine_speed.subjects(gpu)}
    if own := getattr(arguments, "model", ""):
        subjects[config.model] = None
    plans: dict[str, Plan] = {}
    for name, subject in subjects.items():
        plans[name], measured = measure(subject, engine_speed.loads_of(gpu, subject))
        points += measured
    for _ in range(engine_speed.ANEW):
        doubts = engine_speed.doubtful_points(points, PointPredictor(plain, points).expected())
        for name in dict.fromkeys(it.model for it in doubts):
            again = [it.load for it in doubts if it.model == name]
            print(f"  {name}: {len(again)} took too long to be believed, and are measured again", file=sys.stderr)
            points = engine_speed.faster_points(points, measure(subjects[name], again)[1])
    tuned: list[TunedSizes] = []
    if own and index is not None and plans[config.model].attention_backend in TUNED:
        names = [it.name for it in here.gpus]
        tuned = attention(plans[config.model], names.count(names[index]), keep=getattr(arguments, "save", True))
    planned = PointPredictor(plain, points)
    found = fit.fit_constants(plain, points)
    result = fit.build_calibration(
        gpu.name,
        planned,
        found.values,
        runtime_MiB=min(runtime) / 2**20,
        date=datetime.now(UTC).date().isoformat(),
        method=f"least squares over {len(points)} measurements of {len({point.model for point in points})} models",
        errors=fit.fit_errors(points, found),
    )
    return Found(result, points, found, tuned)


def attention(plan: Plan, gpus: int, *, keep: bool) -> list[TunedSizes]:
    """The fastest sizes of the attention kernels for a model's heads, and for a rank's where the heads are cut evenly
    among 2, 4, 8, ... of so many equal GPUs; none where they cannot be measured."""
    heads = len(plan.places[0].kv_heads)
    ranks = takewhile(lambda it: it <= gpus and heads % it == 0, (2**n for n in range(gpus.bit_length())))
    try:
        return tune_attention(plan, tuple(ranks), keep=keep, tell=tell_race)
    except ConfigError as error:
        logger.warning("%s; engines use those that were chosen by reading", error)
        return []


def tell_race(race: RaceResult) -> None:
    """What each size took, the fastest first, and what was passed over."""
    print(f"  {race.title}:", file=sys.stderr)
    for name, took in sorted(race.seconds.items(), key=lambda it: it[1]):
        print(f"    {1e6 * took:9.1f} us  {name}", file=sys.stderr)
    for name, why in race.obstacles.items():
        print(f"    passed over: {name}: {why}", file=sys.stderr)


def tell(point: CalibrationPoint) -> None:
    """A measurement, as soon as it is there."""
    load = point.load
    what = "to the first token" if load.kind == "prefill" else "a step"
    print(
        f"  {point.model}: {load.batch} x {load.length} tokens, {1000 * point.seconds:.2f} ms {what}", file=sys.stderr
    )


def report(found: Found) -> list[str]:
    """What was measured and what fits it, for a person."""
    result, points = found.result, found.points
    errors = fit.fit_errors(points, found.fit)
    rows = [
        [
            f"{point.model}, {point.shape.layers} layers of {point.shape.hidden}",
            point.load.kind,
            str(point.load.batch),
            f"{point.load.length:,}",
            number(1000 * point.seconds),
            number(1000 * predicted),
            f"{100 * error:+.0f} %",
        ]
        for point, predicted, error in zip(points, found.fit.predicted, errors, strict=True)
    ]
    lines = [f"{result.device}, {result.precision}, {result.source}", ""]
    lines += aligned(["model", "", "requests", "tokens", "ms", "fitted", "error"], rows)
    lines += ["", f"mean error {100 * result.error:.1f} %, worst {100 * result.worst:.0f} %", ""]
    for name, figure in result.figures().items():
        own, _, precision = name.partition(" ")
        words, unit = UNITS[own]
        lines.append(f"{number(figure.value / unit):>9} {words}{f', {precision}' if precision else ''}")
    for it in found.tuned:
        lines += ["", f"attention of {it.q_heads} query and {it.kv_heads} KV heads, the fastest sizes:"]
        sizes = [[f"{rows} row{'s' * (rows > 1)}", size] for rows, size in it.decode.items()]
        lines += aligned(["", ""], [*sizes, ["prompts", it.prefill]])[1:]
        lines += [f"kept in {it.path}: engines use them from now on"] * bool(it.path)
        lines += [f"they cannot be kept: {it.lost}"] * bool(it.lost)
    return lines


def as_json(found: Found) -> dict[str, Any]:
    """The same for a program."""
    rows = [
        {
            "model": point.model,
            "precision": point.precision,
            "layers": point.shape.layers,
            "hidden": point.shape.hidden,
            **msgspec.to_builtins(point.load),
            "seconds": point.seconds,
            "predicted_s": predicted,
        }
        for point, predicted in zip(found.points, found.fit.predicted, strict=True)
    ]
    return {
        "task": "calibrate",
        **msgspec.to_builtins(found.result),
        "measurements": rows,
        "attention": [msgspec.to_builtins(it, str_keys=True) for it in found.tuned],
    }
