"""Flags of engine and server, which come from their configs, and of sampling; the configs and options they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Protocol

from weft.cli.flags import values
from weft.cli.flags.declared import Bundle, Flag, Flags, Group, flag, flag_groups, group_values
from weft.config import (
    EngineConfig,
    LayoutOptions,
    MemoryOptions,
    ModelOptions,
    NodeOptions,
    PoolingOptions,
    SchedulingOptions,
)
from weft.engine.core.params import SamplingParams
from weft.http.options import ServeOptions


class ShardFlags(Bundle):
    """The options of an engine that a cut of its checkpoint depends on."""

    checkpoint: Annotated[ModelOptions, Group("model")]
    layout: LayoutOptions


class EngineFlags(Bundle):
    """The options of an engine, which are not checked yet."""

    checkpoint: Annotated[ModelOptions, Group("model")]
    pooling: PoolingOptions
    layout: LayoutOptions
    nodes: NodeOptions
    memory: MemoryOptions
    scheduling: SchedulingOptions


class Sampling(Flags):
    """Sampling parameters; without a flag, the model's or the command's own."""

    temperature: float | None = flag(help="0 always takes the most likely token")
    top_p: float | None = flag(help="sample only from the most likely tokens that together have this probability")
    top_k: int | None = flag(parse=int, help="sample only from this many of the most likely tokens; 0: from all")
    min_p: float | None = flag(help="drop tokens less likely than this share of the most likely one's probability")
    repetition_penalty: float | None = flag(help="above 1: fewer tokens that are already in the prompt or the answer")
    presence_penalty: float | None = flag(help="above 0: fewer tokens that are already in the answer")
    frequency_penalty: float | None = flag(help="above 0: fewer tokens that are in the answer often")
    max_tokens: int | None = flag(
        parse=values.length,
        help="maximum tokens of the answer; auto: up to --max-model-len (default: 512 in weft run, 200 in weft "
        "demo, auto in weft chat)",
    )
    min_tokens: int | None = flag(help="minimum tokens of the answer")
    stop: tuple[str, ...] = flag((), repeated=True, metavar="TEXT", help="end the answer before this text")
    ignore_eos: bool = flag(False, help="continue after the model's end token")


@cache
def flags_of_engine() -> dict[str, Flag]:
    """The engine's flags by name, without --model."""
    return {flag.name: flag for _, flags in flag_groups(EngineFlags) for flag in flags if flag.name != "model"}


class EngineArguments(Protocol):
    """Arguments with the options of an engine."""

    @property
    def engine(self) -> EngineFlags | ShardFlags: ...


class AnswerArguments(EngineArguments, Protocol):
    """Arguments with sampling parameters too."""

    @property
    def sampling(self) -> Sampling: ...


class ServerArguments(Protocol):
    """Arguments with the options of a server."""

    @property
    def server(self) -> ServeOptions: ...

    @property
    def given(self) -> frozenset[str]: ...


def engine_config(arguments: EngineArguments, **ours: Any) -> EngineConfig:
    """The config of an engine; `ours` are the command's own defaults for flags that were not given.

    Raises ConfigError for a value out of range.
    """
    from weft.plan.layout import check_config  # not for --help

    engine = arguments.engine
    named = {"model": engine.model} if engine.model else {}
    config = EngineConfig(**{**ours, **engine.given_values(), **named})
    check_config(config)
    return config


def serve_options(arguments: ServerArguments, environment: Mapping[str, str]) -> ServeOptions:
    """The options of a server, and its admin key, WEFT_ADMIN_KEY of the environment.

    The environment's VLLM_API_KEY counts if no --api-key is given.
    """
    options = replace(arguments.server, admin_key=environment.get("WEFT_ADMIN_KEY"))
    if "api_key" not in arguments.given and environment.get("VLLM_API_KEY"):
        return replace(options, api_key=(environment["VLLM_API_KEY"],))
    return options


def sampling_options(arguments: AnswerArguments, **ours: Any) -> dict[str, Any]:
    """Sampling parameters by name: the flags that were given, else the command's own defaults `ours`.

    The engine's --seed is the request's seed too. Raises RequestError for a value out of range, before an engine
    starts.
    """
    flags = {**group_values(arguments.sampling), "seed": arguments.engine.checkpoint.seed}
    options = {**ours, **{name: value for name, value in flags.items() if name in arguments.engine.given}}
    SamplingParams(**options)
    return options
