"""Device maps: Transformers' map from modules to devices, and the pipeline that a map describes.

A map gives each module, by its name, a device: a GPU's number, "cuda:1", "cpu" or "disk". The innermost module around a
tensor counts; "" is the whole model. Instead of a map, one of Transformers' strategies in SPREADS may be given;
`planner.search.balance` carries that out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import Literal, get_args

import msgspec

from weft.checkpoint.architectures.modules import (
    EXPERT,
    PipelineUnit,
    enclosing_modules,
    generic_name,
    holds_weights,
    module_names,
    pipeline_units,
)
from weft.checkpoint.architectures.shape import ModelShape
from weft.errors import ConfigError
from weft.formatting import format_bytes

Spread = Literal["auto", "balanced", "balanced_low_0", "sequential"]
SPREADS: tuple[Spread, ...] = get_args(Spread)
OffGpu = Literal["cpu", "disk"]
OFF_GPU: tuple[OffGpu, ...] = get_args(OffGpu)
Device = int | OffGpu
Placed = tuple[PipelineUnit, Device]

DISK_BPS = 3e9  # bytes per second of an NVMe disk on PCIe 3.0 x4, read in sequence: its four lanes have 3.9 GB/s

_LISTED = 4  # names in a message before "and N more"
_CUDA = re.compile(r"(?:cuda(?::(?P<number>\d+))?|(?P<bare>\d+))")


class Stages(msgspec.Struct, frozen=True):
    """The pipeline of a map: the device of each stage, and its number of layers."""

    devices: tuple[Device, ...]
    layers: tuple[int, ...]


class AvailableDevices(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that a map may use, and the sizes for its error messages.

    - `gpus`: numbers of the GPUs that may be used; `left_out`: GPUs that --max-memory leaves out.
    - `nbytes`: bytes of a part of the model as it is to be stored.
    """

    gpus: Collection[int]
    nbytes: Callable[[PipelineUnit], int]
    left_out: Collection[int] = ()


def parse_device(value: object, about: str = "the model") -> Device:
    """Parse a device as people and Transformers write it. Raises ConfigError that names the module, `about`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        match = _CUDA.fullmatch(value)
        if match:
            return int(match["number"] or match["bare"] or 0)
        for device in OFF_GPU:
            if value == device:
                return device
    raise ConfigError(
        f"--device-map puts {about} on {value!r}, which is no device; write a GPU's number as in 0 or cuda:0, or cpu",
        code="bad-device-in-map",
    )


def map_to_stages(shape: ModelShape, device_map: Mapping[str, object], available: AvailableDevices) -> Stages:
    """Turn a device map into the pipeline that it describes.

    Raises ConfigError, in one line, for a map that leaves a part out, splits a layer, names an unknown module or
    device, or puts parts on disk. Whole layers may be on cpu while the others are on GPUs.
    """
    devices = {module: parse_device(value, _label(module)) for module, value in device_map.items()}
    if not devices:
        raise ConfigError(
            '--device-map is empty; give every module a device, or the whole model one: {"": 0}',
            code="empty-device-map",
        )
    _check_modules(shape, devices)
    _check_devices(devices, available)
    placed = _place_units(shape, devices)
    _check_disk(placed, available)
    _check_ends(shape, placed)
    layers = [device for unit, device in placed if unit.kind == "layer"]
    runs = [(device, len(list(run))) for device, run in groupby(layers)]
    return Stages(tuple(device for device, _ in runs), tuple(count for _, count in runs))


def _check_modules(shape: ModelShape, devices: Mapping[str, Device]) -> None:
    for module in devices:
        if module and holds_weights(shape, module) is None:
            hint = _suggestion(shape, module)
            raise ConfigError(
                f"--device-map names {module!r}, which is no module of this model{hint}", code="unknown-module-in-map"
            )


def _suggestion(shape: ModelShape, module: str) -> str:
    """End of a message about an unknown module: the model's layers, or the nearest name."""
    units = pipeline_units(shape)
    layers = [unit.name for unit in units if unit.kind == "layer"]
    prefix = layers[0].rpartition(".")[0]
    beyond = re.match(rf"{re.escape(prefix)}\.(\d+)(?=\.|$)", module)
    if beyond and int(beyond[1]) >= len(layers):
        return f"; its layers are {layers[0]} to {layers[-1]}"
    # One number is as good as another: names are compared with "#" for each number, which is then put back.
    known = {re.sub(r"\d+", "#", name): name for name in module_names(shape) if EXPERT not in name}
    match = get_close_matches(re.sub(r"\d+", "#", module), known, n=1, cutoff=0.5)
    if not match:
        return f"; it has {layers[0]} to {layers[-1]}, {units[0].name}, {units[-1].name}"
    numbers = iter(re.findall(r"\d+", module))
    name = re.sub("#", lambda _: next(numbers, "0"), match[0])
    return f"; did you mean {name if holds_weights(shape, name) else known[match[0]]!r}?"


def _check_devices(devices: Mapping[str, Device], available: AvailableDevices) -> None:
    for module, device in devices.items():
        if not isinstance(device, int) or device in available.gpus:
            continue
        puts = f"--device-map puts {_label(module)} on GPU {device}"
        if not available.gpus:
            raise ConfigError(f"{puts}, and there is no GPU; put it on cpu", code="map-without-gpu")
        if device in available.left_out:
            raise ConfigError(
                f"{puts}, which --max-memory leaves out: add {device}=40GB", code="map-outside-max-memory"
            )
        raise ConfigError(f"{puts}; there {_listed_gpus(sorted(available.gpus))}", code="map-beyond-gpus")


def _listed_gpus(gpus: Sequence[int]) -> str:
    if len(gpus) == 1:
        return f"is GPU {gpus[0]} only"
    if list(gpus) == list(range(gpus[0], gpus[-1] + 1)):
        return f"are GPUs {gpus[0]} to {gpus[-1]}"
    return f"are GPUs {', '.join(map(str, gpus))}"


def _place_units(shape: ModelShape, devices: Mapping[str, Device]) -> list[Placed]:
    """Give each unit of the model its device. A tied head that the map does not name goes with the final norm."""
    expert_lists = _named_expert_lists(shape, devices)
    placed: list[Placed] = []
    left_out: list[str] = []  # parts without a device
    for unit in pipeline_units(shape):
        by_device, missing = _unit_tensors(shape, unit, devices, expert_lists)
        if len(by_device) > 1:
            raise _split_error(unit, by_device)
        placed += [(unit, device) for device in by_device]
        if not missing:
            continue
        if placed and _is_unnamed_tied_head(shape, unit, by_device):
            placed.append((unit, placed[-1][1]))
        else:
            left_out += _parts_left_out(unit, by_device, missing)
    if left_out:
        raise ConfigError(
            f'--device-map leaves out {_listed(left_out)}; give every module a device, or "" one, which is for all '
            "that is not named",
            code="map-leaves-modules-out",
        )
    return placed


def _named_expert_lists(shape: ModelShape, devices: Mapping[str, Device]) -> set[str]:
    """Modules that hold a list of experts of which the map names single ones; only these lists are looked at expert by
    expert."""
    return {module[: module.rindex(".experts.")] for module in devices if generic_name(shape, module) != module}


def _unit_tensors(
    shape: ModelShape, unit: PipelineUnit, devices: Mapping[str, Device], expert_lists: Collection[str]
) -> tuple[dict[Device, list[str]], list[str]]:
    """The unit's tensors on each device, and the tensors that the map gives no device."""
    by_device: dict[Device, list[str]] = {}
    missing: list[str] = []
    for names in unit.tensors:
        for tensor in _expert_tensors(names, shape, expert_lists):
            device = _tensor_device(tensor, devices)
            if device is None:
                missing.append(tensor[0])
            else:
                by_device.setdefault(device, []).append(tensor[0])
    return by_device, missing


def _expert_tensors(names: tuple[str, ...], shape: ModelShape, expert_lists: Collection[str]) -> list[tuple[str, ...]]:
    """The names of each expert's tensor if the map names experts of this list, else the given names alone."""
    if shape.experts is None or not any(name.partition(f".experts.{EXPERT}")[0] in expert_lists for name in names):
        return [names]
    return [tuple(name.replace(EXPERT, str(expert)) for name in names) for expert in range(shape.experts.count)]


def _split_error(unit: PipelineUnit, by_device: Mapping[Device, Sequence[str]]) -> ConfigError:
    parts = ", ".join(
        f"{_enclosing_part(names[0], unit, by_device.values())} on {_device_name(device)}"
        for device, names in by_device.items()
    )
    return ConfigError(
        f"--device-map splits {unit.name}: {parts}; all of it has to be on one device", code="map-splits-layer"
    )


def _is_unnamed_tied_head(shape: ModelShape, unit: PipelineUnit, by_device: Collection[Device]) -> bool:
    """Return True for a tied head without a tensor on any device."""
    return unit.kind == "head" and shape.tied and not by_device


def _parts_left_out(unit: PipelineUnit, by_device: Mapping[Device, Sequence[str]], missing: Sequence[str]) -> list[str]:
    """The largest parts of a unit that have no device: all of it, or its parts with `missing` tensors."""
    if not by_device:
        return [unit.name]
    return list(dict.fromkeys(_enclosing_part(name, unit, by_device.values()) for name in missing))


def _enclosing_part(tensor: str, unit: PipelineUnit, groups: Iterable[Sequence[str]]) -> str:
    """The largest module inside a unit that holds this tensor and no tensor of the other groups."""
    others = [name for names in groups for name in names if tensor not in names]
    inside = [module for module in enclosing_modules(tensor) if module.startswith(unit.name + ".")][1:]
    free = [module for module in inside if not any(name.startswith(module + ".") for name in others)]
    return free[-1] if free else tensor.rpartition(".")[0]


def _tensor_device(names: tuple[str, ...], devices: Mapping[str, Device]) -> Device | None:
    """The device of the innermost module around a tensor that the map names; None if it names none.

    Raises ConfigError if two names of the same module have different devices.
    """
    nearest = [_nearest_module(name, devices) for name in names]
    named = [depth_and_module for depth_and_module in nearest if depth_and_module is not None]
    if not named:
        return None
    depth, module = min(named)
    for other_depth, other in named:
        if other_depth == depth and devices[other] != devices[module]:
            raise ConfigError(
                f"--device-map has one module twice: {module} on {_device_name(devices[module])}, {other} on "
                f"{_device_name(devices[other])}",
                code="module-twice-in-map",
            )
    return devices[module]


def _nearest_module(name: str, devices: Mapping[str, Device]) -> tuple[int, str] | None:
    """(depth, module) of the innermost module around a tensor that the map names; the tensor itself has depth 0."""
    for depth, module in enumerate(enclosing_modules(name)):
        if module in devices:
            return depth, module
    return None


def _check_disk(placed: Sequence[Placed], available: AvailableDevices) -> None:
    """Raise ConfigError for parts on disk, with the seconds that each token would wait for them."""
    units = [unit for unit, device in placed if device == "disk"]
    if not units:
        return
    size = sum(available.nbytes(unit) for unit in units)
    raise ConfigError(
        f"--device-map puts {_listed([unit.name for unit in units])}, {format_bytes(size)}, on disk; every token would "
        f"take {size / DISK_BPS:.2g} s from a disk of {DISK_BPS / 1e9:.0f} GB/s: Weft keeps all weights in memory, put "
        "them on cpu",
        code="map-to-disk",
    )


def _check_ends(shape: ModelShape, placed: Sequence[Placed]) -> None:
    """Raise ConfigError unless the first stage holds the embedding, and the last one the norm and the head.

    A tied head may be on the embedding's device or on the last stage.
    """
    embedding, *layers, norm, head = placed
    ends = [("first", embedding, layers[0]), ("last", norm, layers[-1])]
    if not (shape.tied and head[1] == embedding[1]):
        ends.append(("last", head, layers[-1]))
    for which, (unit, device), (layer, layer_device) in ends:
        if device != layer_device:
            raise ConfigError(
                f"--device-map puts {unit.name} on {_device_name(device)} and {layer.name} on "
                f"{_device_name(layer_device)}; the {which} stage of a pipeline holds the {unit.kind}: put both on one "
                "device",
                code="map-moves-end-of-model",
            )


def _label(module: str) -> str:
    return module or "the model"


def _device_name(device: Device) -> str:
    return device if isinstance(device, str) else f"GPU {device}"


def _listed(names: Sequence[str]) -> str:
    """Join names for a message, runs of numbers as ranges: "a.3 to a.5, b"; at most _LISTED of them."""
    runs: list[list[str]] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        previous = runs[-1][-1] if runs else ""
        if number.isdigit() and previous == f"{stem}.{int(number) - 1}":
            runs[-1].append(name)
        else:
            runs.append([name])
    shown = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    hidden = len(shown) - _LISTED
    return ", ".join(shown[:_LISTED]) + (f" and {hidden} more" if hidden > 0 else "")
