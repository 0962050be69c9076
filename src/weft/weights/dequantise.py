"""ggml's quantised blocks to float32: bit for bit what the `gguf` library gives, on any device.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. In each function `b` is
[blocks, bytes of a block] uint8, and the result [blocks, elements of a block] float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.facts.tensor import ENCODINGS


def dequantise(data: torch.Tensor, type: str) -> torch.Tensor:
    """[rows, bytes] uint8, each row whole blocks of `type`, to [rows, elements] float32."""
    encoding = ENCODINGS[type]
    blocks = data.reshape(-1, encoding.nbytes)
    return BLOCKS[type](blocks).view(data.shape[0], -1)


def _half(b: torch.Tensor) -> torch.Tensor:
    """Two bytes per block as a number: [blocks, 1]."""
    return b.view(torch.float16).float()


def _fields(q: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """[..., n] bytes to [..., count, n] float32: the count fields of `width` bits in each byte, lowest first."""
    out = torch.empty(*q.shape[:-1], count, q.shape[-1], dtype=torch.float32, device=q.device)
    for i in range(count):
        out[..., i, :] = (q >> (i * width)) & ((1 << width) - 1)
    return out


def _fifth(b: torch.Tensor) -> torch.Tensor:
    """The fifth bits of 32 elements, in the 32 bits of four bytes, as 0 or 16: [blocks, 32]."""
    bits = torch.arange(32, dtype=torch.int32, device=b.device)
    return ((b.contiguous().view(torch.int32) >> bits) & 1).mul_(16)


def q4_0(b: torch.Tensor) -> torch.Tensor:
    return _fields(b[:, 2:], 4, 2).flatten(1).sub_(8).mul_(_half(b[:, :2]))


def q4_1(b: torch.Tensor) -> torch.Tensor:
    return _fields(b[:, 4:], 4, 2).flatten(1).mul_(_half(b[:, :2])).add_(_half(b[:, 2:4]))


def q5_0(b: torch.Tensor) -> torch.Tensor:
    return _fields(b[:, 6:], 4, 2).flatten(1).add_(_fifth(b[:, 2:6])).sub_(16).mul_(_half(b[:, :2]))


def q5_1(b: torch.Tensor) -> torch.Tensor:
    q = _fields(b[:, 8:], 4, 2).flatten(1).add_(_fifth(b[:, 4:8]))
    return q.mul_(_half(b[:, :2])).add_(_half(b[:, 2:4]))


def q8_0(b: torch.Tensor) -> torch.Tensor:
    return b[:, 2:].view(torch.int8).float().mul_(_half(b[:, :2]))


def _scale_and_minimum(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the 8 groups of 32 in a K block: each [blocks, 8, 1]. Six bits each, packed in 12 bytes after two halves."""
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=1).float()
    minimum = torch.cat((mid & 63, (high >> 4) | ((mid >> 2) & 48)), dim=1).float()
    return scale.mul_(_half(b[:, :2])).unsqueeze(2), minimum.mul_(_half(b[:, 2:4])).unsqueeze(2)


def q4_k(b: torch.Tensor) -> torch.Tensor:
    scale, minimum = _scale_and_minimum(b)
    return _fields(b[:, 16:].unflatten(1, (4, 32)), 4, 2).view(-1, 8, 32).mul_(scale).sub_(minimum).flatten(1)


def q5_k(b: torch.Tensor) -> torch.Tensor:
    scale, minimum = _scale_and_minimum(b)
    q = _fields(b[:, 48:].unflatten(1, (4, 32)), 4, 2).view(-1, 8, 32)
    return q.add_(_fields(b[:, 16:48], 1, 8), alpha=16).mul_(scale).sub_(minimum).flatten(1)


def q6_k(b: torch.Tensor) -> torch.Tensor:
    scale = b[:, 192:208].view(torch.int8).float().mul_(_half(b[:, 208:])).unsqueeze(2)
    # Two halves of 128; in each, 64 bytes of low nibbles and 32 of four times two high bits.
    q = _fields(b[:, :128].unflatten(1, (2, 64)), 4, 2).view(-1, 2, 4, 32)
    q.add_(_fields(b[:, 128:192].unflatten(1, (2, 32)), 2, 4), alpha=16).sub_(32)
    return q.view(-1, 16, 16).mul_(scale).flatten(1)


BLOCKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
