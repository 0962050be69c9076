"""Files of --config that hold several models: a list under `models`, or the servers of an Infernet node's book."""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weft.api.ollama.keep_alive import parse_keep_alive
from weft.cli.flags.command_flags import ServeArguments
from weft.cli.flags.declared import Flag, flags_of
from weft.cli.flags.flags import EngineFlags, engine_config, flags_of_engine
from weft.cli.parser import (
    LIST,
    Parser,
    UsageError,
    add_flag,
    fill_arguments,
    is_set,
    parsed_values,
    read_config_file,
    spelled_name,
    typed_flags,
)
from weft.config import EngineConfig, Scope
from weft.errors import ConfigError, nearest_name
from weft.fleet.hosting.model_set import ModelEntry, ModelSet, check_model_set
from weft.http.options import ServeOptions, scoped_options

if TYPE_CHECKING:
    from weft.study.export.infernet_config import NodeConfig

OWN = ("name", "model", "keep-alive", "priority", "load")  # fields of a model that are no flags of its engine
SERVER_FLAGS = {flag.name: flag for flag in flags_of(ServeOptions)}
# Options of the server that concern the answers of one model; all others are the address's.
ANSWERS = {name: flag for name, flag in SERVER_FLAGS.items() if flag.dest in scoped_options(Scope.EACH)}
MODEL_FLAGS = {**flags_of_engine(), **ANSWERS}


def read_model_set(path: str) -> ModelSet | None:
    """The set in a file; None if the file holds flags.

    Raises UsageError and ConfigError, one line for the first fault.
    """
    content = read_config_file(path)
    if not is_set(content):
        return None
    models = _listed_models(content, path) if LIST in content else _models_of_book(path)
    check_model_set(models)
    return models


def _listed_models(content: Mapping[Any, Any], path: str) -> ModelSet:
    """The models of the list; engine flags that are given with the list apply to all of them."""
    rows = content[LIST]
    if not isinstance(rows, list):
        raise ConfigError(
            f"models in {path} is no list; write it as models: [{{name: small, model: demo}}]", code="models-not-list"
        )
    engine = flags_of_engine()
    common = {engine[spelled_name(key)]: value for key, value in content.items() if spelled_name(key) in engine}
    entries = tuple(_entry(row, number, common, path) for number, row in enumerate(rows, 1))
    return ModelSet(entries=entries, source=path)


def _entry(row: object, number: int, common: Mapping[Flag, Any], path: str) -> ModelEntry:
    """One model of the list. Raises ConfigError and UsageError."""
    where = f"model {number} of {path}"
    fields = _fields(row, where)
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigError(f"{where} has no model; give one, as in model: demo", code="model-missing")
    given = {**common, **_flags_of_fields(fields, where)}
    flags = [word for flag, value in given.items() if value is not None for word in typed_flags(flag, value, where)]
    keep_alive = fields.get("keep-alive")
    priority = _priority(fields.get("priority", 0), where)
    return ModelEntry(
        names=_names(fields.get("name"), model, where),
        config=config_of_flags(model, flags, where),
        flags=tuple(flags),
        keep_alive_s=float("inf") if keep_alive is None else parse_keep_alive(keep_alive, f"keep-alive of {where}"),
        priority=priority,
        always=_loads_at_start(fields.get("load", "start"), where),
    )


def _fields(row: object, where: str) -> dict[Any, Any]:
    """The fields of a model, each by its name in OWN or its flag's name."""
    if not isinstance(row, dict):
        raise ConfigError(
            f"{where} is {row!r:.60}; it must be a mapping, as in {{name: small, model: demo}}",
            code="model-not-mapping",
        )
    return {key if key in OWN else spelled_name(key): value for key, value in row.items()}


def _flags_of_fields(fields: Mapping[Any, Any], where: str) -> dict[Flag, Any]:
    """The values of the fields that are flags. Raises ConfigError for a field that is no flag of a model."""
    values = {key: value for key, value in fields.items() if key not in OWN}
    for key in values:
        if key not in MODEL_FLAGS:
            raise _unknown_field(key, where)
    return {MODEL_FLAGS[key]: value for key, value in values.items()}


def _unknown_field(key: object, where: str) -> ConfigError:
    if key in SERVER_FLAGS:
        return ConfigError(
            f"{where} has {key!r}, which is about the address of all models; put it next to the list",
            code="address-flag-of-model",
        )
    near = nearest_name(str(key), [*OWN, *MODEL_FLAGS], {"keepalive": "keep-alive", "names": "name"})
    return ConfigError(f"{where} has the unknown field {key!r}{near}", code="unknown-field")


def _priority(value: object, where: str) -> int:
    if type(value) is not int:
        raise ConfigError(f"priority of {where} is {value!r:.60}; it must be a whole number", code="invalid-priority")
    return value


def _loads_at_start(value: object, where: str) -> bool:
    if value not in ("start", "demand"):
        raise ConfigError(f"load of {where} is {value!r:.60}; it must be start or demand", code="invalid-load")
    return value == "start"


def _names(value: object, model: str, where: str) -> tuple[str, ...]:
    """The names of a model in requests: the given names, or the model's own."""
    names = [model] if value is None else value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise ConfigError(
            f"name of {where} is {value!r:.60}; it must be a name or a list of names", code="invalid-model-name"
        )
    return tuple(dict.fromkeys(names))


def config_of_flags(model: str, flags: list[str], where: str) -> EngineConfig:
    """The engine's options that flags give. Raises ConfigError and UsageError, which name the model at fault."""
    parser = Parser(prog=where, add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
    for flag in MODEL_FLAGS.values():
        add_flag(parser.add_argument_group(), flag)
    try:
        parsed = {**parsed_values(parser.parse_args(flags)), "model": model}
        return engine_config(fill_arguments(ServeArguments, "serve", parsed))
    except UsageError as error:
        text = str(error).partition(" (see ")[0]
        raise ConfigError(f"{where}: {text}", code=error.code) from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", code=error.code) from None


def _models_of_book(path: str) -> ModelSet:
    """The servers that the book's chapter on several GPUs lists."""
    from weft.study.export.infernet_config import read_node_config

    return models_of_node(read_node_config(path), path)


def models_of_node(node: NodeConfig, path: str) -> ModelSet:
    """The servers of a node's configuration as models of one address: the first one's."""
    from weft.study.export.infernet_config import model_of_tag

    entries = []
    for server in node.instances:
        model = model_of_tag(server.model)
        config = config_of_flags(model, [], path)
        entries.append(ModelEntry(names=tuple(dict.fromkeys((server.model, model))), config=config))
    ports = [server.port for server in node.instances if server.port is not None]
    others = [server for server in node.instances if server.port not in (None, *ports[:1])]
    warnings = [
        f"{server.model} is served on port {ports[0]} as the others are, not on {server.port}" for server in others
    ]
    return ModelSet(
        entries=tuple(entries),
        source=path,
        port=ports[0] if ports else None,
        equal_shares=True,
        warnings=(*node.warnings, *warnings),
    )


def check_front_flags(engine: EngineFlags, source: str) -> None:
    """Raise UsageError for an engine's flag given with a set: it would be unclear which engine it is for."""
    misplaced = next((flag for flag in flags_of_engine().values() if flag.dest in engine.given), None)
    if misplaced is not None:
        raise UsageError(
            f"{misplaced.long} is about one engine, and {source} has several; put {misplaced.name} into the file, for "
            "one model or next to `models` for all",
            code="engine-flag-beside-set",
        )
