"""Unpacking of GGUF's quantised types to integers with a scale for each group, on any device.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. In each function `b` is
[blocks, bytes of a block] uint8; `checkpoint.quantised.schemes.GGUF_SCHEMES` lists the groups of each type.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.checkpoint.files.tensor import ENCODINGS
from weft.checkpoint.quantised.schemes import GGUF_SCHEMES, MXFP4_VALUES
from weft.ranks.quant.quantised import unpack_sixes
from weft.ranks.weights.finite import check_finite

# (q, scale, lowest): q [blocks, groups, group] uint8, the others [blocks, groups, 1] float32. A weight is
# q * scale + lowest. If `lowest` is None, a weight is (q - zero) * scale instead, with the type's own `zero_point`.
Numbers = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

# The 16 values of types that begin with IQ4, each plus 128. Source: kvalues_iq4nl of ggml-common.h.
MXFP4_NAN = 255  # a scale's byte that stands for no number
MXFP4_ZERO = 12  # what is added to twice each of MXFP4_VALUES to give numbers without sign
IQ4_VALUES = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)


def block_numbers(data: torch.Tensor, type: str) -> Numbers:
    """Unpack [rows, bytes] uint8, each row whole blocks of `type`, block by block.

    Raises ModelError for a scale that is NaN or infinite.
    """
    q, scale, lowest = BLOCKS[type](data.reshape(-1, ENCODINGS[type].nbytes))
    for part in (scale, lowest):
        if part is not None:
            check_finite(part)
    return q, scale, lowest


def zero_point(type: str) -> int:
    """The q that means zero, in a type without minima."""
    if type == "MXFP4":
        return MXFP4_ZERO
    return 128 if type.startswith("IQ4") else 1 << (GGUF_SCHEMES[type].bits - 1)


def dequantise(data: torch.Tensor, type: str) -> torch.Tensor:
    """Dequantise [rows, bytes] uint8, each row whole blocks of `type`, to [rows, elements] float32.

    The result equals the `gguf` library's bit for bit.
    """
    q, scale, lowest = block_numbers(data, type)
    values = q.float()
    values = values.sub_(zero_point(type)).mul_(scale) if lowest is None else values.mul_(scale).add_(lowest)
    return values.view(data.shape[0], -1)


def _half(b: torch.Tensor) -> torch.Tensor:
    """Read a float16 per block, from two bytes: [blocks, 2] uint8 -> [blocks, 1, 1] float32."""
    return b.view(torch.float16).float().unsqueeze(2)


def _fields(b: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Extract the `count` fields of `width` bits from each byte, lowest first: [..., n] -> [..., count, n]."""
    b, mask = b.contiguous(), (1 << width) - 1
    return torch.stack([(b >> i * width).bitwise_and_(mask) for i in range(count)], dim=-2)


def _fifth(b: torch.Tensor) -> torch.Tensor:
    """Extract the fifth bits of 32 elements from four bytes, as 0 or 16: [blocks, 4] -> [blocks, 1, 32]."""
    bits = torch.arange(32, dtype=torch.int32, device=b.device)
    return ((b.contiguous().view(torch.int32) >> bits) & 1).to(torch.uint8).mul_(16).unsqueeze(1)


def q4_0(b: torch.Tensor) -> Numbers:
    return _fields(b[:, None, 2:], 4, 2).flatten(2), _half(b[:, :2]), None


def q4_1(b: torch.Tensor) -> Numbers:
    return _fields(b[:, None, 4:], 4, 2).flatten(2), _half(b[:, :2]), _half(b[:, 2:4])


def q5_0(b: torch.Tensor) -> Numbers:
    return _fields(b[:, None, 6:], 4, 2).flatten(2).add_(_fifth(b[:, 2:6])), _half(b[:, :2]), None


def q5_1(b: torch.Tensor) -> Numbers:
    return _fields(b[:, None, 8:], 4, 2).flatten(2).add_(_fifth(b[:, 4:8])), _half(b[:, :2]), _half(b[:, 2:4])


def q8_0(b: torch.Tensor) -> Numbers:
    return b[:, None, 2:] ^ 128, _half(b[:, :2]), None


def _group_scales(scales: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply integers [blocks, groups] by the block's float16 in `b` [blocks, 2]: [blocks, groups, 1] float32."""
    return scales.float().unsqueeze(2).mul_(_half(b))


def q2_k(b: torch.Tensor) -> Numbers:
    # Two halves of 128 elements; in each, 32 bytes of four 2-bit fields.
    q = _fields(b[:, 16:80].unflatten(1, (2, 32)), 2, 4).view(-1, 16, 16)
    return q, _group_scales(b[:, :16] & 15, b[:, 80:82]), _group_scales(b[:, :16] >> 4, b[:, 82:84]).neg_()


def q3_k(b: torch.Tensor) -> Numbers:
    # Like Q2_K, with a third bit of each element in 32 bytes of eight 1-bit fields.
    q = _fields(b[:, 32:96].unflatten(1, (2, 32)), 2, 4).view(-1, 8, 32).add_(_fields(b[:, :32], 1, 8).mul_(4))
    low, high = _fields(b[:, 96:104], 4, 2).flatten(1), _fields(b[:, 104:108], 2, 4).flatten(1)
    scale = (low | high << 4).view(torch.int8) - 32
    return q.view(-1, 16, 16), _group_scales(scale, b[:, 108:]), None


def _scale_and_minimum(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of the 8 groups of 32 in a K block: six bits each, packed in 12 bytes after two float16."""
    scale, minimum = unpack_sixes(b[:, 4:16])
    return _group_scales(scale, b[:, :2]), _group_scales(minimum, b[:, 2:4]).neg_()


def q4_k(b: torch.Tensor) -> Numbers:
    return _fields(b[:, 16:].unflatten(1, (4, 32)), 4, 2).view(-1, 8, 32), *_scale_and_minimum(b)


def q5_k(b: torch.Tensor) -> Numbers:
    q = _fields(b[:, 48:].unflatten(1, (4, 32)), 4, 2).view(-1, 8, 32).add_(_fields(b[:, 16:48], 1, 8).mul_(16))
    return q, *_scale_and_minimum(b)


def q6_k(b: torch.Tensor) -> Numbers:
    # Two halves of 128 elements; in each, 64 bytes of low nibbles and 32 bytes of four 2-bit fields, the high bits.
    q = _fields(b[:, :128].unflatten(1, (2, 64)), 4, 2).view(-1, 2, 4, 32)
    q.add_(_fields(b[:, 128:192].unflatten(1, (2, 32)), 2, 4).mul_(16))
    return q.view(-1, 16, 16), _group_scales(b[:, 192:208].view(torch.int8), b[:, 208:]), None


def _look_up_iq4(q: torch.Tensor) -> torch.Tensor:
    """Values of the 4-bit indices `q`, from IQ4_VALUES."""
    return torch.tensor(IQ4_VALUES, dtype=torch.uint8, device=q.device).take(q.long())


def iq4_nl(b: torch.Tensor) -> Numbers:
    return _look_up_iq4(_fields(b[:, None, 2:], 4, 2).flatten(2)), _half(b[:, :2]), None


def mxfp4(b: torch.Tensor) -> Numbers:
    twice = torch.tensor([int(2 * value) + MXFP4_ZERO for value in MXFP4_VALUES], dtype=torch.uint8, device=b.device)
    q = twice.take(_fields(b[:, None, 1:], 4, 2).flatten(2).long())
    # The byte 255 is no number; exp2 makes infinity of it.
    return q, torch.exp2(b[:, :1, None].float() - 128).where(b[:, :1, None] != MXFP4_NAN, torch.inf), None


def iq4_xs(b: torch.Tensor) -> Numbers:
    low, high = _fields(b[:, 4:8].unsqueeze(2), 4, 2).flatten(1), _fields(b[:, 2:4].unsqueeze(2), 2, 4).flatten(1)
    scale = (low | high << 4).view(torch.int8) - 32
    return _look_up_iq4(_fields(b[:, 8:].unflatten(1, (8, 16)), 4, 2).flatten(2)), _group_scales(scale, b[:, :2]), None


BLOCKS: dict[str, Callable[[torch.Tensor], Numbers]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}
