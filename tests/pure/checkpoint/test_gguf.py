"""GGUF headers: as the gguf library reads them, and one clear line for every way to be damaged."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf as library
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.gguf_files import Stored, random_blocks, write
from tests.refusals import refusal_line, refuses
from weft.checkpoint.files import gguf
from weft.checkpoint.files.tensor import ENCODINGS
from weft.errors import ModelError

METADATA = {
    "small": 7,
    "real": 0.5,
    "yes": True,
    "text": "naïve 🧵",
    "words": ["", "a", "ß" * 300, "<|im_end|>"],
    "numbers": [1, -2, 3],
    "reals": [0.25, -1.5],
    "flags": [True, False, True],
}
RNG = np.random.default_rng(0)
TENSORS = {
    "vector": np.arange(5, dtype=np.float32),
    "matrix": np.ones((3, 7), dtype=np.float16),
    "cube": np.zeros((2, 3, 4), dtype=np.float32),
    **{
        name: Stored(random_blocks(RNG, 3, 256, name), name)
        for name, encoding in ENCODINGS.items()
        if encoding.elements > 1
    },
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "good.gguf", "llama", METADATA, TENSORS)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file so small that every byte of it can be tried, and that lies on a grid of 8 bytes."""
    metadata = {"general.alignment": 8, "words": ["ab", "c"], "numbers": [1, 2]}
    tensors = {"a": np.ones((2, 2), dtype=np.float32), "b": np.ones(3, dtype=np.float32)}
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf", "llama", metadata, tensors)


def test_encodings_are_the_librarys() -> None:
    for name, encoding in gguf.SIZES.items():
        sizes = library.GGML_QUANT_SIZES[library.GGMLQuantizationType[name]]
        assert (encoding.elements, encoding.nbytes) == sizes
    for number, name in (gguf.TYPES | gguf.OTHER_TYPES).items():
        assert library.GGMLQuantizationType(number).name == name
    assert set(gguf.TYPES.values()) == set(ENCODINGS)
    assert {*gguf.TYPES.values(), *gguf.OTHER_TYPES.values()} == set(gguf.SIZES)


def test_metadata_is_what_the_library_reads(path: Path) -> None:
    ours, theirs = gguf.read_gguf(path), library.GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for name, field in fields.items():
        value = ours.metadata[name]
        assert (ours.array(name) if isinstance(value, gguf.Array) else value) == field.contents()
    assert ours.metadata["yes"] is True
    assert ours.array("words") == METADATA["words"]


def test_tensors_are_what_the_library_reads(path: Path) -> None:
    ours, theirs = gguf.read_gguf(path), library.GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.dims == tuple(reversed(tensor.shape.tolist()))
        assert (info.type, info.offset, info.nbytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert info.file == str(path)


def test_arrays_are_left_alone_until_asked_for(path: Path) -> None:
    header = gguf.read_gguf(path)
    words = header.metadata["words"]
    assert isinstance(words, gguf.Array)
    assert words.count == 4
    assert header.array("no such key") == []
    with refuses(ModelError, "gguf-field-not-array", "small", "7"):
        header.array("small")


def test_version_2_is_read_too(path: Path, tmp_path: Path) -> None:
    old = changed(path, tmp_path, 4, struct.pack("<I", 2))
    assert gguf.read_gguf(old).metadata == gguf.read_gguf(path).metadata


def changed(path: Path, folder: Path, at: int, data: bytes) -> Path:
    """A copy with other bytes from `at` on."""
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    copy = folder / "changed.gguf"
    copy.write_bytes(content)
    return copy


def entry(path: Path, name: bytes) -> int:
    """Position of a tensor's number of dims in the index: after its name."""
    content = path.read_bytes()
    return content.rindex(struct.pack("<Q", len(name)) + name) + 8 + len(name)


def fails(path: Path, code: str, *values: object) -> str:
    """The line of the refusal, without the folder of the file."""
    with refuses(ModelError, code, path, *values) as caught:
        gguf.read_gguf(path)
    return refusal_line(caught.value, path.parent)


def test_files_that_are_no_gguf(path: Path, tmp_path: Path) -> None:
    fails(changed(path, tmp_path, 0, b"PK\3\4"), "not-a-gguf-file")
    fails(changed(path, tmp_path, 4, struct.pack("<I", 1)), "unknown-gguf-version", "1", "2 and 3")
    fails(changed(path, tmp_path, 4, struct.pack(">I", 3)), "big-endian-gguf")
    fails(tmp_path / "missing.gguf", "cannot-read-model", "No such file")
    fails(tmp_path, "cannot-read-model", "Is a directory")


@pytest.mark.parametrize("at", [8, 16])
@pytest.mark.parametrize("count", [1 << 20, 1 << 62, (1 << 64) - 1])
def test_absurd_counts(path: Path, tmp_path: Path, at: int, count: int) -> None:
    fails(changed(path, tmp_path, at, struct.pack("<Q", count)), "impossible-gguf-counts")


def test_absurd_lengths(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    # A key is followed by its type, an array's key by the elements' type and their number as well.
    for key, skip in ((b"text", 4), (b"words", 8), (b"words", 16), (b"numbers", 8)):
        at = content.index(key) + len(key) + skip
        for length in (len(content), 1 << 62, (1 << 64) - 1):
            fails(changed(path, tmp_path, at, struct.pack("<Q", length)), "short-gguf-header")


def test_a_text_that_ends_beyond_the_file(tmp_path: Path) -> None:
    """With nothing after it that would notice."""

    def text(content: bytes) -> bytes:
        return struct.pack("<Q", len(content)) + content

    words = struct.pack("<IIQ", gguf.ARRAY, gguf.STRING, 2) + text(b"a") + text(b"bc")
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(b"words") + words
    (tmp_path / "words.gguf").write_bytes(content)
    assert gguf.read_gguf(tmp_path / "words.gguf").array("words") == ["a", "bc"]
    (tmp_path / "words.gguf").write_bytes(content[:-1])
    fails(tmp_path / "words.gguf", "short-gguf-header")


def test_damaged_index(path: Path, tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    count = entry(path, b"matrix")
    dims, type, offset = count + 4, count + 4 + 16, count + 4 + 16 + 4
    told = fails(changed(path, tmp_path, count, struct.pack("<I", 0)), "gguf-dims-out-of-range", "'matrix'", "0")
    told += fails(
        changed(path, tmp_path, count, struct.pack("<I", 1 << 31)),
        "gguf-dims-out-of-range",
        "'matrix'",
        "2,147,483,648",
    )
    told += fails(changed(path, tmp_path, dims, struct.pack("<Q", 0)), "bad-gguf-dims", "'matrix'", "[3, 0]")
    told += fails(changed(path, tmp_path, dims, struct.pack("<Q", 1 << 60)), "short-tensor", "'matrix'")
    told += fails(changed(path, tmp_path, type, struct.pack("<I", 10)), "bad-gguf-dims", "256")
    told += fails(changed(path, tmp_path, type, struct.pack("<I", 99)), "unknown-gguf-type", "'matrix'", "99")
    told += fails(changed(path, tmp_path, type, struct.pack("<I", 2)), "bad-gguf-dims", "32")
    told += fails(changed(path, tmp_path, offset, struct.pack("<Q", 1 << 40)), "short-tensor", "'matrix'")
    told += fails(changed(path, tmp_path, offset, struct.pack("<Q", 1)), "gguf-tensor-off-grid", "'matrix'", "32-byte")
    told += fails(changed(path, tmp_path, offset, struct.pack("<Q", 0)), "overlapping-tensors", "'matrix'")
    told += fails(changed(path, tmp_path, count - 6, b"vector"), "tensor-named-twice")
    told += fails(changed(path, tmp_path, count - 6, b"\xff"), "gguf-text-not-utf8", "UTF-8")
    golden("gguf.txt", told)


def test_impossible_alignment(small: Path, tmp_path: Path) -> None:
    at = small.read_bytes().index(b"general.alignment") + len("general.alignment") + 4
    for alignment in (0, 3):
        fails(changed(small, tmp_path, at, struct.pack("<I", alignment)), "bad-gguf-alignment", alignment)


def test_cut_short_anywhere(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    # The library pads the last tensor, which nobody needs.
    for length in range(gguf.read_gguf(small).tensors["b"].offset + 12):
        (tmp_path / "short.gguf").write_bytes(content[:length])
        if length < 4:
            fails(tmp_path / "short.gguf", "not-a-gguf-file")
        else:
            with pytest.raises(ModelError) as caught:
                gguf.read_gguf(tmp_path / "short.gguf")
            assert caught.value.code in ("short-gguf-header", "impossible-gguf-counts", "short-tensor")


@given(st.data())
def test_other_bytes_anywhere_never_end_in_another_error(
    small: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(small.read_bytes())
    for at in data.draw(st.lists(st.integers(4, len(content) - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    copy = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    copy.write_bytes(content)
    try:
        header = gguf.read_gguf(copy)
        for key, value in header.metadata.items():
            if isinstance(value, gguf.Array):
                header.array(key)
    except ModelError as error:
        assert "\n" not in str(error)


def test_a_split_file_is_one_model(tmp_path: Path) -> None:
    def part(number: int, **tensors: np.ndarray) -> Path:
        metadata = {"split.no": number - 1, "split.count": 2, "only": number}
        return write(tmp_path / f"m-{number:05}-of-00002.gguf", "llama", metadata, tensors)

    first, second = part(1, a=np.ones(2, dtype=np.float32)), part(2, b=np.ones(3, dtype=np.float32))
    whole = gguf.read_gguf(first)
    assert {name: info.file for name, info in whole.tensors.items()} == {"a": str(first), "b": str(second)}
    assert whole.metadata["only"] == 1
    fails(second, "gguf-part", "2", "-00001-of-00002.gguf")
    second.unlink()
    with refuses(ModelError, "cannot-read-model", "-00002-of-00002.gguf", "No such file"):
        gguf.read_gguf(first)
