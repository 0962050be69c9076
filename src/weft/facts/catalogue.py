"""Catalogue: the models that Weft knows without asking anybody, in data/models.json.

Each has its config.json there, without what does not matter to its shape, and is read as any other config.json.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

import msgspec

from weft.errors import ModelError
from weft.facts import config_json
from weft.facts.fields import Fields
from weft.facts.model import Model

# What the names of quantised copies end in, and the precision that they stand for.
SUFFIXES = {
    "awq": "int4",
    "awq-int4": "int4",
    "gptq": "int4",
    "gptq-int4": "int4",
    "gptq-int8": "int8",
    "int4": "int4",
    "int8": "int8",
    "w4a16": "int4",
    "quantized.w4a16": "int4",
    "quantized.w8a16": "int8",
    "fp8": "fp8",
    "fp8-dynamic": "fp8",
    "fp8-kv": "fp8",
    "nvfp4": "nvfp4",
    "fp4": "nvfp4",
    "mxfp4": "mxfp4",
    "bf16": "bf16",
    "fp16": "fp16",
}
_SUFFIX = re.compile(rf"(?P<stem>.+?)-(?P<suffix>{'|'.join(sorted(map(re.escape, SUFFIXES), key=len, reverse=True))})")
_NEAREST = 3


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the catalogue. The first of `names` is the model's own, the others have the same shape; without a
    `precision` it is what the config says."""

    names: tuple[str, ...]
    params: int
    config: dict[str, object]
    source: str
    note: str = ""
    precision: str = ""


@cache
def entries() -> tuple[Entry, ...]:
    """Every line of the catalogue."""
    return msgspec.json.decode((files("weft.facts") / "data/models.json").read_bytes(), type=tuple[Entry, ...])


def find(name: str) -> Model:
    """The model that a hub id, its bare name, or a short name stands for, whatever its case.

    A name that ends as those of quantised copies do (-AWQ, -FP8, ...) is the model it was made from, in that
    precision. Raises ModelError with the nearest names.
    """
    found = look_up(name)
    if found is not None:
        return found
    near = get_close_matches(_key(name), _names(), n=_NEAREST, cutoff=0.5)
    nearest = ", ".join(dict.fromkeys(_names()[key][1] for key in near))
    hint = f"nearest: {nearest}" if near else "give a name on the hub, a directory or a .gguf file"
    raise ModelError(f"unknown model {name!r}; {hint}")


def look_up(name: str) -> Model | None:
    """The same, or None where the catalogue does not have it."""
    key = _key(name)
    if key in _names():
        return _model(*_names()[key])
    match = _SUFFIX.fullmatch(key)
    if match is None:
        return None
    # Copies are published by others too, and as copies of the Instruct model.
    stem = match["stem"] if match["stem"] in _names() else match["stem"].rpartition("/")[2]
    return _model(*_names()[stem], SUFFIXES[match["suffix"]]) if stem in _names() else None


@cache
def _names() -> dict[str, tuple[Entry, str]]:
    """By every name that a model goes by: the line, and the name as it is written there."""
    found: dict[str, tuple[Entry, str]] = {}
    for entry in entries():
        for name in entry.names:
            # A short name that is no id stands for the line's own model.
            found[_key(name)] = entry, name if "/" in name else entry.names[0]
    # Bare names come second: the id of one model never hides behind the bare name of another.
    for entry in entries():
        for name in entry.names:
            bare = _key(name.rpartition("/")[2])
            found.setdefault(bare, (entry, name if "/" in name else entry.names[0]))
    for key, value in list(found.items()):
        found.setdefault(re.sub(r"-(instruct|chat)(-hf)?(?=-|$)", "", key), value)
    return found


def _key(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().casefold())


def _model(entry: Entry, name: str, precision: str | None = None) -> Model:
    config = Fields(entry.config, f"the catalogue's {name}")
    return Model(
        name=name,
        shape=config_json.shape(config, run=False),
        params=entry.params,
        precision=precision or entry.precision or config_json.precision(config) or "bf16",
        source=entry.source,
        note=entry.note,
    )
