"""Changes to a file of a model, drawn by a seed: of its structure, its values, its bytes, and of what it is."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Change = Callable[[Path, Random], str]  # changes a file, and says how

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**53,
    2**64,
    2**70,
    10**5000,
    1.5,
    -1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "x" * 5000,
    "\u0000\u001b[2J\n",
    "\ud800",
    "re:([a-z0-9_.]+)+X",
    "../../etc/passwd",
    [],
    {},
    [None],
    [[1]],
    [-1, 2**40],
    ["re:(("],
    {"x": {}},
    {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x"}] * 9},
    {"type": "Replace", "pattern": {"String": ""}, "content": "a"},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
)
CHARACTERS = b'0123456789"[]{},:-.e\\ \x00\xff'
SPARSE_BYTES = 3 << 30


def change_json(path: Path, random: Random) -> str:
    """Put another value in a place of a JSON file, remove the place, or put it there twice."""
    content = json.loads(path.read_text())
    place = _place(content, random)
    if place is None:
        return "nothing to change"
    holder, key = place
    if random.random() < 0.2:
        del holder[key]
        what = f"without {key!r:.40}"
    else:
        holder[key] = random.choice(VALUES)
        what = f"{key!r:.40} = {_short(holder[key])}"
    path.write_text(_json_text(content))
    return what


def _place(content: Any, random: Random) -> tuple[Any, Any] | None:
    """A random holder in a tree, and a key or an index of it. Each level is as likely as the others."""
    places: list[tuple[Any, Any]] = []
    while isinstance(content, dict | list) and content:
        key = random.choice(list(content)) if isinstance(content, dict) else random.randrange(len(content))
        places.append((content, key))
        content = content[key]
    return random.choice(places) if places else None


def _json_text(content: Any) -> str:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(content)
    finally:
        sys.set_int_max_str_digits(limit)


def _short(value: Any) -> str:
    return "10**5000" if isinstance(value, int) and value > 10**100 else f"{value!r:.40}"


def change_bytes(path: Path, random: Random) -> str:
    """Other bytes in some places near the beginning of a file, where its structure is."""
    data = bytearray(path.read_bytes())
    if not data:
        return "nothing to change"
    reach = min(len(data), random.choice((32, 400, 4000, len(data))))
    places = [random.randrange(reach) for _ in range(random.randint(1, 6))]
    for place in places:
        data[place] = random.choice(CHARACTERS) if random.random() < 0.7 else random.randrange(256)
    path.write_bytes(data)
    return f"bytes at {places}"


def change_numbers(path: Path, random: Random) -> str:
    """A number of 32 or 64 bits near the beginning of a binary file, where lengths and counts are."""
    data = bytearray(path.read_bytes())
    if len(data) < 16:
        return "nothing to change"
    place = random.randrange(min(len(data) - 8, random.choice((24, 300, 4000))))
    value = random.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, 1000, 200_000))
    data[place : place + 8] = struct.pack("<Q", value)
    path.write_bytes(data)
    return f"{value} at byte {place}"


def cut(path: Path, random: Random) -> str:
    """The beginning of a file alone."""
    size = random.randrange(path.stat().st_size + 1)
    os.truncate(path, size)
    return f"cut at {size}"


def repeat(path: Path, random: Random) -> str:
    """Random parts of a file again, somewhere else in it."""
    data = path.read_bytes()
    start, place = random.randrange(len(data) + 1), random.randrange(len(data) + 1)
    piece = data[start : start + random.randint(1, 200)] * random.choice((1, 1, 2, 1000))
    path.write_bytes(data[:place] + piece + data[place:])
    return f"{len(piece)} bytes of {start} again at {place}"


def replace_file(path: Path, random: Random) -> str:
    """Something else under a file's name."""
    path.unlink()
    kind = random.choice(("pipe", "device", "directory", "loop", "empty", "sparse", "missing"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind in ("empty", "sparse"):
        path.touch()
        os.truncate(path, SPARSE_BYTES if kind == "sparse" else 0)
    return kind


def change_tensors(path: Path, random: Random) -> str:
    """Another form, other values or no data at all for some tensors of a safetensors file."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    name = random.choice(sorted(tensors))
    suffix = name.rpartition(".")[2]
    # All parts of a kind, or one alone: of a stack of layers a single one may be damaged.
    names = [name] if random.random() < 0.5 else [other for other in tensors if other.endswith(suffix)]
    label, change = random.choice(TENSOR_CHANGES)
    for one in names:
        made = change(tensors.pop(one), torch)
        if made is not None:
            tensors[one] = made.contiguous().clone()
    save_file(tensors, path)
    return f"{label} {suffix} of {len(names)}"


def _with_first(value: float) -> Callable[[Any, Any], Any]:
    def change(tensor: Any, torch: Any) -> Any:
        if not tensor.numel():
            return tensor
        if not tensor.dtype.is_floating_point:
            bounds = torch.iinfo(tensor.dtype)
            first = int(min(max(value, bounds.min), bounds.max)) if value == value else bounds.min
            return torch.cat([tensor.new_tensor([first]), tensor.view(-1)[1:]]).view(tensor.shape)
        wide = tensor.float()
        wide.view(-1)[0] = value
        return wide.to(tensor.dtype)

    return change


TENSOR_CHANGES: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
    ("no", lambda tensor, torch: None),
    ("flat", lambda tensor, torch: tensor.reshape(-1)),
    ("transposed", lambda tensor, torch: tensor.t() if tensor.dim() == 2 else tensor[None]),
    ("half of", lambda tensor, torch: tensor[: max(1, len(tensor) // 2)] if tensor.dim() else tensor),
    (
        "narrow",
        lambda tensor, torch: tensor[..., : max(1, tensor.shape[-1] // 2)] if tensor.dim() else tensor,
    ),
    ("empty", lambda tensor, torch: tensor.reshape(-1)[:0]),
    ("scalar", lambda tensor, torch: tensor.reshape(-1)[0] if tensor.numel() else tensor),
    ("longer", lambda tensor, torch: torch.cat([tensor, tensor[:1]]) if tensor.dim() else tensor[None]),
    ("float64", lambda tensor, torch: tensor.double()),
    ("int64", lambda tensor, torch: tensor.float().nan_to_num(0, 0, 0).long()),
    ("uint8", lambda tensor, torch: tensor.view(torch.uint8) if tensor.dim() else tensor),
    ("zero", lambda tensor, torch: torch.zeros_like(tensor)),
    ("NaN in", _with_first(float("nan"))),
    ("inf in", _with_first(float("inf"))),
    ("-1 in", _with_first(-1)),
    ("2**31 in", _with_first(2.0**31)),
)
ANY: tuple[Change, ...] = (change_bytes, cut, repeat, replace_file)


def changes_of(path: Path) -> tuple[Change, ...]:
    """Changes that make sense for a file, by its name."""
    if path.suffix == ".json":
        return (change_json, change_json, change_json, change_json, *ANY)
    if path.suffix == ".safetensors":
        return (change_tensors, change_tensors, change_tensors, change_numbers, *ANY)
    return (change_numbers, change_numbers, *ANY)
