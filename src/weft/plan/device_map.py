"""Device maps: which device holds which module, in Transformers' form, and the pipeline that it comes to.

A map gives each module, by its name, a GPU's number, "cuda:1", "cpu" or "disk"; the nearest module around a tensor
counts, and "" is the whole model. Instead of a map one of Transformers' words for it may be given, which
`planner.balance` carries out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import Literal, get_args

import msgspec

from weft.architectures.modules import EXPERT, Unit, enclosing, generic, holds_weights, modules, units
from weft.architectures.shape import ModelShape
from weft.errors import ConfigError
from weft.formatting import format_bytes

Spread = Literal["auto", "balanced", "balanced_low_0", "sequential"]
SPREADS: tuple[Spread, ...] = get_args(Spread)
Off = Literal["cpu", "disk"]  # the GPUs, where there are any
OFF: tuple[Off, ...] = get_args(Off)
Device = int | Off

_CUDA = re.compile(r"(?:cuda(?::(?P<number>\d+))?|(?P<bare>\d+))")


class Stages(msgspec.Struct, frozen=True):
    """A pipeline as a map has it: the device of each stage, and its layers."""

    devices: tuple[Device, ...]
    layers: tuple[int, ...]


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to place modules on: the numbers of its GPUs, and of those that --max-memory leaves out. `nbytes`
    are those of a part of the model as it is to be stored; `fetch_Bps` is what a GPU reads of the host's memory, None
    where that is not known."""

    gpus: Collection[int]
    nbytes: Callable[[Unit], int]
    left_out: Collection[int] = ()
    fetch_Bps: float | None = None


def device(said: object, about: str = "the model") -> Device:
    """A device as people and Transformers write it. Raises ConfigError."""
    if isinstance(said, int) and not isinstance(said, bool) and said >= 0:
        return said
    if isinstance(said, str):
        match = _CUDA.fullmatch(said)
        if match:
            return int(match["number"] or match["bare"] or 0)
        for off in OFF:
            if said == off:
                return off
    raise ConfigError(
        f"--device-map puts {about} on {said!r}, which is no device; write a GPU's number as in 0 or cuda:0, or cpu"
    )


def pipeline(shape: ModelShape, said: Mapping[str, object], room: Room) -> Stages:
    """The pipeline of a map. Raises ConfigError, in one line, for a map that is no pipeline of this model on these
    devices: one that leaves something out, splits a block, names what is not there, or needs more than GPUs."""
    found = {module: device(it, module or "the model") for module, it in said.items()}
    if not found:
        raise ConfigError('--device-map is empty; give every module a device, or the whole model one: {"": 0}')
    _check_modules(shape, found)
    _check_devices(found, room)
    placed = _placed(shape, found)
    _check_offload(placed, room)
    _check_ends(shape, placed)
    layers = [it for unit, it in placed if unit.kind == "layer"]
    runs = [(it, len(list(run))) for it, run in groupby(layers)]
    return Stages(tuple(it for it, _ in runs), tuple(count for _, count in runs))


def _check_modules(shape: ModelShape, found: Mapping[str, Device]) -> None:
    for module in found:
        if module and holds_weights(shape, module) is None:
            raise ConfigError(f"--device-map names {module!r}, which is no module of this model{_near(shape, module)}")


def _near(shape: ModelShape, module: str) -> str:
    """What was meant: the layers there are, or the nearest name."""
    layers = [unit.name for unit in units(shape) if unit.kind == "layer"]
    prefix = layers[0].rpartition(".")[0]
    beyond = re.match(rf"{re.escape(prefix)}\.(\d+)(?=\.|$)", module)
    if beyond and int(beyond[1]) >= len(layers):
        return f"; its layers are {layers[0]} to {layers[-1]}"
    # Every number is as good as another: names are compared without, and get theirs back.
    known = {re.sub(r"\d+", "#", name): name for name in modules(shape) if EXPERT not in name}
    match = get_close_matches(re.sub(r"\d+", "#", module), known, n=1, cutoff=0.5)
    if not match:
        return f"; it has {layers[0]} to {layers[-1]}, {units(shape)[0].name}, {units(shape)[-1].name}"
    numbers = iter(re.findall(r"\d+", module))
    name = re.sub("#", lambda _: next(numbers, "0"), match[0])
    return f"; did you mean {name if holds_weights(shape, name) else known[match[0]]!r}?"


def _check_devices(found: Mapping[str, Device], room: Room) -> None:
    for module, it in found.items():
        if isinstance(it, int) and it not in room.gpus:
            what = module or "the model"
            if not room.gpus:
                raise ConfigError(f"--device-map puts {what} on GPU {it}, and there is no GPU; put it on cpu")
            if it in room.left_out:
                raise ConfigError(f"--device-map puts {what} on GPU {it}, which --max-memory leaves out: add {it}=40GB")
            raise ConfigError(f"--device-map puts {what} on GPU {it}; there {_numbers(sorted(room.gpus))}")


def _numbers(gpus: Sequence[int]) -> str:
    if len(gpus) == 1:
        return f"is GPU {gpus[0]} only"
    if list(gpus) == list(range(gpus[0], gpus[-1] + 1)):
        return f"are GPUs {gpus[0]} to {gpus[-1]}"
    return f"are GPUs {', '.join(map(str, gpus))}"


def _placed(shape: ModelShape, found: Mapping[str, Device]) -> list[tuple[Unit, Device]]:
    """Each part of the model with its device. A tied head that is not named goes with the last norm."""
    # Experts are told apart only where the map does.
    apart = {module[: module.rindex(".experts.")] for module in found if generic(shape, module) != module}
    placed: list[tuple[Unit, Device]] = []
    without: list[str] = []
    for unit in units(shape):
        tensors = [tensor for names in unit.tensors for tensor in _each(names, shape, apart)]
        homes: dict[Device | None, list[str]] = {}
        for tensor in tensors:
            homes.setdefault(_home(tensor, found), []).append(tensor[0])
        missing = homes.pop(None, [])
        if len(homes) > 1:
            parts = [(_around(names[0], unit, homes.values()), it) for it, names in homes.items()]
            told = ", ".join(f"{module} on {_named(it)}" for module, it in parts if it is not None)
            raise ConfigError(f"--device-map splits {unit.name}: {told}; all of it has to be on one device")
        if missing and homes:
            without += dict.fromkeys(_around(name, unit, homes.values()) for name in missing)
        elif missing and unit.kind == "head" and shape.tied and placed:
            placed.append((unit, placed[-1][1]))
        elif missing:
            without.append(unit.name)
        placed += [(unit, it) for it in homes if it is not None]
    if without:
        raise ConfigError(
            f'--device-map leaves out {_listed(without)}; give every module a device, or "" one, which is for all '
            "that is not named"
        )
    return placed


def _each(names: tuple[str, ...], shape: ModelShape, apart: Collection[str]) -> list[tuple[str, ...]]:
    """The tensor of every expert, where it is one of those that a map tells apart."""
    if shape.experts is None or not any(name.partition(f".experts.{EXPERT}")[0] in apart for name in names):
        return [names]
    return [tuple(name.replace(EXPERT, str(expert)) for name in names) for expert in range(shape.experts.count)]


def _around(tensor: str, unit: Unit, others: Iterable[Sequence[str]]) -> str:
    """The largest module of a part that holds this tensor and none of the others'."""
    elsewhere = [name for names in others for name in names if tensor not in names]
    inside = [module for module in enclosing(tensor) if module.startswith(unit.name + ".")][1:]
    free = [module for module in inside if not any(name.startswith(module + ".") for name in elsewhere)]
    return free[-1] if free else tensor.rpartition(".")[0]


def _home(names: tuple[str, ...], found: Mapping[str, Device]) -> Device | None:
    """The device of the nearest module around a tensor that the map names."""
    homes: list[tuple[int, str]] = []
    for name in names:
        nearest = next(((depth, it) for depth, it in enumerate(enclosing(name)) if it in found), None)
        if nearest:
            homes.append(nearest)
    if not homes:
        return None
    depth, module = min(homes)
    for other in (it for at, it in homes if at == depth and found[it] != found[module]):
        raise ConfigError(
            f"--device-map has one module twice: {module} on {_named(found[module])}, {other} on {_named(found[other])}"
        )
    return found[module]


def _check_offload(placed: Sequence[tuple[Unit, Device]], room: Room) -> None:
    """A CPU is a device where there is no other, or everything lies on it."""
    off = [(unit, it) for unit, it in placed if it in OFF]
    if not off or (len(off) == len(placed) and {it for _, it in off} == {"cpu"}):
        return
    size = sum(room.nbytes(unit) for unit, _ in off)
    where = " and ".join(sorted({str(it) for _, it in off}))
    told = f"--device-map puts {_listed([unit.name for unit, _ in off])}, {format_bytes(size)}, on {where}"
    if not room.gpus:
        raise ConfigError(f"{told}; Weft keeps all weights in memory: put them on cpu")
    cost = "would be fetched for every token"
    if room.fetch_Bps:
        cost += f", {size / room.fetch_Bps:.2g} s at the {room.fetch_Bps / 1e9:.0f} GB/s of PCIe"
        cost += ", and longer from a disk" if "disk" in where else ""
    raise ConfigError(
        f"{told}: that {cost}, so Weft runs no layers off the GPUs; spread them with --device-map balanced, or take "
        "more GPUs or a checkpoint of fewer bits"
    )


def _check_ends(shape: ModelShape, placed: Sequence[tuple[Unit, Device]]) -> None:
    """The first stage holds the embedding, the last one norm and head; a tied head may be named with either."""
    embedding, *layers, norm, head = placed
    ends = [("first", embedding, layers[0]), ("last", norm, layers[-1])]
    if not (shape.tied and head[1] == embedding[1]):
        ends.append(("last", head, layers[-1]))
    for which, (unit, it), (layer, its) in ends:
        if it != its:
            raise ConfigError(
                f"--device-map puts {unit.name} on {_named(it)} and {layer.name} on {_named(its)}; the {which} stage "
                f"of a pipeline holds the {unit.kind}: put both on one device"
            )


def _named(it: Device) -> str:
    return it if isinstance(it, str) else f"GPU {it}"


def _listed(names: Sequence[str]) -> str:
    """`a.3, a.4, a.5, b` as "a.3 to a.5, b"; only the first few."""
    runs: list[list[str]] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        before = runs[-1][-1] if runs else ""
        if number.isdigit() and before == f"{stem}.{int(number) - 1}":
            runs[-1].append(name)
        else:
            runs.append([name])
    told = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    more = len(told) - 4
    return ", ".join(told[:4]) + (f" and {more} more" if more > 0 else "")
