"""Catalogue: the models that Weft knows without a network, in data/models.json.

Each entry holds the model's config.json, without the fields that do not matter to its shape, and is read like any other
config.json.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

import msgspec

from weft.checkpoint.architectures.model import Model
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.config import config_json
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.quantised.registry import COPIES
from weft.errors import ModelError

# Suffixes in the names of quantised copies, and their precisions.
SUFFIXES = COPIES | {
    "int4": "int4",
    "int8": "int8",
    "nvfp4": "nvfp4",
    "fp4": "nvfp4",
    "bf16": "bf16",
    "fp16": "fp16",
}
_SUFFIX = re.compile(rf"(?P<stem>.+?)-(?P<suffix>{'|'.join(sorted(map(re.escape, SUFFIXES), key=len, reverse=True))})")
# Kinds of models that Weft has none of, by the families of Ollama's library and of the hub.
_OTHER_KINDS = {
    "that see pictures": r"(bak)?llava|minicpm-?v|moondream|pixtral|(qwen[\d.]+|deepseek|internvl?|smol)-?vl|"
    r"llama[\d.]+-vision|llama-?4|granite[\d.]*-vision|cogvlm|molmo|gemma-?3n",
    "that hear or speak": r"whisper|voxtral|qwen[\d.]+-(audio|omni)",
    "of BERT's kind, which embed texts": r"(nomic|mxbai|snowflake-arctic)-embed|bge-|all-minilm|gte-|bert|"
    r"(multilingual-)?e5-|paraphrase-|embeddinggemma|granite-embedding",
    "that draw pictures": r"stable-diffusion|flux|sdxl|z-image",
}
_NEAREST, _FAMILY = 3, 6  # largest number of names to suggest: similar ones, or names of one family


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the catalogue: models with the same shape.

    - `names`: ids on the hub, the entry's main one first.
    - `nicknames`: other name -> id, beyond the names that `loose_key` derives from an id.
    - `precision`: "" if the config gives it.
    - `listed`: id that represents the entry in a list of well-known models; "" for most entries.
    """

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
    """All entries of the catalogue."""
    return msgspec.json.decode((files("weft.checkpoint") / "data/models.json").read_bytes(), type=tuple[Entry, ...])


def well_known() -> list[Model]:
    """Models to suggest: the newest sizes of the usual families, the smallest first."""
    models = [_model(entry, entry.listed) for entry in entries() if entry.listed]
    return sorted(models, key=lambda model: model.params)


def find(name: str) -> Model:
    """Find a model by its hub id, the id without its owner, or a nickname, in any case.

    A name with the suffix of a quantised copy (-AWQ, -FP8, ...) is the original model in that precision. Raises
    ModelError with the nearest names.
    """
    model = find_known(name)
    if model is None:
        check_kind(name)
        near = nearest(name)
        hint = f"nearest: {', '.join(near)}" if near else "give a name on the hub, a directory or a .gguf file"
        raise ModelError(f"unknown model {name!r}; {hint}", code="unknown-model")
    return model


def check_kind(name: str) -> None:
    """Raise ModelError for the name of a kind of model that Weft has none of: near names would mislead."""
    bare = _key(_bare(name))
    kind = next((kind for kind, families in _OTHER_KINDS.items() if re.match(families, bare)), None)
    if kind is not None:
        raise ModelError(
            f"{name!r:.200}: Weft runs no models {kind}; weft plan without a model lists some that it runs",
            code="kind-not-run",
        )


def check_runs(name: str) -> None:
    """Raise ModelError for a model of the catalogue that the engine does not run."""
    identified = _identify(name)
    if identified is not None:
        config_json.shape_from_config(Fields(identified[0].config, identified[1]), run=True)


def find_known(name: str) -> Model | None:
    """`find`, but None for a model that the catalogue does not have."""
    identified = _identify(name)
    if identified is not None:
        return _model(*identified)
    match = _SUFFIX.fullmatch(_key(name))
    if match is None:
        return None
    # Copies are published by other owners too, and as copies of the Instruct model.
    identified = _identify(match["stem"]) or _identify(match["stem"].rpartition("/")[2])
    return _model(*identified, SUFFIXES[match["suffix"]]) if identified else None


def full_name(name: str) -> str | None:
    """The hub id (or "demo") for a name that people use, as in `qwen3:8b` or `Qwen3-8B`; None for an unknown name.

    Versions and sizes must agree: every number in the name is one of the id's, or the model's size.
    """
    identified = _identify(name)
    return identified[1] if identified else None


def same_name(name: str, full: str) -> bool:
    """Return True if `name` is the id `full`, with or without its owner, in any case."""
    return _key(name) in (_key(full), _key(_bare(full)))


def nearest(name: str) -> list[str]:
    """Ids of known models that `name` may mean, likeliest first: models of its family (`llama3.3`), or similar
    names."""
    typed, exact = loose_key(_bare(name)), full_name(_bare(name))
    if exact:
        return [exact]
    others = {key: full for key, (_, full) in _loose_names().items()}
    family = [key for key in others if typed and _in_family(key, typed)]
    near = get_close_matches(typed, family, n=_FAMILY, cutoff=0.0)
    near = near or get_close_matches(typed, others, n=_NEAREST, cutoff=0.6)
    return list(dict.fromkeys(others[key] for key in near))


def did_you_mean(name: str) -> str:
    """The suggestion "did you mean X, or Y, or Z?"; "" if no known name is near."""
    near = nearest(name)[:_NEAREST]
    return f"did you mean {', or '.join(near)}?" if near else ""


def loose_key(name: str) -> str:
    """A normalised name, the same for Ollama's `qwen3:8b` and the hub's `Qwen3-8B`.

    Suffixes like -Instruct are dropped, and a family's version is joined to its name. Numbers are kept as they are.
    """
    key = _key(name).replace(":", "-").removeprefix("meta-")
    key = re.sub(r"-(instruct|chat|it)(-hf)?(?=-|$)|-hf$", "", key)
    return re.sub(r"(?<=[a-z])-(?=\d)", "", key)


def _in_family(key: str, typed: str) -> bool:
    """Return True if a loose key is `typed` and another word or number: llama3.1-8b is in llama3.1, not in llama3."""
    ending = key.removeprefix(typed)
    if ending == key:
        return False
    if typed[-1].isdigit():
        return not ending[0].isdigit() and ending[0] != "."
    return not ending[0].isalpha()


def _identify(name: str) -> tuple[Entry, str] | None:
    """The entry of a name, and the id as the entry spells it; None for an unknown name."""
    return _names().get(_key(name)) or (None if "/" in name else _loose_names().get(loose_key(name)))


@cache
def _names() -> dict[str, tuple[Entry, str]]:
    """Entry and id by each id, by each nickname, and by each id without its owner."""
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
    """Entry and id by loose key. Nicknames come first, then instruction-tuned models, then base models."""
    nicknames = [(loose_key(short), entry, name) for entry in entries() for short, name in entry.nicknames.items()]
    ids = [(loose_key(_bare(name)), entry, name) for entry in entries() for name in entry.names]
    ids.sort(key=lambda row: re.search(r"-(instruct|chat|it)\b", _key(row[2])) is None)
    table: dict[str, tuple[Entry, str]] = {}
    for key, entry, name in (*nicknames, *ids):
        table.setdefault(key, (entry, name))
    return table


def _bare(name: str) -> str:
    """An id without its owner."""
    return name.rpartition("/")[2]


def _key(name: str) -> str:
    """A name in lower case, with "-" for spaces and underscores, and "." for an underscore between digits."""
    return re.sub(r"[\s_]+", "-", re.sub(r"(?<=\d)_(?=\d)", ".", name.strip().casefold()))


@cache
def _shape(name: str) -> ModelShape:
    """The shape of the model with this id: always the same object, which caches find without comparing all layers."""
    entry, id = _names()[_key(name)]
    return config_json.shape_from_config(Fields(entry.config, f"the catalogue's {id}"), run=False)


def _model(entry: Entry, name: str, precision: str | None = None) -> Model:
    config = Fields(entry.config, f"the catalogue's {name}")
    return Model(
        name=name,
        shape=_shape(name),
        params=entry.params,
        precision=precision or entry.precision or config_json.precision(config) or "bf16",
        source=entry.source,
        note=entry.note,
    )
