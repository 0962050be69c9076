"""Memory caps per device, in accelerate's form: 0=40GB,1=40GiB,cpu=64GB.

As in accelerate, a GPU that is not named is not used. Unlike accelerate's, a cap is for all that lies on a device:
besides the weights, the KV cache and the engine's own memory. Units are bytes whatever their case (accelerate's 40gb:
bits).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from weft.errors import ConfigError
from weft.machine.hardware.cluster import Cluster
from weft.machine.hardware.quantities import parse_bytes

SMALLEST_CAP = 1 << 20  # bytes; a smaller cap that is not 0 lacks its unit

_GPU = re.compile(r"(?:cuda:)?(\d+)")


class Caps(msgspec.Struct, frozen=True, kw_only=True):
    """Caps in bytes: of each named GPU, by its number, and of the host's memory (None: no cap)."""

    gpus: dict[int, int]
    cpu: int | None = None


def parse_size(value: object, device: str) -> int:
    """Parse a cap into bytes. Raises ConfigError for a value that is no size, or that lacks its unit."""
    size = parse_bytes(value)
    if size is None:
        raise ConfigError(
            f"--max-memory {device}={value} is no size; write it as 40GB or 40GiB", code="bad-memory-size"
        )
    if 0 < size < SMALLEST_CAP:
        raise ConfigError(
            f"--max-memory {device}={value} is {size} bytes; write it as 40GB or 40GiB, or 0 for none",
            code="memory-size-out-of-range",
        )
    return size


def parse_max_memory(max_memory: Mapping[int | str, int | str]) -> Caps:
    """Parse the user's caps. Raises ConfigError for an unknown device, a repeated GPU, or a value that is no size."""
    gpus: dict[int, int] = {}
    cpu: int | None = None
    for name, value in max_memory.items():
        match = _GPU.fullmatch(str(name))
        if match:
            number = int(match[1])
            if number in gpus:
                raise ConfigError(f"--max-memory names GPU {number} twice", code="max-memory-gpu-twice")
            gpus[number] = parse_size(value, str(name))
        elif name == "cpu":
            cpu = parse_size(value, "cpu")
        elif name == "disk":
            parse_size(value, "disk")  # nothing is put there
        else:
            raise ConfigError(
                f"--max-memory names {name!r}, which is no device; write GPUs' numbers and cpu",
                code="max-memory-unknown-device",
            )
    if not max_memory:
        raise ConfigError("--max-memory is empty; write it as 0=40GB,1=40GB", code="empty-max-memory")
    return Caps(gpus=gpus, cpu=cpu)


def check_caps(caps: Caps, count: int) -> None:
    """Raise ConfigError if a cap names a GPU beyond the `count` GPUs of this machine, or if no GPU is left."""
    beyond = [number for number in caps.gpus if number >= count]
    if beyond and not count:
        raise ConfigError(
            f"--max-memory names GPU {beyond[0]}, and there is no GPU; a CPU is capped as in cpu=8GB",
            code="max-memory-without-gpu",
        )
    if beyond:
        available = "there is GPU 0 only" if count == 1 else f"there are GPUs 0 to {count - 1}"
        raise ConfigError(f"--max-memory names GPU {beyond[0]}; {available}", code="max-memory-beyond-gpus")
    if count and not any(caps.gpus.values()):
        raise ConfigError(
            "--max-memory leaves no GPU: GPUs that it does not name are not used, as with accelerate; add 0=40GB",
            code="max-memory-leaves-no-gpu",
        )


def device_caps(
    max_memory: Mapping[int | str, int | str] | None, gpus: int, *, on_cpu: bool, ids: Sequence[int | str] | None = None
) -> dict[str, int]:
    """Cap in bytes of each device that ranks may run on, by the engine's device name; {} without --max-memory.

    `gpus` is the number of GPUs, `ids` the value of --device-ids, which may name the CPU too. Raises ConfigError as
    `check_caps` does, for a device in `ids` that is left out, and for caps of GPUs if the ranks run on the CPU.
    """
    if max_memory is None:
        return {}
    caps = parse_max_memory(max_memory)
    if not on_cpu:
        check_caps(caps, gpus)
        _check_device_ids(caps, ids or ())
        cpu_cap = {"cpu": caps.cpu} if caps.cpu is not None and "cpu" in (ids or ()) else {}
        return {f"cuda:{number}": limit for number, limit in sorted(caps.gpus.items()) if limit} | cpu_cap
    if caps.gpus:
        raise ConfigError(
            f"--max-memory names GPU {min(caps.gpus)}, and the ranks run on the CPU; that is capped as in cpu=8GB",
            code="max-memory-gpu-on-cpu",
        )
    return {} if caps.cpu is None else {"cpu": caps.cpu}


def _check_device_ids(caps: Caps, ids: Sequence[int | str]) -> None:
    for number in ids:
        if isinstance(number, int) and not caps.gpus.get(number):
            raise ConfigError(
                f"--device-ids names GPU {number}, which --max-memory leaves out; add {number}=40GB",
                code="device-ids-outside-max-memory",
            )


def cap_cluster(cluster: Cluster, caps: Caps) -> Cluster:
    """Set the caps as limits of the cluster's devices; a GPU without a cap gets a limit of 0. If there are GPUs, a CPU
    without a cap is as if it were not there.

    Raises ConfigError as `check_caps` does.
    """
    check_caps(caps, sum(device.kind == "gpu" for device in cluster.gpus))
    capped = []
    for number, device in enumerate(cluster.gpus):
        limit = caps.gpus.get(number, 0) if device.kind == "gpu" else caps.cpu
        if limit is not None and limit >= device.memory_bytes:
            limit = None  # a cap above the device's memory is no limit
        capped.append(msgspec.structs.replace(device, limit_bytes=limit))
    cpu = msgspec.structs.replace(cluster.cpu, limit_bytes=caps.cpu) if cluster.cpu and caps.cpu else None
    return msgspec.structs.replace(cluster.with_gpus(capped), cpu=cpu)
