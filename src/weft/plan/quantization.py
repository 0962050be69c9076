"""Quantised weights of a plan: the scheme of each tensor that an engine holds quantised."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from weft.checkpoint.architectures.axes import Axis
from weft.checkpoint.architectures.parameters import Parameter, model_parameters
from weft.checkpoint.architectures.place import Place, Span
from weft.checkpoint.architectures.published import ORDERED
from weft.checkpoint.architectures.shape import DTYPE_BYTES, DType, ModelShape
from weft.checkpoint.files.gguf_types import MIXES, gguf_type
from weft.checkpoint.quantised.precision import BF16, OF_DTYPE, held_precision, part_format
from weft.checkpoint.quantised.registry import METHODS
from weft.checkpoint.quantised.schemes import (
    FLOAT_SCHEMES,
    ONLINE_QUANTIZATIONS,
    UNIT,
    scheme_for_parameter,
    scheme_for_types,
)
from weft.config import EngineConfig
from weft.errors import ConfigError, PlanError
from weft.formatting import join_commas
from weft.logs import event_fields
from weft.plan.backends import kernel_family, runs_on_gpus
from weft.plan.places import column_unit, cut_places

if TYPE_CHECKING:
    from weft.checkpoint.checkpoint import Checkpoint

logger = logging.getLogger("weft")

# Dtypes of activations in which each family of kernels multiplies quantised weights.
QUANTISED_DTYPES: dict[str, tuple[DType, ...]] = {
    "torch": (),
    "cpu": ("bfloat16", "float32"),
    "triton": ("bfloat16", "float16", "float32"),
}


MAX_SIZES = 16  # sizes of tensor parallel that an error tries out


class Matrix(NamedTuple):
    """A parameter of one layer that is a matrix. `sources` are the names of its tensors in the checkpoint."""

    sources: list[str]
    parameter: Parameter
    layer: int


class HeldWeights(NamedTuple):
    """The weights as an engine holds them.

    `schemes`: scheme of each tensor that is held quantised, by its name in the checkpoint. `quantization`: "none", the
    user's choice, or the origin of the quantised weights ("gguf", "gptq"). `precision`: a precision whose scales cover
    as many columns as the scales of these weights, for `places.column_unit`.
    """

    schemes: dict[str, str]
    quantization: str
    precision: str


def held_weights(
    quantization: str, backend: str, checkpoint: Checkpoint, dtype: DType, devices: Sequence[str]
) -> HeldWeights:
    """The weights as an engine with this attention backend holds them. Raises as `tensor_schemes`."""
    published = checkpoint.shape.published
    schemes = tensor_schemes(quantization, backend, checkpoint, dtype, devices)
    if quantises_online(quantization, checkpoint.shape):
        return HeldWeights(schemes, quantization if schemes else "none", ONLINE_QUANTIZATIONS[quantization])
    if not schemes:
        return HeldWeights(schemes, "none", "bf16")
    return HeldWeights(schemes, *((published.method, published.precision) if published else ("gguf", "bf16")))


def tensor_schemes(
    quantization: str, backend: str, checkpoint: Checkpoint, dtype: DType, devices: Sequence[str]
) -> dict[str, str]:
    """Scheme of each tensor that the engine holds quantised, by the tensor's name in the checkpoint.

    Quantization "auto" holds a file's quantised tensors in the schemes of `checkpoint.quantised.schemes` for their
    types, if the
    devices have kernels for quantised weights in `dtype` and `dtype` has 16 bits. Raises ConfigError for a quantization
    that this checkpoint or device cannot have.
    """
    dtypes = quantised_dtypes(backend, devices)
    _check_method(quantization, checkpoint.shape)
    if quantization in ONLINE_QUANTIZATIONS:
        _check_online(quantization, dtype, dtypes)
    if quantises_online(quantization, checkpoint.shape):
        return _online_schemes(checkpoint.shape, quantization)
    wide = DTYPE_BYTES[dtype] > 2 and quantization not in (*ONLINE_QUANTIZATIONS, *METHODS)
    if quantization == "none" or dtype not in dtypes or wide:
        return {}
    return held_tensors(checkpoint.shape, checkpoint.quantised)


def quantised_dtypes(backend: str, devices: Sequence[str]) -> tuple[DType, ...]:
    """Dtypes of activations in which all of these devices multiply quantised weights.

    A CPU that is used with GPUs keeps its own kernels if the backend is for GPUs.
    """
    beside_gpus = any(name != "cpu" for name in devices) and runs_on_gpus(backend)
    families = {
        name: "cpu" if name == "cpu" and beside_gpus else kernel_family(backend, on_cpu=name == "cpu")
        for name in devices
    }
    own = [QUANTISED_DTYPES[family] for family in families.values()]
    return tuple(dtype for dtype in own[0] if all(dtype in dtypes for dtypes in own))


def quantises_online(quantization: str, shape: ModelShape) -> bool:
    """Return True if weights are quantised as they are loaded.

    Weights that the checkpoint already has in the precision of this `quantization` stay as they are.
    """
    if quantization not in ONLINE_QUANTIZATIONS:
        return False
    return shape.published is None or shape.published.precision != ONLINE_QUANTIZATIONS[quantization]


def log_dequantised(
    config: EngineConfig, backend: str, checkpoint: Checkpoint, dtype: DType, schemes: Mapping[str, str]
) -> None:
    """Log the file's quantised tensors that are held in another scheme or in `dtype`, unless the user chose that."""
    if config.quantization == "none" or quantises_online(config.quantization, checkpoint.shape):
        return
    if config.dtype == "auto":
        _log_dtype(checkpoint.shape, dtype, schemes)
    _log_changed(checkpoint.quantised, schemes)
    _log_lost(backend, checkpoint, dtype, schemes)


def _log_dtype(shape: ModelShape, dtype: DType, schemes: Mapping[str, str]) -> None:
    if schemes and shape.published and dtype != shape.dtype:
        logger.info(
            "Computing in %s: the kernels for %s weights on this device do not compute in the checkpoint's %s",
            dtype,
            shape.published.precision,
            shape.dtype,
        )


def _log_changed(types: Mapping[str, str], schemes: Mapping[str, str]) -> None:
    """Log the tensors that are held in another scheme than their type in the file."""
    changed = Counter((type, schemes[name]) for name, type in types.items() if schemes.get(name, type) != type)
    if changed:
        listed = ", ".join(f"{count} of {type} as {scheme}" for (type, scheme), count in sorted(changed.items()))
        count = sum(changed.values())
        logger.info("%d of %d quantised tensors are held in another type: %s", count, len(types), listed)


def _matrix_types(checkpoint: Checkpoint) -> dict[str, str]:
    """The types of the quantised tensors that are matrices, by name."""
    sources = {name for matrix in _matrices(checkpoint.shape) for name in matrix.sources}
    return {name: type for name, type in checkpoint.quantised.items() if name in sources}


def _log_lost(backend: str, checkpoint: Checkpoint, dtype: DType, schemes: Mapping[str, str]) -> None:
    """Log the tensors that are held in `dtype`; the first expert stands for all."""
    shape = checkpoint.shape
    types = _matrix_types(checkpoint)
    lost = {name: type for name, type in types.items() if name not in schemes}
    on_torch = backend == "torch"
    if not on_torch and (schemes or not held_tensors(shape, lost)):
        _warn_dequantised(shape, lost, len(types), dtype)
    elif lost:
        why = "with --attention-backend torch" if on_torch else f"in {dtype}"
        logger.info(
            "Quantised weights are held in %s: there are no kernels for them %s",
            dtype,
            why,
            extra=event_fields("weights-dequantised", dtype=dtype),
        )


def _warn_dequantised(shape: ModelShape, lost: Mapping[str, str], total: int, dtype: DType) -> None:
    """Warn of the tensors in `lost` (name -> type) that no scheme can hold, reason by reason."""
    uneven = {name for matrix in _matrices(shape) if not _has_whole_units(matrix.parameter) for name in matrix.sources}
    by_reason: dict[str, Counter[str]] = {}
    for name, type in lost.items():
        types = by_reason.setdefault(_dequantised_reason(type, name in uneven), Counter())
        types[type.removesuffix(ORDERED)] += 1
    for reason, types in sorted(by_reason.items()):
        listed = ", ".join(f"{count} of {type}" for type, count in sorted(types.items()))
        logger.warning(
            "%d of %d quantised tensors are held in %s, %s: %s", sum(types.values()), total, dtype, reason, listed
        )


def _dequantised_reason(type: str, uneven: bool) -> str:
    """The reason, for a log line, that a tensor of this type is not held quantised."""
    if type.endswith(ORDERED):
        return "since there are no kernels for columns of a group that lie apart (desc_act)"
    if uneven:
        return f"since kernels need columns in multiples of {UNIT}"
    if scheme_for_types([type]) and type not in FLOAT_SCHEMES:
        return "like the tensors that they are multiplied together with"
    return "for lack of kernels"


def precision_of(shape: ModelShape, quantization: str, schemes: Mapping[str, str], dtype: DType) -> str:
    """The planner's name for the precision of a plan's weights; for a GGUF file, the mix whose tensors, as the
    engine holds them, agree with most of the file's."""
    if quantization in ONLINE_QUANTIZATIONS:
        return ONLINE_QUANTIZATIONS[quantization]
    if not schemes:
        return OF_DTYPE[dtype]
    if shape.published:
        return shape.published.precision
    return _nearest_mix(shape, schemes, scheme_for_parameter)


def checkpoint_precision(config: EngineConfig, checkpoint: Checkpoint, dtype: DType, devices: Sequence[str]) -> str:
    """The planner's name for the precision in which an engine would hold a checkpoint; for a GGUF file, the mix
    nearest to the types stored in it."""
    held = held_weights(config.quantization, config.attention_backend, checkpoint, dtype, devices)
    if held.quantization == "gguf":
        return _nearest_mix(checkpoint.shape, checkpoint.quantised, _last_part_type)
    return precision_of(checkpoint.shape, held.quantization, held.schemes, dtype)


def _last_part_type(shape: ModelShape, mix: str, parameter: Parameter, layer: int) -> str:
    return gguf_type(shape, mix, parameter, parameter.parts[-1], layer)


def _nearest_mix(
    shape: ModelShape,
    types: Mapping[str, str],
    expected: Callable[[ModelShape, str, Parameter, int], str | None],
) -> str:
    """The mix whose `expected` types agree with `types` for most matrices; a matrix counts by its last tensor."""
    actual = [(matrix, types.get(matrix.sources[-1])) for matrix in _matrices(shape)]

    def agreements(mix: str) -> int:
        return sum(expected(shape, mix, matrix.parameter, matrix.layer) == type for matrix, type in actual)

    return max(MIXES, key=agreements)


def check_cuts(shape: ModelShape, places: Sequence[Place], schemes: Mapping[str, str]) -> None:
    """Raise PlanError if a rank's columns of a quantised matrix are not whole units of UNIT columns."""
    off_grid = cache(partial(_off_grid_cut, places))
    for matrix in _matrices(shape):
        name = matrix.sources[0]
        if name not in schemes:
            continue
        uneven = off_grid(matrix.parameter.parts[0].cols)
        if uneven is not None:
            quantised = [other.parameter for other in _matrices(shape) if other.sources[0] in schemes]
            raise _cut_error(shape, quantised, *uneven, name, schemes[name], "--quantization none")


def check_planned_cuts(shape: ModelShape, places: Sequence[Place], precision: str) -> None:
    """`check_cuts` for a layout that is only planned, with weights in this precision."""
    held = held_precision(precision)
    if held == precision:
        return

    def is_quantised(parameter: Parameter, layer: int) -> bool:
        return part_format(shape, held, parameter, parameter.parts[0], layer).bits < BF16.bits

    off_grid = cache(partial(_off_grid_cut, places))
    for parameter, layer in model_parameters(shape):
        uneven = off_grid(parameter.parts[0].cols)
        if uneven is not None and is_quantised(parameter, layer or 0):
            name = parameter.parts[0].source.format(layer=layer, expert=0)
            quantised = [other for other, number in model_parameters(shape) if is_quantised(other, number or 0)]
            raise _cut_error(shape, quantised, *uneven, name, precision, "--precision bf16")


def _off_grid_cut(places: Sequence[Place], axis: Axis | None) -> tuple[Place, Span] | None:
    """The first rank whose columns of a matrix are not whole units, and these columns; None if all are. `axis` is the
    axis of the columns, None for a vector."""
    if axis is None:
        return None
    for place in places:
        cols = axis.owned(place)
        if cols.start % UNIT or cols.stop % UNIT:
            return place, cols
    return None


def _cut_error(
    shape: ModelShape, quantised: Sequence[Parameter], place: Place, cols: Span, name: str, held: str, otherwise: str
) -> PlanError:
    sizes = _working_sizes(shape, quantised)
    return PlanError(
        f"rank {place.rank} would hold columns {cols.start} to {cols.stop} of {name}, which is quantised ({held}) and "
        f"cut in multiples of {UNIT}; use one of --tensor-parallel-size {join_commas(sizes)}, another --tensor-split, "
        f"pipeline parallel, or {otherwise}",
        code="quantised-columns-off-grid",
    )


def _working_sizes(shape: ModelShape, quantised: Sequence[Parameter]) -> list[int]:
    """Sizes of an even tensor parallel that cut all of these matrices in whole units."""
    unit, sizes = column_unit(shape, shape.published.precision if shape.published else "bf16"), []
    axes = {parameter.parts[0].cols for parameter in quantised}
    for size in range(1, min(shape.q_heads, MAX_SIZES) + 1):
        places = cut_places(shape, [1.0] * size, [len(shape.layers)], ffn_unit=unit)
        if all(_off_grid_cut(places, axis) is None for axis in axes):
            sizes.append(size)
    return sizes


def _check_method(quantization: str, shape: ModelShape) -> None:
    """Raise ConfigError for the name of a method that the checkpoint was not quantised with."""
    own = shape.published.method if shape.published else "none of these"
    if METHODS.get(quantization, own) != own:
        raise ConfigError(
            f"quantization is {quantization}, and the checkpoint was quantised with {own}; leave it out, or give int8 "
            "or int4 to have its weights rounded as they are read",
            code="checkpoint-quantised-already",
        )


def _check_online(quantization: str, dtype: DType, dtypes: Sequence[str]) -> None:
    """Raise ConfigError if there are no kernels for this quantization, or none that compute in `dtype`."""
    if not dtypes:
        raise ConfigError(
            f"quantization is {quantization}, for which --attention-backend torch has no kernels; leave one of them "
            "out",
            code="quantization-on-torch-backend",
        )
    if dtype not in dtypes:
        raise ConfigError(
            f"quantization {quantization} computes in {' or '.join(dtypes)} on a CPU, not in {dtype}; give another "
            "--dtype",
            code="quantization-dtype-on-cpu",
        )


def _online_schemes(shape: ModelShape, quantization: str) -> dict[str, str]:
    """Scheme of each tensor that an online quantization makes, whatever the tensor is stored in."""
    schemes: dict[str, str] = {}
    for matrix in _matrices(shape):
        scheme = scheme_for_parameter(shape, ONLINE_QUANTIZATIONS[quantization], matrix.parameter, matrix.layer)
        if scheme is not None:
            schemes |= dict.fromkeys(matrix.sources, scheme)
    return schemes


def held_tensors(shape: ModelShape, stored: Mapping[str, str]) -> dict[str, str]:
    """Scheme of each tensor that can be held quantised, given the stored types; one scheme for all of a parameter.

    Only matrices of experts are held in floating-point schemes (MXFP4).
    """
    schemes: dict[str, str] = {}
    for matrix in _matrices(shape):
        if matrix.parameter.role == "expansion" or not _has_whole_units(matrix.parameter):
            continue
        scheme = scheme_for_types(stored.get(name, "") for name in matrix.sources)
        if scheme is not None and (scheme not in FLOAT_SCHEMES or matrix.parameter.role == "expert"):
            schemes |= dict.fromkeys(matrix.sources, scheme)
    return schemes


def _has_whole_units(parameter: Parameter) -> bool:
    """Return True if a matrix has a multiple of UNIT columns, as kernels need them."""
    cols = parameter.parts[0].cols
    return cols is not None and cols.length % UNIT == 0


def _matrices(shape: ModelShape) -> Iterator[Matrix]:
    """Yield the matrices of the embedding, of all layers and of the head."""
    for parameter, layer in model_parameters(shape):
        if parameter.parts[0].cols is not None:
            sources = [part.source.format(layer=layer, expert=0) for part in parameter.parts]
            yield Matrix(sources, parameter, layer or 0)
