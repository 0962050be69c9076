"""Words: matrices of integers of 4 or 8 bits that share 32-bit integers, with a scale per group of columns.

The matrix is [rows, cols]; its rows are output features. Each int32 holds 32 / bits numbers, the lowest bits first.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping

import msgspec

from weft.checkpoint.architectures.published import ORDERED, ROW, PublishedQuantization, scheme_name
from weft.checkpoint.files.model_file import read_tensor
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised.packed import SCALE_TYPES, Packed, check_part, wrong_part
from weft.checkpoint.quantised.schemes import BITS
from weft.errors import ModelError

WORD = 32  # bits of an integer that numbers are packed in
SHAPE_TYPES = {"I64": "<2q", "I32": "<2i"}
UNSET = b"\xff"  # each byte of a -1


class WordLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of a matrix.

    The first five are suffixes to a layer's name; "" for a tensor that the format does not have.

    - `values`: numbers [rows, cols]. `scales`: [rows, groups]. `zeros`: zero points [rows, groups], of which an integer
      holds several rows.
    - `order`: each column's group [cols]. `shape`: the two numbers [rows, cols].
    - `turned`: numbers, scales and zero points are stored with their dims exchanged.
    - `packs_rows`: integers hold numbers of several rows too, not of several columns.
    - `nibbles`: the rows of an integer's 4-bit numbers, the lowest bits first.
    - `zeros_optional`: a matrix without zero points is symmetric; else the config says which ones are.
    """

    values: str
    scales: str
    zeros: str
    order: str = ""
    shape: str = ""
    turned: bool = False
    packs_rows: bool = False
    nibbles: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    zeros_optional: bool = False

    def dims(self, rows: int, cols: int) -> tuple[int, ...]:
        """[rows, cols] as they are stored."""
        return (cols, rows) if self.turned else (rows, cols)


class PackedWords(Packed, frozen=True, kw_only=True):
    """A matrix in this layout. `zero_offset` is added to each stored zero point."""

    layout: WordLayout
    zeros: TensorInfo | None
    order: TensorInfo | None
    zero_offset: int


def join_words(
    index: Mapping[str, TensorInfo], published: PublishedQuantization, layout: WordLayout
) -> dict[str, TensorInfo]:
    """Replace the tensors of each matrix in an index by one `PackedWords`, named `LAYER.weight`.

    That is the matrix's name in a checkpoint that is not quantised. Raises ModelError, naming the tensor, if the
    tensors of a matrix do not fit together.
    """
    ends = tuple("." + name for name in (layout.values, layout.scales, layout.zeros, layout.order) if name)
    joined = {name: info for name, info in index.items() if not name.endswith(ends)}
    for name, info in index.items():
        if name.endswith(ends[0]):
            layer = name.removesuffix(ends[0])
            joined[layer + ".weight"] = _join(index, layer, info, published, layout)
    return joined


def _join(
    index: Mapping[str, TensorInfo],
    layer: str,
    values: TensorInfo,
    published: PublishedQuantization,
    layout: WordLayout,
) -> PackedWords:
    """Join the tensors of one matrix, and check that they fit together."""
    scales, zeros, order = _find_parts(index, layer, values, published, layout)
    rows, groups = layout.dims(*scales.dims)
    bits = _stored_bits(published, layout, rows, zeros)
    if bits not in BITS:
        raise wrong_part(values, layer, f"has numbers of {bits} bits; Weft reads 4 and 8", code="packed-bits-not-read")
    per_word, stored_cols = WORD // bits, layout.dims(*values.dims)[1]
    cols, words = stored_cols * (1 if layout.packs_rows else per_word), -(-rows // per_word)
    check_part(values, layer, ("I32",), layout.dims(words if layout.packs_rows else rows, stored_cols))
    check_part(scales, layer, SCALE_TYPES)
    if zeros is not None:
        check_part(zeros, layer, ("I32",), layout.dims(words, groups))
    if layout.shape:
        _check_shape(index.get(f"{layer}.{layout.shape}"), f"{layer}.{layout.shape}", (rows, cols), per_word)
    group = _group_columns(cols, groups, published)
    if group is None:
        raise wrong_part(
            scales,
            layer,
            f"has {groups} scales for rows of {cols} columns, and the config groups of "
            f"{'whole rows' if published.group == ROW else published.group}",
            code="scales-do-not-divide-rows",
        )
    in_order = order is None or _is_in_order(order, layer, cols, group, published)
    if order is None and published.ordered and not published.mixed:
        raise wrong_part(
            values,
            layer,
            f"has no {layout.order} with it, which desc_act or actorder in the config says it has",
            code="matrix-without-column-groups",
        )
    symmetric = zeros is None if layout.zeros_optional else published.symmetric
    return PackedWords(
        file=values.file,
        type=scheme_name("integers", group, bits, symmetric) + ("" if in_order else ORDERED),
        dims=(rows, cols),
        offset=values.offset,
        nbytes=sum(info.nbytes for info in (values, scales, zeros, order) if info is not None),
        numbers="integers",
        bits=bits,
        group=group,
        symmetric=symmetric,
        values=values,
        scales=scales,
        layout=layout,
        zeros=zeros,
        order=None if in_order else order,
        zero_offset=published.zero_offset,
    )


def _find_parts(
    index: Mapping[str, TensorInfo],
    layer: str,
    values: TensorInfo,
    published: PublishedQuantization,
    layout: WordLayout,
) -> tuple[TensorInfo, TensorInfo | None, TensorInfo | None]:
    """Scales, zero points and column groups of a matrix's numbers."""
    scales = index.get(f"{layer}.{layout.scales}")
    if scales is None or len(scales.dims) != 2 or len(values.dims) != 2:
        raise wrong_part(
            values, layer, f"has no {layer}.{layout.scales} of two dims with it", code="matrix-without-scales"
        )
    zeros = index.get(f"{layer}.{layout.zeros}")
    if zeros is None and not (layout.zeros_optional and (published.symmetric or published.mixed)):
        raise wrong_part(values, layer, f"has no {layer}.{layout.zeros} with it", code="matrix-without-zero-points")
    return scales, zeros, index.get(f"{layer}.{layout.order}") if layout.order else None


def _stored_bits(published: PublishedQuantization, layout: WordLayout, rows: int, zeros: TensorInfo | None) -> int:
    """Bits per number: the config's, unless the zero points show others (a layer of its own, GPTQ's "dynamic")."""
    if zeros is None or len(zeros.dims) != 2:
        return published.bits
    words = layout.dims(*zeros.dims)[0]
    if words == -(-rows * published.bits // WORD):
        return published.bits
    return words * WORD // max(1, rows)


def _check_shape(info: TensorInfo | None, name: str, dims: tuple[int, int], per_word: int) -> None:
    """Raise ModelError unless the [rows, cols] of a matrix that the tensor `name` stores agree with `dims`."""
    if info is None or info.type not in SHAPE_TYPES or info.dims != (2,):
        stored = "missing" if info is None else f"{info.type} of {list(info.dims)}"
        raise ModelError(
            f"{name} is {stored}; it must be {' or '.join(SHAPE_TYPES)} of [2]; fetch the model again",
            code="packed-part-of-other-dims",
        )
    rows, cols = struct.unpack(SHAPE_TYPES[info.type], read_tensor(info))
    if (rows, -(-cols // per_word) * per_word) != dims:
        layer, _, suffix = name.rpartition(".")
        raise wrong_part(
            info,
            layer,
            f"says in {suffix} that it is of [{rows}, {cols}], and its numbers are of {list(dims)}",
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
        raise wrong_part(
            order,
            layer,
            f"has groups in {order.type} of {list(order.dims)}; they must be I32 of [{cols}]",
            code="column-groups-of-other-dims",
        )
    data = read_tensor(order)
    is_unset = not any(data) or data == UNSET * len(data)
    if is_unset and published.ordered and not published.mixed and cols > group:
        raise wrong_part(
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
            raise wrong_part(
                order, layer, f"has a column in group {number}, of {groups} groups", code="column-group-out-of-range"
            )
    return False
