"""Matrices of 8-bit integers with a sign, as bitsandbytes and compressed-tensors publish them for int8 products.

- bitsandbytes (LLM.int8()): NAME.weight [rows, cols] I8 and NAME.SCB [rows], the largest number of each row: a weight
  is number * SCB / 127. NAME.weight_format is 0 for rows as they are. Source: bitsandbytes, nn.Linear8bitLt.
- compressed-tensors (int-quantized): NAME.weight I8 and NAME.weight_scale, [rows, 1] or a single number. Source:
  compressed-tensors, compressors.

Both were made for products in which activations are rounded to 8 bits too; bitsandbytes multiplies columns of large
activations (`llm_int8_threshold`) apart in 16 bits. Weft multiplies activations as they are, which is more exact; so
`input_scale` and the threshold are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import msgspec

from weft.checkpoint.architectures.published import ROW, PublishedQuantization
from weft.checkpoint.files.model_file import read_tensor
from weft.checkpoint.files.tensor import TensorInfo
from weft.checkpoint.quantised.packed import SCALE_TYPES, Packed, check_zero_points
from weft.errors import ModelError

LARGEST = 127  # that bitsandbytes' SCB stands for
# By method: the suffix of a matrix's scales, and the suffixes of tensors that are not needed.
SCALES = {"bitsandbytes": ".SCB", "compressed-tensors": ".weight_scale"}
UNREAD = (".weight_format", ".input_scale", ".input_zero_point", ".weight_zero_point")


def join_signed(index: Mapping[str, TensorInfo], published: PublishedQuantization) -> dict[str, TensorInfo]:
    """Replace each matrix of signed integers and its scales in an index by one `Packed` of the matrix's name.

    Raises ModelError, naming file and tensor, for a matrix without scales, or with scales that do not fit it.
    """
    ending = SCALES[published.method]
    joined = {name: info for name, info in index.items() if not name.endswith((ending, *UNREAD))}
    for name, values in index.items():
        if values.type != "I8" or len(values.dims) != 2 or not name.endswith(".weight"):
            continue
        layer = name.removesuffix(".weight")
        scales = index.get(layer + ending)
        if scales is None:
            raise _misfit(values, name, f"is I8 and has no {layer}{ending} with it", code="matrix-without-scales")
        rows = values.dims[0]
        has_one = published.rows == ROW or published.mixed
        counts = (rows, 1) if has_one else (rows,)
        if scales.type not in SCALE_TYPES or prod(scales.dims) not in counts or len(scales.dims) > 2:
            raise _misfit(
                scales,
                layer + ending,
                f"is {scales.type} of {list(scales.dims)}; it must be {' or '.join(SCALE_TYPES)} of [{rows}]"
                f"{' or [1]' if has_one else ''}",
                code="packed-part-of-other-dims",
            )
        _check_order(index.get(layer + ".weight_format"), layer)
        check_zero_points(index.get(layer + ".weight_zero_point"))
        joined[name] = Packed(
            file=values.file,
            type=published.scheme,
            dims=values.dims,
            offset=values.offset,
            nbytes=values.nbytes + scales.nbytes,
            published=published,
            bits=8,
            group=ROW,
            symmetric=True,
            values=values,
            scales=msgspec.structs.replace(scales, dims=(prod(scales.dims),)),
            zeros=None,
            order=None,
        )
    return joined


def _check_order(format: TensorInfo | None, layer: str) -> None:
    """Raise ModelError if bitsandbytes stored the numbers in the order of one GPU's tensor cores."""
    if format is None:
        return
    if format.nbytes != 1:
        raise _misfit(
            format,
            f"{layer}.weight_format",
            f"is {format.type} of {list(format.dims)}; it must be one byte",
            code="packed-part-of-other-dims",
        )
    order = read_tensor(format)
    if order != b"\0":
        raise _misfit(
            format,
            f"{layer}.weight_format",
            f"is {order[0]}, an order of one GPU's cores; Weft reads 0, rows as they are",
            code="weight-format-not-read",
        )


def _misfit(info: TensorInfo, name: str, what: str, *, code: str) -> ModelError:
    return ModelError(f"{info.file}: tensor {name} {what}; fetch it again", code=code)
