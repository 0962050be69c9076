"""Quantization: which of a model's tensors an engine holds quantised, and in which scheme."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from weft.config import EngineConfig
from weft.errors import ConfigError, PlanError
from weft.facts.axes import owned
from weft.facts.parameters import Parameter, Part, layers_of, parameters
from weft.facts.place import Place
from weft.facts.schemes import MADE, SCHEMES, UNIT, scheme_of
from weft.facts.shape import DType, ModelShape

if TYPE_CHECKING:
    from weft.facts.checkpoint import Checkpoint

logger = logging.getLogger("weft")


def quantised_tensors(
    config: EngineConfig, checkpoint: Checkpoint, dtype: DType, devices: Sequence[str]
) -> dict[str, str]:
    """The scheme of each tensor of the checkpoint that is held quantised, by its name there.

    "auto" holds a file's quantised tensors as they lie in it where there are kernels for that, which is on CPUs and in
    bfloat16, and says which it does not. Raises ConfigError where what is asked for cannot be.
    """
    asked = config.quantization
    if asked in MADE:
        return _made(checkpoint.shape, asked, dtype, devices)
    stored = checkpoint.quantised
    if asked == "none" or not stored:
        return {}
    if dtype != "bfloat16" or config.attention_backend == "torch" or not _on_cpus(devices):
        where = "on GPUs" if not _on_cpus(devices) else f"in {dtype} or by torch"
        logger.info("There are no kernels for quantised weights %s: they are held in %s", where, dtype)
        return {}
    kept = _whole_parameters(checkpoint.shape, stored)
    lost = Counter(kind for name, kind in stored.items() if name not in kept)
    if lost:
        kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(lost.items()))
        logger.warning(
            "Of %d quantised tensors these are held in %s, for lack of kernels: %s", len(stored), dtype, kinds
        )
    return kept


def quantization_of(config: EngineConfig, schemes: Mapping[str, str]) -> str:
    """What a plan says of its weights: "none", what was asked for, or "gguf" for those that are held as they lie."""
    if not schemes:
        return "none"
    return config.quantization if config.quantization in MADE else "gguf"


def check_cuts(shape: ModelShape, places: Sequence[Place], schemes: Mapping[str, str]) -> None:
    """Raises PlanError where a rank's columns of a quantised matrix begin or end within what a kernel multiplies at
    once."""
    for name, _, part in _tensors(shape):
        if name not in schemes or part.cols is None:
            continue
        for place in places:
            cols = owned(shape, place, part.cols)
            if cols.start % UNIT or cols.stop % UNIT:
                raise PlanError(
                    f"rank {place.rank} would hold columns {cols.start} to {cols.stop} of {name}, which is quantised "
                    f"({schemes[name]}) and cut in multiples of {UNIT}; use another --tensor-parallel-size or "
                    "--tensor-split, pipeline parallel, or --quantization none"
                )


def _on_cpus(devices: Sequence[str]) -> bool:
    return all(device == "cpu" for device in devices)


def _made(shape: ModelShape, asked: str, dtype: DType, devices: Sequence[str]) -> dict[str, str]:
    """What `asked` makes of a model, whatever it is stored in."""
    if not _on_cpus(devices):
        raise ConfigError(
            f"quantization is {asked}, for which there are kernels for CPUs only; leave it out, or use --device cpu"
        )
    if dtype == "float16":
        raise ConfigError(f"quantization {asked} computes in bfloat16 or float32, not in float16; give another --dtype")
    found = ((name, scheme_of(shape, MADE[asked], parameter, part)) for name, parameter, part in _tensors(shape))
    return {name: scheme for name, scheme in found if scheme is not None}


def _whole_parameters(shape: ModelShape, stored: Mapping[str, str]) -> dict[str, str]:
    """Those stored tensors that have kernels, and whose parameters' other parts are of the same type."""
    kinds: dict[tuple[str, str], set[str]] = {}
    home = {}
    for name, parameter, part in _tensors(shape):
        home[name] = (parameter.name, name.partition("layers.")[2].partition(".")[0])
        kinds.setdefault(home[name], set()).add(stored.get(name, ""))
        if part.cols is None:
            kinds[home[name]].add("")
    return {name: kind for name, kind in stored.items() if kind in SCHEMES and kinds[home[name]] == {kind}}


def _tensors(shape: ModelShape) -> Iterator[tuple[str, Parameter, Part]]:
    """Each tensor of a checkpoint, with the parameter that it is a part of; a tied head's comes with both."""
    for parameter in parameters(shape):
        layers = layers_of(shape, parameter, range(shape.layers)) if parameter.where == "layer" else [0]
        for layer in layers:
            for part in parameter.parts:
                yield part.source.format(layer=layer, expert=0), parameter, part
