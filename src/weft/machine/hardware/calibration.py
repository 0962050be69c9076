"""Calibration: the engine's measured speeds on this machine, stored by `weft bench calibrate`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path

import msgspec

from weft.cache import cache_path, warn_damaged, write_cache_file
from weft.errors import WeftError

AGAIN = "run weft bench calibrate again"
VERSION = 1  # version of the constants: raised when their meaning changes


class MeasuredFigure(msgspec.Struct, frozen=True, array_like=True):
    """A figure and a sentence on how it was measured."""

    value: float
    method: str


class QuantisedFigures(msgspec.Struct, frozen=True):
    """Speeds of one quantised precision: bytes/s of its weights in decode, FLOPS of its matrix products."""

    weights_Bps: MeasuredFigure
    matmul_flops: MeasuredFigure


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Measured speeds of one device, with 16-bit weights (`precision`) and with each `quantised` precision.

    The figures have the names of `planner.profiles`. `weights_Bps` and `cache_Bps` are bytes per second of weights and
    of cached keys and values in decode; `matmul_flops` and `attention_flops` are operations per second of matrix
    products and of attention in prefill. `overlap` is the share of the shorter of streaming and multiplying that hides
    behind the longer. `error` is the mean error of the fit over `points` measurements, `worst` the largest (0.1: 10 %).
    """

    device: str
    precision: str
    date: str
    weft: str
    weights_Bps: MeasuredFigure
    cache_Bps: MeasuredFigure
    matmul_flops: MeasuredFigure
    attention_flops: MeasuredFigure
    overlap: MeasuredFigure
    layer_us: MeasuredFigure
    step_us: MeasuredFigure
    sequence_us: MeasuredFigure
    runtime_MiB: MeasuredFigure
    quantised: dict[str, QuantisedFigures] = {}
    points: int
    error: float
    worst: float

    @property
    def source(self) -> str:
        """The origin of the figures, for people."""
        return f"measured here on {self.date} by weft bench calibrate"

    def figures(self) -> dict[str, MeasuredFigure]:
        """All figures by name; the name of a quantised precision's figure ends in the precision."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        figures = {name: value for name, value in fields.items() if isinstance(value, MeasuredFigure)}
        for precision, own in self.quantised.items():
            figures |= {f"weights_Bps {precision}": own.weights_Bps, f"matmul_flops {precision}": own.matmul_flops}
        return figures

    def scaled(self, memory: float, compute: float) -> Calibration:
        """This calibration scaled to a device with `memory` times the bandwidth and `compute` times the FLOPS."""

        def times(figure: MeasuredFigure, factor: float) -> MeasuredFigure:
            return MeasuredFigure(figure.value * factor, figure.method)

        return msgspec.structs.replace(
            self,
            weights_Bps=times(self.weights_Bps, memory),
            cache_Bps=times(self.cache_Bps, memory),
            matmul_flops=times(self.matmul_flops, compute),
            attention_flops=times(self.attention_flops, compute),
            quantised={
                precision: QuantisedFigures(times(own.weights_Bps, memory), times(own.matmul_flops, compute))
                for precision, own in self.quantised.items()
            },
        )


class _File(msgspec.Struct, frozen=True):
    """The file of one machine's calibrations."""

    machine: str
    calibrations: tuple[Calibration, ...]


def calibration_versions() -> tuple[int, str]:
    """Versions that a calibration depends on: of its constants, and of torch, whose kernels run."""
    try:
        return VERSION, version("torch")
    except PackageNotFoundError:
        return VERSION, ""


def calibration_path(machine: str) -> Path:
    """Path of the calibrations of `machine`, a fingerprint of the machine and of `calibration_versions`."""
    return cache_path() / f"calibration-{machine}.json"


def load_calibrations(machine: str) -> tuple[Calibration, ...]:
    """Calibrations of the machine's devices by this version of Weft; empty if there is no file or a damaged one."""
    try:
        stored = msgspec.json.decode(calibration_path(machine).read_bytes(), type=_File)
    except (FileNotFoundError, RuntimeError):  # RuntimeError: there is no home directory, and so no cache
        return ()
    except (OSError, msgspec.DecodeError) as error:
        warn_damaged(calibration_path(machine), str(error), AGAIN)
        return ()
    if stored.machine != machine or not all(map(is_plausible, stored.calibrations)):
        warn_damaged(calibration_path(machine), "its figures are impossible", AGAIN)
        return ()
    return tuple(calibration for calibration in stored.calibrations if calibration.weft == _weft_version())


def is_plausible(calibration: Calibration) -> bool:
    """Return True if all figures are possible; a file that was edited by hand may hold anything."""
    figures = calibration.figures()
    if not all(isfinite(figure.value) and figure.value >= 0 for figure in figures.values()):
        return False
    names = [name for name in figures if name.partition(" ")[0].endswith(("_Bps", "_flops"))]
    return (
        all(figures[name].value > 0 for name in names)
        and calibration.overlap.value <= 1
        and isfinite(calibration.error)
    )


def store_calibration(machine: str, calibration: Calibration) -> Path:
    """Store a calibration in place of an older one of the same device; return the path. Raises WeftError on failure."""
    others = [other for other in load_calibrations(machine) if other.device != calibration.device]
    text = msgspec.json.format(msgspec.json.encode(_File(machine, (*others, calibration))))
    try:
        write_cache_file(calibration_path(machine), text)
    except (OSError, RuntimeError) as error:
        raise WeftError(
            f"cannot keep the calibration: {error}; set XDG_CACHE_HOME to a directory elsewhere",
            code="cannot-keep-calibration",
        ) from error
    return calibration_path(machine)


def _weft_version() -> str:
    from weft._version import __version__

    return __version__
