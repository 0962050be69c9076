"""Fit of the planner's constants to measurements.

Least squares in the logarithm, on the predictions of `planner.speed.cost` itself: no constant belongs to one
measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from statistics import fmean

import msgspec
import numpy as np

from weft._version import __version__
from weft.checkpoint.quantised.precision import OF_DTYPE
from weft.machine.hardware.calibration import Calibration, MeasuredFigure, QuantisedFigures
from weft.machine.hardware.cluster import Cluster, Node
from weft.machine.hardware.gpus import GpuSpec
from weft.plan.parallelism import Parallelism
from weft.planner.deployment import Workload, deploy
from weft.planner.profiles import calibrated, load_profile
from weft.planner.work.replica import PlannedReplica
from weft.study.measure.engine_speed import CalibrationPoint

# The constants, and the width within which they may differ freely from the planner's own figures (natural logarithm);
# it is wide for constants that the points determine well. For `overlap` it is a share, not a logarithm.
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
PER_PRECISION = ("weights_Bps", "matmul_flops")  # constants of each quantised precision; its name follows theirs
RIDGE = 0.02  # error in the logarithm that weighs as much as a constant's whole width
FLOOR = 0.05  # errors above this count linearly, below it quadratically
ROUNDS = 20
NUDGE = 1e-3
WHOLE = frozenset(OF_DTYPE.values())  # precisions of models that are not quantised
RUNTIME = "resident memory of the engine's process, or the driver's figure, less weights, KV cache and activations"


class CalibrationFit(msgspec.Struct, frozen=True):
    """Fitted constants by name, and the predicted seconds of each point."""

    values: dict[str, float]
    predicted: tuple[float, ...]


class PointPredictor:
    """Predicts the seconds of points on one device from given constants."""

    def __init__(self, gpu: GpuSpec, points: Sequence[CalibrationPoint]) -> None:
        self._gpu, self._plain, self.points = gpu, msgspec.structs.replace(gpu, calibration=None), points
        self._profile = load_profile("weft", on_cpu=gpu.kind == "cpu")
        precisions = dict.fromkeys(point.precision for point in points)
        self.whole = next((precision for precision in precisions if precision in WHOLE), "bf16")
        self.quantised = tuple(precision for precision in precisions if precision not in WHOLE)
        self._shapes = {(point.model, point.precision): point.shape for point in points}
        self._layouts = {
            (model, precision): deploy(
                shape,
                Parallelism(1, pipeline_split=(len(shape.layers),), devices=(0,)),
                precision=precision,
                kv_dtype=self.whole,
            )
            for (model, precision), shape in self._shapes.items()
        }

    def start(self) -> dict[str, float]:
        """Constants of the planner without a measurement."""
        engine, gpu = calibrated(self._profile, [self._plain]), self._gpu
        kernels = engine.kernels(gpu, self.whole)
        flops = gpu.flops.get("bf16") or gpu.flops["fp16"]
        constants = {
            "weights_Bps": gpu.bandwidth_Bps * kernels.weights,
            "cache_Bps": gpu.bandwidth_Bps * kernels.decode_attention * engine.attention_scale.value,
            "matmul_flops": flops * kernels.matmul * engine.matmul_scale.value,
            "attention_flops": flops * kernels.prefill_attention,
            "layer_us": engine.layer_us.value,
            "step_us": engine.step_us.value,
            "sequence_us": engine.sequence_us.value,
            "overlap": engine.overlap.value,
        }
        own = {f"{name} {precision}": constants[name] for precision in self.quantised for name in PER_PRECISION}
        return constants | own

    def seconds(self, values: Mapping[str, float]) -> list[float]:
        """Predicted seconds of each point under these constants."""
        candidate = build_calibration(self._gpu.name, self, values, runtime_MiB=0.0)
        return self._predicted(msgspec.structs.replace(self._gpu, calibration=candidate))

    def expected(self) -> list[float]:
        """Predicted seconds of each point without a calibration."""
        return self._predicted(self._plain)

    def _predicted(self, gpu: GpuSpec) -> list[float]:
        cluster = Cluster((Node((gpu,), "memory" if gpu.kind == "cpu" else "pcie"),), 1.0)
        profile = calibrated(self._profile, [gpu])
        replicas = {
            key: PlannedReplica(self._shapes[key], layout, cluster, profile, 0, {})
            for key, layout in self._layouts.items()
        }
        seconds = []
        for point in self.points:
            load, replica = point.load, replicas[point.model, point.precision]
            work = Workload(input_len=load.length, output_len=load.output)
            is_prefill = load.kind == "prefill"
            seconds.append(replica.prompt_s(work) if is_prefill else replica.round_s(load.batch, work).total)
        return seconds


def fit_constants(gpu: GpuSpec, points: Sequence[CalibrationPoint]) -> CalibrationFit:
    """Fit the constants to the points: first the engine's, then each quantised precision's."""
    predictor = PointPredictor(gpu, points)
    whole = [point for point in points if point.precision in WHOLE]
    values = least_squares(PointPredictor(gpu, whole), predictor.start(), tuple(WIDTHS))
    for precision in predictor.quantised:
        quantised = [point for point in points if point.precision == precision]
        own = tuple(f"{name} {precision}" for name in PER_PRECISION)
        values |= {name: values[name.partition(" ")[0]] for name in own}
        values = least_squares(PointPredictor(gpu, quantised), values, own)
    return CalibrationFit(values, tuple(predictor.seconds(values)))


def least_squares(predictor: PointPredictor, start: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Fit the constants `names` to the predictor's points by Gauss-Newton steps from `start`.

    The constants move in the logarithm, `overlap` as a share between 0 and 1. A ridge term pulls them to `start`.
    """
    width = np.array([WIDTHS[name.partition(" ")[0]] for name in names])
    measured = np.log([point.seconds for point in predictor.points])
    is_share = np.array([name == "overlap" for name in names])
    lowest = np.where(is_share, -start["overlap"], -np.inf)
    highest = np.where(is_share, 1 - start["overlap"], np.inf)

    def at(steps: np.ndarray) -> dict[str, float]:
        moved = {
            name: start[name] + step if name == "overlap" else start[name] * exp(step)
            for name, step in zip(names, steps.tolist(), strict=True)
        }
        return {**start, **moved}

    def errors_at(steps: np.ndarray) -> np.ndarray:
        errors: np.ndarray = np.log(predictor.seconds(at(steps))) - measured
        return errors

    moved = np.zeros(len(names))
    for _ in range(ROUNDS):
        errors = errors_at(moved)
        slopes = np.zeros((len(measured), len(names)))
        for number in range(len(names)):
            nudged = moved.copy()
            # Inwards if the constant is at its upper limit.
            nudge = -NUDGE if moved[number] + NUDGE > highest[number] else NUDGE
            nudged[number] += nudge
            slopes[:, number] = (errors_at(nudged) - errors) / nudge
        weight = FLOOR / np.maximum(np.abs(errors), FLOOR)
        normal = (slopes.T * weight) @ slopes + np.diag((RIDGE / width) ** 2)
        gradient = (slopes.T * weight) @ errors + (RIDGE / width) ** 2 * moved
        before = moved
        moved = np.clip(moved - np.clip(np.linalg.solve(normal, gradient), -0.5, 0.5), lowest, highest)
        if np.abs(moved - before).max() < NUDGE:
            break
    return at(moved)


def fit_errors(points: Sequence[CalibrationPoint], fitted: CalibrationFit) -> list[float]:
    """Relative error of the fit at each point: 0.1 is 10 % too long."""
    return [predicted / point.seconds - 1 for point, predicted in zip(points, fitted.predicted, strict=True)]


def build_calibration(
    device: str,
    predictor: PointPredictor,
    values: Mapping[str, float],
    *,
    runtime_MiB: float,
    date: str = "",
    method: str = "",
    errors: Sequence[float] = (),
) -> Calibration:
    """Calibration with these constants, ready to store; `errors` are the fit's errors at its points."""
    sizes = [abs(error) for error in errors] or [0.0]
    return Calibration(
        device=device,
        precision=predictor.whole,
        date=date,
        weft=__version__,
        **{name: MeasuredFigure(values[name], method) for name in WIDTHS},
        quantised={
            precision: QuantisedFigures(
                *(MeasuredFigure(values[f"{name} {precision}"], method) for name in PER_PRECISION)
            )
            for precision in predictor.quantised
        },
        runtime_MiB=MeasuredFigure(runtime_MiB, RUNTIME),
        points=len(errors),
        error=fmean(sizes),
        worst=max(sizes),
    )
