"""Packed: a quantised matrix of a checkpoint that is stored in several tensors."""

from __future__ import annotations

from weft.checkpoint.architectures.published import Numbers
from weft.checkpoint.files.model_file import read_tensor
from weft.checkpoint.files.tensor import TensorInfo
from weft.errors import ModelError

SCALE_TYPES = ("F16", "BF16", "F32")


class Packed(TensorInfo, frozen=True, kw_only=True):
    """A matrix stored in several tensors, or the matrices of all experts. Each layout has a class of its own.

    - `dims`: [rows, cols] of `numbers` of `bits` bits each. `type`: a scheme's name; no kernel multiplies with some.
    - `group`: columns that share a scale, unless `type` ends in ORDERED: then each column names its group.
    - `symmetric`: zero is in the middle of the range, even if stored zero points say so.
    """

    numbers: Numbers
    bits: int
    group: int
    symmetric: bool = True
    values: TensorInfo
    scales: TensorInfo


def check_part(info: TensorInfo, layer: str, types: tuple[str, ...], dims: tuple[int, ...] | None = None) -> None:
    """Raise ModelError unless a tensor has one of `types`, and these dims if any are given."""
    if info.type not in types or (dims is not None and info.dims != dims):
        expected = f"{' or '.join(types)}{f' of {list(dims)}' if dims else ''}"
        raise wrong_part(
            info,
            layer,
            f"has a part that is {info.type} of {list(info.dims)}; it must be {expected}",
            code="packed-part-of-other-dims",
        )


def check_zero_points(info: TensorInfo | None) -> None:
    """Raise ModelError for zero points that are not 0, of a matrix whose format has none."""
    if info is not None and any(read_tensor(info)):
        raise ModelError(
            f"{info.file}: a weight_zero_point of {info.type} {list(info.dims)} is not 0, though the config says that "
            "weights are symmetric; fetch the model again",
            code="uneven-zero-points",
        )


def wrong_part(info: TensorInfo, layer: str, what: str, *, code: str) -> ModelError:
    """The error for a tensor that does not agree with the others of a layer, or with the config."""
    return ModelError(f"{info.file}: {layer} {what}; fetch it again, or give the config of these weights", code=code)


def misfit(info: TensorInfo, name: str, what: str, *, code: str) -> ModelError:
    """The error for a tensor that does not fit the matrix it belongs to."""
    return ModelError(f"{info.file}: tensor {name} {what}; fetch it again", code=code)
