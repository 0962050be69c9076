"""Packed: the tensors that GPTQ, AWQ and compressed-tensors store a matrix in, as one tensor of the model.

Layouts, of a matrix [rows, cols] whose rows are output features, each int32 with 32 / bits numbers, the lowest bits
first: GPTQ has qweight [cols packed, rows], scales [groups, rows], qzeros [groups, rows packed] and g_idx [cols], the
group of each column (GPTQModel, nn_modules/qlinear); AWQ's gemm the same without g_idx, but for qweight [cols, rows
packed] and the order of numbers in an int32 (AutoAWQ, awq/modules/linear/gemm.py); compressed-tensors weight_packed
[rows, cols packed], weight_scale [rows, groups], weight_zero_point [rows packed, groups] and weight_g_idx [cols]
(compressors/pack_quantized), where numbers have a sign and are stored with half their range added, as zero points are.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from weft.architectures.parameters import Parameter, layers_of, parameters
from weft.architectures.published import ORDERED, ROW, Published, scheme_name
from weft.architectures.shape import ModelShape
from weft.errors import ModelError, error_reason
from weft.formats.fields import Fields
from weft.formats.quantization_config import is_quantised, read
from weft.formats.tensor import TensorInfo

WORD = 32  # bits of an integer that numbers are packed in
# What follows a layer's name: its numbers, scales, zero points, and each column's group.
NAMES = {
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "awq": ("qweight", "scales", "qzeros", ""),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
}
UNSET = b"\xff"  # in each byte of a -1
SCALES = ("F16", "BF16", "F32")
LAYERS = ("linear", "expert", "head")  # what may be quantised


class Packed(TensorInfo, frozen=True, kw_only=True):
    """A matrix in several tensors. `dims` are [rows, cols] of numbers of `bits` bits, `type` is a scheme's name, or
    what no kernel multiplies with; `group` columns share a scale, but where `order` says each column's group. With
    `symmetric` zero is in the middle, whether or not there are `zeros` that say so."""

    published: Published
    bits: int
    group: int
    symmetric: bool
    values: TensorInfo
    scales: TensorInfo
    zeros: TensorInfo | None
    order: TensorInfo | None


def joined(index: Mapping[str, TensorInfo], published: Published) -> dict[str, TensorInfo]:
    """An index with each packed matrix as `weight` of its layer, as it is called where it is not quantised. Raises
    ModelError, naming the tensor, where its parts do not fit together."""
    ends = tuple("." + name for name in NAMES[published.method] if name)
    found = {name: info for name, info in index.items() if not name.endswith(ends)}
    for name, info in index.items():
        if name.endswith(ends[0]):
            layer = name.removesuffix(ends[0])
            found[layer + ".weight"] = _packed(index, layer, info, published)
    return found


def described(shape: ModelShape, tensors: Mapping[str, TensorInfo]) -> ModelShape:
    """The shape with what the tensors of a checkpoint really are stored in, in the place of what its config says."""
    if shape.published is None:
        return shape
    roles = {name: parameter.role for name, parameter in matrices(shape)}
    kinds = {name: shape.published.of(name, role) for name, role in roles.items()}
    kinds |= {name: it.type if isinstance(it, Packed) else "" for name, it in tensors.items() if name in roles}
    most = Counter(kind for name, kind in kinds.items() if kind and roles[name] != "head").most_common(1)
    if most and most[0][0] != shape.published.scheme:
        info = next(it for it in tensors.values() if isinstance(it, Packed) and it.type == most[0][0])
        published = msgspec.structs.replace(
            shape.published, bits=info.bits, group=info.group, symmetric=info.symmetric, ordered=info.order is not None
        )
        shape = msgspec.structs.replace(shape, published=published)
    return _with_exceptions(shape, kinds)


def configured(shape: ModelShape, config: Fields) -> ModelShape:
    """The shape with what its quantization_config, without an obstacle, says of its weights."""
    published, quantised = read(config), is_quantised(config)
    kinds = {
        name: published.scheme if parameter.role in LAYERS and quantised(name.removesuffix(".weight")) else ""
        for name, parameter in matrices(shape)
    }
    return _with_exceptions(msgspec.structs.replace(shape, published=published), kinds)


def _with_exceptions(shape: ModelShape, kinds: Mapping[str, str]) -> ModelShape:
    """The shape with those of `kinds`, what each tensor is stored in, that are not the usual."""
    assert shape.published is not None
    plain = msgspec.structs.replace(shape.published, exceptions=())
    others = {name: kinds[name] for name, parameter in matrices(shape) if kinds[name] != plain.of(name, parameter.role)}
    return msgspec.structs.replace(shape, published=msgspec.structs.replace(plain, exceptions=tuple(others.items())))


def stored(shape: ModelShape) -> dict[str, str]:
    """What each quantised tensor of such a checkpoint is stored in, as its shape says."""
    if shape.published is None:
        return {}
    kinds = {name: shape.published.of(name, parameter.role) for name, parameter in matrices(shape)}
    return {name: kind for name, kind in kinds.items() if kind}


def matrices(shape: ModelShape) -> Iterator[tuple[str, Parameter]]:
    """The tensors of a model that have rows and columns, the first for all experts. A tied head's is its embedding's,
    and comes once."""
    for parameter in parameters(shape):
        if parameter.role == "head" and shape.tied:
            continue
        for layer in layers_of(shape, parameter):
            for part in parameter.parts:
                if part.cols is not None:
                    yield part.source.format(layer=layer, expert=0), parameter


def _packed(index: Mapping[str, TensorInfo], layer: str, values: TensorInfo, published: Published) -> Packed:
    _, *names = (f"{layer}.{name}" if name else "" for name in NAMES[published.method])
    scales, zeros, order = (index.get(name) for name in names)
    if scales is None or len(scales.dims) != 2 or len(values.dims) != 2:
        raise _wrong(values, layer, f"has no {names[0]} of two dims beside it")
    by_row = published.method == "compressed-tensors"
    groups, rows = scales.dims[::-1] if by_row else scales.dims
    if zeros is None and not by_row:
        raise _wrong(values, layer, f"has no {names[1]} beside it")
    symmetric = published.symmetric if not by_row else zeros is None
    bits = published.bits
    if zeros is not None and len(zeros.dims) == 2:
        words = zeros.dims[0 if by_row else 1]
        if words != -(-rows * bits // WORD):
            bits = words * WORD // max(1, rows)  # a layer of its own ("dynamic")
    if bits not in (4, 8):
        raise _wrong(values, layer, f"has numbers of {bits} bits; Weft reads 4 and 8")
    each = WORD // bits
    cols = values.dims[0] if published.method == "awq" else values.dims[0 if not by_row else 1] * each
    group = _group(cols, groups, published.group)
    packed = {
        "gptq": (-(-cols // each), rows),
        "awq": (cols, -(-rows // each)),
        "compressed-tensors": (rows, -(-cols // each)),
    }[published.method]
    points = (-(-rows // each), groups) if by_row else (groups, -(-rows // each))
    for info, kinds, dims in ((values, ("I32",), packed), (scales, SCALES, None), (zeros, ("I32",), points)):
        if info is not None and (info.type not in kinds or (dims is not None and info.dims != dims)):
            wanted = f"{' or '.join(kinds)}{f' of {list(dims)}' if dims else ''}"
            raise _wrong(info, layer, f"has a part that is {info.type} of {list(info.dims)}; it must be {wanted}")
    if group is None:
        raise _wrong(scales, layer, f"has {groups} scales for rows of {cols} columns")
    parts = [info for info in (values, scales, zeros, order) if info is not None]
    plain = order is None or _is_plain(order, layer, cols, group)
    return Packed(
        file=values.file,
        type=scheme_name(bits, group, symmetric) + ("" if plain else ORDERED),
        dims=(rows, cols),
        offset=values.offset,
        nbytes=sum(info.nbytes for info in parts),
        published=published,
        bits=bits,
        group=group,
        symmetric=symmetric,
        values=values,
        scales=scales,
        zeros=zeros,
        order=None if plain else order,
    )


def _group(cols: int, groups: int, usual: int) -> int | None:
    """Columns that share a scale, from how many scales there are; as the config has it where that is the same."""
    if -(-cols // usual) == groups:
        return usual
    if groups == 1:
        return ROW
    return cols // groups if groups and cols % groups == 0 else None


def _is_plain(order: TensorInfo, layer: str, cols: int, group: int) -> bool:
    """Whether the groups are of columns that lie side by side, the first ones in the first. Nothing but zeros, or
    -1 in compressed-tensors, is what those write who have not set it."""
    if order.type != "I32" or order.dims != (cols,):
        raise _wrong(order, layer, f"has groups in {order.type} of {list(order.dims)}; they must be I32 of [{cols}]")
    try:
        with open(order.file, "rb") as file:
            file.seek(order.offset)
            found = file.read(order.nbytes)
    except OSError as error:
        raise ModelError(f"cannot read {order.file}: {error_reason(error)}") from error
    unset = not any(found) or found == UNSET * len(found)
    if unset or found == array("i", (col // group for col in range(cols))).tobytes():
        return True
    of, groups = array("i", found), -(-cols // group)
    for number in (min(of), max(of)):
        if not 0 <= number < groups:
            raise _wrong(order, layer, f"has a column in group {number}, of {groups} groups")
    return False


def _wrong(info: TensorInfo, layer: str, what: str) -> ModelError:
    return ModelError(f"{info.file}: {layer} {what}; fetch it again, or give the config of these weights")
