"""Stored speeds: this machine's measured figures, kept in the cache as long as the machine stays the same."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import msgspec

from weft.cache import cache_path, warn_damaged, write_cache_file
from weft.errors import ConfigError, WeftError
from weft.logs import event_fields
from weft.machine.hardware import calibration, cpu
from weft.machine.hardware.calibration import Calibration
from weft.machine.hardware.cpu import CpuSpeed
from weft.machine.hardware.host import Host
from weft.machine.native import prebuilt

logger = logging.getLogger("weft")

VERSION = 2  # version of the measurements: raised when their meaning changes
CPU_DEADLINE_S = 20.0  # limit of the CPU's measurement, which takes about 1 s: other processes may be busy
MIN_READ_BYTES = 256 << 20  # lower bound of the array that is read
CACHE_MULTIPLE = 8  # and at least 8 times the last-level cache
MEASURED_AGAIN = "this machine is measured again"
BUSY = 0.25  # load, as a share of the cores, above which the machine counts as busy

# Result of a copy between two GPUs. "works": all bytes arrived. "broken": some are wrong, or the copy failed. "hung":
# it never ended.
Verdict = Literal["works", "broken", "hung"]


class GpuSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of one GPU, by its UUID, in bytes per second: of copies within its memory (each byte counts twice, read and
    written), and to and from pinned memory of the host."""

    gpu: str
    copy_Bps: float
    from_host_Bps: float
    to_host_Bps: float


class PairSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Copies between two GPUs, by their UUIDs. `peer`: direct GPU-to-GPU access, not by the host. `Bps` is the
    slower direction's bytes per second, 0 unless copies work; `detail` says what went wrong."""

    first: str
    second: str
    verdict: Verdict
    peer: bool = False
    Bps: float = 0.0
    detail: str = ""


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of this machine. `cpu` None, or empty `gpus`: not measured yet. The engine's `calibrations` are stored in
    a file of their own."""

    machine: str
    version: int = VERSION
    cpu: CpuSpeed | None = None
    gpus: tuple[GpuSpeed, ...] = ()
    pairs: tuple[PairSpeed, ...] = ()
    calibrations: tuple[Calibration, ...] = ()

    def pair(self, first: str, second: str) -> PairSpeed | None:
        """Measurement of two GPUs in either order; None if they were not measured."""
        return next((pair for pair in self.pairs if {pair.first, pair.second} == {first, second}), None)


def speeds_path(host: Host) -> Path:
    """Path of this machine's speeds in the cache."""
    return cache_path() / f"speeds-{fingerprint(host, VERSION)}.json"


def calibration_fingerprint(host: Host) -> str:
    """Fingerprint under which calibrations are stored; other versions of libraries count as another machine."""
    return fingerprint(host, "calibration", *calibration.calibration_versions())


def load_speeds(host: Host) -> Speeds:
    """Load this machine's speeds from the cache; without figures if there is no file, or a damaged one."""
    machine = fingerprint(host, VERSION)
    empty = Speeds(machine=machine, calibrations=calibration.load_calibrations(calibration_fingerprint(host)))
    try:
        stored = msgspec.json.decode(speeds_path(host).read_bytes(), type=Speeds)
    except (FileNotFoundError, RuntimeError):  # RuntimeError: there is no home directory, and so no cache
        return empty
    except (OSError, msgspec.DecodeError) as error:
        warn_damaged(speeds_path(host), str(error), MEASURED_AGAIN)
        return empty
    if (stored.machine, stored.version) != (machine, VERSION):
        warn_damaged(speeds_path(host), "it describes another machine or an older measurement", MEASURED_AGAIN)
        return empty
    if not is_plausible(stored):
        warn_damaged(speeds_path(host), "its figures are impossible", MEASURED_AGAIN)
        return empty
    return msgspec.structs.replace(stored, calibrations=empty.calibrations)


def is_plausible(speeds: Speeds) -> bool:
    """Return True if all figures are possible: a file that was edited by hand, or merged from two, may hold any."""
    figures = [pair.Bps for pair in speeds.pairs if pair.verdict == "works"]
    for gpu in speeds.gpus:
        figures += [gpu.copy_Bps, gpu.from_host_Bps, gpu.to_host_Bps]
    if speeds.cpu:
        figures += _cpu_figures(speeds.cpu)
    return all(0 < figure < float("inf") for figure in figures)


def _cpu_figures(speed: CpuSpeed) -> list[float]:
    figures = [speed.bandwidth_Bps, speed.fp32_flops]
    if speed.kernels:
        figures += [speed.kernels.cache_Bps, speed.kernels.attention_flops, speed.kernels.rows_Bps]
        for product in speed.kernels.products:
            figures += [*product.weights_Bps, product.matmul_flops]
    return figures


def store_speeds(host: Host, speeds: Speeds) -> None:
    """Store the speeds for the next time; on failure warn that they will be measured again."""
    text = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(speeds, calibrations=())))
    try:
        write_cache_file(speeds_path(host), text)
    except (OSError, RuntimeError, WeftError) as error:
        logger.warning(
            "the measurements of this machine cannot be stored, and will be repeated next time: %s",
            error,
            extra=event_fields("measurements-not-stored"),
        )


def cpu_speed_of(host: Host, *, refresh: bool = False) -> CpuSpeed:
    """Speed of this machine's CPU: from the cache, or measured now if it is unknown, which takes about a second.

    It is measured again in any of three cases: with `refresh`; if the machine was busy the last time and no longer is;
    if other kernels have been built since. Raises ConfigError if measuring is impossible.
    """
    speeds = load_speeds(host)
    if speeds.cpu and not refresh and not is_outdated(speeds.cpu):
        return speeds.cpu
    measured = measure_cpu(host)
    # Loaded again: another process may have stored other figures during the measurement.
    store_speeds(host, msgspec.structs.replace(load_speeds(host), cpu=measured))
    return measured


def is_outdated(speed: CpuSpeed) -> bool:
    """Return True if a measurement now would be better: without other processes, or with the kernels that run now.

    The library of kernels is one of three: a path, whose name must be the measured library's; None without a compiler,
    if the measurement had none either; "" if it is not built yet. In the last case a measurement with the kernels of an
    older library is better than none.
    """
    if speed.busy and not is_busy():
        return True
    built = prebuilt.built_library()
    if built == "":
        return not speed.runs_own
    return (built and Path(built).name) != speed.library


def is_busy() -> bool:
    """Return True if other processes have been computing on this machine in the last minute."""
    return cpu.load_average() > BUSY


def measure_cpu(host: Host) -> CpuSpeed:
    """Measure with one thread on each of `host.compute_cores`, and with Weft's kernels if they are built and run.

    Raises ConfigError if that is impossible.
    """
    built = prebuilt.built_library()
    name = built and Path(built).name
    if built:
        try:
            return msgspec.structs.replace(_measure_in_child(host, built), library=name)
        except OSError as error:
            logger.warning("the CPU kernels do not run (%s); delete %s, and they are built again", error, built)
    try:
        return msgspec.structs.replace(_measure_in_child(host, None), library=name)
    except OSError as error:
        raise ConfigError(
            f"cannot measure the CPU of {host.hostname}: {error}; describe the hardware to plan for, as in "
            "--gpus 4xRTX4090 or --gpus FILE.yaml",
            code="cannot-measure-cpu",
        ) from None


def _measure_in_child(host: Host, kernels: str | None) -> CpuSpeed:
    """Measure in a process of its own, since the kernels' library may crash it. Raises OSError on failure."""
    size = max(MIN_READ_BYTES, CACHE_MULTIPLE * cpu.last_cache_bytes())
    size = min(size, host.memory_free_bytes // 4)
    command = [sys.executable, "-P", "-m", "weft.probes.cpu_speed", ",".join(map(str, host.compute_cores)), str(size)]
    command += [kernels] if kernels else []
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **_child_variables(host)},
            capture_output=True,
            timeout=CPU_DEADLINE_S,
            check=True,
        )
        return msgspec.json.decode(done.stdout, type=CpuSpeed)
    except subprocess.TimeoutExpired:
        reason = f"it took more than {CPU_DEADLINE_S:.0f} s"
    except subprocess.CalledProcessError as error:
        status = error.returncode
        exit_words = f"status {status}" if status > 0 else signal.strsignal(-status) or f"signal {-status}"
        reason = (error.stderr.decode(errors="replace").strip().splitlines() or [exit_words])[-1]
    except msgspec.DecodeError as error:
        reason = str(error)
    raise OSError(reason)


def _child_variables(host: Host) -> dict[str, str]:
    """Environment of the measuring process, which starts its own threads: numpy's library adds none."""
    variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # On a CPU that OpenBLAS does not recognise, it falls back to old instructions.
    core_type = openblas_core_type(host.cpu.features if host.cpu else ())
    if core_type:
        variables["OPENBLAS_CORETYPE"] = core_type
    source = str(Path(__file__).parents[2])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    return variables


def openblas_core_type(features: Collection[str]) -> str | None:
    """OPENBLAS_CORETYPE for a CPU with these features; None to let OpenBLAS, numpy's library, choose."""
    core_types = {"avx512f": "SkylakeX", "avx2": "Haswell"}
    return next((core_type for feature, core_type in core_types.items() if feature in features), None)


def fingerprint(host: Host, *versions: object) -> str:
    """Sixteen hexadecimal digits of the host's name, CPU, number of cores that compute, GPUs and driver.

    `versions` are other things that a measurement depends on, such as its own version.
    """
    cpu = host.cpu
    parts = [
        host.hostname,
        cpu and [cpu.model, cpu.sockets, cpu.threads, cpu.features],
        len(host.compute_cores),
        host.driver,
        [[gpu.uuid, gpu.name, gpu.total_bytes] for gpu in host.gpus],
        [str(version) for version in versions],
    ]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]
