"""Stored: tensors of a checkpoint on disk, read by the ranges that a rank owns."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch

from weft.architectures.place import Span
from weft.errors import ModelError
from weft.formats.schemes import ALL, STORED
from weft.formats.tensor import ENCODINGS, TensorInfo
from weft.quant.quantised import QuantisedWeight
from weft.weights.blocks import dequantise
from weft.weights.quantised import split, unpack

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Elements dequantised at once: on a CPU as many as its cache holds with what is made on the way.
CHUNK = {"cpu": 1 << 20, "cuda": 1 << 24}


class Stored:
    """Tensors under Hugging Face's names, in safetensors or GGUF files."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self.tensors = tensors

    def dtype(self, source: str) -> torch.dtype:
        """The smallest that `read` loses nothing in."""
        return DENSE.get(self.tensors[source].type, torch.float32)

    def read(self, source: str, rows: Span, cols: Span | None, into: torch.Tensor) -> None:
        """Copy source[rows, cols] to `into`, of the same dims and of any dtype and device.

        Of a matrix it reads the rows' bytes, and of those only the columns' (for quantised ones the blocks
        that hold them). Raises ModelError where the file cannot be read.
        """
        info = self.tensors[source]
        if len(info.dims) == 1:
            # A vector is one row: `rows` are its columns.
            whole = Span(0, info.dims[0])
            vector = torch.empty(1, len(whole), dtype=torch.float32)
            self._matrix(info, (1, len(whole)), Span(0, 1), whole, vector)
            _copy_rows(vector[0, rows.start : rows.stop], into, info.interleaved)
        else:
            self._matrix(info, info.dims, rows, cols or Span(0, info.dims[1]), into)

    def holds(self, source: str, type: str) -> bool:
        """Whether it is stored in a scheme, or in what that has room for."""
        stored = self.tensors[source].type
        return stored in STORED and ALL[type].holds(STORED[stored])

    def read_blocks(self, source: str, rows: Span, cols: Span, into: QuantisedWeight) -> bool:
        """The same of a matrix that is quantised, and in a type that the scheme of `into` holds; False where it is not.
        Where its heads are interleaved, the rows are whole heads."""
        info = self.tensors[source]
        if not self.holds(source, into.type):
            return False
        encoding = ENCODINGS[info.type]
        data, first, last = self._bytes(info, info.dims, rows, cols)
        step = rows_at_once(into.device, (last - first) * encoding.elements, info.interleaved)
        for row in range(0, len(rows), step):
            some = data[row : row + step].to(into.device)
            if info.interleaved:
                ordered = torch.empty_like(some)
                _copy_rows(some, ordered, info.interleaved)
                some = ordered
            part = into.narrow(0, row, len(some))
            if info.type == into.type:
                split(some.view(len(some), -1, encoding.nbytes), part)
            else:
                unpack(some, info.type, cols.start - first * encoding.elements, part)
        return True

    def _bytes(self, info: TensorInfo, dims: tuple[int, ...], rows: Span, cols: Span) -> tuple[torch.Tensor, int, int]:
        """The rows [rows, bytes] of blocks `first` to `last`, which have these columns."""
        encoding = ENCODINGS[info.type]
        row_bytes = dims[1] // encoding.elements * encoding.nbytes
        data = mapped(info, rows.start * row_bytes, len(rows) * row_bytes, whole=len(cols) == dims[1])
        first, last = cols.start // encoding.elements, -(-cols.stop // encoding.elements)
        data = data.view(len(rows), row_bytes)[:, first * encoding.nbytes : last * encoding.nbytes]
        return data, first, last

    def _matrix(self, info: TensorInfo, dims: tuple[int, ...], rows: Span, cols: Span, into: torch.Tensor) -> None:
        encoding = ENCODINGS[info.type]
        data, first, last = self._bytes(info, dims, rows, cols)
        interleaved = info.interleaved if dims[0] > 1 else 0
        if info.type in DENSE:
            _copy_rows(typed(data, DENSE[info.type]), into, interleaved)
            return
        inside = slice(cols.start - first * encoding.elements, cols.stop - first * encoding.elements)
        step = rows_at_once(into.device, (last - first) * encoding.elements, interleaved)
        for row in range(0, len(rows), step):
            values = dequantise(data[row : row + step].to(into.device), info.type)
            _copy_rows(values[:, inside], into[row : row + step], interleaved)


def rows_at_once(device: torch.device, width: int, interleaved: int) -> int:
    """Of so many elements each; whole heads where those are interleaved."""
    rows = max(1, CHUNK[device.type] // width)
    return -(-rows // interleaved) * interleaved if interleaved else rows


def _copy_rows(values: torch.Tensor, into: torch.Tensor, interleaved: int) -> None:
    """Copy [rows, ...] with conversion; `interleaved` heads get the first halves of their pairs, then the second."""
    if interleaved:
        into = into.unflatten(0, (-1, 2, interleaved // 2))
        values = values.unflatten(0, (-1, interleaved // 2, 2)).transpose(1, 2)
    into.copy_(values)


def typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as numbers; where they lie off their own grid, by way of a copy."""
    aligned = data.data_ptr() % dtype.itemsize == 0
    return (data if aligned else data.clone()).view(dtype)


def mapped(info: TensorInfo, start: int, nbytes: int, *, whole: bool) -> torch.Tensor:
    """`nbytes` bytes of a tensor from `start` on, as uint8 on the CPU, read as they are used; where the `whole`
    range will be, from now on and in one go, which a cold or a remote disk rewards.

    Private and writable, since torch has no tensors that are not; no memory is set aside for writes that do
    not happen. Unmapped with the last view of it.
    """
    begin = info.offset + start
    slack = begin % mmap.ALLOCATIONGRANULARITY
    try:
        with open(info.file, "rb") as file:
            data = mmap.mmap(
                file.fileno(),
                nbytes + slack,
                flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0),
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=begin - slack,
            )
            if whole:
                data.madvise(mmap.MADV_WILLNEED)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {info.file}: {error}") from error
    return torch.frombuffer(data, dtype=torch.uint8, count=nbytes, offset=slack)
