"""The server's options for a set: the front applies them, passes them on to the models' servers, or refuses them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from weft.api.server.server import check_keys
from weft.config import EngineConfig, Scope
from weft.errors import ConfigError
from weft.fleet.hosting.model_set import ModelSet
from weft.http.options import ServeOptions, scoped_options

PASSED_ON, REFUSED = scoped_options(Scope.MODELS | Scope.EACH), scoped_options(Scope.SINGLE)
DEFAULTS = ServeOptions()


def check_options(models: ModelSet, options: ServeOptions) -> None:
    """Raise ConfigError for options that only a server of one model has, and for keys without effect."""
    for name in REFUSED:
        if getattr(options, name) != getattr(DEFAULTS, name):
            raise ConfigError(f"--{_flag(name)} is for a server of one model; leave it out", code="option-of-one-model")
    configs = [entry.config for entry in models.entries] or [EngineConfig(model="")]
    check_keys(next((config for config in configs if config.scheduling_policy == "fair"), configs[0]), options)


def member_words(options: ServeOptions) -> list[str]:
    """Flags of the options that are passed on to every model's server. A model's own flags come after them."""
    given = [(name, getattr(options, name)) for name in PASSED_ON]
    return [_word(_flag(name), value) for name, value in given if value != getattr(DEFAULTS, name)]


def stall_limit(argv: Sequence[str]) -> float:
    """Seconds of --progress-timeout in the flags of a model's server; the last one counts."""
    start = f"--{_flag('progress_timeout')}="
    limits = [float(word.removeprefix(start)) for word in argv if word.startswith(start)]
    return limits[-1] if limits else DEFAULTS.progress_timeout


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _word(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}"
