"""Comparison of the structures and constants of a loaded C++ library with `structures.py`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

from weft.machine.native.structures import CONSTANTS, SIZE, STRUCTURES


class AbiEntry(ctypes.Structure):
    """`AbiEntry` of abi.h: a name, and the size, offset in bytes or value that goes by it."""

    _fields_ = (("name", ctypes.c_char_p), ("value", SIZE))


def check_abi(library: ctypes.CDLL, path: Path) -> None:
    """Raise OSError, in one line, unless the library at `path` has the structures and constants of `structures.py`."""
    try:
        theirs = read_abi(library)
    except AttributeError:
        reason = "it has no weft_abi"
    else:
        mismatch = find_mismatch(theirs)
        if mismatch is None:
            return
        reason = mismatch
    raise OSError(f"{path} does not fit this version of Weft: {reason}; delete that file to have it built again")


def read_abi(library: ctypes.CDLL) -> dict[str, int]:
    """Sizes, offsets and constants by the names that the library gives them. Raises AttributeError without weft_abi."""
    function = library.weft_abi
    function.argtypes, function.restype = [ctypes.POINTER(SIZE)], ctypes.POINTER(AbiEntry)
    count = SIZE()
    entries = function(ctypes.byref(count))
    return {entries[i].name.decode(): entries[i].value for i in range(count.value)}


def expected_abi() -> dict[str, int]:
    """Sizes, offsets and constants of `structures.py`, by the names that the library gives them."""
    expected = {}
    for name, structure in STRUCTURES.items():
        expected[name] = ctypes.sizeof(structure)
        for field, *_ in structure._fields_:
            expected[f"{name}.{field}"] = getattr(structure, field).offset
    return expected | {name: SIZE(value).value for name, value in CONSTANTS.items()}


def find_mismatch(theirs: Mapping[str, int]) -> str | None:
    """First structure, field or constant that the library and `structures.py` have differently, with both numbers."""
    ours = expected_abi()
    # Fields first: they tell more than the sizes of their structures.
    for name in sorted(ours.keys() | theirs.keys(), key=lambda name: ("." not in name, name)):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name, 'missing')} in the library and {ours.get(name, 'missing')} in Python"
    return None
