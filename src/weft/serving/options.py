"""ServeOptions: the options of the HTTP server, and the only place for their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of the HTTP server, named as their flags (`--api-key` is `api_key`). Times are seconds.

    `served_model_name`: empty means the model as the user typed it. `uds`: a path, used instead of host and port.
    `shutdown_timeout`: time that running requests get after SIGTERM.
    `max_body_bytes`: longer bodies are refused unread; None is 8 MiB, or 16 bytes per token of the model's maximum
    length if that is larger.
    `keepalive_interval`: time after which an idle stream sends a comment.
    `progress_timeout`: the server is unhealthy if requests run and no step finishes for this time.
    `refuse_while_asleep`: requests get 503 while the engine sleeps, instead of waiting.
    `admin_key`: the key of the endpoints in `serving.admin`; without one these are refused.
    `profile_directory`: where /start_profile writes traces.
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
    refuse_while_asleep: bool = False
    admin_key: str | None = None
    profile_directory: str = "weft-profiles"
