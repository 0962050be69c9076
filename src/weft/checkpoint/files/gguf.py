"""GGUF files: the header and the tensor index, read without touching the weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import msgspec

from weft.checkpoint.files import limits
from weft.checkpoint.files.model_file import file_error, open_model_file
from weft.checkpoint.files.tensor import ENCODINGS, Encoding, TensorInfo, check_bounds
from weft.errors import ModelError
from weft.regular_files import open_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes; default of general.alignment
MAX_DIMS = 4
SMALLEST_FIELD = 8 + 4 + 1  # bytes: the length of an empty key, a type, one byte
SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # bytes: the length of an empty name, one dim, type, offset
SMALLEST_FILE = 4 + 4 + 8 + 8

# Tensor types by number: the types that Weft reads, and others of which the planner needs the sizes.
TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K"}
TYPES |= {13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16", 39: "MXFP4"}
OTHER_TYPES = {9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"}
OTHER_TYPES |= {
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
}
SIZES = ENCODINGS | {
    "Q8_1": Encoding(32, 40),
    "Q8_K": Encoding(256, 292),
    "IQ2_XXS": Encoding(256, 66),
    "IQ2_XS": Encoding(256, 74),
    "IQ3_XXS": Encoding(256, 98),
    "IQ1_S": Encoding(256, 50),
    "IQ3_S": Encoding(256, 110),
    "IQ2_S": Encoding(256, 82),
    "I8": Encoding(1, 1),
    "I16": Encoding(1, 2),
    "I32": Encoding(1, 4),
    "I64": Encoding(1, 8),
    "F64": Encoding(1, 8),
    "IQ1_M": Encoding(256, 56),
    "TQ1_0": Encoding(256, 54),
    "TQ2_0": Encoding(256, 66),
}

# Metadata types by number.
SCALARS = {number: struct.Struct("<" + code) for number, code in enumerate("BbHhIif?")}
SCALARS |= {10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d")}
STRING, ARRAY = 8, 9
U32, U64 = SCALARS[4], SCALARS[10]

Scalar = int | float | bool | str


class Array(msgspec.Struct, frozen=True):
    """A metadata array that is still in the file: type and number of its elements, and the offset of its first byte."""

    type: int
    count: int
    offset: int


class Gguf(msgspec.Struct, frozen=True):
    """A file's header. `tensors` are keyed by ggml's names; `metadata` holds scalars and unread arrays."""

    path: str
    metadata: dict[str, Scalar | Array]
    tensors: dict[str, TensorInfo]

    def count(self, key: str) -> int:
        """Number of elements of a metadata array; 0 if there is none."""
        array = self.metadata.get(key)
        return array.count if isinstance(array, Array) else 0

    def array(self, key: str) -> list[Scalar]:
        """Read the elements of a metadata array from the file; [] if there is no such key."""
        array = self.metadata.get(key)
        if array is None:
            return []
        if not isinstance(array, Array):
            raise ModelError(f"{self.path}: {key} is {array!r:.80}; it must be an array", code="gguf-field-not-array")
        with _open_header(self.path) as header:
            header.at = array.offset
            return header.elements(array.type, array.count)


class _HeaderReader:
    """Reads a header forward from byte `at`. Raises struct.error or ModelError at the end of the file."""

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self.data, self.path, self.at = data, path, 0
        self._text_bytes = self._texts = 0  # that were read, outside and inside of arrays

    def scalar(self, kind: struct.Struct) -> int:
        value: int = kind.unpack_from(self.data, self.at)[0]
        self.at += kind.size
        return value

    def text(self) -> str:
        start = self.at + 8
        self.at = start + self.scalar(U64)
        if self.at > len(self.data):
            raise self.short()
        self._text_bytes += self.at - start
        self._check_texts()
        return self.data[start : self.at].decode()

    def value(self, type: int) -> Scalar | Array:
        if type == STRING:
            return self.text()
        if type != ARRAY:
            return self.scalar(self.kind(type))
        array = Array(self.scalar(U32), self.scalar(U64), self.at)
        self.skip(array)
        return array

    def skip(self, array: Array) -> None:
        """Move `at` behind an array. The array is checked against the size of the file before it is walked."""
        least = 8 if array.type == STRING else self.kind(array.type).size
        if array.count * least > len(self.data) - self.at:
            raise self.short()
        if array.type == STRING:
            self._texts += array.count
            self._check_texts()
            data, at, length = self.data, self.at, U64.unpack_from
            for _ in range(array.count):
                at += 8 + length(data, at)[0]
            self.at = at
            if at > len(data):
                raise self.short()
        else:
            self.at += array.count * least

    def elements(self, type: int, count: int) -> list[Scalar]:
        if type != STRING:
            return list(struct.unpack_from(f"<{count}{self.kind(type).format[1:]}", self.data, self.at))
        data, at, length = self.data, self.at, U64.unpack_from
        texts: list[Scalar] = []
        for _ in range(count):
            start = at + 8
            at = start + length(data, at)[0]
            texts.append(data[start:at].decode())
        return texts

    def kind(self, type: int) -> struct.Struct:
        if type not in SCALARS:
            raise ModelError(
                f"{self.path} is damaged: metadata of type {type} at byte {self.at:,}; fetch it again",
                code="damaged-gguf-metadata",
            )
        return SCALARS[type]

    def _check_texts(self) -> None:
        """Raise ModelError for more texts than any published header has."""
        if self._text_bytes > limits.GGUF_TEXT_BYTES or self._texts > limits.GGUF_TEXTS:
            raise ModelError(
                f"{self.path}: its header has {self._text_bytes:,} bytes of text and {self._texts:,} texts in arrays; "
                f"at most {limits.GGUF_TEXT_BYTES:,} and {limits.GGUF_TEXTS:,} are read; fetch it again",
                code="too-many-gguf-texts",
            )

    def short(self) -> ModelError:
        return ModelError(
            f"{self.path} is cut short or damaged: its header reaches beyond its {len(self.data):,} bytes; "
            "fetch it again",
            code="short-gguf-header",
        )


def without_tensors(path: str) -> bytes:
    """A GGUF file with the metadata of another one and no tensors. Raises ModelError as `read_gguf` does."""
    with _open_header(path) as header:
        _, field_count = _read_counts(header)
        begin, fields = header.data[: len(MAGIC) + U32.size], []
        for _ in range(field_count):
            start = header.at
            key = header.text()
            header.value(header.scalar(U32))
            if not key.startswith("split."):  # of one file among several
                fields.append(header.data[start : header.at])
    return begin + U64.pack(0) + U64.pack(len(fields)) + b"".join(fields)


def is_gguf(path: Path) -> bool:
    """Return True if a file begins as GGUF does, whatever its name (Ollama names its files by their hash).

    Raises OSError.
    """
    with open_regular(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: str | Path) -> Gguf:
    """Read header and tensor index of a GGUF file, version 2 or 3, little-endian; of a split file, the indices of all
    parts.

    Raises ModelError for a file that is missing, cut short, damaged, or of unknown types.
    """
    first = _read_part(str(path))
    parts = first.metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts <= 1:
        return first
    name = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", first.path)
    if first.metadata.get("split.no") != 0 or name is None:
        raise ModelError(
            f"{path} is one part of {parts}; give the first, whose name ends in -00001-of-{parts:05}.gguf",
            code="gguf-part",
        )
    tensors = dict(first.tensors)
    for number in range(2, parts + 1):
        tensors |= _read_part(f"{name[1]}{number:05}{name[2]}").tensors
        limits.check_tensor_count(len(tensors), str(path))
    return Gguf(first.path, first.metadata, tensors)


def _read_part(path: str) -> Gguf:
    with _open_header(path) as header:
        tensor_count, field_count = _read_counts(header)
        metadata: dict[str, Scalar | Array] = {}
        for _ in range(field_count):
            key = header.text()
            metadata[key] = header.value(header.scalar(U32))
        alignment = _alignment(metadata, path)
        # Offsets count from the end of the index, which is not known before it is read.
        tensors = dict(_read_tensor(header) for _ in range(tensor_count))
        for name, info in tensors.items():
            if info.offset % alignment:
                raise ModelError(
                    f"{path} is damaged: tensor {name!r:.80} begins off the {alignment}-byte grid; fetch it again",
                    code="gguf-tensor-off-grid",
                )
        data = -(-header.at // alignment) * alignment
        tensors = {name: msgspec.structs.replace(info, offset=data + info.offset) for name, info in tensors.items()}
        if len(tensors) != tensor_count:
            raise ModelError(
                f"{path} is damaged: two of its tensors have the same name; fetch it again", code="tensor-named-twice"
            )
        check_bounds(tensors, path, len(header.data))
        return Gguf(path, metadata, tensors)


def _alignment(metadata: dict[str, Scalar | Array], path: str) -> int:
    """Bytes that the data of each tensor is aligned to. Raises ModelError unless it is a power of two."""
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(
            f"{path}: general.alignment is {alignment!r:.80}; it must be a power of two", code="bad-gguf-alignment"
        )
    return alignment


def _read_counts(header: _HeaderReader) -> tuple[int, int]:
    """Numbers of tensors and of metadata fields. Raises ModelError for a version that Weft does not read."""
    path, size = header.path, len(header.data)
    header.at = len(MAGIC)
    version, tensors, fields = header.scalar(U32), header.scalar(U64), header.scalar(U64)
    if version & 0xFFFF == 0:
        raise ModelError(
            f"{path} is big-endian; convert it to little-endian with gguf-convert-endian", code="big-endian-gguf"
        )
    if version not in VERSIONS:
        raise ModelError(
            f"{path} is GGUF version {version}; Weft reads {VERSIONS[0]} and {VERSIONS[1]}", code="unknown-gguf-version"
        )
    if tensors * SMALLEST_TENSOR + fields * SMALLEST_FIELD > size:
        raise ModelError(
            f"{path} is cut short or damaged: {tensors:,} tensors and {fields:,} metadata fields cannot be in "
            f"{size:,} bytes; fetch it again",
            code="impossible-gguf-counts",
        )
    limits.check_tensor_count(tensors, path)
    if fields > limits.GGUF_FIELDS:
        raise ModelError(
            f"{path} has {fields:,} metadata fields; at most {limits.GGUF_FIELDS:,} are read; fetch it again",
            code="too-many-gguf-fields",
        )
    return tensors, fields


def _read_tensor(header: _HeaderReader) -> tuple[str, TensorInfo]:
    """Read the next entry of the tensor index; its offset counts from the start of the data section."""
    name, path = header.text(), header.path
    count = header.scalar(U32)
    limits.check_tensor(path, name, 1)
    if not 1 <= count <= MAX_DIMS:
        raise ModelError(
            f"{path} is damaged: tensor {name!r:.80} has {count:,} dims; fetch it again", code="gguf-dims-out-of-range"
        )
    dims = tuple(header.scalar(U64) for _ in range(count))[::-1]  # ggml's dims come fastest first
    number, offset = header.scalar(U32), header.scalar(U64)
    type = TYPES.get(number) or OTHER_TYPES.get(number)
    if type is None:
        known = ", ".join(sorted((*TYPES.values(), *OTHER_TYPES.values())))
        raise ModelError(
            f"{path}: tensor {name!r:.80} is of the unknown type {number}; known: {known}", code="unknown-gguf-type"
        )
    encoding = SIZES[type]
    if 0 in dims or dims[-1] % encoding.elements:
        raise ModelError(
            f"{path} is damaged: tensor {name!r:.80} has dims {list(dims)}; the last one of {type} must be "
            f"a multiple of {encoding.elements}, none 0",
            code="bad-gguf-dims",
        )
    nbytes = prod(dims) // encoding.elements * encoding.nbytes
    return name, TensorInfo(file=path, type=type, dims=dims, offset=offset, nbytes=nbytes)


@contextmanager
def _open_header(path: str) -> Iterator[_HeaderReader]:
    """Map a file and yield a reader of its header; errors of the reader become ModelError."""
    try:
        with open_model_file(path) as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(
                    f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}", code="not-a-gguf-file"
                )
            if file.seek(0, 2) < SMALLEST_FILE:
                raise ModelError(
                    f"{path} is cut short: {file.tell()} bytes do not hold a GGUF header; fetch it again",
                    code="short-gguf-header",
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _HeaderReader(data, path)
                try:
                    yield header
                except (struct.error, OverflowError):
                    raise header.short() from None
                except UnicodeDecodeError:
                    raise ModelError(
                        f"{path} is damaged: a text before byte {header.at:,} is not UTF-8; fetch it again",
                        code="gguf-text-not-utf8",
                    ) from None
    except OSError as error:
        raise file_error(path, error) from error
