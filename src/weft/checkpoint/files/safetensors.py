"""safetensors: headers of single files and of a checkpoint's directory, without the library and without torch.

Format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType

import msgspec

from weft.checkpoint.files import limits
from weft.checkpoint.files.model_file import file_error, open_model_file, read_model_file
from weft.checkpoint.files.tensor import TensorInfo, check_bounds
from weft.errors import ModelError

LENGTH_BYTES = 8  # a file begins with the header's length, little-endian
LARGEST_HEADER = 100_000_000  # bytes, the format's own limit
ABOUT = "__metadata__"  # the entry of a header that is no tensor
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
# Bits per element of every dtype of the format.
BITS = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16}
BITS |= {"I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _About(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name=ABOUT, default_factory=dict)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_safetensors(path: Path) -> dict[str, TensorInfo]:
    """Read the tensors of one file. Raises ModelError if it is missing, cut short, damaged or of unknown types."""
    header, size = _read_header(path)
    start = LENGTH_BYTES + len(header)
    tensors = decode_header(header, str(path), start)
    check_bounds(tensors, str(path), size)
    end = max((info.offset + info.nbytes for info in tensors.values()), default=start)
    if end != size:
        raise ModelError(
            f"{path} is damaged: {size - end:,} bytes at its end belong to no tensor; fetch it again",
            code="bytes-after-tensors",
        )
    return tensors


def _read_header(path: Path) -> tuple[bytes, int]:
    """Header of a file, and the bytes of the whole file. Raises ModelError."""
    try:
        with open_model_file(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, LARGEST_HEADER):
                raise ModelError(
                    f"{path} is cut short or no safetensors file: its header would be {length:,} bytes, the file has "
                    f"{size:,}; fetch it again",
                    code="short-safetensors-header",
                )
            return file.read(length), size
    except OSError as error:
        raise file_error(path, error) from error


def read_metadata(path: Path) -> dict[str, str]:
    """Read the texts that a file holds about itself, by name. Raises ModelError as `read_safetensors` does."""
    try:
        return msgspec.json.decode(_read_header(path)[0], type=_About).metadata
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged_header(str(path), error) from error


def _damaged_header(path: str, error: Exception) -> ModelError:
    return ModelError(
        f"{path} is damaged: its header is not safetensors' JSON ({error!s:.200}); fetch it again",
        code="damaged-safetensors-header",
    )


def encode_header(
    tensors: Mapping[str, tuple[str, Sequence[int], int]], metadata: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """Encode the beginning of a file, up to its data. `tensors` has dtype, dims and bytes of each, in their order."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, dims, nbytes) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(dims), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % LENGTH_BYTES)  # so that the data is aligned
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def decode_header(header: bytes, path: str, start: int = 0) -> dict[str, TensorInfo]:
    """Decode a header into its tensors; the data section begins at byte `start`. Raises ModelError."""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        limits.check_tensor_count(len(entries), path)
        decoder = msgspec.json.Decoder(_Entry)
        if not _is_compact(header, entries):
            limits.check_unique(header, path)
        return {name: _tensor(path, name, decoder.decode(raw), start) for name, raw in entries.items() if name != ABOUT}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged_header(path, error) from error


def _is_compact(header: bytes, entries: Mapping[str, msgspec.Raw]) -> bool:
    """Return True if a header has the bytes of these entries, with each field once, and no other: none was there twice.

    So the libraries write it; all others are decoded once more, which takes three times as long.
    """
    size, fields = 1, len(_Entry.__struct_fields__)
    for name, raw in entries.items():
        text = bytes(raw)
        size += len(name.encode()) + len('"":,') + len(text)
        if text.count(b'":') != (fields if name != ABOUT else len(msgspec.json.decode(text, type=dict[str, str]))):
            return False
    return size == len(header.rstrip(b" "))


def _tensor(path: str, name: str, entry: _Entry, start: int) -> TensorInfo:
    bits, (begin, end) = BITS.get(entry.dtype), entry.data_offsets
    limits.check_tensor(path, name, len(entry.shape))
    if bits is None:
        raise ModelError(
            f"{path}: tensor {name!r:.80} has the unknown dtype {entry.dtype!r:.80}; known: {', '.join(BITS)}",
            code="unknown-tensor-dtype",
        )
    if min(entry.shape, default=0) < 0 or begin < 0 or (end - begin) * 8 != prod(entry.shape) * bits:
        raise ModelError(
            f"{path} is damaged: tensor {name!r:.80} is {entry.dtype} of {list(entry.shape)} in bytes {begin:,} to "
            f"{end:,}; fetch it again",
            code="tensor-of-other-size",
        )
    return TensorInfo(file=path, type=entry.dtype, dims=entry.shape, offset=start + begin, nbytes=end - begin)


def read_directory(folder: Path) -> dict[str, TensorInfo]:
    """Read the tensors of a checkpoint: from `model.safetensors`, else the files of its index, else all its files.

    Raises ModelError if there are none, or if two files hold the same tensor.
    """
    if (folder / SINGLE).exists():
        return read_safetensors(folder / SINGLE)
    if (folder / INDEX).exists():
        return _read_indexed(folder)
    # Mistral's own format, with other tensor names, lies next to Hugging Face's.
    files = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("consolidated")]
    if not files:
        raise _no_weights(folder)
    tensors: dict[str, TensorInfo] = {}
    for path in files:
        part = read_safetensors(path)
        repeated = min(tensors.keys() & part.keys(), default=None)
        if repeated is not None:
            raise ModelError(
                f"{repeated!r:.80} is in {path} and in {tensors[repeated].file}; leave one checkpoint in that "
                "directory",
                code="tensor-in-two-files",
            )
        tensors |= part
        limits.check_tensor_count(len(tensors), str(folder))
    return tensors


def _read_indexed(folder: Path) -> dict[str, TensorInfo]:
    index = folder / INDEX
    weight_map = _read_weight_map(index)
    limits.check_tensor_count(len(weight_map), str(index))
    names = sorted(set(weight_map.values()))
    files = {name: _read_listed_file(folder, name, weight_map, len(names)) for name in names}
    missing = next((tensor for tensor, file in weight_map.items() if tensor not in files[file]), None)
    if missing is not None:
        raise ModelError(
            f"{folder / weight_map[missing]} lacks tensor {missing!r:.80}, which the index puts there; fetch it again",
            code="missing-indexed-tensor",
        )
    return {tensor: files[file][tensor] for tensor, file in weight_map.items()}


def _read_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, from an index. Raises ModelError."""
    try:
        text = read_model_file(index, limits.CONFIG_BYTES, code="cannot-read-index")
        weight_map = msgspec.json.decode(text, type=_Index).weight_map
        limits.check_unique(text, str(index))
        return weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{index} is damaged ({error!s:.200}); fetch it again", code="damaged-index") from error


def _read_listed_file(folder: Path, name: str, weight_map: Mapping[str, str], count: int) -> dict[str, TensorInfo]:
    """The tensors of one of the `count` files of a directory's index. Raises ModelError."""
    if Path(name).name != name:
        raise ModelError(
            f"{folder / INDEX} names {name!r:.80}, which is not a file next to it; fetch it again",
            code="index-names-no-file",
        )
    if not (folder / name).exists():
        tensor = next(tensor for tensor, file in weight_map.items() if file == name)
        raise ModelError(
            f"{folder} lacks {name}, one of the {count} files of its index, with tensor {tensor!r:.80}; fetch it again",
            code="missing-weight-file",
        )
    return read_safetensors(folder / name)


def _no_weights(folder: Path) -> ModelError:
    pickled = next((path for path in sorted(folder.iterdir()) if path.suffix in PICKLED), None)
    if pickled is None:
        return ModelError(
            f"{folder} holds no weights: neither *.safetensors nor *.gguf; fetch them, or give another model",
            code="no-weights",
        )
    return ModelError(
        f"{folder} has its weights only in pickled files ({pickled.name}), which can run code when they are read; "
        "use a revision with safetensors, or convert it with Transformers' save_pretrained",
        code="only-pickled-weights",
    )
