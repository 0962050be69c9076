"""Sampling parameters of a chat, which /set changes while the chat runs."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any

from weft.cli.flags.flags import SAMPLING, Flag
from weft.cli.hints import did_you_mean
from weft.engine.core.params import SamplingParams
from weft.errors import ConfigError

SWITCH = {"on": True, "off": False}
FLAGS = {flag.dest: flag for flag in SAMPLING}


# Values in words, where the value alone says little.
NOT_SET = {"max_tokens": "up to the context's end", "seed": "random", "stop": "none", "top_k": "all tokens"}
NOTES = {("temperature", 0.0): "always the likeliest token", ("min_p", 0.0): "off", ("repetition_penalty", 1.0): "off"}


def changed_setting(words: str) -> tuple[str, Any]:
    """The parameter that `words` change, as in "temperature 0.5", and its value. Raises ConfigError."""
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
    return flag.dest, _parse_value(flag, text.strip())


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


def setting_text(params: SamplingParams, name: str) -> str:
    """A parameter and its value, as in "temperature 0 (always the likeliest token)"."""
    value = getattr(params, name)
    if value in (None, ()) or (name == "top_k" and value == 0):
        shown = NOT_SET.get(name, "none")
    elif isinstance(value, bool):
        shown = "on" if value else "off"
    elif isinstance(value, tuple):
        shown = ", ".join(map(repr, value))
    else:
        shown = f"{value:g}" if isinstance(value, float) else str(value)
    note = NOTES.get((name, value)) if isinstance(value, float) else None
    return f"{name} {shown}{f' ({note})' if note else ''}"
