"""Quantization: which of a model's tensors an engine holds quantised, and in which scheme."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from weft.architectures.axes import axis_length, owned
from weft.architectures.parameters import Parameter, layers_of, model_parameters
from weft.architectures.place import Place, Span
from weft.architectures.published import ORDERED
from weft.architectures.shape import DTYPE_BYTES, DType, ModelShape
from weft.config import EngineConfig
from weft.errors import ConfigError, PlanError
from weft.formats.gguf_types import MIXES, gguf_type
from weft.formats.precision import BF16, OF_DTYPE, held_precision, part_format
from weft.formats.schemes import METHODS, ONLINE_QUANTIZATIONS, UNIT, scheme_for_parameter, scheme_for_types
from weft.plan.backends import GPU_BACKENDS

if TYPE_CHECKING:
    from weft.formats.checkpoint import Checkpoint

logger = logging.getLogger("weft")


def quantised_tensors(
    config: EngineConfig, checkpoint: Checkpoint, dtype: DType, devices: Sequence[str]
) -> dict[str, str]:
    """The scheme of each tensor of the checkpoint that is held quantised, by its name there.

    "auto" holds a file's quantised tensors in the schemes that `formats.schemes` names for their types, where there are
    kernels for that and 16 bits are computed in. Raises ConfigError where what is asked for cannot be.
    """
    asked, computed = config.quantization, _computed_in(config.attention_backend, devices)
    _check_method(asked, checkpoint.shape)
    if asked in ONLINE_QUANTIZATIONS:
        _check_made(asked, dtype, computed)
    if makes(asked, checkpoint.shape):
        return _made(checkpoint.shape, asked)
    wide = DTYPE_BYTES[dtype] > 2 and asked not in ONLINE_QUANTIZATIONS
    if asked == "none" or dtype not in computed or wide:
        return {}
    return held_tensors(checkpoint.shape, checkpoint.quantised)


def makes(asked: str, shape: ModelShape) -> bool:
    """Whether weights are rounded anew: not where the checkpoint has been quantised to what is asked for."""
    return asked in ONLINE_QUANTIZATIONS and (
        shape.published is None or shape.published.precision != ONLINE_QUANTIZATIONS[asked]
    )


def cut_as(config: EngineConfig, shape: ModelShape, schemes: Mapping[str, str]) -> str:
    """A precision whose groups of columns are cut where the weights' are."""
    if makes(config.quantization, shape):
        return ONLINE_QUANTIZATIONS[config.quantization]
    return shape.published.precision if shape.published and schemes else "bf16"


def tell_dequantised(config: EngineConfig, checkpoint: Checkpoint, dtype: DType, kept: Mapping[str, str]) -> None:
    """Say what a file's quantised tensors are held as, where that is not what they are and nobody asked for it."""
    shape, kinds = checkpoint.shape, checkpoint.quantised
    if config.quantization == "none" or makes(config.quantization, shape):
        return
    if kept and shape.published and config.dtype == "auto" and dtype != shape.dtype:
        kind = shape.published.precision
        logger.info(
            "Computing in %s: what multiplies %s weights here does not in the checkpoint's %s", dtype, kind, shape.dtype
        )
    others = Counter((kind, kept[name]) for name, kind in kinds.items() if kept.get(name, kind) != kind)
    if others:
        told = ", ".join(f"{count} of {kind} as {scheme}" for (kind, scheme), count in sorted(others.items()))
        logger.info("Of %d quantised tensors these are held otherwise: %s", len(kinds), told)
    lost = {name: kind for name, kind in kinds.items() if name not in kept}
    if config.attention_backend == "torch" or (not kept and held_tensors(shape, lost)):
        if lost:
            why = "with --attention-backend torch" if config.attention_backend == "torch" else f"in {dtype}"
            logger.info("Quantised weights are not multiplied as they are %s: they are held in %s", why, dtype)
        return
    uneven = {name for names, parameter, _ in _matrices(shape) if not _is_even(shape, parameter) for name in names}
    reasons = Counter((_why(kind, name in uneven), kind.removesuffix(ORDERED)) for name, kind in lost.items())
    for why in sorted({why for why, _ in reasons}):
        told = ", ".join(f"{count} of {kind}" for (other, kind), count in sorted(reasons.items()) if other == why)
        logger.warning("Of %d quantised tensors these are held in %s, %s: %s", len(kinds), dtype, why, told)


def _why(kind: str, uneven: bool) -> str:
    """Why a tensor of a type is not held quantised."""
    if kind.endswith(ORDERED):
        return "since the columns of a group lie apart (desc_act), for which there are no kernels"
    if uneven:
        return f"since their columns are no multiple of {UNIT}, as kernels need them"
    return "as others are that they are multiplied together with" if scheme_for_types([kind]) else "for lack of kernels"


def quantization_of(config: EngineConfig, shape: ModelShape, schemes: Mapping[str, str]) -> str:
    """What a plan says of its weights: "none", what was asked for, or who quantised them, as "gguf" or "gptq"."""
    if not schemes:
        return "none"
    if makes(config.quantization, shape):
        return config.quantization
    return shape.published.method if shape.published else "gguf"


def precision_of(shape: ModelShape, quantization: str, schemes: Mapping[str, str], dtype: DType) -> str:
    """What the planner calls such weights; of a GGUF file, the mix that is held most like it."""
    if quantization in ONLINE_QUANTIZATIONS:
        return ONLINE_QUANTIZATIONS[quantization]
    if not schemes:
        return OF_DTYPE[dtype]
    if shape.published:
        return shape.published.precision
    return _mix(shape, schemes, scheme_for_parameter)


def checkpoint_precision(config: EngineConfig, checkpoint: Checkpoint, dtype: DType, devices: Sequence[str]) -> str:
    """The same of what an engine would hold; a GGUF file's own mix."""
    shape, schemes = checkpoint.shape, quantised_tensors(config, checkpoint, dtype, devices)
    quantization = quantization_of(config, shape, schemes)
    if quantization == "gguf":
        return _mix(shape, checkpoint.quantised, _type_of)
    return precision_of(shape, quantization, schemes, dtype)


def _type_of(shape: ModelShape, mix: str, parameter: Parameter, layer: int) -> str:
    return gguf_type(shape, mix, parameter, parameter.parts[-1], layer)


def _mix(
    shape: ModelShape, found: Mapping[str, str], of: Callable[[ModelShape, str, Parameter, int], str | None]
) -> str:
    """The mix in which most tensors are `of` what was found; the last part of a parameter stands for it."""
    tensors = [(parameter, layer, found.get(names[-1])) for names, parameter, layer in _matrices(shape)]
    return max(MIXES, key=lambda mix: sum(of(shape, mix, it, layer) == kind for it, layer, kind in tensors))


def check_cuts(shape: ModelShape, places: Sequence[Place], schemes: Mapping[str, str]) -> None:
    """Raises PlanError where a rank's columns of a quantised matrix begin or end within what a kernel multiplies at
    once."""
    for (name, *_), parameter, _ in _matrices(shape):
        if name in schemes and (found := _parted(shape, places, parameter)):
            raise _wrongly_cut(*found, name, schemes[name], "--quantization none")


def check_planned_cuts(shape: ModelShape, places: Sequence[Place], precision: str) -> None:
    """The same for a plan of our own engine, of weights in a precision in the planner's words."""
    held = held_precision(precision)
    for parameter in model_parameters(shape) if held != precision else ():
        part, found = parameter.parts[0], _parted(shape, places, parameter)
        if found is None:
            continue
        for layer in layers_of(shape, parameter):
            if part_format(shape, held, parameter, part, layer).bits < BF16.bits:
                name = part.source.format(layer=layer, expert=0)
                raise _wrongly_cut(*found, name, precision, "--precision bf16")


def _parted(shape: ModelShape, places: Sequence[Place], parameter: Parameter) -> tuple[Place, Span] | None:
    """The first rank whose columns of a matrix are not whole units, and these."""
    axis = parameter.parts[0].cols
    if axis is None:
        return None
    each = ((place, owned(shape, place, axis)) for place in places)
    return next(((place, cols) for place, cols in each if cols.start % UNIT or cols.stop % UNIT), None)


def _wrongly_cut(place: Place, cols: Span, name: str, held: str, otherwise: str) -> PlanError:
    return PlanError(
        f"rank {place.rank} would hold columns {cols.start} to {cols.stop} of {name}, which is quantised ({held}) and "
        f"cut in multiples of {UNIT}; use another --tensor-parallel-size or --tensor-split, pipeline parallel, or "
        f"{otherwise}"
    )


def _computed_in(backend: str, devices: Sequence[str]) -> tuple[DType, ...]:
    """What the kernels compute in that multiply quantised weights; nothing where there are none."""
    if backend == "torch":
        return ()
    if backend in GPU_BACKENDS or any(device != "cpu" for device in devices):
        return "bfloat16", "float16", "float32"
    return "bfloat16", "float32"


def _check_method(asked: str, shape: ModelShape) -> None:
    """Raises ConfigError for the name of a method that the checkpoint was not quantised with."""
    own = shape.published.method if shape.published else "none of these"
    if METHODS.get(asked, own) != own:
        raise ConfigError(
            f"quantization is {asked}, and the checkpoint was quantised with {own}; leave it out, or give int8 or int4 "
            "to have its weights rounded as they are read"
        )


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
    found = (
        (names, scheme_for_parameter(shape, ONLINE_QUANTIZATIONS[asked], parameter, layer))
        for names, parameter, layer in _matrices(shape)
    )
    return {name: scheme for names, scheme in found if scheme is not None for name in names}


def held_tensors(shape: ModelShape, stored: Mapping[str, str]) -> dict[str, str]:
    """What stored tensors are held as, those of one parameter alike."""
    found = (
        (names, scheme_for_types(stored.get(name, "") for name in names))
        for names, parameter, _ in _matrices(shape)
        if _is_even(shape, parameter)
    )
    return {name: scheme for names, scheme in found if scheme is not None for name in names}


def _is_even(shape: ModelShape, parameter: Parameter) -> bool:
    """Whether a matrix has columns that kernels can multiply: a multiple of UNIT."""
    cols = parameter.parts[0].cols
    return cols is not None and axis_length(shape, cols) % UNIT == 0


def _matrices(shape: ModelShape) -> Iterator[tuple[list[str], Parameter, int]]:
    """Each parameter of a layer that is a matrix, with the tensors of a checkpoint that are its parts."""
    for parameter in model_parameters(shape):
        if parameter.parts[0].cols is None:
            continue
        for layer in layers_of(shape, parameter):
            yield [part.source.format(layer=layer, expert=0) for part in parameter.parts], parameter, layer
