"""The structures and constants that C++ and Python share: any difference between the two sides is found at load."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.cpu.attention import shaped
from tests.cpu.kernels import built
from tests.cpu.programs import compiler
from weft.machine.native import build, structures
from weft.machine.native.library import SOURCES, check_abi, expected_abi, find_mismatch, open_library, read_abi
from weft.machine.native.structures import CONSTANTS, STRUCTURES, LayerDescriptor, RoundingDescriptor
from weft.ranks.kernels import create_kernels

Fields = tuple[tuple[str, type], ...]
EPS = LayerDescriptor.eps.offset  # of the last field, after another of the same size


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """This process has not loaded the library yet, nor has it after the test."""
    build.load_library.cache_clear()
    yield
    build.load_library.cache_clear()


def change(monkeypatch: pytest.MonkeyPatch, name: str, fields: Fields) -> None:
    """Give Python's structure other fields."""
    monkeypatch.setitem(STRUCTURES, name, type(name, (ctypes.Structure,), {"_fields_": fields}))


def swapped(fields: Fields) -> Fields:
    return (*fields[:-2], fields[-1], fields[-2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_both_sides_are_the_same(dtype: str) -> None:
    library = open_library(built(dtype))
    assert read_abi(library) == expected_abi()
    assert len(expected_abi()) == sum(len(it._fields_) + 1 for it in STRUCTURES.values()) + len(CONSTANTS)


@pytest.mark.parametrize(
    ("name", "fields", "difference"),
    [
        ("Layer", swapped, rf"\bLayer\.eps .*\b{EPS} .*\b{EPS - 4} "),
        ("Layer", lambda fields: fields[:-1], rf"\bLayer\.eps .*\b{EPS} .*\bmissing "),
        (
            "Layer",
            lambda fields: (*fields, ("extra", ctypes.c_float)),
            rf"\bLayer\.extra .*\bmissing .*\b{EPS + 4} ",
        ),
        ("Step", lambda fields: fields[1:], r"\bStep\.angle_rows .*\b16 .*\b8 "),
        ("Matrix", lambda fields: (*fields, ("", ctypes.c_int64)), r"\bMatrix\. .*\bmissing .*\b88 "),
        ("Rounding", swapped, r"\bRounding\.cols .*\b56 .*\b48 "),
    ],
)
def test_a_structure_that_differs_is_refused_in_one_line(
    name: str, fields: Callable[[Fields], Fields], difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = built("bfloat16")
    change(monkeypatch, name, fields(tuple(STRUCTURES[name]._fields_)))  # type: ignore[arg-type]
    with pytest.raises(OSError, match=difference) as error:
        open_library(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_constant_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = built("bfloat16")
    monkeypatch.setitem(CONSTANTS, "PANEL", 64)
    with pytest.raises(OSError, match=r"\bPANEL .*\b32 .*\b64 "):
        open_library(path)


def test_another_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="weft_abi"):
        check_abi(ctypes.CDLL(None), tmp_path)


def test_torch_takes_the_place_of_a_library_that_differs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built("float32")
    change(monkeypatch, "Layer", swapped(tuple(LayerDescriptor._fields_)))  # type: ignore[arg-type]
    with caplog.at_level("WARNING", "weft"):
        assert create_kernels("auto", torch.device("cpu"), shaped(torch.float32)).attention.name == "torch"
    assert "Layer.eps" in caplog.text and str(EPS) in caplog.text


def test_no_structure_is_declared_elsewhere() -> None:
    declared = {it for it in vars(structures).values() if isinstance(it, type) and issubclass(it, ctypes.Structure)}
    assert declared == {*STRUCTURES.values()}


# --- the other side: C++ that differs ---


def altered(folder: Path, header: str, old: str, new: str) -> subprocess.CompletedProcess[str]:
    """Compile the ABI alone, to `folder`/abi.so, from sources in which `old` is `new`."""
    sources = shutil.copytree(SOURCES, folder / "cpp")
    text = (sources / header).read_text()
    assert text.count(old) == 1
    (sources / header).write_text(text.replace(old, new))
    (sources / "alone.cpp").write_text('#include "abi.h"\n')
    command = [compiler(), "-std=c++17", "-shared", "-fPIC", "-Wno-psabi", sources / "alone.cpp"]
    return subprocess.run([*command, "-o", folder / "abi.so"], capture_output=True, text=True)


def test_fields_that_change_places_in_c_are_found(tmp_path: Path) -> None:
    done = altered(tmp_path, "rounding.h", "int64_t lacking, cols;", "int64_t cols, lacking;")
    assert done.returncode == 0, done.stderr
    theirs = read_abi(ctypes.CDLL(str(tmp_path / "abi.so")))
    assert re.match(r"Rounding\.cols .*\b48 .*\b56 ", str(find_mismatch(theirs)))
    assert RoundingDescriptor.cols.offset == 56


def test_a_field_that_is_not_listed_does_not_compile(tmp_path: Path) -> None:
    """Not even one that hides in the padding, and leaves the structure's size as it was."""
    done = altered(tmp_path, "workspace.h", "float scale, head_eps, eps;", "float scale, head_eps, eps, extra;")
    assert done.returncode != 0 and "list all fields of Layer in abi.h" in done.stderr
