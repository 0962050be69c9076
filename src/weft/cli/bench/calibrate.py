"""weft bench calibrate [MODEL]: measure the engine on this machine, and keep the figures for the planner."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

import msgspec

from weft.cli.bench.view import aligned, number
from weft.cli.flags.bench_flags import CalibrateArguments
from weft.cli.flags.flags import engine_config
from weft.cli.parser import UsageError
from weft.config import EngineConfig
from weft.engine.client.progress import ProgressBar
from weft.errors import ConfigError
from weft.machine.hardware import calibration, host
from weft.machine.hardware.calibration import Calibration
from weft.machine.hardware.gpus import GpuSpec
from weft.machine.hardware.host import Host
from weft.plan.plan import Plan
from weft.probes import stored_speeds
from weft.probes.machine import host_cluster
from weft.study.bench import fit
from weft.study.bench.fit import CalibrationFit, PointPredictor
from weft.study.measure import engine_speed
from weft.study.measure.engine_speed import (
    BATCHED_TOKENS,
    MAX_REPEATS,
    UNRELIABLE_ERROR,
    CalibrationLoad,
    CalibrationPoint,
    Subject,
)
from weft.study.measure.tuning import RaceResult, TunedSizes, tune_attention

logger = logging.getLogger("weft.cli")

BUSY = 0.5  # load average per core from which the machine is not idle
UNITS = {  # a constant's meaning, and its factor from the kept unit to the printed one
    "weights_Bps": ("GB/s of weights in decode", 1e9),
    "cache_Bps": ("GB/s of keys and values in decode", 1e9),
    "matmul_flops": ("TFLOPS of matrix products", 1e12),
    "attention_flops": ("TFLOPS of a prompt's attention", 1e12),
    "overlap": ("of the shorter of memory and compute time hidden behind the longer", 1.0),
    "layer_us": ("us of each layer besides its products", 1.0),
    "step_us": ("us of each step", 1.0),
    "sequence_us": ("us of each request in a step", 1.0),
    "runtime_MiB": ("MiB of memory besides weights and cache", 1.0),
}
TUNABLE_BACKENDS = ("auto", "triton", "varlen")  # attention backends that use our kernels


@dataclass(frozen=True)
class DeviceResult:
    """All measurements on one device, the constants that fit them, and the fastest sizes of attention kernels.

    `tunable` is the plan of the user's own model if the sizes of its attention kernels can be chosen.
    """

    result: Calibration
    points: list[CalibrationPoint]
    fit: CalibrationFit
    tunable: Plan | None = None
    tuned: list[TunedSizes] = field(default_factory=list)


def main(arguments: CalibrateArguments) -> int:
    """Measure every kind of GPU of this machine, or its CPU; return 1 if the figures fit too badly to be kept."""
    config = measured_config(arguments)
    here = _measured_host(config)
    measured = [calibrate_device(arguments, config, here, gpu, index) for index, gpu in devices(here, config)]
    bad = [device.result for device in measured if device.result.error > UNRELIABLE_ERROR]
    keep = not bad if arguments.save is None else arguments.save
    # After all fits: a machine that was busy gives no reliable sizes either.
    results = [tune_device(device, here, keep=keep) for device in measured]
    print_results(results, as_json=arguments.json)
    if keep:
        keep_results(results)
    for result in bad:
        _warn_of_misfit(result, keep=keep)
    return 1 if bad and not keep else 0


def _measured_host(config: EngineConfig) -> Host:
    """This machine with the devices to measure: without GPUs if its CPU is measured."""
    here = host.probe_host()
    if config.device == "cpu" or not here.gpus:
        return msgspec.structs.replace(here, gpus=(), pairs=())
    return here


def _warn_of_misfit(result: Calibration, *, keep: bool) -> None:
    doubt = f"the planner's formulas miss the measurements by {100 * result.error:.0f} %"
    kept = "" if keep else "No figures are kept (--save keeps them anyway)"
    print(f"{result.device}: {doubt}: was the machine busy with something else? {kept}", file=sys.stderr)


def print_results(results: Sequence[DeviceResult], *, as_json: bool) -> None:
    """Print the results of all devices."""
    if as_json:
        print(json.dumps([device_json(device) for device in results]))
    else:
        print("\n\n".join("\n".join(device_lines(device)) for device in results))


def keep_results(results: Sequence[DeviceResult]) -> None:
    """Write the figures to the cache, and print their paths."""
    # The planner looks for the figures under the machine's own fingerprint, with its GPUs or without.
    machine = stored_speeds.calibration_fingerprint(host.probe_host())
    for device in results:
        path = calibration.store_calibration(machine, device.result)
        print(f"kept in {path}; weft plan uses it from now on", file=sys.stderr)


def measured_config(arguments: CalibrateArguments) -> EngineConfig:
    """The engine config of the flags; without a model, the config for synthetic models. Raises UsageError for several
    ranks."""
    config = engine_config(arguments, model="synthetic")
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (getattr(config, name) or 1) > 1:
            raise UsageError(
                f"--{name.replace('_', '-')}: one rank is measured, alone on each kind of device",
                code="several-ranks-to-calibrate",
            )
    if config.tensor_split or config.pipeline_split:
        raise UsageError(
            "one rank is measured, alone on each kind of device; leave the splits out",
            code="several-ranks-to-calibrate",
        )
    return config


def devices(here: Host, config: EngineConfig) -> list[tuple[int | None, GpuSpec]]:
    """One device of each kind, with its number; the number of the CPU is None."""
    known = stored_speeds.load_speeds(here)
    if not here.gpus:
        known = msgspec.structs.replace(known, cpu=stored_speeds.cpu_speed_of(here))
        (spec,) = host_cluster(here, known).gpus
        return [(None, spec)]
    specs = host_cluster(here, known).gpus
    kinds: dict[str, tuple[int | None, GpuSpec]] = {}
    for index in config.device_ids or range(len(specs)):
        if index == "cpu":
            continue  # it is calibrated on a machine without GPUs, or with --device cpu
        if not 0 <= index < len(specs):
            raise ConfigError(
                f"device_ids names GPU {index}; visible here are 0 to {len(specs) - 1}", code="device-ids-beyond-gpus"
            )
        kinds.setdefault(specs[index].name, (index, specs[index]))
    return list(kinds.values())


def calibrate_device(
    arguments: CalibrateArguments, config: EngineConfig, here: Host, gpu: GpuSpec, index: int | None
) -> DeviceResult:
    """Measure the engine on one device, and fit the planner's constants to the figures."""
    print(f"measuring {gpu.name}; it should have nothing else to do", file=sys.stderr)
    warn_if_busy(here)
    plain = msgspec.structs.replace(gpu, calibration=None)
    measurements = DeviceMeasurements(config, gpu, index)
    measurements.measure_subjects(arguments.model)
    measurements.repeat_doubtful(plain)
    points = measurements.points
    constants = fit.fit_constants(plain, points)
    result = fit.build_calibration(
        gpu.name,
        PointPredictor(plain, points),
        constants.values,
        runtime_MiB=min(measurements.runtime_bytes) / 2**20,
        date=datetime.now(UTC).date().isoformat(),
        method=f"least squares over {len(points)} measurements of {len({point.model for point in points})} models",
        errors=fit.fit_errors(points, constants),
    )
    plan = measurements.plans.get(config.model)
    tunable = plan if index is not None and plan and plan.attention_backend in TUNABLE_BACKENDS else None
    return DeviceResult(result, points, constants, tunable)


def warn_if_busy(here: Host) -> None:
    """Log a warning if other processes use the CPU."""
    busy = os.getloadavg()[0]
    if busy > BUSY * len(here.cores):
        logger.warning(
            "the machine is busy (a load of %.1f on %d cores): the figures will be too low", busy, len(here.cores)
        )


class DeviceMeasurements:
    """Measurements of engines on one device, one engine after the other.

    `plans` are the plans of the measured models by name, `runtime_bytes` each engine's memory without its weights.
    """

    def __init__(self, config: EngineConfig, gpu: GpuSpec, index: int | None) -> None:
        self.points: list[CalibrationPoint] = []
        self.plans: dict[str, Plan] = {}
        self.runtime_bytes: list[int] = []
        self._gpu = gpu
        self._config = replace(
            config,
            tensor_parallel_size=1,
            device=gpu.kind.replace("gpu", "cuda"),
            device_ids=None if index is None else (index,),
            skip_tokenizer_init=True,
            max_num_batched_tokens=config.max_num_batched_tokens or BATCHED_TOKENS[gpu.kind],
        )
        self._subjects: dict[str, Subject | None] = {}  # None is the user's own model

    def measure_subjects(self, own_model: str) -> None:
        """Measure the synthetic models, and the user's own if `own_model` names one."""
        self._subjects = {subject.name: subject for subject in engine_speed.subjects(self._gpu)}
        if own_model:
            self._subjects[self._config.model] = None
        for name, subject in self._subjects.items():
            self.points += self._measure(name, engine_speed.loads_of(self._gpu, subject))

    def repeat_doubtful(self, plain: GpuSpec) -> None:
        """Measure points again that took much longer than the others suggest; the faster of both figures stays."""
        for _ in range(engine_speed.ANEW):
            doubts = engine_speed.doubtful_points(self.points, PointPredictor(plain, self.points).expected())
            for name in dict.fromkeys(point.model for point in doubts):
                again = [point.load for point in doubts if point.model == name]
                print(f"  {name}: {len(again)} took implausibly long, and are measured again", file=sys.stderr)
                self.points = engine_speed.faster_points(self.points, self._measure(name, again))

    def _measure(self, name: str, loads: Sequence[CalibrationLoad]) -> list[CalibrationPoint]:
        """Start an engine with one of the models, and measure the loads on it."""
        from weft.engine.llm import LLM

        subject = self._subjects[name]
        with subject.model.folder() if subject else nullcontext(self._config.model) as model:
            config = replace(self._config, model=model)
            if subject:
                config = replace(config, load_format="dummy", quantization=subject.quantization)
            before = host.probe_host()
            with LLM.from_config(config) as llm:
                self.runtime_bytes.append(engine_speed.runtime_bytes(llm, before))
                self.plans[name] = llm.plan
                with ProgressBar(len(loads) * MAX_REPEATS, True, name, animated=False) as progress:
                    return engine_speed.measure_loads(llm, name, loads, print_point, progress.advance)


def tune_device(device: DeviceResult, here: Host, *, keep: bool) -> DeviceResult:
    """A device's result with the fastest sizes of the attention kernels, if they can be chosen."""
    if device.tunable is None:
        return device
    gpu = here.gpus[device.tunable.devices[0].index]
    equal = sum(other.name == gpu.name for other in here.gpus)
    return replace(device, tuned=tune_on_gpu(device.tunable, equal, keep=keep))


def tune_on_gpu(plan: Plan, gpus: int, *, keep: bool) -> list[TunedSizes]:
    """The fastest sizes of the attention kernels for a model's heads; empty if they cannot be measured.

    They are measured for all heads, and for a rank's share if 2, 4, 8, ... of `gpus` equal GPUs divide them evenly.
    """
    heads = len(plan.places[0].kv_heads)
    powers = (2**n for n in range(gpus.bit_length()))
    ranks = takewhile(lambda count: count <= gpus and heads % count == 0, powers)
    try:
        return tune_attention(plan, tuple(ranks), keep=keep, report=print_race)
    except ConfigError as error:
        logger.warning("%s; engines use the default sizes", error)
        return []


def print_race(race: RaceResult) -> None:
    """Print the time of each size, the fastest first, and the sizes that were skipped."""
    print(f"  {race.title}:", file=sys.stderr)
    for name, seconds in sorted(race.seconds.items(), key=lambda entry: entry[1]):
        print(f"    {1e6 * seconds:9.1f} us  {name}", file=sys.stderr)
    for name, why in race.obstacles.items():
        print(f"    skipped: {name}: {why}", file=sys.stderr)


def print_point(point: CalibrationPoint) -> None:
    """Print a measurement as soon as it is done."""
    load = point.load
    what = "to the first token" if load.kind == "prefill" else "a step"
    print(
        f"  {point.model}: {load.batch} x {load.length} tokens, {1000 * point.seconds:.2f} ms {what}", file=sys.stderr
    )


def device_lines(device: DeviceResult) -> list[str]:
    """The measurements of a device, the constants that fit them, and the sizes of attention, as text."""
    result, points = device.result, device.points
    errors = fit.fit_errors(points, device.fit)
    rows = [
        [
            f"{point.model}, {len(point.shape.layers)} layers of {point.shape.hidden}",
            point.load.kind,
            str(point.load.batch),
            f"{point.load.length:,}",
            number(1000 * point.seconds),
            number(1000 * predicted),
            f"{100 * error:+.0f} %",
        ]
        for point, predicted, error in zip(points, device.fit.predicted, errors, strict=True)
    ]
    lines = [f"{result.device}, {result.precision}, {result.source}", ""]
    lines += aligned(["model", "", "requests", "tokens", "ms", "fitted", "error"], rows)
    lines += ["", f"mean error {100 * result.error:.1f} %, worst {100 * result.worst:.0f} %", ""]
    for name, figure in result.figures().items():
        constant, _, precision = name.partition(" ")
        meaning, unit = UNITS[constant]
        lines.append(f"{number(figure.value / unit):>9} {meaning}{f', {precision}' if precision else ''}")
    for tuned in device.tuned:
        lines += tuned_lines(tuned)
    return lines


def tuned_lines(tuned: TunedSizes) -> list[str]:
    """The fastest sizes of attention, and the file that keeps them."""
    sizes = [[f"{rows} row{'s' * (rows > 1)}", size] for rows, size in tuned.decode.items()]
    lines = ["", f"attention of {tuned.q_heads} query and {tuned.kv_heads} KV heads, the fastest sizes:"]
    lines += aligned(["", ""], [*sizes, ["prompts", tuned.prefill]])[1:]
    if tuned.path:
        lines.append(f"kept in {tuned.path}: engines use them from now on")
    if tuned.lost:
        lines.append(f"they cannot be kept: {tuned.lost}")
    return lines


def device_json(device: DeviceResult) -> dict[str, Any]:
    """The measurements and constants of a device as JSON."""
    rows = [
        {
            "model": point.model,
            "precision": point.precision,
            "layers": len(point.shape.layers),
            "hidden": point.shape.hidden,
            **msgspec.to_builtins(point.load),
            "seconds": point.seconds,
            "predicted_s": predicted,
        }
        for point, predicted in zip(device.points, device.fit.predicted, strict=True)
    ]
    return {
        "task": "calibrate",
        **msgspec.to_builtins(device.result),
        "measurements": rows,
        "attention": [msgspec.to_builtins(tuned, str_keys=True) for tuned in device.tuned],
    }
