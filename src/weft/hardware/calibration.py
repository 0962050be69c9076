"""Calibration: what our engine reaches on this machine, as `weft bench calibrate` has measured it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path

import msgspec

from weft.cache import cache_path, warn_damaged, write_cache_file
from weft.errors import WeftError

AGAIN = "run weft bench calibrate again"
VERSION = 1  # of the constants: grows when what they mean changes


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """A figure, and how it was measured."""

    value: float
    how: str


class Quantised(msgspec.Struct, frozen=True):
    """What a precision's weights stream with in decode, and what they are multiplied with."""

    weights_Bps: Measured
    matmul_flops: Measured


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """One device, with 16-bit weights (`precision` says which) and with those of the `quantised` precisions.

    The names of the figures are those of `planner.profiles` and of its formulas: `weights_Bps` and `cache_Bps` are the
    bytes per second of weights and of cached keys and values in decode, `matmul_flops` and `attention_flops` what
    matrix products and a prompt's attention reach, `overlap` the share of the shorter of streaming and multiplying that
    hides behind the longer. `error` is the mean error of the fit, `worst` its largest, over `points` measurements: 0.1
    is 10 %.
    """

    device: str
    precision: str
    date: str
    weft: str
    weights_Bps: Measured
    cache_Bps: Measured
    matmul_flops: Measured
    attention_flops: Measured
    overlap: Measured
    layer_us: Measured
    step_us: Measured
    sequence_us: Measured
    runtime_MiB: Measured
    quantised: dict[str, Quantised] = {}
    points: int
    error: float
    worst: float

    @property
    def source(self) -> str:
        """Where its figures are from."""
        return f"measured here on {self.date} by weft bench calibrate"

    def figures(self) -> dict[str, Measured]:
        """All of them, by name, those of a quantised precision with it behind."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        found = {name: value for name, value in fields.items() if isinstance(value, Measured)}
        for precision, it in self.quantised.items():
            found |= {f"weights_Bps {precision}": it.weights_Bps, f"matmul_flops {precision}": it.matmul_flops}
        return found

    def scaled(self, memory: float, compute: float) -> Calibration:
        """That of a device whose memory is so many times as fast, and that computes so many times as fast."""

        def times(figure: Measured, factor: float) -> Measured:
            return Measured(figure.value * factor, figure.how)

        return msgspec.structs.replace(
            self,
            weights_Bps=times(self.weights_Bps, memory),
            cache_Bps=times(self.cache_Bps, memory),
            matmul_flops=times(self.matmul_flops, compute),
            attention_flops=times(self.attention_flops, compute),
            quantised={
                name: Quantised(times(it.weights_Bps, memory), times(it.matmul_flops, compute))
                for name, it in self.quantised.items()
            },
        )


class _File(msgspec.Struct, frozen=True):
    machine: str
    calibrations: tuple[Calibration, ...]


def versions() -> tuple[int, str]:
    """What calibrations depend on beside the machine: what they mean, and the library whose kernels run."""
    try:
        return VERSION, version("torch")
    except PackageNotFoundError:
        return VERSION, ""


def path(machine: str) -> Path:
    """Where they are kept; `machine` is the fingerprint of the machine and of `versions`."""
    return cache_path() / f"calibration-{machine}.json"


def known(machine: str) -> tuple[Calibration, ...]:
    """What was measured of the machine's devices with this version of Weft; nothing where the file is damaged."""
    try:
        found = msgspec.json.decode(path(machine).read_bytes(), type=_File)
    except (FileNotFoundError, RuntimeError):  # RuntimeError: there is no home, and so no cache
        return ()
    except (OSError, msgspec.DecodeError) as error:
        warn_damaged(path(machine), str(error), AGAIN)
        return ()
    if found.machine != machine or not all(map(sound, found.calibrations)):
        warn_damaged(path(machine), "its figures cannot be", AGAIN)
        return ()
    return tuple(it for it in found.calibrations if it.weft == _weft())


def sound(it: Calibration) -> bool:
    """Whether the figures can be: a file that was edited by hand may hold anything."""
    figures = it.figures()
    rates = [figure.value for name, figure in figures.items() if name.partition(" ")[0].endswith(("_Bps", "_flops"))]
    return (
        all(isfinite(figure.value) and figure.value >= 0 for figure in figures.values())
        and all(rate > 0 for rate in rates)
        and it.overlap.value <= 1
        and isfinite(it.error)
    )


def keep(machine: str, calibration: Calibration) -> Path:
    """Write it down in the place of what there was of the same device. Raises WeftError where that is not possible."""
    others = [it for it in known(machine) if it.device != calibration.device]
    text = msgspec.json.format(msgspec.json.encode(_File(machine, (*others, calibration))))
    try:
        write_cache_file(path(machine), text)
    except (OSError, RuntimeError) as error:
        raise WeftError(f"cannot keep the calibration: {error}; set XDG_CACHE_HOME to a directory elsewhere") from error
    return path(machine)


def _weft() -> str:
    from weft import __version__

    return __version__
