"""Tensors of a checkpoint on disk, read by the ranges that a rank owns."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping

import torch

from weft.checkpoint.architectures.place import Span
from weft.checkpoint.files.tensor import ENCODINGS, Encoding, TensorInfo
from weft.checkpoint.gguf.split_heads import SplitHeads
from weft.checkpoint.quantised.schemes import ALL_SCHEMES, GGUF_SCHEMES
from weft.errors import ModelError
from weft.ranks.quant.quantised import QuantisedWeight
from weft.ranks.weights.blocks import dequantise
from weft.ranks.weights.finite import check_finite
from weft.ranks.weights.quantised import split_blocks, unpack_blocks
from weft.regular_files import open_regular

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Elements dequantised at once: on a CPU as many as its cache holds together with the intermediate results.
CHUNK = {"cpu": 1 << 20, "cuda": 1 << 24}
# Bytes of a file that a thread maps at once: a bound of a rank's memory, and enough for reads at a disk's full speed.
BAND = 32 << 20


class StoredWeights:
    """A `WeightSource` of safetensors or GGUF files."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self.tensors = tensors

    def nbytes(self, source: str) -> int:
        """Bytes of the whole tensor in its file."""
        return self.tensors[source].nbytes

    def dtype(self, source: str) -> torch.dtype:
        """The smallest dtype that `read_range` fills without loss."""
        return DENSE.get(self.tensors[source].type, torch.float32)

    def read_range(self, source: str, rows: Span, cols: Span | None, into: torch.Tensor) -> None:
        """Copy source[rows, cols] to `into`, of the same dims and of any dtype and device.

        Only these rows are read. Columns are taken out of whole rows, in the pages that the system keeps of a file: the
        ranks of a host that share a matrix read its pages once between them. Raises ModelError if the file cannot be
        read.
        """
        info = self.tensors[source]
        if isinstance(info, SplitHeads):
            self._read_heads(info, rows, into)
        elif len(info.dims) == 1:
            # A vector is read as one row, of which `rows` are the columns.
            whole = Span(0, info.dims[0] * info.step)
            vector = torch.empty(1, len(whole), dtype=torch.float32)
            self._read_matrix(info, (1, len(whole)), Span(0, 1), whole, vector)
            check_finite(vector)
            _copy_rows(vector[0, info.first :: info.step][rows.start : rows.stop], into, info.interleaved)
        elif info.transposed:
            self._read_transposed(info, rows, cols or Span(0, info.dims[1]), into)
        else:
            self._read_matrix(info, info.dims, rows, cols or Span(0, info.dims[1]), into)

    def holds(self, source: str, scheme: str) -> bool:
        """Return True if the tensor is quantised in a scheme, or in a type that the scheme can represent."""
        stored = self.tensors[source].type
        return stored == scheme or (stored in GGUF_SCHEMES and ALL_SCHEMES[scheme].holds(GGUF_SCHEMES[stored]))

    def read_blocks(self, source: str, rows: Span, cols: Span, into: QuantisedWeight) -> bool:
        """Copy source[rows, cols] to `into` and return True if `holds` says so for the scheme of `into`, else return
        False. If the tensor's heads are interleaved, the rows are whole heads."""
        info = self.tensors[source]
        if not self.holds(source, into.type):
            return False
        encoding = ENCODINGS[info.type]
        blocks = _blocks_of(encoding, cols)
        step = rows_at_once(into.device, len(blocks) * encoding.elements, info.interleaved)
        for band, data in _row_bands(info, info.dims, rows, blocks, info.interleaved):
            for row in range(0, len(band), step):
                chunk = data[row : row + step].to(into.device)
                if info.interleaved:
                    ordered = torch.empty_like(chunk)
                    _copy_rows(chunk, ordered, info.interleaved)
                    chunk = ordered
                part = into.narrow(0, band.start + row, len(chunk))
                if info.type == into.type:
                    split_blocks(chunk.view(len(chunk), -1, encoding.nbytes), part)
                else:
                    unpack_blocks(chunk, info.type, cols.start - blocks.start * encoding.elements, part)
        return True

    def _read_transposed(self, info: TensorInfo, rows: Span, cols: Span, into: torch.Tensor) -> None:
        """Copy rows and columns of a matrix that lies in the file as [cols, rows] and is not quantised."""
        within = Span(rows.start * info.step, rows.stop * info.step)
        for band, data in _row_bands(info, (info.dims[1], info.dims[0] * info.step), cols, within):
            values = view_bytes(data, DENSE[info.type])[:, info.first :: info.step]
            into[:, band.start : band.stop].copy_(values.t())

    def _read_heads(self, info: SplitHeads, rows: Span, into: torch.Tensor) -> None:
        """Copy the rows of some heads."""
        per_head, rank = info.dims[0] // info.heads, info.dims[1]
        first, last = rows.start // per_head, rows.stop // per_head
        assert (first * per_head, last * per_head) == (rows.start, rows.stop), "whole heads"
        heads, nope_dim = into.view(last - first, per_head, rank), info.keys.dims[1]
        key_rows, value_rows = (Span(first, last).scaled(each) for each in (rank, per_head - nope_dim))
        keys, values = into.new_empty(len(key_rows), nope_dim), into.new_empty(len(value_rows), rank)
        self._read_matrix(info.keys, info.keys.dims, key_rows, Span(0, nope_dim), keys)
        self._read_matrix(info.values, info.values.dims, value_rows, Span(0, rank), values)
        heads[:, :nope_dim].copy_(keys.view(last - first, rank, nope_dim).transpose(1, 2))
        heads[:, nope_dim:].copy_(values.view(last - first, -1, rank))

    def _read_matrix(self, info: TensorInfo, dims: tuple[int, ...], rows: Span, cols: Span, into: torch.Tensor) -> None:
        """Copy rows and columns of a tensor with these dims to `into`."""
        blocks = _blocks_of(ENCODINGS[info.type], cols)
        interleaved = info.interleaved if dims[0] > 1 else 0
        for band, data in _row_bands(info, dims, rows, blocks, interleaved):
            part = into[band.start : band.stop]
            if info.type in DENSE:
                _copy_rows(view_bytes(data, DENSE[info.type]), part, interleaved)
            else:
                _dequantise_rows(
                    info.type, data, cols.shifted(-blocks.start * ENCODINGS[info.type].elements), part, interleaved
                )


def _dequantise_rows(type: str, data: torch.Tensor, cols: Span, into: torch.Tensor, interleaved: int) -> None:
    """Copy the columns `cols` of rows of whole blocks, [rows, bytes] uint8, to `into`."""
    step = rows_at_once(into.device, ENCODINGS[type].elements * (data.shape[1] // ENCODINGS[type].nbytes), interleaved)
    for row in range(0, len(data), step):
        values = dequantise(data[row : row + step].to(into.device), type)
        _copy_rows(values[:, cols.start : cols.stop], into[row : row + step], interleaved)


def _blocks_of(encoding: Encoding, cols: Span) -> Span:
    """Numbers of a row's blocks that hold these columns."""
    return Span(cols.start // encoding.elements, -(-cols.stop // encoding.elements))


def _row_bands(
    info: TensorInfo, dims: tuple[int, ...], rows: Span, blocks: Span, interleaved: int = 0
) -> Iterator[tuple[Span, torch.Tensor]]:
    """Yield bands of a tensor's rows, each with its place among `rows` and its blocks' bytes: [rows, bytes] uint8.

    The tensor lies in its file with these dims. A band has at most BAND bytes or one row, and whole heads if heads of
    `interleaved` rows are. While a band is used, the next one is read.
    """
    encoding, unit = ENCODINGS[info.type], interleaved or 1
    row_bytes = dims[1] // encoding.elements * encoding.nbytes
    step = max(1, BAND // row_bytes // unit) * unit
    for row in range(rows.start, rows.stop, step):
        last, ahead = min(row + step, rows.stop), min(row + 2 * step, rows.stop)
        data = map_bytes(info, row * row_bytes, (last - row) * row_bytes, ahead=(ahead - last) * row_bytes)
        columns = slice(blocks.start * encoding.nbytes, blocks.stop * encoding.nbytes)
        yield Span(row, last).shifted(-rows.start), data.view(last - row, row_bytes)[:, columns]


def rows_at_once(device: torch.device, width: int, interleaved: int) -> int:
    """Number of rows of `width` elements to dequantise at once.

    If heads of `interleaved` rows are interleaved, the number is a multiple of that.
    """
    rows = max(1, CHUNK[device.type] // width)
    return -(-rows // interleaved) * interleaved if interleaved else rows


def _copy_rows(values: torch.Tensor, into: torch.Tensor, interleaved: int) -> None:
    """Copy [rows, ...] to `into` with conversion of the dtype.

    If heads of `interleaved` rows are interleaved (GGUF's rotary order), each head gets the first rows of its pairs,
    then the second ones.
    """
    if interleaved:
        into = into.unflatten(0, (-1, 2, interleaved // 2))
        values = values.unflatten(0, (-1, interleaved // 2, 2)).transpose(1, 2)
    into.copy_(values)


def view_bytes(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View bytes as numbers of `dtype`, or view a copy if the bytes are not aligned for the dtype."""
    aligned = data.data_ptr() % dtype.itemsize == 0
    return (data if aligned else data.clone()).view(dtype)


def map_bytes(info: TensorInfo, start: int, nbytes: int, *, ahead: int = 0) -> torch.Tensor:
    """Map `nbytes` bytes of a tensor from byte `start` on: uint8 on the CPU, read from the file as they are used.

    The system begins to read them now and in one go, and `ahead` bytes after them, which pays on a cold or a remote
    disk. The mapping is private and writable, since torch has no read-only tensors; no memory is set aside for writes
    that do not happen. It ends with the last view of it. Raises ModelError if the file cannot be read.
    """
    begin = info.offset + start
    slack = begin % mmap.ALLOCATIONGRANULARITY
    try:
        with open_regular(info.file) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), begin, nbytes + ahead, os.POSIX_FADV_WILLNEED)
            data = mmap.mmap(
                file.fileno(),
                nbytes + slack,
                flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0),
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=begin - slack,
            )
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {info.file}: {error}", code="cannot-read-model") from error
    return torch.frombuffer(data, dtype=torch.uint8, count=nbytes, offset=slack)
