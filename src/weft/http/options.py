"""ServeOptions: the options of the HTTP server, and the only place for their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.config import Options, Scope, declared_options, option

ADDRESS, MODELS, EACH = Scope.ADDRESS, Scope.MODELS, Scope.EACH


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Options):
    """Options of the HTTP server. The flag of `api_key` is `--api-key`. Times are seconds."""

    host: str = option("127.0.0.1", scope=ADDRESS, help="address to listen on; 0.0.0.0 means all")
    port: int = option(8000, scope=ADDRESS, help="port to listen on; 0 picks a free one")
    uds: str | None = option(None, metavar="PATH", scope=ADDRESS, help="listen on this Unix socket instead")
    api_key: tuple[str, ...] = option(
        (),
        repeated=True,
        scope=ADDRESS,
        help="key that clients must send; VLLM_API_KEY in the environment is safer, because `ps` shows flags",
    )
    api_key_file: str | None = option(
        None,
        metavar="FILE",
        scope=ADDRESS,
        help="YAML list of the keys that clients may send, with their limits, models and weights; only you may read it",
    )
    open_listing: bool = option(
        False, scope=ADDRESS, help="show the models to processes of this machine without a key, as Infernet's node asks"
    )
    prefix_cache_per_key: bool = option(
        True,
        scope=ADDRESS,
        help="let prompts share cached prefixes only with others of the same key, if there are several keys",
    )
    served_model_name: tuple[str, ...] = option(
        (), several=True, help="names of the model in the API, instead of MODEL"
    )
    root_path: str = option("", help="path prefix that a reverse proxy removes")
    ssl_keyfile: str | None = option(None, metavar="FILE", scope=ADDRESS, help="key for HTTPS")
    ssl_certfile: str | None = option(None, metavar="FILE", scope=ADDRESS, help="certificate for HTTPS")
    enable_ssl_refresh: bool = option(
        False, scope=ADDRESS, help="use a certificate that has been replaced, for new connections"
    )
    allowed_origins: tuple[str, ...] = option((), metavar="LIST", help="origins from which browsers may call the API")
    shutdown_timeout: float = option(
        30.0, metavar="S", scope=ADDRESS | MODELS, help="seconds that running requests have left after SIGTERM"
    )
    request_timeout: float | None = option(
        None,
        metavar="S",
        scope=ADDRESS | MODELS,
        help="seconds after which a request ends with an error, its time in the queue included",
    )
    max_body_bytes: int | None = option(
        None,
        scope=ADDRESS | EACH,
        help="maximum size of a request body (default: 8 MiB, or 16 bytes per token of --max-model-len if more)",
    )
    keepalive_interval: float = option(
        15.0, metavar="S", scope=EACH, help="seconds between keep-alive messages while no token is sent"
    )
    reset_on_error: bool = option(
        False,
        scope=ADDRESS | MODELS,
        help="reset the connection of a stream that fails, for clients that read no error event",
    )
    list_served_only: bool = option(
        False, scope=ADDRESS, help="leave models of the hub's cache that are not served out of /api/tags"
    )
    progress_timeout: float = option(
        30.0,
        metavar="S",
        scope=ADDRESS | EACH,
        help="/health fails if requests run but no step has finished for this many seconds; an engine starts again "
        "whose steps do not finish for as long, or one of whose processes shows no sign of life",
    )
    disable_log_stats: bool = option(False, scope=MODELS, help="do not log statistics every ten seconds")
    enable_request_id_headers: bool = option(
        False, scope=ADDRESS, help="send the header X-Request-Id with every answer"
    )
    log_format: str = option(
        "text",
        choices=("text", "json"),
        scope=ADDRESS | MODELS,
        help="json: one object per line, and one for each HTTP request, with its X-Request-Id and without its text",
    )
    enable_log_requests: bool = option(
        False, scope=MODELS, help="log the prompt and the sampling parameters of every request"
    )
    otlp_traces_endpoint: str | None = option(
        None,
        metavar="URL",
        scope=EACH,
        help="send a trace of every request, without its text, to this OpenTelemetry collector, as in "
        "http://HOST:4318/v1/traces (needs weft-llm[otel])",
    )
    enable_prefix_debug: bool = option(
        False, help="send the header X-Weft-Prefix with every answer: where its prompt left the client's earlier ones"
    )
    response_role: str = option("assistant", scope=EACH, help="role of the answers' messages")
    default_chat_template_kwargs: dict[str, Any] = option(
        default_factory=dict,
        metavar="JSON",
        scope=EACH,
        help="variables of the chat template, for requests that give none",
    )
    clip_max_tokens: bool = option(
        False,
        scope=MODELS,
        help="shorten answers whose max_tokens is more than the context has room for, instead of refusing them",
    )
    enable_auto_tool_choice: bool = option(False, scope=EACH, help="accepted: tools work without it")
    tool_call_parser: str | None = option(
        None, metavar="NAME", scope=EACH, help="form of the model's tool calls (default: that of its chat template)"
    )
    reasoning_parser: str | None = option(
        None, metavar="NAME", scope=EACH, help="form of the model's reasoning (default: that of its chat template)"
    )
    refuse_while_asleep: bool = option(
        False, help="answer requests with status 503 while the engine sleeps, instead of letting them wait"
    )
    profile_directory: str = option("weft-profiles", metavar="DIR", help="where POST /start_profile writes traces")
    storage_directory: str | None = option(
        None, metavar="DIR", help="where uploaded files and batches are kept (default: $XDG_CACHE_HOME/weft/storage)"
    )
    storage_days: float = option(
        30.0, metavar="DAYS", help="how long files, batches and their results are kept; 0: until a client deletes them"
    )
    admin_key: str | None = None  # for the endpoints in serving.admin, which are refused without a key
    announces: bool = True  # `weft ps` shows the server; not each of several behind one address
    behind_front: bool = False  # its only client is the front of a set, which names its own clients in a header


def scoped_options(scope: Scope) -> list[str]:
    """The options that have one of these scopes."""
    return [name for name, option in declared_options(ServeOptions).items() if option.scope & scope]
