"""Max memory: how much of each device may be taken, in accelerate's form: 0=40GB,1=40GiB,cpu=64GB.

As with accelerate a GPU that is not named is not used. Unlike accelerate's a cap is for all that lies on a device,
the KV cache and the engine's own beside the weights; and a unit is of bytes whatever its case (there 40gb are bits).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from weft.errors import ConfigError
from weft.hardware.cluster import Cluster
from weft.hardware.quantities import parse_bytes

LEAST = 1 << 20  # bytes; what is smaller, and not 0, lacks its unit

_GPU = re.compile(r"(?:cuda:)?(\d+)")


class Caps(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by GPU number, of all that may be used, and of the host's memory; None where nobody says it."""

    gpus: dict[int, int]
    cpu: int | None = None


def size(said: object, device: str) -> int:
    """Bytes, as `hardware.quantities` reads them. Raises ConfigError for what is no size, or has lost its unit."""
    found = parse_bytes(said)
    if found is None:
        raise ConfigError(f"--max-memory {device}={said} is no size; write it as 40GB or 40GiB")
    if 0 < found < LEAST:
        raise ConfigError(f"--max-memory {device}={said} is {found} bytes; write it as 40GB or 40GiB, or 0 for none")
    return found


def read(said: Mapping[int | str, int | str]) -> Caps:
    """The caps as they were said. Raises ConfigError for what is no device, twice the same, or no size."""
    gpus: dict[int, int] = {}
    cpu: int | None = None
    for name, value in said.items():
        match = _GPU.fullmatch(str(name))
        if match:
            number = int(match[1])
            if number in gpus:
                raise ConfigError(f"--max-memory names GPU {number} twice")
            gpus[number] = size(value, str(name))
        elif name == "cpu":
            cpu = size(value, "cpu")
        elif name == "disk":
            size(value, "disk")  # nothing is put there
        else:
            raise ConfigError(f"--max-memory names {name!r}, which is no device; write GPUs' numbers and cpu")
    if not said:
        raise ConfigError("--max-memory is empty; write it as 0=40GB,1=40GB")
    return Caps(gpus=gpus, cpu=cpu)


def check(caps: Caps, count: int) -> None:
    """Raises ConfigError where a GPU is capped that is not among the `count` there are, or none is left."""
    beyond = [number for number in caps.gpus if number >= count]
    if beyond and not count:
        raise ConfigError(f"--max-memory names GPU {beyond[0]}, and there is no GPU; a CPU is capped as in cpu=8GB")
    if beyond:
        there = "there is GPU 0 only" if count == 1 else f"there are GPUs 0 to {count - 1}"
        raise ConfigError(f"--max-memory names GPU {beyond[0]}; {there}")
    if count and not any(caps.gpus.values()):
        raise ConfigError(
            "--max-memory leaves no GPU, for those that it does not name are not used, as with accelerate: add 0=40GB"
        )


def of_devices(
    said: Mapping[int | str, int | str] | None, gpus: int, *, on_cpu: bool, ids: Sequence[int] | None = None
) -> dict[str, int]:
    """Bytes of each device that ranks may run on, by the engine's name of it; empty where nobody says it. Raises
    ConfigError as `check` does, for one of `ids` that is left out, and for GPUs where the ranks run on the CPU."""
    if said is None:
        return {}
    caps = read(said)
    if not on_cpu:
        check(caps, gpus)
        for number in (number for number in ids or () if not caps.gpus.get(number)):
            raise ConfigError(f"--device-ids names GPU {number}, which --max-memory leaves out; add {number}=40GB")
        return {f"cuda:{number}": limit for number, limit in sorted(caps.gpus.items()) if limit}
    if caps.gpus:
        raise ConfigError(
            f"--max-memory names GPU {min(caps.gpus)}, and the ranks run on the CPU; that is capped as in cpu=8GB"
        )
    return {} if caps.cpu is None else {"cpu": caps.cpu}


def capped(cluster: Cluster, caps: Caps) -> Cluster:
    """The cluster with no more of each GPU than may be taken; those that are not named give nothing. Raises
    ConfigError as `check` does."""
    flat = cluster.gpus
    numbers = [number for number, gpu in enumerate(flat) if gpu.kind == "gpu"]
    check(caps, len(numbers))
    limits = {number: caps.gpus.get(number, 0) for number in numbers}
    if caps.cpu is not None:
        limits |= {number: caps.cpu for number, gpu in enumerate(flat) if gpu.kind == "cpu"}
    # More than there is says nothing.
    limits = {number: limit for number, limit in limits.items() if limit < flat[number].memory_bytes}
    return cluster.with_gpus(
        [msgspec.structs.replace(gpu, limit_bytes=limits.get(number)) for number, gpu in enumerate(flat)]
    )
