"""FP8 matrices in safetensors files: a tensor of 8-bit floating-point numbers (E4M3), and a tensor of scales for it.

The scales of NAME are NAME_scale_inv (DeepSeek, Qwen) or NAME_scale (fbgemm, compressed-tensors, vLLM); both multiply
the numbers. Their dims say what shares a scale: one number for the whole matrix, [rows] or [rows, 1],
or [blocks of rows, blocks of columns]. A stack of matrices [experts, rows, cols] has one more dim in both. Sources:
Transformers, integrations/finegrained_fp8 and integrations/fbgemm_fp8; compressed-tensors, compressors.
`input_scale` (static activations) is left unread: see `checkpoint.quantised.fp8_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from msgspec.structs import replace

from weft.checkpoint.architectures.published import ROW, PublishedQuantization, fp8_scheme_name
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised.packed import Packed, check_zero_points
from weft.errors import ModelError

NUMBERS = "F8_E4M3"  # the type of the numbers, in safetensors' words
SCALE_NAMES = ("_scale_inv", "_scale")  # suffixes to the name of the numbers
SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")  # the last one: 2^(byte - 127)


def join_fp8(index: Mapping[str, TensorInfo], published: PublishedQuantization) -> dict[str, TensorInfo]:
    """Replace each matrix of FP8 numbers and its scales in an index by one `Packed` of the matrix's name.

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
        joined[name] = _join(name, values, joined.pop(own), published)
        check_zero_points(index.get(name.removesuffix(".weight") + ".weight_zero_point"))
    return joined


def _join(name: str, values: TensorInfo, scales: TensorInfo, published: PublishedQuantization) -> Packed:
    """Join a matrix, or a stack of them, with its scales."""
    *experts, rows, cols = values.dims
    own = scales.dims[len(experts) :] if scales.dims[: len(experts)] == tuple(experts) else None
    shared = None if own is None else _rows_and_columns(own, rows, cols, published)
    if shared is None or scales.type not in SCALE_TYPES:
        raise _misshapen(name, values, scales, published)
    return Packed(
        file=values.file,
        type=fp8_scheme_name(shared[1]),
        dims=values.dims,
        offset=values.offset,
        nbytes=values.nbytes + scales.nbytes,
        published=published,
        bits=8,
        group=shared[1],
        rows=shared[0],
        symmetric=True,
        values=values,
        scales=scales if len(scales.dims) > len(experts) else replace(scales, dims=(*scales.dims, 1)),
        zeros=None,
        order=None,
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
        f"be {' or '.join(SCALE_TYPES)} of {' or '.join(map(str, expected))}; fetch it again, or use the "
        "config.json that belongs to these weights",
        code="packed-part-of-other-dims",
    )
