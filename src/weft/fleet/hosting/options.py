"""The server's options for a set: the front applies them, passes them on to the models' servers, or refuses them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from weft.api.server.server import check_keys
from weft.config import EngineConfig, declared_options
from weft.errors import ConfigError
from weft.fleet.hosting.model_set import ModelSet
from weft.http.options import ServeOptions

# Every option is in APPLIED, PASSED_ON (or both), or REFUSED.
APPLIED = frozenset(
    [
        "host",
        "port",
        "uds",
        "api_key",
        "api_key_file",
        "open_listing",
        "prefix_cache_per_key",
        "ssl_keyfile",
        "ssl_certfile",
        "enable_ssl_refresh",
        "shutdown_timeout",
        "request_timeout",
        "max_body_bytes",
        "reset_on_error",
        "list_served_only",  # a set never lists another model
        "progress_timeout",
        "enable_request_id_headers",
        "log_format",
    ]
)
PASSED_ON = frozenset(
    [
        "shutdown_timeout",
        "request_timeout",
        "max_body_bytes",
        "keepalive_interval",
        "reset_on_error",
        "progress_timeout",
        "otlp_traces_endpoint",  # each model's server sends the spans of its requests
        "disable_log_stats",
        "log_format",
        "enable_log_requests",
        "response_role",
        "default_chat_template_kwargs",
        "clip_max_tokens",
        "enable_auto_tool_choice",
        "tool_call_parser",
        "reasoning_parser",
    ]
)
REFUSED = frozenset(
    [
        "served_model_name",
        "root_path",
        "allowed_origins",
        "enable_prefix_debug",
        "refuse_while_asleep",
        "profile_directory",
        "storage_directory",
        "storage_days",
    ]
)
DEFAULTS = ServeOptions()


def check_options(models: ModelSet, options: ServeOptions) -> None:
    """Raise ConfigError for options that only a server of one model has, and for keys without effect."""
    for name in declared_options(ServeOptions):
        if name in REFUSED and getattr(options, name) != getattr(DEFAULTS, name):
            raise ConfigError(f"--{_flag(name)} is for a server of one model; leave it out", code="option-of-one-model")
    configs = [entry.config for entry in models.entries] or [EngineConfig(model="")]
    check_keys(next((config for config in configs if config.scheduling_policy == "fair"), configs[0]), options)


def member_words(options: ServeOptions) -> list[str]:
    """Flags of the options that are passed on to every model's server. A model's own flags come after them."""
    given = [(field.name, getattr(options, field.name)) for field in fields(options) if field.name in PASSED_ON]
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
