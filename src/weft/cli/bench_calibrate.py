"""weft bench calibrate [MODEL]: measure the engine here, and keep what the planner reckons with."""

from __future__ import annotations

import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import msgspec

from weft.bench import calibrate, fit
from weft.bench.calibrate import BATCHED_TOKENS, FAR, Point, Subject
from weft.bench.fit import Fit, Planned
from weft.cli.bench_view import aligned, number
from weft.cli.flags import engine_config
from weft.cli.parser import UsageError
from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.facts import calibration, host, speeds
from weft.facts.calibration import Calibration
from weft.facts.gpus import GpuSpec
from weft.facts.host import Host
from weft.facts.machine import this_machine

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


def main(arguments: Namespace) -> int:
    """Measure every kind of device that is here; 1 where the figures fit too badly to be kept."""
    here = host.probe()
    config = settings(arguments)
    if config.device == "cpu" or not here.gpus:
        here = msgspec.structs.replace(here, gpus=(), pairs=())
    found = [one(arguments, config, here, gpu, index) for index, gpu in devices(here, config)]
    results = [it for it, _, _ in found]
    bad = [it for it in results if it.error > FAR]
    keeping = getattr(arguments, "save", not bad)
    if getattr(arguments, "json", False):
        print(json.dumps([as_json(*it) for it in found]))
    else:
        print("\n\n".join("\n".join(report(*it)) for it in found))
    # Kept where the planner looks for it: under the machine's own fingerprint, GPUs or not.
    machine = speeds.calibrated_machine(host.probe())
    for result in results if keeping else []:
        print(f"kept in {calibration.keep(machine, result)}; weft plan uses it from now on", file=sys.stderr)
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
    known = speeds.known(here)
    if not here.gpus:
        known = msgspec.structs.replace(known, cpu=speeds.cpu_speed(here))
        (spec,) = this_machine(here, known).gpus
        return [(None, spec)]
    specs = this_machine(here, known).gpus
    kinds: dict[str, tuple[int | None, GpuSpec]] = {}
    for index in config.device_ids or range(len(specs)):
        if not 0 <= index < len(specs):
            raise ConfigError(f"device_ids names GPU {index}; visible here are 0 to {len(specs) - 1}")
        kinds.setdefault(specs[index].name, (index, specs[index]))
    return list(kinds.values())


def one(
    arguments: Namespace, config: EngineConfig, here: Host, gpu: GpuSpec, index: int | None
) -> tuple[Calibration, list[Point], Fit]:
    """All measurements on one device, and what comes of them."""
    from weft.llm import LLM

    points: list[Point] = []
    runtime: list[int] = []
    asked = {
        "tensor_parallel_size": 1,
        "device": gpu.kind.replace("gpu", "cuda"),
        "device_ids": None if index is None else (index,),
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": config.max_num_batched_tokens or BATCHED_TOKENS[gpu.kind],
    }

    def measure(name: str, subject: Subject | None, **engine: Any) -> None:
        before = host.probe()
        with LLM(**{**asdict(config), **asked, **engine}) as llm:
            runtime.append(calibrate.runtime_bytes(llm, before))
            points.extend(calibrate.measure(llm, name, calibrate.loads(gpu, subject), tell))

    print(f"measuring {gpu.name}; it should have nothing else to do", file=sys.stderr)
    busy = os.getloadavg()[0]
    if busy > BUSY * len(here.cores):
        logger.warning(
            "the machine is busy (a load of %.1f on %d cores): the figures will be too low", busy, len(here.cores)
        )
    for subject in calibrate.subjects(gpu):
        with subject.model.folder() as folder:
            held = {"load_format": "dummy", "quantization": subject.quantization}
            measure(subject.name, subject, model=folder, **held)
    if getattr(arguments, "model", ""):
        measure(config.model, None)
    plain = msgspec.structs.replace(gpu, calibration=None)
    planned = Planned(plain, points)
    found = fit.fit(plain, points)
    result = fit.calibration(
        gpu.name,
        planned,
        found.values,
        runtime_MiB=min(runtime) / 2**20,
        date=datetime.now(UTC).date().isoformat(),
        how=f"least squares over {len(points)} measurements of {len({point.model for point in points})} models",
        measured=fit.errors(points, found),
    )
    return result, points, found


def tell(point: Point) -> None:
    """A measurement, as soon as it is there."""
    load = point.load
    what = "to the first token" if load.kind == "prefill" else "a step"
    print(
        f"  {point.model}: {load.batch} x {load.length} tokens, {1000 * point.seconds:.2f} ms {what}", file=sys.stderr
    )


def report(result: Calibration, points: Sequence[Point], found: Fit) -> list[str]:
    """What was measured and what fits it, for a person."""
    errors = fit.errors(points, found)
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
        for point, predicted, error in zip(points, found.predicted, errors, strict=True)
    ]
    lines = [f"{result.device}, {result.precision}, {result.source}", ""]
    lines += aligned(["model", "", "requests", "tokens", "ms", "fitted", "error"], rows)
    lines += ["", f"mean error {100 * result.error:.1f} %, worst {100 * result.worst:.0f} %", ""]
    for name, figure in result.figures().items():
        own, _, precision = name.partition(" ")
        words, unit = UNITS[own]
        lines.append(f"{number(figure.value / unit):>9} {words}{f', {precision}' if precision else ''}")
    return lines


def as_json(result: Calibration, points: Sequence[Point], found: Fit) -> dict[str, Any]:
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
        for point, predicted in zip(points, found.predicted, strict=True)
    ]
    return {"task": "calibrate", **msgspec.to_builtins(result), "measurements": rows}
