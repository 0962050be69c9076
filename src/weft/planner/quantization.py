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
from weft.facts.precision import canonical
from weft.facts.schemes import MADE, SCHEMES, UNIT, scheme_of
from weft.facts.shape import DTYPE_BYTES, DType, ModelShape
from weft.planner.plan import GPU_BACKENDS

if TYPE_CHECKING:
    from weft.facts.checkpoint import Checkpoint

logger = logging.getLogger("weft")

PRECISIONS: dict[DType, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # in the planner's words


def quantised_tensors(
    config: EngineConfig, checkpoint: Checkpoint, dtype: DType, devices: Sequence[str]
) -> dict[str, str]:
    """The scheme of each tensor of the checkpoint that is held quantised, by its name there.

    "auto" holds a file's quantised tensors as they lie in it where there are kernels for that and 16 bits are computed
    in. Raises ConfigError where what is asked for cannot be.
    """
    asked, computed = config.quantization, _computed_in(config.attention_backend, devices)
    if asked in MADE:
        _check_made(asked, dtype, computed)
        return _made(checkpoint.shape, asked)
    if asked == "none" or dtype not in computed or DTYPE_BYTES[dtype] > 2:
        return {}
    return _whole_parameters(checkpoint.shape, checkpoint.quantised)


def tell_dequantised(config: EngineConfig, checkpoint: Checkpoint, dtype: DType, kept: Mapping[str, str]) -> None:
    """Say which of a file's quantised tensors are not held as they lie in it, where nobody asked for that."""
    lost = Counter(kind for name, kind in checkpoint.quantised.items() if name not in kept)
    if config.quantization != "auto" or not lost:
        return
    if config.attention_backend == "torch" or (dtype == "float32" and not kept):
        why = "with --attention-backend torch" if config.attention_backend == "torch" else f"in {dtype}"
        logger.info("Quantised weights are not multiplied as they are %s: they are held in %s", why, dtype)
        return
    kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(lost.items()))
    logger.warning(
        "Of %d quantised tensors these are held in %s, for lack of kernels: %s",
        len(checkpoint.quantised),
        dtype,
        kinds,
    )


def quantization_of(config: EngineConfig, schemes: Mapping[str, str]) -> str:
    """What a plan says of its weights: "none", what was asked for, or "gguf" for those that are held as they lie."""
    if not schemes:
        return "none"
    return config.quantization if config.quantization in MADE else "gguf"


def precision_of(quantization: str, schemes: Mapping[str, str], dtype: DType) -> str:
    """What the planner calls such weights; of a GGUF file's mix, what most of its tensors are."""
    if quantization in MADE:
        return MADE[quantization]
    if not schemes:
        return PRECISIONS[dtype]
    ((kind, _),) = Counter(schemes.values()).most_common(1)
    return canonical(kind.lower())


def precision_held(config: EngineConfig, checkpoint: Checkpoint, dtype: DType, devices: Sequence[str]) -> str:
    """The same of what an engine would hold."""
    schemes = quantised_tensors(config, checkpoint, dtype, devices)
    return precision_of(quantization_of(config, schemes), schemes, dtype)


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


def _computed_in(backend: str, devices: Sequence[str]) -> tuple[DType, ...]:
    """What the kernels compute in that multiply quantised weights; nothing where there are none."""
    if backend == "torch":
        return ()
    if backend in GPU_BACKENDS or any(device != "cpu" for device in devices):
        return "bfloat16", "float16", "float32"
    return "bfloat16", "float32"


def _check_made(asked: str, dtype: DType, computed: Sequence[str]) -> None:
    if not computed:
        raise ConfigError(
            f"quantization is {asked}, for which --attention-backend torch has no kernels; leave one of them out"
        )
    if dtype not in computed:
        raise ConfigError(
            f"quantization {asked} computes in {' or '.join(computed)} on a CPU, not in {dtype}; give another --dtype"
        )


def _made(shape: ModelShape, asked: str) -> dict[str, str]:
    """What `asked` makes of a model, whatever it is stored in."""
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
