"""Sampling parameters of a chat, which /set changes while the chat runs."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Mapping
from typing import Any

from weft.cli.flags import SAMPLING, Flag
from weft.cli.hints import did_you_mean
from weft.core.params import SamplingParams
from weft.errors import ConfigError

SWITCH = {"on": True, "off": False}
FLAGS = {flag.dest: flag for flag in SAMPLING}


def changed_setting(options: Mapping[str, Any], words: str) -> dict[str, Any]:
    """`options` with one parameter changed by `words`, as in "temperature 0.5". Raises ConfigError."""
    name, _, text = words.partition(" ")
    flag = FLAGS.get(name.lstrip("-").replace("-", "_"))
    if flag is None:
        names = sorted(FLAGS)
        hint = did_you_mean(name, names)
        raise ConfigError(
            f"unknown parameter {name!r}; {f'{hint} ' * bool(hint)}the parameters are {', '.join(names)}",
            code="unknown-parameter",
        )
    if not text.strip():
        raise ConfigError(f"{flag.dest} needs a value: {flag.help}", code="flag-needs-value")
    return {**options, flag.dest: _parse_value(flag, text.strip())}


def _parse_value(flag: Flag, text: str) -> Any:
    if flag.parse is None:
        if text not in SWITCH:
            raise ConfigError(f"{flag.dest} is {text!r}; it must be on or off", code="flag-needs-boolean")
        return SWITCH[text]
    try:
        value = flag.parse(text)
    except (ValueError, ArgumentTypeError) as error:
        reason = error if isinstance(error, ArgumentTypeError) else f"{text!r} is not a number"
        raise ConfigError(f"{flag.dest}: {reason}", code="invalid-flag-value") from None
    return (value,) if flag.repeated else value


def settings_text(params: SamplingParams) -> str:
    """Every parameter that can be set, with its current value."""
    return "\n".join(f"  {name} {getattr(params, name)}" for name in FLAGS)
