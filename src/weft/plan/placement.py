"""Placement: what --device-map comes to, beside the other flags that say how to cut a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from weft.architectures.modules import Unit
from weft.architectures.place import Span, whole
from weft.architectures.shape import ModelShape
from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.formats.precision import weight_bytes
from weft.formatting import join_commas
from weft.hardware.host import Host
from weft.plan import max_memory
from weft.plan.device_map import SPREADS, Room, Spread, Stages, pipeline

DeviceMap = str | Mapping[str, Any]


def spread_of(device_map: DeviceMap) -> Spread | None:
    """The word that it is, in place of a map."""
    return next((word for word in SPREADS if word == device_map), None)


def modules_of(device_map: DeviceMap) -> Mapping[str, Any]:
    """The map that it is; a device is one for the whole model. Raises ConfigError for another word."""
    if not isinstance(device_map, str):
        return device_map
    plain = device_map.isdigit() or device_map in ("cpu", "disk") or device_map.startswith("cuda")
    if not plain:
        raise ConfigError(f"--device-map {device_map} is none of {', '.join(SPREADS)}, no device and no file")
    return {"": device_map}


def check_flags(device_map: DeviceMap, said: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first flag that contradicts any map. `said` has flags by their fields' names."""
    tensor, replicas = said.get("tensor_parallel_size") or 1, said.get("data_parallel_size") or 1
    if said.get("tensor_split") and len(said["tensor_split"]) > 1:
        raise ConfigError(_both(f"--tensor-split {join_commas(said['tensor_split'])} cuts each layer among several"))
    if tensor > 1:
        raise ConfigError(_both(f"--tensor-parallel-size {tensor} cuts each layer among several"))
    if replicas > 1:
        raise ConfigError(_both(f"--data-parallel-size {replicas} makes copies of the whole model"))
    if said.get("enable_expert_parallel"):
        raise ConfigError(_both("--enable-expert-parallel deals the experts of each layer out to several"))
    if said.get("device_ids") is not None:
        raise ConfigError("--device-map says on which GPU each stage runs, and so does --device-ids: leave one out")
    if spread_of(device_map):
        for name in ("pipeline_split", "pipeline_parallel_size"):
            if said.get(name) is not None:
                raise ConfigError(
                    f"--device-map {device_map} makes the stages itself, of the GPUs that --max-memory names or of "
                    f"all: leave --{name.replace('_', '-')} out"
                )


def _both(other: str) -> str:
    return f"--device-map puts whole layers on one device each, once; {other}: leave one of them out"


def check_stages(stages: Stages, said: Mapping[str, Any]) -> None:
    """Raises ConfigError where other flags divide the layers in another way than the map."""
    layers, sizes = said.get("pipeline_split"), said.get("pipeline_parallel_size")
    if layers is not None and tuple(layers) != stages.layers:
        raise ConfigError(
            f"--pipeline-split {join_commas(layers)} contradicts --device-map, which makes it "
            f"{join_commas(stages.layers)}: leave one of them out"
        )
    if sizes is not None and sizes != len(stages.layers):
        raise ConfigError(
            f"--pipeline-parallel-size {sizes} contradicts --device-map, which makes {len(stages.layers)} "
            f"{'stage' if len(stages.layers) == 1 else 'stages'} ({join_commas(stages.layers)} layers): leave one of "
            "them out"
        )


def placed(config: EngineConfig, shape: ModelShape, host: Host, precision: str) -> EngineConfig:
    """The config with the layers per stage and the devices that its device map comes to in this model; a word for a
    map is left to the search, but where there is only a CPU to spread over. `precision` is what it weighs it in.

    Raises ConfigError for a map that is no pipeline of the model on this machine.
    """
    if config.device_map is None:
        return config
    caps = max_memory.read(config.max_memory) if config.max_memory else None
    there = () if config.device == "cpu" else tuple(gpu.index for gpu in host.gpus)
    if spread_of(config.device_map):
        if there:
            return config
        return replace(config, device_map=None, device="cpu", pipeline_split=(shape.layers,))
    left_out = [number for number in there if caps and not caps.gpus.get(number)]
    room = Room(
        gpus=[number for number in there if number not in left_out],
        left_out=left_out,
        nbytes=lambda unit: unit_bytes(shape, precision, unit),
    )
    stages = pipeline(shape, modules_of(config.device_map), room)
    check_stages(stages, vars(config))
    numbers = tuple(it for it in stages.devices if isinstance(it, int))
    if not numbers and config.device == "cuda":
        raise ConfigError("--device-map puts the whole model on cpu, and --device is cuda: leave one of them out")
    return replace(
        config,
        device_map=None,
        device="cuda" if numbers else "cpu",
        device_ids=numbers or None,
        pipeline_split=stages.layers,
    )


def unit_bytes(shape: ModelShape, precision: str, unit: Unit) -> int:
    """Bytes of a part of the model as it is stored in this precision; the last norm counts with the head, and a tied
    head with the embedding."""
    if unit.kind == "norm" or (unit.kind == "head" and shape.tied):
        return 0
    layers = Span(0, 0) if unit.layer is None else Span(unit.layer, unit.layer + 1)
    stage, stages = {"embedding": (0, 2), "layer": (1, 3), "head": (1, 2)}[unit.kind]
    place = msgspec.structs.replace(whole(shape), layers=layers, stage=stage, stages=stages)
    return weight_bytes(shape, precision, place)
