"""Devices and CPU cores of each rank, and each rank's share of its GPU's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from weft.config import EngineConfig
from weft.errors import ConfigError, PlanError
from weft.machine.hardware.host import Host
from weft.plan.max_memory import device_caps
from weft.plan.parallelism import Parallelism
from weft.plan.split import split


def device_kind(config: EngineConfig, host: Host) -> str:
    """Kind of the devices that ranks run on: "cuda" or "cpu". Raises ConfigError for cuda without a GPU."""
    if config.device == "cuda" and not host.gpus:
        raise ConfigError(
            "device is cuda, but no GPU is visible here; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device "
            "cpu",
            code="no-gpu-visible",
        )
    if config.device == "auto":
        return "cuda" if host.gpus else "cpu"
    return config.device


class RankDevices(NamedTuple):
    """The kind of a plan's devices, the device of each rank ("cpu" or "cuda:N"), and the cap of each device in bytes.

    Only capped devices are used if --max-memory gives caps.
    """

    kind: str
    names: tuple[str, ...]
    caps: dict[str, int]


def choose_devices(config: EngineConfig, host: Host, cut: Parallelism) -> RankDevices:
    """The devices of the ranks of an engine.

    `device_ids` may name a GPU twice: the ranks on it then share its memory. Besides GPUs it may name the CPU for whole
    stages of a pipeline. Raises ConfigError for wrong device_ids, PlanError for too few GPUs.
    """
    kind = device_kind(config, host)
    caps = device_caps(config.max_memory, len(host.gpus), on_cpu=kind == "cpu", ids=config.device_ids)
    names = _device_names(config, host, kind, cut.engine_ranks, caps)
    _check_beside_cpu(names, cut.pipeline_parallel)
    return RankDevices(kind, names, caps)


def _device_names(config: EngineConfig, host: Host, kind: str, ranks: int, caps: Mapping[str, int]) -> tuple[str, ...]:
    if kind == "cpu":
        if config.device_ids is not None:
            raise ConfigError(
                f"device_ids {','.join(map(str, config.device_ids))} names GPUs, but the ranks run on the CPU; leave "
                "it out",
                code="device-ids-on-cpu",
            )
        return ("cpu",) * ranks
    visible = len(host.gpus)
    ids = _default_gpus(host, ranks, caps) if config.device_ids is None else config.device_ids
    if len(ids) != ranks:
        raise ConfigError(
            f"device_ids names {len(ids)} GPUs for {ranks} {'rank' if ranks == 1 else 'ranks'}; give one per rank, or "
            "set --tensor-parallel-size and --pipeline-parallel-size to match",
            code="device-ids-not-per-rank",
        )
    for number in ids:
        if number != "cpu" and not 0 <= number < visible:
            raise ConfigError(
                f"device_ids names GPU {number}; visible here are 0 to {visible - 1}", code="device-ids-beyond-gpus"
            )
    return tuple("cpu" if number == "cpu" else f"cuda:{number}" for number in ids)


def _check_beside_cpu(devices: Sequence[str], stages: int) -> None:
    """Raise ConfigError unless a CPU that is used with GPUs has whole stages of one pipeline."""
    if len(set(devices)) > 1 and "cpu" in devices and len(devices) != stages:
        raise ConfigError(
            f"a CPU that is used with GPUs takes whole layers, a stage of one pipeline, and {len(devices)} ranks in "
            f"{stages} {'stage' if stages == 1 else 'stages'} share layers or experts: leave tensor, data and expert "
            "parallelism out, or the CPU",
            code="cpu-beside-other-cut",
        )


def _default_gpus(host: Host, ranks: int, caps: Mapping[str, int]) -> tuple[int, ...]:
    """The first GPUs, or the first that --max-memory names. Raises PlanError if there are fewer than ranks."""
    visible = len(host.gpus)
    if ranks > visible:
        raise PlanError(
            f"{ranks} ranks need {ranks} GPUs and {visible} {'is' if visible == 1 else 'are'} visible; lower "
            "--tensor-parallel-size or --pipeline-parallel-size, use --device cpu, or let ranks share a GPU "
            f"with --device-ids {','.join(str(n % visible) for n in range(ranks))}",
            code="more-ranks-than-gpus",
        )
    ids = tuple(gpu.index for gpu in host.gpus_of(caps))[:ranks] if caps else tuple(range(ranks))
    if len(ids) < ranks:
        raise PlanError(
            f"{ranks} ranks need {ranks} GPUs and --max-memory leaves {len(ids)}; name more there, or lower "
            "--tensor-parallel-size or --pipeline-parallel-size",
            code="max-memory-leaves-too-few-gpus",
        )
    return ids


def rank_cores(host: Host, devices: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """CPU numbers of each rank: this host's cores divided among its ranks, neighbours together.

    If other ranks run on the CPU, a rank on a GPU gets one core. With more ranks than cores, each rank gets one core in
    turn. OMP_NUM_THREADS limits a rank's threads and not its cores: otherwise engines side by side would all be bound
    to the first few.
    """
    cores, ranks = host.cores, len(devices)
    if ranks > len(cores):
        return tuple((cores[rank % len(cores)],) for rank in range(ranks))
    if len(set(devices)) > 1 and "cpu" in devices:
        computing = devices.count("cpu")
        shares = iter(split(len(cores) - (ranks - computing), [1.0] * computing, minimum=1))
        counts = [len(next(shares)) if device == "cpu" else 1 for device in devices]
    else:
        counts = [len(part) for part in split(len(cores), [1.0] * ranks, minimum=1)]
    ends = list(accumulate(counts, initial=0))
    return tuple(cores[start:end] for start, end in pairwise(ends))


def rank_uuids(host: Host, devices: Sequence[str]) -> tuple[str, ...]:
    """The driver's id of each rank's GPU, "" for ranks on the CPU; () if no rank has a GPU."""
    uuids = {f"cuda:{gpu.index}": gpu.uuid for gpu in host.gpus}
    return tuple(uuids.get(name, "") for name in devices) if set(devices) != {"cpu"} else ()


def utilization(shares: tuple[float, ...], host: Host, devices: RankDevices) -> tuple[float, ...]:
    """Share of its GPU's memory that each rank may use, at most the GPU's cap; `shares` are the user's."""
    ranks = len(devices.names)
    if len(shares) not in (1, ranks):
        raise ConfigError(
            f"gpu_memory_utilization has {len(shares)} values for {ranks} {'rank' if ranks == 1 else 'ranks'}; give "
            "one, or one per rank",
            code="utilization-not-per-rank",
        )
    per_rank = shares * ranks if len(shares) == 1 else shares
    totals = {f"cuda:{gpu.index}": gpu.total_bytes for gpu in host.gpus}
    capped = {name: size / totals[name] for name, size in devices.caps.items() if name in totals}
    return tuple(min(share, capped.get(name, 1.0)) for share, name in zip(per_rank, devices.names, strict=True))
