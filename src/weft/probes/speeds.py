"""Speeds: what was measured on this machine, kept in the cache as long as the machine stays the same."""

from __future__ import annotations

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
from weft.hardware import calibration, cpu
from weft.hardware.calibration import Calibration
from weft.hardware.cpu import CpuSpeed
from weft.hardware.host import Host
from weft.native import library
from weft.probes.fingerprint import fingerprint

logger = logging.getLogger("weft")

VERSION = 2  # of the measurements: grows when what they mean changes
CPU_DEADLINE_S = 20.0  # that what takes a second gets on a machine that is busy with something else
LEAST_BYTES = 256 << 20  # of memory that is read, to be far more than caches hold
CACHES = 8  # times the last level of them
MEASURED_AGAIN = "this machine is measured again"
BUSY = 0.25  # of the cores

# "works": what was copied is what arrived. "broken": it is not, or the copy failed. "hung": it never ended.
Verdict = Literal["works", "broken", "hung"]


class GpuSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, by its UUID: bytes per second that it reads and writes while it copies within its own memory (each byte
    is both), and in which pinned memory of the host reaches it and comes back."""

    gpu: str
    copy_Bps: float
    from_host_Bps: float
    to_host_Bps: float


class PairSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Two GPUs, by their UUIDs. `peer`: they reach each other's memory without the host's. `Bps` is the slower
    direction's bytes per second, 0 unless it works; `detail` says what went wrong."""

    first: str
    second: str
    verdict: Verdict
    peer: bool = False
    Bps: float = 0.0
    detail: str = ""


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """What is known so far. `cpu` None, or no `gpus`: not measured yet. `calibrations` are those of our engine, which
    have a file of their own."""

    machine: str
    version: int = VERSION
    cpu: CpuSpeed | None = None
    gpus: tuple[GpuSpeed, ...] = ()
    pairs: tuple[PairSpeed, ...] = ()
    calibrations: tuple[Calibration, ...] = ()

    def pair(self, first: str, second: str) -> PairSpeed | None:
        """What was found between two GPUs."""
        return next((pair for pair in self.pairs if {pair.first, pair.second} == {first, second}), None)


def path(host: Host) -> Path:
    """Where this machine's speeds are kept."""
    return cache_path() / f"speeds-{fingerprint(host, VERSION)}.json"


def calibrated_machine(host: Host) -> str:
    """The fingerprint that calibrations are kept under: other libraries make it another machine."""
    return fingerprint(host, "calibration", *calibration.versions())


def known(host: Host) -> Speeds:
    """What the cache knows of this machine; nothing where it has no file of it, or a damaged one."""
    nothing = Speeds(machine=fingerprint(host, VERSION), calibrations=calibration.known(calibrated_machine(host)))
    try:
        found = msgspec.json.decode(path(host).read_bytes(), type=Speeds)
    except (OSError, RuntimeError, msgspec.DecodeError) as error:
        if not isinstance(error, FileNotFoundError | RuntimeError):  # RuntimeError: there is no home, and so no cache
            warn_damaged(path(host), str(error), MEASURED_AGAIN)
        return nothing
    if (found.machine, found.version) != (nothing.machine, VERSION) or not sound(found):
        warn_damaged(path(host), "its figures cannot be", MEASURED_AGAIN)
        return nothing
    return msgspec.structs.replace(found, calibrations=nothing.calibrations)


def sound(speeds: Speeds) -> bool:
    """Whether the figures can be: a file that was edited by hand, or half of another one, may hold anything."""
    figures = [speeds.cpu.bandwidth_Bps, speeds.cpu.fp32_flops] if speeds.cpu else []
    if speeds.cpu and (own := speeds.cpu.kernels):
        figures += [own.cache_Bps, own.attention_flops, own.rows_Bps]
        figures += [figure for it in own.products for figure in (*it.weights_Bps, it.matmul_flops)]
    figures += [figure for gpu in speeds.gpus for figure in (gpu.copy_Bps, gpu.from_host_Bps, gpu.to_host_Bps)]
    figures += [pair.Bps for pair in speeds.pairs if pair.verdict == "works"]
    return all(0 < figure < float("inf") for figure in figures)


def keep(host: Host, speeds: Speeds) -> None:
    """Write them down for the next time; where that is not possible they are measured again then."""
    text = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(speeds, calibrations=())))
    try:
        write_cache_file(path(host), text)
    except (OSError, RuntimeError, WeftError) as error:
        logger.warning("what was measured of this machine cannot be kept, and will be measured again: %s", error)


def cpu_speed(host: Host, *, refresh: bool = False) -> CpuSpeed:
    """How fast this machine's CPU is: as the cache knows, or measured now, which takes less than a second; once more
    where the machine was busy then and no longer is, and where the engine's kernels have been built since. Raises
    ConfigError where that is not possible."""
    speeds = known(host)
    if speeds.cpu and not refresh and not outdated(speeds.cpu):
        return speeds.cpu
    measured = measure_cpu(host)
    keep(host, msgspec.structs.replace(known(host), cpu=measured))  # whatever else was found meanwhile
    return measured


def outdated(speed: CpuSpeed) -> bool:
    """Whether it would be measured better now."""
    if speed.busy and not busy():
        return True
    built = library.built_library()
    if built == "":  # what others of our kernels reached tells more than nothing
        return not speed.runs_own
    return (built and Path(built).name) != speed.library


def busy() -> bool:
    """Whether others have been computing here in the last minute."""
    return cpu.load() > BUSY


def measure_cpu(host: Host) -> CpuSpeed:
    """With a thread on each core that computes, and with our own kernels where they are built and run. Raises
    ConfigError where it is not possible."""
    built, reason = library.built_library(), ""
    for kernels in dict.fromkeys((built or None, None)):
        try:
            return msgspec.structs.replace(_measured(host, kernels), library=built and Path(built).name)
        except OSError as error:
            reason = str(error)
        if kernels:
            logger.warning("the CPU kernels do not run (%s); delete %s, and they are built anew", reason, kernels)
    raise ConfigError(
        f"cannot measure the CPU of {host.hostname}: {reason}; describe the hardware that is meant, as in "
        "--gpus 4xRTX4090 or --gpus FILE.yaml"
    )


def _measured(host: Host, kernels: str | None) -> CpuSpeed:
    """In a process of its own, which the library of the kernels may end. Raises OSError where it fails."""
    size = max(LEAST_BYTES, CACHES * cpu.last_cache_bytes())
    size = min(size, host.memory_free_bytes // 4)
    # The threads are ours; the library that multiplies adds none. On a CPU that it does not know it would make do with
    # fewer instructions than there are.
    ours = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    if kind := openblas(host.cpu.features if host.cpu else ()):
        ours["OPENBLAS_CORETYPE"] = kind
    ours["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "weft.probes.cpu_speed", ",".join(map(str, host.computing)), str(size)]
    command += [kernels] if kernels else []
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **ours},
            capture_output=True,
            timeout=CPU_DEADLINE_S,
            check=True,
        )
        return msgspec.json.decode(done.stdout, type=CpuSpeed)
    except subprocess.TimeoutExpired:
        reason = f"it took more than {CPU_DEADLINE_S:.0f} s"
    except subprocess.CalledProcessError as error:
        status = error.returncode
        ended = f"status {status}" if status > 0 else signal.strsignal(-status) or f"signal {-status}"
        reason = (error.stderr.decode(errors="replace").strip().splitlines() or [ended])[-1]
    except msgspec.DecodeError as error:
        reason = str(error)
    raise OSError(reason)


def openblas(features: Collection[str]) -> str | None:
    """What OpenBLAS, which numpy brings, calls CPUs with the largest of these instruction sets; None where it is to
    make its own choice."""
    kinds = {"avx512f": "SkylakeX", "avx2": "Haswell"}
    return next((kind for feature, kind in kinds.items() if feature in features), None)
