"""TensorInfo: position and encoding of one tensor of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from weft.errors import ModelError


class Encoding(msgspec.Struct, frozen=True):
    """Storage of numbers in blocks: each `elements` numbers along a row take `nbytes` bytes."""

    elements: int
    nbytes: int


# Names as in safetensors and ggml; the dense types have the same names in both.
ENCODINGS: dict[str, Encoding] = {
    "F32": Encoding(1, 4),
    "F16": Encoding(1, 2),
    "BF16": Encoding(1, 2),
    "Q4_0": Encoding(32, 18),
    "Q4_1": Encoding(32, 20),
    "Q5_0": Encoding(32, 22),
    "Q5_1": Encoding(32, 24),
    "Q8_0": Encoding(32, 34),
    "Q2_K": Encoding(256, 84),
    "Q3_K": Encoding(256, 110),
    "Q4_K": Encoding(256, 144),
    "Q5_K": Encoding(256, 176),
    "Q6_K": Encoding(256, 210),
    "IQ4_NL": Encoding(32, 18),
    "IQ4_XS": Encoding(256, 136),
    "MXFP4": Encoding(32, 17),
}


DENSE = ("F32", "F16", "BF16")  # types of tensors that are not quantised


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in a file. `dims` are row-major, the last one contiguous; `offset` and `nbytes` are bytes of `file`.

    Rows may be some of the stored rows: row r is their number `first` + r * `step`.

    - `type`: a key of ENCODINGS, or another type, which a model's weights must not have.
    - `interleaved`: head_dim if each head's rows alternate between the two halves of its rotary pairs (ggml's order for
      Llama); 0 if one half follows the other (all other files).
    - `transposed`: a matrix [rows, cols] that lies in the file as [cols, rows].
    """

    file: str
    type: str
    dims: tuple[int, ...]
    offset: int
    nbytes: int
    interleaved: int = 0
    transposed: bool = False
    first: int = 0
    step: int = 1


def check_bounds(tensors: Mapping[str, TensorInfo], file: str, size: int) -> None:
    """Raise ModelError if a tensor of `file` ends beyond its `size` bytes, or overlaps with another tensor."""
    end, previous = 0, ""
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset + info.nbytes > size:
            raise ModelError(
                f"{file} is cut short: tensor {name!r:.80} ends at byte {info.offset + info.nbytes:,}, the file has "
                f"{size:,} bytes; fetch it again",
                code="short-tensor",
            )
        if info.offset < end and info.nbytes:
            raise ModelError(
                f"{file} is damaged: tensors {previous!r:.80} and {name!r:.80} overlap; fetch it again",
                code="overlapping-tensors",
            )
        end, previous = info.offset + info.nbytes, name
