"""One tensor of a checkpoint: where its bytes lie and how its numbers are stored."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from weft.errors import ModelError


class Encoding(msgspec.Struct, frozen=True):
    """How numbers are stored: each `elements` of them, along a row, in `nbytes` bytes."""

    elements: int
    nbytes: int


# Names as safetensors and ggml write them; the dense ones are the same in both.
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
}


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`dims` are row-major, the last one contiguous; `offset` and `nbytes` are bytes of `file`.

    `type` is a key of ENCODINGS, or a type that only some other tensor than a model's weights may have.
    `interleaved` is head_dim where each head's rows alternate between the two halves of its rotary pairs
    (ggml's order for Llama), and 0 where the halves follow each other (everybody else's).
    """

    file: str
    type: str
    dims: tuple[int, ...]
    offset: int
    nbytes: int
    interleaved: int = 0


def check_bounds(tensors: Mapping[str, TensorInfo], file: str, size: int) -> None:
    """Raises ModelError where a tensor of `file` ends beyond its `size` bytes, or lies over another one."""
    end, before = 0, ""
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset + info.nbytes > size:
            raise ModelError(
                f"{file} is cut short: tensor {name!r:.80} ends at byte {info.offset + info.nbytes:,}, the file has "
                f"{size:,} bytes; fetch it again"
            )
        if info.offset < end and info.nbytes:
            raise ModelError(
                f"{file} is damaged: tensors {before!r:.80} and {name!r:.80} lie over each other; fetch it again"
            )
        end, before = info.offset + info.nbytes, name
