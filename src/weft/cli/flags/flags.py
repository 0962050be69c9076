"""Flags as data: vLLM's names and meanings if it has the flag. Flags of engine and server come from their configs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import reduce
from operator import or_
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from weft.cli.flags import values
from weft.config import (
    DeviceIds,
    DeviceMap,
    EngineConfig,
    LayoutOptions,
    MaxMemory,
    MemoryOptions,
    ModelOptions,
    NodeOptions,
    Option,
    Options,
    PoolingOptions,
    SchedulingOptions,
    declared_options,
)
from weft.engine.core.params import SamplingParams
from weft.http.options import ServeOptions

# Parsers of a flag's text by the type of its option; None is a switch.
PARSERS: dict[Any, Callable[[str], Any] | None] = {
    bool: None,
    int: values.size,
    float: float,
    str: str,
    tuple[int, ...]: values.integers,
    tuple[float, ...]: values.decimals,
    DeviceIds: values.device_ids,
    tuple[str, ...]: values.words,
    dict[str, Any]: values.mapping,
    DeviceMap: values.device_map,
    MaxMemory: values.max_memory,
}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """`--name VALUE`, or if `parse` is None, the pair `--name` and `--no-name`.

    `field` is the config's field if it differs from the name. A flag with `several` takes one or more values; a flag
    with `repeated` may be given several times; both give a list. `default` is the value if the flag is not given, and
    `bare` the value if it is given without one. `config_default` is the default of a config, which the help shows:
    without the flag there is no value.
    """

    name: str
    help: str
    parse: Callable[[str], Any] | None = str
    field: str = ""
    short: str = ""
    choices: tuple[str, ...] = ()
    metavar: str = ""
    several: bool = False
    repeated: bool = False
    default: Any = None
    bare: Any = None
    config_default: Any = None

    @property
    def long(self) -> str:
        return "--" + self.name

    @property
    def dest(self) -> str:
        return self.field or self.name.replace("-", "_")


def option_flags(config: type[Options]) -> tuple[Flag, ...]:
    """The flags of a config's options, in the order of its fields."""
    types, options = get_type_hints(config), declared_options(config)
    defaults = {field.name: None if field.default is MISSING else field.default for field in fields(config)}
    return tuple(
        Flag(
            name=option.flag or name.replace("_", "-"),
            field=name,
            parse=option_parser(option, types[name]),
            choices=(*option.synonyms, *option.choices),
            config_default=defaults[name],
            help=option.help,
            short=option.short,
            metavar=option.metavar,
            several=option.several,
            repeated=option.repeated,
        )
        for name, option in options.items()
    )


def option_parser(option: Option, kind: Any) -> Callable[[str], Any] | None:
    """The parser of a flag's text, or None for a switch; `kind` is the type of the option's field."""
    if option.auto:
        return values.length
    if option.several or option.repeated:
        return str  # of each value
    if isinstance(kind, UnionType):
        kind = reduce(or_, (part for part in get_args(kind) if part is not NoneType))
    return PARSERS[kind]


ENGINE = (
    ("model", option_flags(ModelOptions)),
    ("pooling", option_flags(PoolingOptions)),
    ("layout", option_flags(LayoutOptions)),
    ("nodes", option_flags(NodeOptions)),
    ("memory", option_flags(MemoryOptions)),
    ("scheduling", option_flags(SchedulingOptions)),
)
SERVER = option_flags(ServeOptions)
SAMPLING = (
    Flag(name="temperature", parse=float, help="0 always takes the most likely token"),
    Flag(name="top-p", parse=float, help="sample only from the most likely tokens that together have this probability"),
    Flag(name="top-k", parse=int, help="sample only from this many of the most likely tokens; 0: from all"),
    Flag(
        name="min-p", parse=float, help="drop tokens less likely than this share of the most likely one's probability"
    ),
    Flag(
        name="repetition-penalty",
        parse=float,
        help="above 1: fewer tokens that are already in the prompt or the answer",
    ),
    Flag(name="presence-penalty", parse=float, help="above 0: fewer tokens that are already in the answer"),
    Flag(name="frequency-penalty", parse=float, help="above 0: fewer tokens that are in the answer often"),
    Flag(
        name="max-tokens",
        parse=values.length,
        help="maximum tokens of the answer; auto: up to --max-model-len (default: 512 in weft run, 200 in weft demo, "
        "auto in weft chat)",
    ),
    Flag(name="min-tokens", parse=values.size, help="minimum tokens of the answer"),
    Flag(name="stop", repeated=True, metavar="TEXT", help="end the answer before this text"),
    Flag(name="ignore-eos", parse=None, help="continue after the model's end token"),
)


def engine_flag(name: str) -> Flag:
    """The engine's flag of this name, for commands that have the same one."""
    return next(flag for _, flags in ENGINE for flag in flags if flag.name == name)


def given_values(arguments: Namespace, flags: tuple[Flag, ...]) -> dict[str, Any]:
    """Values of the flags that were given, by field."""
    given = {flag.dest: getattr(arguments, flag.dest) for flag in flags if hasattr(arguments, flag.dest)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def engine_config(arguments: Namespace, **ours: Any) -> EngineConfig:
    """The config of an engine; `ours` are the command's own defaults for flags that were not given.

    Raises ConfigError for a value out of range.
    """
    from weft.plan.layout import check_config  # not for --help

    flags = given_values(arguments, tuple(flag for _, group in ENGINE for flag in group))
    config = EngineConfig(**{**ours, **flags})
    check_config(config)
    return config


def serve_options(arguments: Namespace, environment: Mapping[str, str]) -> ServeOptions:
    """The options of a server, and its admin key, WEFT_ADMIN_KEY of the environment.

    The environment's VLLM_API_KEY counts if no --api-key is given.
    """
    flags = given_values(arguments, SERVER)
    if "api_key" not in flags and environment.get("VLLM_API_KEY"):
        flags["api_key"] = (environment["VLLM_API_KEY"],)
    return ServeOptions(**flags, admin_key=environment.get("WEFT_ADMIN_KEY"))


def sampling_options(arguments: Namespace, **ours: Any) -> dict[str, Any]:
    """Sampling parameters by name: the flags that were given, else the command's own defaults `ours`.

    The engine's --seed is the request's seed too. Raises RequestError for a value out of range, before an engine
    starts.
    """
    flags = given_values(arguments, SAMPLING)
    if hasattr(arguments, "seed"):
        flags["seed"] = arguments.seed
    options = {**ours, **flags}
    SamplingParams(**options)
    return options
