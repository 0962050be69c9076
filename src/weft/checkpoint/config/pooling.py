"""Embeddings and scores of a model, as the files next to its weights declare them.

Sentence Transformers' modules.json lists a Pooling module (1_Pooling/config.json) and a Normalize module for models
that embed, and a LogitScore module (1_LogitScore/config.json) for rerankers that answer with one of two tokens. GGUF
files have `pooling_type` (https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h, llama_pooling_type).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.config import config_json
from weft.checkpoint.files import limits
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.files.model_file import read_model_file
from weft.errors import ModelError

# Task that the user wants a model for: "auto" leaves it to the files, "pooling" to them too, but for an embedding if
# they declare nothing.
PoolingTask = Literal["auto", "generate", "pooling", "embed", "score"]

MODULES, POOLING, LOGIT_SCORE = "modules.json", "1_Pooling", "1_LogitScore"
LAST_TOKEN = "lasttoken"
MODE_FLAG = "pooling_mode_"
# llama.cpp's numbers of the last token's state, and of others. A file for ranking has a head of its own, and may lack
# the model's.
GGUF_LAST = 3
GGUF_OTHERS = {1: "mean", 2: "cls", 4: "rank"}
# Kinds of modules that add nothing to what is computed here.
PLAIN_MODULES = frozenset(("Transformer", "Pooling", "Normalize", "LogitScore"))


class PoolingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Use of a model for prompts as a whole, without answers.

    - `task`: "embed", the hidden state after the last token, or "score", by the logits of "yes" and "no" there.
    - `normalises`: embeddings have length 1.
    - `dimensions`: lengths to which an embedding may be cut; () allows all.
    - `tokens`: ids of "yes" and "no", if the files name them.
    - `generates`: the model answers prompts too.
    """

    task: Literal["embed", "score"]
    normalises: bool = True
    dimensions: tuple[int, ...] = ()
    tokens: tuple[int, int] | None = None
    generates: bool = True


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration in a model's files: settings, or the reason why Weft does not compute them ("": nothing is
    declared)."""

    settings: PoolingSettings | None = None
    unsupported: str = ""


def read_pooling(
    path: Path, shape: ModelShape, task: PoolingTask, metadata: Mapping[str, object] | None = None
) -> PoolingSettings | None:
    """Read the settings of the model in a directory, or in a GGUF file with `metadata`; None if it only generates.

    Raises ModelError for damaged files, and if `task` asks for what cannot be computed.
    """
    if task == "generate":
        return None
    declared = _declared_by_folder(path) if metadata is None else _declared_by_gguf(path, metadata)
    problem = declared.unsupported
    if shape.embedding_dim is not None:
        problem = "a projection follows its hidden states"
    if task == "auto":
        return None if problem else declared.settings
    settings = declared.settings
    if settings is None or (task != "pooling" and settings.task != task):
        settings = PoolingSettings(task="score" if task == "score" else "embed")
    if problem:
        raise ModelError(f"{path} cannot {settings.task}: {problem}", code="pooling-not-supported")
    return settings


def _declared_by_gguf(path: Path, metadata: Mapping[str, object]) -> Declaration:
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if kind == GGUF_LAST:
        return Declaration(settings=PoolingSettings(task="embed", generates=False))
    if isinstance(kind, int) and kind in GGUF_OTHERS:
        return Declaration(unsupported=_other_mode(f"{path}: pooling_type", GGUF_OTHERS[kind]))
    return Declaration()


def _declared_by_folder(folder: Path) -> Declaration:
    modules = _modules(folder)
    kinds = {kind: place for kind, place in modules.items() if kind not in PLAIN_MODULES}
    if kinds:
        return Declaration(unsupported=f"{folder / MODULES} lists the module {next(iter(kinds))}, which Weft lacks")
    scoring = folder / modules.get("LogitScore", LOGIT_SCORE) / config_json.CONFIG
    if scoring.is_file():
        return _logit_score(scoring)
    file = folder / modules.get("Pooling", POOLING) / config_json.CONFIG
    if not file.is_file():
        return Declaration()
    mode = _pooling_mode(config_json.load_json(file))
    if mode != LAST_TOKEN:
        return Declaration(unsupported=_other_mode(str(file), mode))
    normalises = "Normalize" in modules or not modules
    dimensions = _dimensions(folder / config_json.CONFIG)
    return Declaration(
        settings=PoolingSettings(task="embed", normalises=normalises, dimensions=dimensions, generates=False)
    )


def _other_mode(where: str, mode: str) -> str:
    return f"{where} asks for {mode}, and Weft embeds by the last token alone"


def _modules(folder: Path) -> dict[str, str]:
    """Folder of each module of modules.json, by the last word of its type; {} without that file."""
    file = folder / MODULES
    if not file.is_file():
        return {}
    try:
        text = read_model_file(file, limits.CONFIG_BYTES, code="damaged-config")
        rows = msgspec.json.decode(text, type=list[dict[str, object]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{file} is damaged: {error!s:.200}; fetch it again", code="damaged-config") from error
    modules = {}
    for row in rows:
        place = str(row.get("path") or "")
        if Path(place).name != place:
            raise ModelError(f"{file}: a module lies at {place!r:.80}, outside this folder", code="wrong-field-value")
        modules[str(row.get("type")).rpartition(".")[2]] = place
    return modules


def _pooling_mode(fields: Fields) -> str:
    """The modes that a Pooling module's config turns on, joined by "and"; newer configs name them as text."""
    named = fields.values.get("pooling_mode")
    if named is not None:
        return " and ".join(map(str, named)) if isinstance(named, list) else str(named)
    flags = [key for key in fields.values if key.startswith(MODE_FLAG) and fields.flag(key)]
    return " and ".join(key.removeprefix(MODE_FLAG) for key in flags)


def _logit_score(file: Path) -> Declaration:
    fields = config_json.load_json(file)
    yes, no = (fields.integer_or(f"{name}_token_id", None, minimum=0) for name in ("true", "false"))
    if yes is None or no is None:
        return Declaration(unsupported=f"{file} names no two tokens")
    return Declaration(settings=PoolingSettings(task="score", tokens=(yes, no)))


def _dimensions(file: Path) -> tuple[int, ...]:
    """The lengths that config.json allows for embeddings (matryoshka_dimensions); () allows all."""
    if not file.is_file():
        return ()
    fields = config_json.load_json(file)
    given = fields.values.get("matryoshka_dimensions")
    if given is None:
        return ()
    if not isinstance(given, list) or not all(type(size) is int and size > 0 for size in given):
        raise fields.wrong_value("matryoshka_dimensions", "a list of lengths")
    return tuple(given)
