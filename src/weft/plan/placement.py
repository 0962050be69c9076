"""--device-map: its layers per stage and devices, checked against the other flags that cut a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from weft.checkpoint.architectures.modules import PipelineUnit
from weft.checkpoint.architectures.place import Span, whole
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.quantised.precision import weight_bytes
from weft.config import DeviceMap, EngineConfig
from weft.errors import ConfigError
from weft.formatting import join_commas
from weft.machine.hardware.host import Host
from weft.plan import max_memory
from weft.plan.device_map import SPREADS, AvailableDevices, Spread, Stages, map_to_stages
from weft.plan.parallelism import asked_parallelism


def spread_word(device_map: DeviceMap) -> Spread | None:
    """The strategy given instead of a map ("auto", "balanced", ...); None for a map or a device."""
    return next((word for word in SPREADS if word == device_map), None)


def module_devices(device_map: DeviceMap) -> Mapping[str, Any]:
    """Device of each module; a device alone is for the whole model. Raises ConfigError for another word."""
    if not isinstance(device_map, str):
        return device_map
    is_device = device_map.isdigit() or device_map in ("cpu", "disk") or device_map.startswith("cuda")
    if not is_device:
        raise ConfigError(
            f"--device-map {device_map} is none of {', '.join(SPREADS)}, no device and no file",
            code="unknown-device-map",
        )
    return {"": device_map}


def check_flags(device_map: DeviceMap, flags: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first of `flags` (by field name) that contradicts every device map."""
    _check_tensor_flags(flags)
    if flags.get("device_ids") is not None:
        raise ConfigError(
            "--device-map says on which GPU each stage runs, and so does --device-ids: leave one out",
            code="device-map-beside-device-ids",
        )
    if spread_word(device_map):
        for name in ("pipeline_split", "pipeline_parallel_size"):
            if flags.get(name) is not None:
                raise ConfigError(
                    f"--device-map {device_map} makes the stages itself, of the GPUs that --max-memory names or of "
                    f"all: leave --{name.replace('_', '-')} out",
                    code="device-map-makes-stages",
                )


def _check_tensor_flags(flags: Mapping[str, Any]) -> None:
    """Raise ConfigError for a flag that cuts layers, deals out experts or copies the model."""
    cut, other = asked_parallelism(flags), None
    if len(cut.tensor_split) > 1:
        other = f"--tensor-split {join_commas(cut.tensor_split)} cuts each layer among several"
    elif cut.tensor_parallel > 1:
        other = f"--tensor-parallel-size {cut.tensor_parallel} cuts each layer among several"
    elif cut.deals_experts:
        sharing = f" of {cut.groups} attention groups (--data-parallel-size)" if cut.shares_experts else ""
        other = f"--enable-expert-parallel deals the experts of each layer out to all ranks{sharing}"
    elif cut.data_parallel > 1:
        other = f"--data-parallel-size {cut.data_parallel} makes copies of the whole model"
    if other is not None:
        raise ConfigError(
            f"--device-map puts whole layers on one device each, once; {other}: leave one of them out",
            code="device-map-beside-other-cut",
        )


def check_stages(stages: Stages, flags: Mapping[str, Any]) -> None:
    """Raise ConfigError if `flags` (by field name) divide the layers otherwise than the device map does."""
    cut = asked_parallelism(flags)
    if cut.pipeline_split and cut.pipeline_split != stages.layers:
        raise ConfigError(
            f"--pipeline-split {join_commas(cut.pipeline_split)} contradicts --device-map, which makes it "
            f"{join_commas(stages.layers)}: leave one of them out",
            code="device-map-contradicts-split",
        )
    if cut.pipeline_parallel not in (0, len(stages.layers)):
        raise ConfigError(
            f"--pipeline-parallel-size {cut.pipeline_parallel} contradicts --device-map, which makes "
            f"{len(stages.layers)} {'stage' if len(stages.layers) == 1 else 'stages'} "
            f"({join_commas(stages.layers)} layers): leave one of them out",
            code="device-map-contradicts-stages",
        )


def apply_device_map(config: EngineConfig, shape: ModelShape, host: Host, precision: str) -> EngineConfig:
    """Replace the config's device map by the layers per stage and the devices that it gives this model.

    A strategy instead of a map is left to the planner's search, except without GPUs: then all layers are on the CPU.
    `precision` is the weights', for the sizes in messages. Raises ConfigError for a map that is no pipeline of the
    model on this machine.
    """
    if config.device_map is None:
        return config
    gpus = () if config.device == "cpu" else tuple(gpu.index for gpu in host.gpus)
    if spread_word(config.device_map):
        if gpus:
            return config
        return replace(config, device_map=None, device="cpu", pipeline_split=(len(shape.layers),))
    available = _available_devices(config, gpus, lambda unit: unit_bytes(shape, precision, unit))
    stages = map_to_stages(shape, module_devices(config.device_map), available)
    check_stages(stages, vars(config))
    return _config_of_stages(config, stages)


def _config_of_stages(config: EngineConfig, stages: Stages) -> EngineConfig:
    """The config with these stages in place of its device map."""
    config = replace(config, device_map=None, pipeline_split=stages.layers)
    ids: tuple[int | Literal["cpu"], ...] = tuple(
        device if isinstance(device, int) else "cpu" for device in stages.devices
    )
    if any(device != "cpu" for device in ids):
        return replace(config, device="cuda", device_ids=ids)
    if config.device == "cuda":
        raise ConfigError(
            "--device-map puts the whole model on cpu, and --device is cuda: leave one of them out",
            code="device-map-on-cpu-with-cuda",
        )
    return replace(config, device="cpu", device_ids=None)


def _available_devices(
    config: EngineConfig, gpus: Sequence[int], nbytes: Callable[[PipelineUnit], int]
) -> AvailableDevices:
    """The GPUs that --max-memory leaves for a device map; all of them without --max-memory."""
    caps = max_memory.parse_max_memory(config.max_memory) if config.max_memory else None
    left_out = [number for number in gpus if caps and not caps.gpus.get(number)]
    return AvailableDevices(
        gpus=[number for number in gpus if number not in left_out], left_out=left_out, nbytes=nbytes
    )


def unit_bytes(shape: ModelShape, precision: str, unit: PipelineUnit) -> int:
    """Bytes of a part of the model as stored in this precision.

    The final norm counts with the head, and a tied head with the embedding.
    """
    if unit.kind == "norm" or (unit.kind == "head" and shape.tied):
        return 0
    layers = Span(0, 0) if unit.layer is None else Span(unit.layer, unit.layer + 1)
    stage, stages = {"embedding": (0, 2), "layer": (1, 3), "head": (1, 2)}[unit.kind]
    place = msgspec.structs.replace(whole(shape), layers=layers, stage=stage, stages=stages)
    return weight_bytes(shape, precision, place)
