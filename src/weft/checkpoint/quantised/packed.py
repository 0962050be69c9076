"""Packed matrices: the tensors in which GPTQ, AWQ, compressed-tensors and MXFP4 store one matrix.

The matrix is [rows, cols]; its rows are output features. Each int32 holds 32 / bits numbers, the lowest bits first.

- GPTQ: qweight [cols packed, rows], scales [groups, rows], qzeros [groups, rows packed] and g_idx [cols], the group of
  each column. Source: GPTQModel, nn_modules/qlinear.
- AWQ (gemm): as GPTQ, but qweight is [cols, rows packed], the numbers of an int32 are in another order, and there is no
  g_idx. Source: AutoAWQ, awq/modules/linear/gemm.py.
- compressed-tensors: weight_packed [rows, cols packed], weight_scale [rows, groups], weight_zero_point [rows packed,
  groups] and weight_g_idx [cols]. Numbers and zero points are signed and stored with half their range added. Source:
  compressors/pack_quantized.

MXFP4 (gpt-oss) stores the matrices of all experts together: NAME_blocks [experts, rows, groups, 16] uint8, two numbers
in each byte, the lower bits first, and NAME_scales [experts, rows, groups] uint8. Source: Transformers,
integrations/mxfp4.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from weft.checkpoint.architectures.parameters import Parameter, model_parameters
from weft.checkpoint.architectures.published import (
    ORDERED,
    ROW,
    Method,
    PublishedQuantization,
    held_group,
    scheme_name,
    wide_scheme_name,
)
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.files.model_file import read_tensor
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised.quantization_config import BITS, parse_quantization, quantised_layer_predicate
from weft.errors import ModelError

WORD = 32  # bits of an integer that numbers are packed in
# Suffixes to a layer's name: its numbers, scales, zero points, and each column's group; "" if the method has none.
PART_NAMES = {
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "awq": ("qweight", "scales", "qzeros", ""),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
}
MXFP4_PARTS = ("_blocks", "_scales")  # suffixes to the name of the experts' tensor
MXFP4_BLOCK = (32, 16)  # numbers that share a scale, and their bytes
SHAPE_NAME, SHAPE_TYPES = "weight_shape", {"I64": "<2q", "I32": "<2i"}  # of compressed-tensors
UNSET = b"\xff"  # each byte of a -1
SCALE_TYPES = ("F16", "BF16", "F32")
QUANTISABLE = ("linear", "expansion", "expert", "head")  # roles of parameters that may be quantised


class Packed(TensorInfo, frozen=True, kw_only=True):
    """A matrix stored in several tensors, or the matrices of all experts.

    - `dims`: [rows, cols] of numbers of `bits` bits each. `type`: a scheme's name; no kernel multiplies with some.
    - `group`: columns that share a scale, unless `order` gives each column's group.
    - `rows`: rows that share a scale, of FP8 numbers.
    - `symmetric`: zero is in the middle of the range, even if there are `zeros` that say so.
    """

    published: PublishedQuantization
    bits: int
    group: int
    symmetric: bool
    values: TensorInfo
    scales: TensorInfo
    zeros: TensorInfo | None
    order: TensorInfo | None
    rows: int = 1


class _Layout(NamedTuple):
    """Sizes of a packed matrix, and the dims that its tensors of numbers and zero points must have."""

    rows: int
    cols: int
    groups: int
    values: tuple[int, int]
    zeros: tuple[int, int]


def join_packed(index: Mapping[str, TensorInfo], published: PublishedQuantization) -> dict[str, TensorInfo]:
    """Replace the tensors of each packed matrix in an index by one `Packed`, named `LAYER.weight`.

    That is the matrix's name in a checkpoint that is not quantised. Raises ModelError, naming the tensor, if the
    tensors of a matrix do not fit together.
    """
    if published.method == "mxfp4":
        return _join_mxfp4(index, published)
    ends = tuple("." + name for name in PART_NAMES[published.method] if name)
    joined = {name: info for name, info in index.items() if not name.endswith(ends)}
    for name, info in index.items():
        if name.endswith(ends[0]):
            layer = name.removesuffix(ends[0])
            joined[layer + ".weight"] = _pack(index, layer, info, published)
    return joined


def _join_mxfp4(index: Mapping[str, TensorInfo], published: PublishedQuantization) -> dict[str, TensorInfo]:
    """Replace each pair of NAME_blocks and NAME_scales by one `Packed` NAME of dims [experts, rows, cols]."""
    joined = {name: info for name, info in index.items() if not name.endswith(MXFP4_PARTS)}
    elements, nbytes = MXFP4_BLOCK
    for name, values in index.items():
        if not name.endswith(MXFP4_PARTS[0]):
            continue
        stack = name.removesuffix(MXFP4_PARTS[0])
        scales = index.get(stack + MXFP4_PARTS[1])
        if scales is None:
            raise _wrong(values, stack, f"has no {stack}{MXFP4_PARTS[1]} with it", code="matrix-without-scales")
        if not scales.dims:
            raise _wrong(scales, stack, "has a scalar for its scales", code="packed-part-of-other-dims")
        _check_part(scales, stack, ("U8",))
        _check_part(values, stack, ("U8",), (*scales.dims, nbytes))
        joined[stack] = Packed(
            file=values.file,
            type="MXFP4",
            dims=(*scales.dims[:-1], scales.dims[-1] * elements),
            offset=values.offset,
            nbytes=values.nbytes + scales.nbytes,
            published=published,
            bits=4,
            group=elements,
            symmetric=True,
            values=values,
            scales=scales,
            zeros=None,
            order=None,
        )
    return joined


def with_stored_types(shape: ModelShape, tensors: Mapping[str, TensorInfo]) -> ModelShape:
    """Correct the shape's `published` by the schemes that the checkpoint's tensors really have.

    Tensors that are missing in `tensors` count as the config describes them.
    """
    if shape.published is None:
        return shape
    roles = {name: parameter.role for name, parameter in matrices(shape)}
    schemes = {name: shape.published.stored_as(name, role) for name, role in roles.items()}
    for name, info in tensors.items():
        if name in roles:
            schemes[name] = info.type if isinstance(info, Packed) else ""
    counts = Counter(scheme for name, scheme in schemes.items() if scheme and roles[name] != "head")
    most_common = max(counts, key=lambda scheme: counts[scheme], default=shape.published.scheme)
    if most_common != shape.published.scheme:
        published = _like_tensors(shape.published, tensors, most_common)
        shape = msgspec.structs.replace(shape, published=published)
    return _with_exceptions(shape, schemes)


def _like_tensors(
    published: PublishedQuantization, tensors: Mapping[str, TensorInfo], scheme: str
) -> PublishedQuantization:
    """The published quantisation with the figures of the packed tensors in this scheme."""
    packed = next(info for info in tensors.values() if isinstance(info, Packed) and info.type == scheme)
    return msgspec.structs.replace(
        published,
        bits=packed.bits,
        group=packed.group,
        symmetric=packed.symmetric,
        ordered=packed.order is not None,
    )


def with_config_types(shape: ModelShape, config: Fields) -> ModelShape:
    """Set the shape's `published` as a quantization_config describes it; Weft must be able to read the method."""
    published, is_quantised = parse_quantization(config), quantised_layer_predicate(config)
    schemes = {}
    for name, parameter in matrices(shape):
        quantised = parameter.role in QUANTISABLE and is_quantised(name.removesuffix(".weight"))
        schemes[name] = _scheme_in_config(shape, published, parameter) if quantised else ""
    return _with_exceptions(msgspec.structs.replace(shape, published=published), schemes)


def _scheme_in_config(shape: ModelShape, published: PublishedQuantization, parameter: Parameter) -> str:
    """Scheme of a quantised matrix; bitsandbytes' blocks run along the whole matrix, whose columns may cut them."""
    cols = parameter.parts[0].cols
    if not published.wide or cols is None:
        return published.scheme
    return wide_scheme_name(published.wide, held_group(published.group, cols.length))


def _with_exceptions(shape: ModelShape, schemes: Mapping[str, str]) -> ModelShape:
    """Record as exceptions the tensors whose scheme is not the usual one; `schemes` has all matrices."""
    assert shape.published is not None
    usual = msgspec.structs.replace(shape.published, exceptions=())
    exceptions = {}
    for name, parameter in matrices(shape):
        if schemes[name] != usual.stored_as(name, parameter.role):
            exceptions[name] = schemes[name]
    published = msgspec.structs.replace(usual, exceptions=tuple(exceptions.items()))
    return msgspec.structs.replace(shape, published=published)


def stored_types(shape: ModelShape) -> dict[str, str]:
    """Scheme of each quantised tensor of a checkpoint of this shape, by name."""
    if shape.published is None:
        return {}
    schemes = {name: shape.published.stored_as(name, parameter.role) for name, parameter in matrices(shape)}
    return {name: scheme for name, scheme in schemes.items() if scheme}


def matrices(shape: ModelShape) -> Iterator[tuple[str, Parameter]]:
    """Yield (tensor name, parameter) of a model's matrices, without a tied head; the first expert stands for all."""
    for parameter, layer in model_parameters(shape):
        if parameter.role == "head" and shape.tied:
            continue
        for part in parameter.parts:
            if part.cols is not None:
                yield part.source.format(layer=layer, expert=0), parameter


def _pack(index: Mapping[str, TensorInfo], layer: str, values: TensorInfo, published: PublishedQuantization) -> Packed:
    """Join the tensors of one matrix, and check that they fit together."""
    scales, zeros, order = _find_parts(index, layer, values, published)
    by_row = published.method == "compressed-tensors"
    bits = _stored_bits(published, scales.dims[0 if by_row else 1], zeros)
    if bits not in BITS:
        raise _wrong(values, layer, f"has numbers of {bits} bits; Weft reads 4 and 8", code="packed-bits-not-read")
    layout = _layout(published.method, bits, values, scales)
    _check_part(values, layer, ("I32",), layout.values)
    _check_part(scales, layer, SCALE_TYPES)
    if zeros is not None:
        _check_part(zeros, layer, ("I32",), layout.zeros)
    _check_shape(index.get(f"{layer}.{SHAPE_NAME}"), layer, layout, bits, published)
    group = _group_columns(layout.cols, layout.groups, published)
    if group is None:
        raise _wrong(
            scales,
            layer,
            f"has {layout.groups} scales for rows of {layout.cols} columns, and the config groups of "
            f"{'whole rows' if published.group == ROW else published.group}",
            code="scales-do-not-divide-rows",
        )
    in_order = order is None or _is_in_order(order, layer, layout.cols, group, published)
    if order is None and published.ordered and not published.mixed:
        raise _wrong(
            values,
            layer,
            f"has no {PART_NAMES[published.method][3]} with it, which desc_act or actorder in the config says it has",
            code="matrix-without-column-groups",
        )
    symmetric = zeros is None if by_row else published.symmetric
    return Packed(
        file=values.file,
        type=scheme_name(bits, group, symmetric) + ("" if in_order else ORDERED),
        dims=(layout.rows, layout.cols),
        offset=values.offset,
        nbytes=sum(info.nbytes for info in (values, scales, zeros, order) if info is not None),
        published=published,
        bits=bits,
        group=group,
        symmetric=symmetric,
        values=values,
        scales=scales,
        zeros=zeros,
        order=None if in_order else order,
    )


def _find_parts(
    index: Mapping[str, TensorInfo], layer: str, values: TensorInfo, published: PublishedQuantization
) -> tuple[TensorInfo, TensorInfo | None, TensorInfo | None]:
    """Scales, zero points and column groups of a matrix's numbers.

    Only symmetric compressed-tensors may lack zero points.
    """
    _, scale_name, zero_name, order_name = PART_NAMES[published.method]
    scales = index.get(f"{layer}.{scale_name}")
    if scales is None or len(scales.dims) != 2 or len(values.dims) != 2:
        raise _wrong(values, layer, f"has no {layer}.{scale_name} of two dims with it", code="matrix-without-scales")
    zeros = index.get(f"{layer}.{zero_name}")
    may_lack_zeros = published.method == "compressed-tensors" and (published.symmetric or published.mixed)
    if zeros is None and not may_lack_zeros:
        raise _wrong(values, layer, f"has no {layer}.{zero_name} with it", code="matrix-without-zero-points")
    return scales, zeros, index.get(f"{layer}.{order_name}") if order_name else None


def _stored_bits(published: PublishedQuantization, rows: int, zeros: TensorInfo | None) -> int:
    """Bits per number: the config's, unless the zero points show others (a layer of its own, GPTQ's "dynamic")."""
    if zeros is None or len(zeros.dims) != 2:
        return published.bits
    words = zeros.dims[0 if published.method == "compressed-tensors" else 1]
    if words == -(-rows * published.bits // WORD):
        return published.bits
    return words * WORD // max(1, rows)


def _layout(method: Method, bits: int, values: TensorInfo, scales: TensorInfo) -> _Layout:
    """Sizes of a matrix from its packed numbers and scales."""
    per_word = WORD // bits
    if method == "compressed-tensors":
        rows, groups = scales.dims
        cols = values.dims[1] * per_word
        return _Layout(rows, cols, groups, (rows, -(-cols // per_word)), (-(-rows // per_word), groups))
    groups, rows = scales.dims
    zeros = (groups, -(-rows // per_word))
    if method == "awq":
        cols = values.dims[0]
        return _Layout(rows, cols, groups, (cols, -(-rows // per_word)), zeros)
    cols = values.dims[0] * per_word
    return _Layout(rows, cols, groups, (-(-cols // per_word), rows), zeros)


def _check_part(info: TensorInfo, layer: str, types: tuple[str, ...], dims: tuple[int, ...] | None = None) -> None:
    """Raise ModelError unless a tensor has one of `types`, and these dims if any are given."""
    if info.type not in types or (dims is not None and info.dims != dims):
        expected = f"{' or '.join(types)}{f' of {list(dims)}' if dims else ''}"
        raise _wrong(
            info,
            layer,
            f"has a part that is {info.type} of {list(info.dims)}; it must be {expected}",
            code="packed-part-of-other-dims",
        )


def _check_shape(
    info: TensorInfo | None, layer: str, layout: _Layout, bits: int, published: PublishedQuantization
) -> None:
    """Raise ModelError unless compressed-tensors' [rows, cols] of a matrix agree with its tensors."""
    if published.method != "compressed-tensors":
        return
    if info is None or info.type not in SHAPE_TYPES or info.dims != (2,):
        stored = "missing" if info is None else f"{info.type} of {list(info.dims)}"
        raise ModelError(
            f"{layer}.{SHAPE_NAME} is {stored}; it must be {' or '.join(SHAPE_TYPES)} of [2]; fetch the model again",
            code="packed-part-of-other-dims",
        )
    rows, cols = struct.unpack(SHAPE_TYPES[info.type], read_tensor(info))
    per_word = WORD // bits
    if rows != layout.rows or -(-cols // per_word) * per_word != layout.cols:
        raise _wrong(
            info,
            layer,
            f"says in {SHAPE_NAME} that it is of [{rows}, {cols}], and its numbers are of "
            f"[{layout.rows}, {layout.cols}]",
            code="packed-part-of-other-dims",
        )


def _group_columns(cols: int, groups: int, published: PublishedQuantization) -> int | None:
    """Columns that share a scale, from the number of scales per row; None if the columns cannot be divided so.

    The number of the config is preferred. Others are only taken if it says that layers differ: half of the scales, in a
    file that was cut, would look like groups twice as long.
    """
    if -(-cols // published.group) == groups:
        return published.group
    if not published.mixed:
        return None
    if groups == 1:
        return ROW
    return cols // groups if groups and cols % groups == 0 else None


def _is_in_order(order: TensorInfo, layer: str, cols: int, group: int, published: PublishedQuantization) -> bool:
    """Return True if each group's columns lie side by side, the first columns in the first group.

    A tensor of only zeros, or in compressed-tensors of only -1, was never set: in order, unless the config says that
    columns were put in another one. Raises ModelError for such an order, for a tensor of another type or length, and
    for a column of a group that does not exist.
    """
    if order.type != "I32" or order.dims != (cols,):
        raise _wrong(
            order,
            layer,
            f"has groups in {order.type} of {list(order.dims)}; they must be I32 of [{cols}]",
            code="column-groups-of-other-dims",
        )
    data = read_tensor(order)
    is_unset = not any(data) or data == UNSET * len(data)
    if is_unset and published.ordered and not published.mixed and cols > group:
        raise _wrong(
            order,
            layer,
            "has the same group for all columns, and the config says that they are ordered (desc_act, actorder)",
            code="column-groups-unset",
        )
    if is_unset or data == array("i", (col // group for col in range(cols))).tobytes():
        return True
    column_groups, groups = array("i", data), -(-cols // group)
    for number in (min(column_groups), max(column_groups)):
        if not 0 <= number < groups:
            raise _wrong(
                order, layer, f"has a column in group {number}, of {groups} groups", code="column-group-out-of-range"
            )
    return False


def check_zero_points(info: TensorInfo | None) -> None:
    """Raise ModelError for zero points that are not 0, of a matrix whose format has none."""
    if info is not None and any(read_tensor(info)):
        raise ModelError(
            f"{info.file}: a weight_zero_point of {info.type} {list(info.dims)} is not 0, though the config says that "
            "weights are symmetric; fetch the model again",
            code="uneven-zero-points",
        )


def _wrong(info: TensorInfo, layer: str, what: str, *, code: str) -> ModelError:
    return ModelError(f"{info.file}: {layer} {what}; fetch it again, or give the config of these weights", code=code)
