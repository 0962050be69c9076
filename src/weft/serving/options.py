"""ServeOptions: what a user may say about the HTTP side, and the only place for its defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Names are the flags' names (`--api-key` is `api_key`). Times are seconds.

    `served_model_name` empty: the model as typed. `uds`, a path, takes the place of host and port.
    `shutdown_timeout` is how long running requests may go on after SIGTERM. A request longer than
    `max_body_bytes` is refused unread (None: 8 MiB, or 16 bytes per token of the model's length, if that is more); an
    open stream with nothing to say sends a comment every
    `keepalive_interval`; requests that run while no step finishes for `progress_timeout` are unhealthy.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_key: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    allowed_origins: tuple[str, ...] = ()
    shutdown_timeout: float = 30.0
    disable_log_stats: bool = False
    enable_request_id_headers: bool = False
    response_role: str = "assistant"
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_body_bytes: int | None = None
    keepalive_interval: float = 15.0
    progress_timeout: float = 60.0
