"""Byte numbers: matrices [rows, cols] of a byte for each number, FP8 or a signed integer, and a tensor of scales.

FP8 (E4M3): the scales of NAME are NAME_scale_inv (DeepSeek, Qwen) or NAME_scale (fbgemm, compressed-tensors, vLLM);
both multiply the numbers. Their dims say what shares a scale: one number for the whole matrix, [rows] or [rows, 1], or
[blocks of rows, blocks of columns]. A stack of matrices [experts, rows, cols] has one more dim in both.

Signed integers: a scale for each row, or a single number for the whole matrix.

Activations are described too, in the config and by `input_scale`. They are not rounded: Weft multiplies them as they
are, which is more exact; a GPU's own FP8 product rounds each token to its own scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from msgspec.structs import replace

from weft.checkpoint.architectures.published import ROW, PublishedQuantization, scheme_name
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised.packed import SCALE_TYPES, Packed, check_zero_points, misfit
from weft.errors import ModelError

NUMBERS = "F8_E4M3"  # the type of FP8 numbers, in safetensors' words
SCALE_NAMES = ("_scale_inv", "_scale")  # suffixes to the name of FP8 numbers
FP8_SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")  # the last one: 2^(byte - 127)
# Suffixes of tensors of signed matrices that are not needed.
UNREAD = (".weight_format", ".input_scale", ".input_zero_point", ".weight_zero_point")


class PackedBytes(Packed, frozen=True, kw_only=True):
    """A matrix in this layout. `rows`: rows that share a scale. `divisor` divides each stored scale."""

    rows: int
    divisor: int = 1


def join_fp8(index: Mapping[str, TensorInfo], published: PublishedQuantization) -> dict[str, TensorInfo]:
    """Replace each matrix of FP8 numbers and its scales in an index by one `PackedBytes` of the matrix's name.

    Raises ModelError, naming file and tensor, for a matrix without scales, or with scales that do not fit it.
    """
    joined = dict(index)
    for name, values in index.items():
        if values.type != NUMBERS or len(values.dims) not in (2, 3):
            continue
        own = next((name + suffix for suffix in SCALE_NAMES if name + suffix in index), None)
        if own is None:
            raise ModelError(
                f"{values.file}: tensor {name} is {NUMBERS} and has no {name}{SCALE_NAMES[0]} or "
                f"{name}{SCALE_NAMES[1]} next to it; this checkpoint's scale naming is unsupported, or the "
                "file is incomplete",
                code="matrix-without-scales",
            )
        joined[name] = _join_fp8(name, values, joined.pop(own), published)
        check_zero_points(index.get(name.removesuffix(".weight") + ".weight_zero_point"))
    return joined


def _join_fp8(name: str, values: TensorInfo, scales: TensorInfo, published: PublishedQuantization) -> PackedBytes:
    """Join a matrix, or a stack of them, with its scales."""
    *experts, rows, cols = values.dims
    own = scales.dims[len(experts) :] if scales.dims[: len(experts)] == tuple(experts) else None
    shared = None if own is None else _rows_and_columns(own, rows, cols, published)
    if shared is None or scales.type not in FP8_SCALE_TYPES:
        raise _misshapen(name, values, scales, published)
    return PackedBytes(
        file=values.file,
        type=scheme_name("fp8", shared[1]),
        dims=values.dims,
        offset=values.offset,
        nbytes=values.nbytes + scales.nbytes,
        numbers="fp8",
        bits=8,
        group=shared[1],
        rows=shared[0],
        values=values,
        scales=scales if len(scales.dims) > len(experts) else replace(scales, dims=(*scales.dims, 1)),
    )


def _rows_and_columns(
    dims: tuple[int, ...], rows: int, cols: int, published: PublishedQuantization
) -> tuple[int, int] | None:
    """Rows and columns that share a scale, by the dims of a matrix's scales; None if these do not fit the matrix."""
    # A small matrix may be one block, or one block wide: it is of the same scheme as the others.
    blocks = -(-rows // published.rows), -(-cols // published.group)
    if published.group != ROW and dims == blocks:
        return published.rows, published.group
    is_by_matrix = published.rows == published.group == ROW
    if prod(dims) == 1 and (is_by_matrix or published.mixed or blocks == (1, 1)):
        return ROW, ROW
    return (1, ROW) if dims in ((rows,), (rows, 1)) else None


def _misshapen(name: str, values: TensorInfo, scales: TensorInfo, published: PublishedQuantization) -> ModelError:
    *experts, rows, cols = values.dims
    expected = [[*experts, 1], [*experts, rows, 1]]
    if published.group != ROW:
        expected.append([*experts, -(-rows // published.rows), -(-cols // published.group)])
    return ModelError(
        f"{scales.file}: the scales of {name} {list(values.dims)} are {scales.type} of {list(scales.dims)}; they must "
        f"be {' or '.join(FP8_SCALE_TYPES)} of {' or '.join(map(str, expected))}; fetch it again, or use the "
        "config.json that belongs to these weights",
        code="packed-part-of-other-dims",
    )


def join_signed(
    index: Mapping[str, TensorInfo], published: PublishedQuantization, scales: str, divisor: int = 1
) -> dict[str, TensorInfo]:
    """Replace each matrix of signed integers and its scales in an index by one `PackedBytes` of the matrix's name.

    `scales` is the suffix of the scales to a layer's name. Raises ModelError as `join_fp8` does.
    """
    joined = {name: info for name, info in index.items() if not name.endswith((scales, *UNREAD))}
    for name, values in index.items():
        if values.type != "I8" or len(values.dims) != 2 or not name.endswith(".weight"):
            continue
        layer = name.removesuffix(".weight")
        own = index.get(layer + scales)
        if own is None:
            raise misfit(values, name, f"is I8 and has no {layer}{scales} with it", code="matrix-without-scales")
        rows, count = values.dims[0], prod(own.dims)
        has_one = published.rows == ROW or published.mixed
        counts = (rows, 1) if has_one else (rows,)
        if own.type not in SCALE_TYPES or count not in counts or len(own.dims) > 2:
            raise misfit(
                own,
                layer + scales,
                f"is {own.type} of {list(own.dims)}; it must be {' or '.join(SCALE_TYPES)} of [{rows}]"
                f"{' or [1]' if has_one else ''}",
                code="packed-part-of-other-dims",
            )
        check_zero_points(index.get(layer + ".weight_zero_point"))
        joined[name] = PackedBytes(
            file=values.file,
            type=published.scheme,
            dims=values.dims,
            offset=values.offset,
            nbytes=values.nbytes + own.nbytes,
            numbers="signed",
            bits=8,
            group=ROW,
            rows=1 if count == rows else ROW,
            values=values,
            scales=replace(own, dims=(count, 1)),
            divisor=divisor,
        )
    return joined
