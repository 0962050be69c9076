"""Fit: the planner's constants under which it comes nearest to what was measured.

Least squares in the logarithm, on what `planner.cost` itself predicts: no figure belongs to a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from statistics import fmean

import msgspec
import numpy as np

from weft import __version__
from weft.formats.precision import OF_DTYPE
from weft.hardware.calibration import Calibration, MeasuredFigure, QuantisedFigures
from weft.hardware.cluster import Cluster, Node
from weft.hardware.gpus import GpuSpec
from weft.planner.deployment import Workload, deploy
from weft.planner.profiles import calibrated, profile
from weft.planner.replica import Replica
from weft.probes.engine_speed import CalibrationPoint

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
PER_PRECISION = ("weights_Bps", "matmul_flops")  # those that every quantised precision has for itself, with it behind
RIDGE = 0.02  # of an error in the logarithm, what a constant's whole width weighs
FLOOR = 0.05  # errors above this count by their size, below it by their square
ROUNDS = 20
NUDGE = 1e-3
WHOLE = frozenset(OF_DTYPE.values())  # precisions that are none of a quantised model
RUNTIME = "resident memory of the engine's process, or the driver's figure, less weights, KV cache and a step's own"


class Fit(msgspec.Struct, frozen=True):
    """The constants by name, and each point's predicted seconds."""

    values: dict[str, float]
    predicted: tuple[float, ...]


class PointPredictor:
    """What the planner expects of points on one device, given the constants."""

    def __init__(self, gpu: GpuSpec, points: Sequence[CalibrationPoint]) -> None:
        self._gpu, self._plain, self.points = gpu, msgspec.structs.replace(gpu, calibration=None), points
        self._own = profile("weft", on_cpu=gpu.kind == "cpu")
        precisions = dict.fromkeys(point.precision for point in points)
        self.whole = next((it for it in precisions if it in WHOLE), "bf16")
        self.quantised = tuple(it for it in precisions if it not in WHOLE)
        self._shapes = {(point.model, point.precision): point.shape for point in points}
        self._layouts = {
            (model, precision): deploy(
                shape,
                tensor_weights=[1.0],
                stage_layers=[shape.layers],
                gpus=[0],
                precision=precision,
                kv_dtype=self.whole,
            )
            for (model, precision), shape in self._shapes.items()
        }

    def start(self) -> dict[str, float]:
        """The constants as the planner has them without a measurement."""
        own, gpu = calibrated(self._own, [self._plain]), self._gpu
        kernels = own.kernels(gpu, self.whole)
        flops = gpu.flops.get("bf16") or gpu.flops["fp16"]
        found = {
            "weights_Bps": gpu.bandwidth_Bps * kernels.weights,
            "cache_Bps": gpu.bandwidth_Bps * kernels.decode_attention * own.attention_scale.value,
            "matmul_flops": flops * kernels.matmul * own.matmul_scale.value,
            "attention_flops": flops * kernels.prefill_attention,
            "layer_us": own.layer_us.value,
            "step_us": own.step_us.value,
            "sequence_us": own.sequence_us.value,
            "overlap": own.overlap.value,
        }
        return found | {f"{name} {precision}": found[name] for precision in self.quantised for name in PER_PRECISION}

    def seconds(self, values: Mapping[str, float]) -> list[float]:
        """Of each point."""
        candidate = build_calibration(self._gpu.name, self, values, runtime_MiB=0.0)
        return self._predicted(msgspec.structs.replace(self._gpu, calibration=candidate))

    def expected(self) -> list[float]:
        """Of each point, without a calibration."""
        return self._predicted(self._plain)

    def _predicted(self, gpu: GpuSpec) -> list[float]:
        cluster = Cluster((Node((gpu,), "memory" if gpu.kind == "cpu" else "pcie"),), 1.0)
        profile = calibrated(self._own, [gpu])
        replicas = {
            key: Replica(self._shapes[key], layout, cluster, profile, 0, {}) for key, layout in self._layouts.items()
        }
        found = []
        for point in self.points:
            load, replica = point.load, replicas[point.model, point.precision]
            work = Workload(input_len=load.length, output_len=load.output)
            prefill = load.kind == "prefill"
            found.append(replica.prompt_s(work) if prefill else replica.round_s(load.batch, work).total)
        return found


def fit_constants(gpu: GpuSpec, points: Sequence[CalibrationPoint]) -> Fit:
    """The constants under which the planner comes nearest to the points: first those of the engine, then those that a
    quantised precision has for itself."""
    planned = PointPredictor(gpu, points)
    whole = [point for point in points if point.precision in WHOLE]
    values = least_squares(PointPredictor(gpu, whole), planned.start(), tuple(WIDTHS))
    for precision in planned.quantised:
        held = [point for point in points if point.precision == precision]
        own = tuple(f"{name} {precision}" for name in PER_PRECISION)
        values |= {name: values[name.partition(" ")[0]] for name in own}
        values = least_squares(PointPredictor(gpu, held), values, own)
    return Fit(values, tuple(planned.seconds(values)))


def least_squares(planned: PointPredictor, start: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """`start` with the constants of these `names` moved to where the points are: least squares by Gauss and Newton."""
    width = np.array([WIDTHS[name.partition(" ")[0]] for name in names])
    measured = np.log([point.seconds for point in planned.points])
    share = np.array([name == "overlap" for name in names])
    lowest = np.where(share, -start["overlap"], -np.inf)
    highest = np.where(share, 1 - start["overlap"], np.inf)

    def at(steps: np.ndarray) -> dict[str, float]:
        moved = {
            name: start[name] + step if name == "overlap" else start[name] * exp(step)
            for name, step in zip(names, steps.tolist(), strict=True)
        }
        return {**start, **moved}

    def errors(steps: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.log(planned.seconds(at(steps))) - measured
        return found

    moved = np.zeros(len(names))
    for _ in range(ROUNDS):
        here = errors(moved)
        slopes = np.zeros((len(measured), len(names)))
        for number in range(len(names)):
            nudged = moved.copy()
            # Inwards where it stands at its end.
            nudge = -NUDGE if moved[number] + NUDGE > highest[number] else NUDGE
            nudged[number] += nudge
            slopes[:, number] = (errors(nudged) - here) / nudge
        weight = FLOOR / np.maximum(np.abs(here), FLOOR)
        normal = (slopes.T * weight) @ slopes + np.diag((RIDGE / width) ** 2)
        pull = (slopes.T * weight) @ here + (RIDGE / width) ** 2 * moved
        before = moved
        moved = np.clip(moved - np.clip(np.linalg.solve(normal, pull), -0.5, 0.5), lowest, highest)
        if np.abs(moved - before).max() < NUDGE:
            break
    return at(moved)


def fit_errors(points: Sequence[CalibrationPoint], found: Fit) -> list[float]:
    """How far the fit is from each point, as a share of it."""
    return [predicted / point.seconds - 1 for point, predicted in zip(points, found.predicted, strict=True)]


def build_calibration(
    device: str,
    planned: PointPredictor,
    values: Mapping[str, float],
    *,
    runtime_MiB: float,
    date: str = "",
    method: str = "",
    errors: Sequence[float] = (),
) -> Calibration:
    """The constants as they are kept; `errors` are those of the points that they come from."""
    sizes = [abs(error) for error in errors] or [0.0]
    return Calibration(
        device=device,
        precision=planned.whole,
        date=date,
        weft=__version__,
        **{name: MeasuredFigure(values[name], method) for name in WIDTHS},
        quantised={
            precision: QuantisedFigures(
                *(MeasuredFigure(values[f"{name} {precision}"], method) for name in PER_PRECISION)
            )
            for precision in planned.quantised
        },
        runtime_MiB=MeasuredFigure(runtime_MiB, RUNTIME),
        points=len(errors),
        error=fmean(sizes),
        worst=max(sizes),
    )
