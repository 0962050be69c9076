"""Catalogue: the models that Weft knows without asking anybody, in data/models.json.

Each has its config.json there, without what does not matter to its shape, and is read as any other config.json.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

import msgspec

from weft.architectures.model import Model
from weft.errors import ModelError
from weft.formats import config_json
from weft.formats.fields import Fields

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
_NEAREST, _FAMILY = 3, 6  # names that are told


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the catalogue. `names` are ids on the hub of models with this shape, the line's own first; `nicknames`
    are what people call some of them, beyond what `loose_key` makes of an id. Without a `precision` it is what the
    config says. `listed` is the id that stands for the line in a list of well known models, "" for most lines."""

    names: tuple[str, ...]
    params: int
    config: dict[str, object]
    source: str
    note: str = ""
    precision: str = ""
    nicknames: dict[str, str] = {}
    listed: str = ""


@cache
def entries() -> tuple[Entry, ...]:
    """Every line of the catalogue."""
    return msgspec.json.decode((files("weft.formats") / "data/models.json").read_bytes(), type=tuple[Entry, ...])


def well_known() -> list[Model]:
    """The newest sizes of the usual families, the smallest first."""
    return sorted((_model(it, it.listed) for it in entries() if it.listed), key=lambda model: model.params)


def find(name: str) -> Model:
    """The model that a hub id, its bare name, or a short name stands for, whatever its case.

    A name that ends as those of quantised copies do (-AWQ, -FP8, ...) is the model it was made from, in that
    precision. Raises ModelError with the nearest names.
    """
    model = find_known(name)
    if model is None:
        near = nearest(name)
        hint = f"nearest: {', '.join(near)}" if near else "give a name on the hub, a directory or a .gguf file"
        raise ModelError(f"unknown model {name!r}; {hint}")
    return model


def find_known(name: str) -> Model | None:
    """The same, or None if the catalogue does not have it."""
    named = _identify(name)
    if named is not None:
        return _model(*named)
    match = _SUFFIX.fullmatch(_key(name))
    if match is None:
        return None
    # Copies are published by others too, and as copies of the Instruct model.
    named = _identify(match["stem"]) or _identify(match["stem"].rpartition("/")[2])
    return _model(*named, SUFFIXES[match["suffix"]]) if named else None


def full_name(name: str) -> str | None:
    """The hub id (or "demo") of a name that people use, as in `qwen3:8b` or `Qwen3-8B`; None if it is unknown.

    A version or a size is never taken for another one: every number of the name is the id's, or the model's size.
    """
    named = _identify(name)
    return named[1] if named else None


def same_name(name: str, full: str) -> bool:
    """Whether `name` is the id `full` itself, or that without its owner, whatever the case."""
    return _key(name) in (_key(full), _key(_bare(full)))


def nearest(name: str) -> list[str]:
    """Ids of known models that `name` may have meant, the likeliest first: its family (`qwen3`, `llama3.3`), or else
    those with names alike."""
    typed, exact = loose_key(_bare(name)), full_name(_bare(name))
    if exact:
        return [exact]
    others = {key: full for key, (_, full) in _loose_names().items()}
    family = [key for key in others if typed and _in_family(key, typed)]
    near = get_close_matches(typed, family, n=_FAMILY, cutoff=0.0) or get_close_matches(
        typed, others, n=_NEAREST, cutoff=0.6
    )
    return list(dict.fromkeys(others[key] for key in near))


def did_you_mean(name: str) -> str:
    """ "did you mean X, or Y, or Z?"; "" if no known name is near."""
    near = nearest(name)[:_NEAREST]
    return f"did you mean {', or '.join(near)}?" if near else ""


def loose_key(name: str) -> str:
    """What Ollama's name, `qwen3:8b`, and the hub's, `Qwen3-8B`, have in common: no -Instruct, and a family's version
    is part of its name. Numbers are kept as they are."""
    key = _key(name).replace(":", "-").removeprefix("meta-")
    key = re.sub(r"-(instruct|chat|it)(-hf)?(?=-|$)|-hf$", "", key)
    return re.sub(r"(?<=[a-z])-(?=\d)", "", key)


def _in_family(key: str, typed: str) -> bool:
    """Whether a loose key goes on after `typed` with another word or number: llama3.1-8b is of llama3.1, not llama3."""
    rest = key.removeprefix(typed)
    if rest == key:
        return False
    return not rest[0].isdigit() and rest[0] != "." if typed[-1].isdigit() else not rest[0].isalpha()


def _identify(name: str) -> tuple[Entry, str] | None:
    """The line, and the id as it is written there."""
    return _names().get(_key(name)) or (None if "/" in name else _loose_names().get(loose_key(name)))


@cache
def _names() -> dict[str, tuple[Entry, str]]:
    """Line and id by each id, by what people call it, and by its bare name."""
    ids = [(entry, name) for entry in entries() for name in entry.names]
    table = {_key(name): (entry, name) for entry, name in ids}
    table |= {_key(short): (entry, name) for entry in entries() for short, name in entry.nicknames.items()}
    # Bare names come second: the id of one model never hides behind the bare name of another.
    for entry, name in ids:
        table.setdefault(_key(_bare(name)), (entry, name))
    for entry, name in ids:
        table.setdefault(_key(_bare(name)).removeprefix("meta-"), (entry, name))
    return table


@cache
def _loose_names() -> dict[str, tuple[Entry, str]]:
    """Line and id by loose key: nicknames first, then models that answer, before those that only go on with a text."""
    named = [(loose_key(short), entry, name) for entry in entries() for short, name in entry.nicknames.items()]
    ids = [(loose_key(_bare(name)), entry, name) for entry in entries() for name in entry.names]
    ids.sort(key=lambda row: re.search(r"-(instruct|chat|it)\b", _key(row[2])) is None)
    table: dict[str, tuple[Entry, str]] = {}
    for key, entry, name in (*named, *ids):
        table.setdefault(key, (entry, name))
    return table


def _bare(name: str) -> str:
    """A name without its owner."""
    return name.rpartition("/")[2]


def _key(name: str) -> str:
    return re.sub(r"[\s_]+", "-", re.sub(r"(?<=\d)_(?=\d)", ".", name.strip().casefold()))


def _model(entry: Entry, name: str, precision: str | None = None) -> Model:
    config = Fields(entry.config, f"the catalogue's {name}")
    return Model(
        name=name,
        shape=config_json.shape_from_config(config, run=False),
        params=entry.params,
        precision=precision or entry.precision or config_json.precision(config) or "bf16",
        source=entry.source,
        note=entry.note,
    )
