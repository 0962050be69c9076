"""Memory caps per device, in accelerate's form: 0=40GB,1=40GiB,cpu=64GB.

As in accelerate, a GPU that is not named is not used. Unlike accelerate's, a cap is for all that lies on a device: the
KV cache and the engine's own memory beside the weights. Units are bytes whatever their case (accelerate's 40gb: bits).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from weft.errors import ConfigError
from weft.hardware.cluster import Cluster
from weft.hardware.quantities import parse_bytes

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
        raise ConfigError(f"--max-memory {device}={value} is no size; write it as 40GB or 40GiB")
    if 0 < size < SMALLEST_CAP:
        raise ConfigError(f"--max-memory {device}={value} is {size} bytes; write it as 40GB or 40GiB, or 0 for none")
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
                raise ConfigError(f"--max-memory names GPU {number} twice")
            gpus[number] = parse_size(value, str(name))
        elif name == "cpu":
            cpu = parse_size(value, "cpu")
        elif name == "disk":
            parse_size(value, "disk")  # nothing is put there
        else:
            raise ConfigError(f"--max-memory names {name!r}, which is no device; write GPUs' numbers and cpu")
    if not max_memory:
        raise ConfigError("--max-memory is empty; write it as 0=40GB,1=40GB")
    return Caps(gpus=gpus, cpu=cpu)


def check_caps(caps: Caps, count: int) -> None:
    """Raise ConfigError if a cap names a GPU beyond the `count` GPUs of this machine, or if no GPU is left."""
    beyond = [number for number in caps.gpus if number >= count]
    if beyond and not count:
        raise ConfigError(f"--max-memory names GPU {beyond[0]}, and there is no GPU; a CPU is capped as in cpu=8GB")
    if beyond:
        available = "there is GPU 0 only" if count == 1 else f"there are GPUs 0 to {count - 1}"
        raise ConfigError(f"--max-memory names GPU {beyond[0]}; {available}")
    if count and not any(caps.gpus.values()):
        raise ConfigError(
            "--max-memory leaves no GPU, for those that it does not name are not used, as with accelerate: add 0=40GB"
        )


def device_caps(
    max_memory: Mapping[int | str, int | str] | None, gpus: int, *, on_cpu: bool, ids: Sequence[int] | None = None
) -> dict[str, int]:
    """Cap in bytes of each device that ranks may run on, by the engine's device name; {} without --max-memory.

    `gpus` is the number of GPUs, `ids` those of --device-ids. Raises ConfigError as `check_caps` does, for one of `ids`
    that is left out, and for caps of GPUs if the ranks run on the CPU.
    """
    if max_memory is None:
        return {}
    caps = parse_max_memory(max_memory)
    if not on_cpu:
        check_caps(caps, gpus)
        for number in ids or ():
            if not caps.gpus.get(number):
                raise ConfigError(f"--device-ids names GPU {number}, which --max-memory leaves out; add {number}=40GB")
        return {f"cuda:{number}": limit for number, limit in sorted(caps.gpus.items()) if limit}
    if caps.gpus:
        raise ConfigError(
            f"--max-memory names GPU {min(caps.gpus)}, and the ranks run on the CPU; that is capped as in cpu=8GB"
        )
    return {} if caps.cpu is None else {"cpu": caps.cpu}


def cap_cluster(cluster: Cluster, caps: Caps) -> Cluster:
    """Set the caps as limits of the cluster's devices; a GPU without a cap gets a limit of 0.

    Raises ConfigError as `check_caps` does.
    """
    devices = cluster.gpus
    gpus = [number for number, device in enumerate(devices) if device.kind == "gpu"]
    check_caps(caps, len(gpus))
    limits = {number: caps.gpus.get(number, 0) for number in gpus}
    if caps.cpu is not None:
        limits |= {number: caps.cpu for number, device in enumerate(devices) if device.kind == "cpu"}
    # A cap above the device's memory is no limit.
    limits = {number: limit for number, limit in limits.items() if limit < devices[number].memory_bytes}
    return cluster.with_gpus(
        [msgspec.structs.replace(device, limit_bytes=limits.get(number)) for number, device in enumerate(devices)]
    )
