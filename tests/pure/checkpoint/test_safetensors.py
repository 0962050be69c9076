"""safetensors headers: as the library reads them, and one clear line for every way to be damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.refusals import refusals, refuses
from weft.checkpoint.files import safetensors
from weft.errors import ModelError

TENSORS = {
    "a": np.ones((2, 3), dtype=np.float32),
    "b": np.ones(5, dtype=np.float16),
    "scalar": np.ones((), dtype=np.float64),
    "empty": np.ones((0, 4), dtype=np.int8),
    "flags": np.ones((3, 1), dtype=np.bool_),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safetensors") / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "np"})
    return path


def written(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def read(path: Path) -> None:
    """Read a file, or a directory with files."""
    (safetensors.read_directory if path.is_dir() else safetensors.read_safetensors)(path)


def fails(path: Path, code: str, *values: str) -> None:
    with refuses(ModelError, code, *values):
        read(path)


def test_tensors_are_those_that_the_library_reads(path: Path) -> None:
    ours = safetensors.read_safetensors(path)
    content = path.read_bytes()
    with safe_open(path, "np") as theirs:
        assert ours.keys() == set(theirs.keys())
        for name, info in ours.items():
            tensor = theirs.get_tensor(name)
            assert info.dims == tensor.shape
            assert info.type == theirs.get_slice(name).get_dtype()
            assert content[info.offset : info.offset + info.nbytes] == tensor.tobytes()


def test_cut_short_anywhere(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    for length in range(len(content)):
        (tmp_path / "short.safetensors").write_bytes(content[:length])
        with pytest.raises(ModelError) as caught:
            read(tmp_path / "short.safetensors")
        assert caught.value.code in ("short-safetensors-header", "short-tensor")
        assert "\n" not in str(caught.value)


def test_bytes_too_many(path: Path, tmp_path: Path) -> None:
    (tmp_path / "long.safetensors").write_bytes(path.read_bytes() + b"12")
    fails(tmp_path / "long.safetensors", "bytes-after-tensors", "2")


@given(st.data())
def test_other_bytes_anywhere_never_end_in_another_error(
    path: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(path.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    copy = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    copy.write_bytes(content)
    try:
        safetensors.read_safetensors(copy)
    except ModelError as error:
        assert "\n" not in str(error)


# A header, the code of what is wrong with it, and values of the message.
DAMAGED: list[tuple[Any, str, tuple[str, ...]]] = [
    (b"\x80\x02}q", "damaged-safetensors-header", ()),
    ([], "damaged-safetensors-header", ()),
    ({"a": {"dtype": "F32"}}, "damaged-safetensors-header", ()),
    ({"a": {"dtype": "F32", "shape": [2.5], "data_offsets": [0, 8]}}, "damaged-safetensors-header", ()),
    (
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        "tensor-of-other-size",
        ("'a'", "F32", "[3]", "0", "8"),
    ),
    ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}, "tensor-of-other-size", ("'a'", "F32", "[-2]")),
    ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, "tensor-of-other-size", ("'a'", "F32", "-8", "0")),
    ({"a": {"dtype": "Q4_0", "shape": [2], "data_offsets": [0, 8]}}, "unknown-tensor-dtype", ("'a'", "'Q4_0'")),
    ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "short-tensor", ("'a'",)),
    (
        {
            "a": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]},
            "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
        },
        "overlapping-tensors",
        ("'a'", "'b'"),
    ),
]


@pytest.mark.parametrize(("header", "code", "values"), DAMAGED)
def test_damaged_headers(tmp_path: Path, header: Any, code: str, values: tuple[str, ...]) -> None:
    fails(written(tmp_path / "x.safetensors", header, bytes(8)), code, *values)


def test_the_wording_of_damaged_headers(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    def open_header(header: Any) -> None:
        read(written(tmp_path / "x.safetensors", header, bytes(8)))

    golden("safetensors.txt", refusals(open_header, [header for header, *_ in DAMAGED], tmp_path))


def test_a_missing_tensor(tmp_path: Path) -> None:
    fails(tmp_path / "no.safetensors", "cannot-read-model", "no.safetensors", "No such file")
    fails(tmp_path, "no-weights")
    (tmp_path / "pytorch_model.bin").touch()
    fails(tmp_path, "only-pickled-weights", "pytorch_model.bin", "save_pretrained")


def sharded(folder: Path, weight_map: dict[str, str]) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_an_index_joins_its_files(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"], "unlisted": TENSORS["b"]}, tmp_path / "1.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "2.safetensors")
    tensors = safetensors.read_directory(sharded(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"}))
    assert {name: Path(info.file).name for name, info in tensors.items()} == {
        "a": "1.safetensors",
        "b": "2.safetensors",
    }


def test_damaged_indexes(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "1.safetensors")
    fails(
        sharded(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"}),
        "missing-weight-file",
        "2.safetensors",
        "2",
        "'b'",
    )
    fails(sharded(tmp_path, {"b": "1.safetensors"}), "missing-indexed-tensor", "1.safetensors", "'b'")
    fails(sharded(tmp_path, {"a": "../1.safetensors"}), "index-names-no-file")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": [')
    fails(tmp_path, "damaged-index", "index.json")


def test_files_without_an_index(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "x.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "y.safetensors")
    save_file({"layers.0.wq": TENSORS["b"]}, tmp_path / "consolidated.safetensors")
    assert safetensors.read_directory(tmp_path).keys() == {"a", "b"}
    save_file({"b": TENSORS["b"]}, tmp_path / "z.safetensors")
    fails(tmp_path, "tensor-in-two-files", "'b'", "z.safetensors", "y.safetensors")
