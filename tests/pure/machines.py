"""Machines of the tests, and what would run on them."""

from __future__ import annotations

from typing import Any

from tests.pure.shapes import SMOLLM2
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.checkpoint import Checkpoint
from weft.checkpoint.names import catalogue
from weft.config import EngineConfig
from weft.machine.hardware.cpu import CpuSpeed
from weft.machine.hardware.host import Host
from weft.machine.hardware.topology import Gpu
from weft.plan.layout import build_plan, check_config
from weft.plan.plan import Plan
from weft.planner.execution.forecast import Forecast, forecast_plan
from weft.probes.stored_speeds import Speeds

CARDS = {  # memory in MiB, compute capability
    "NVIDIA GeForce RTX 4090": (24564, (8, 9)),
    "NVIDIA GeForce RTX 3090": (24576, (8, 6)),
    "NVIDIA RTX A6000": (49140, (8, 6)),
    "NVIDIA H100 80GB HBM3": (81559, (9, 0)),
    "Tesla T4": (15360, (7, 5)),
}
FOUR, THREE, SIX, H100, T4 = CARDS

NOTHING = Speeds(machine="")
MEASURED = Speeds(machine="", cpu=CpuSpeed(40e9, 0.3e12))


def gpu(index: int, *, free: float = 20e9, capability: tuple[int, int] = (9, 0)) -> Gpu:
    return Gpu(
        index=index, name="H", uuid=f"GPU-{index}", total_bytes=24 * 10**9, free_bytes=int(free), capability=capability
    )


def host(gpus: int | tuple[Gpu, ...] = (), **facts: Any) -> Host:
    defaults: dict[str, Any] = {
        "hostname": "here",
        "cores": (0, 1, 4, 5),
        "memory_total_bytes": 16 * 10**9,
        "memory_free_bytes": 12 * 10**9,
        "gpus": tuple(gpu(n) for n in range(gpus)) if isinstance(gpus, int) else gpus,
        "packages": {"triton": "3.6.0", "flashinfer-python": "0.6.12"},
    }
    return Host(**(defaults | facts))


def plan(where: Host | None = None, shape: ModelShape = SMOLLM2, kind: str = "safetensors", **flags: Any) -> Plan:
    checkpoint = Checkpoint(model="m", path="/models/m", format=kind, shape=shape, generation={})  # type: ignore[arg-type]
    config = EngineConfig(model="m", **flags)
    check_config(config)
    return build_plan(config, checkpoint, where or host())


def rig(*names: str, **facts: Any) -> Host:
    """A machine with those GPUs, none in use."""
    gpus = tuple(
        Gpu(
            index=index,
            name=name,
            uuid=f"GPU-{index}",
            total_bytes=CARDS[name][0] << 20,
            free_bytes=CARDS[name][0] << 20,
            capability=CARDS[name][1],
        )
        for index, name in enumerate(names)
    )
    roomy = {"cores": tuple(range(16)), "memory_total_bytes": 64 << 30, "memory_free_bytes": 60 << 30}
    return host(gpus, **(roomy | facts))


def checkpoint(name: str) -> Checkpoint:
    model = catalogue.find_known(name)
    assert model is not None
    return Checkpoint(model=model.name, path="/models/m", format="dummy", shape=model.shape, generation={})  # type: ignore[arg-type]


def expected(**flags: Any) -> Forecast:
    """Forecast for SmolLM2-135M on a CPU."""
    return forecast_plan(plan(kind="dummy", **flags), host(), MEASURED)
