"""GatewayConfig: the configuration of a gateway, from flags and YAML files; its defaults are here only."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from weft.checkpoint.files.yaml_text import load_yaml
from weft.errors import ConfigError, error_reason, nearest_name
from weft.fleet.upstreams.policy import OLD_NAMES, POLICIES
from weft.http.key_file import UNKNOWN_FIELD, SpendingLimits
from weft.regular_files import SETTINGS_BYTES, read_regular_text

T = TypeVar("T")


class Timeouts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds. `connect`: for a connection, TLS included. `first_byte`: from the request to the first byte of the
    response's body. `idle`: between two pieces of the body. 0 means no timeout. `wait`: until an upstream takes
    requests; 0 does not wait.
    """

    connect: float = 2.0
    first_byte: float = 120.0
    idle: float = 120.0
    wait: float = 5.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= getattr(self, name) < 1e6:
                raise ValueError(f"{name} must be seconds, 0 or more")


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dollars per million tokens."""

    input: Annotated[float, msgspec.Meta(ge=0)]
    output: Annotated[float, msgspec.Meta(ge=0)]


class Objective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The load up to which requests stay with upstreams that are not marked `overflow`.

    `ttft_s`: predicted seconds to the first token. `queue`: requests that wait for their first token at the least
    loaded upstream.
    """

    ttft_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    queue: Annotated[int, msgspec.Meta(ge=0)] | None = None


class UpstreamConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server behind the gateway.

    `models`: the names that it serves, or a mapping from the gateway's names to this server's. None: the list of its
    /v1/models. `key_env`, `key_file`: the source of the key that it requires. `overflow`: it gets requests only if the
    others are too busy, and within the budget. `price`: the price of an overflow upstream; None for the price in
    genai-prices. `limit_field`: the only field for the limit of an answer, for a server that refuses two.
    """

    url: str
    weight: float = 1.0
    models: list[str] | dict[str, str] | None = None
    key_env: str | None = None
    key_file: str | None = None
    overflow: bool = False
    price: Price | None = None
    limit_field: Literal["max_tokens", "max_completion_tokens"] | None = None

    @property
    def aliases(self) -> dict[str, str] | None:
        """The upstream's name of each model; None if no names are configured."""
        models = self.models
        return {name: name for name in models} if isinstance(models, list) else models


class Discovery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`file`: a YAML list of upstreams that is read again when it changes. `dns`: the URL of a host that has several
    addresses, each of which is an upstream. `ray`: the URL of a Ray cluster's dashboard; the proxies of Ray Serve in
    front of Weft's applications are upstreams. Exactly one of the three is set.
    """

    file: str | None = None
    dns: str | None = None
    ray: str | None = None

    def __post_init__(self) -> None:
        if sum(getattr(self, name) is not None for name in self.__struct_fields__) != 1:
            raise ValueError("discover needs one of file, dns and ray")


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of a gateway.

    `keys`: a file of clients' keys, see `http.key_file`. `access_log`: a file, or - for standard output.
    `max_body_bytes`: largest body of a request. `max_held_bytes`: all bodies that may still be sent to another replica.
    `ledger`: the SQLite file of the tokens of keys and the cost of overflow upstreams. `concurrent`: requests at once
    of all keys together; None for no limit.
    """

    upstreams: list[UpstreamConfig] = []
    policy: str = "least_conn"
    host: str = "127.0.0.1"
    port: int = 8080
    discover: Discovery | None = None
    keys: str | None = None
    objective: Objective = Objective()
    budget: SpendingLimits | None = None
    ledger: str | None = None
    concurrent: Annotated[int, msgspec.Meta(ge=1)] | None = None
    timeouts: Timeouts = Timeouts()
    access_log: str | None = None
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1)] = 2**26  # conversations with pictures are large
    max_held_bytes: Annotated[int, msgspec.Meta(ge=1)] = 2**29
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None


class UpstreamUrl(msgspec.Struct, frozen=True):
    """The parts of an upstream's URL. `path` comes before the path of every request."""

    scheme: str
    host: str
    port: int
    path: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> UpstreamUrl:
    """Parse an upstream's URL. Raises ConfigError.

    A /v1 at its end is removed, since the paths of requests have it.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(
            f"upstream {url!r} is not the URL of a server; write it as http://10.0.1.10:8000", code="invalid-upstream"
        )
    port = port or (443 if parts.scheme == "https" else 80)
    return UpstreamUrl(parts.scheme, host, port, parts.path.rstrip("/").removesuffix("/v1"))


def read_config(path: str, flags: Mapping[str, Any]) -> GatewayConfig:
    """The configuration of a YAML file, with the values of flags in place of the file's.

    Raises ConfigError, one line for the first fault.
    """
    content = _read_yaml(path) or {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a mapping, as in policy: least_conn", code="config-not-mapping")
    return make_config({**content, **flags}, path)


def make_config(values: Mapping[str, Any], source: str = "the flags") -> GatewayConfig:
    """Convert and check a configuration. Raises ConfigError."""
    config = _convert(values, GatewayConfig, source)
    config = msgspec.structs.replace(config, policy=OLD_NAMES.get(config.policy, config.policy))
    if config.policy not in POLICIES:
        near = nearest_name(config.policy, POLICIES)
        raise ConfigError(
            f"policy is {config.policy!r}; it must be one of {', '.join(POLICIES)}{near}", code="unknown-policy"
        )
    if not config.upstreams and config.discover is None:
        raise ConfigError("there is no upstream; give --upstream URL, or upstreams in --config", code="no-upstream")
    check_upstreams(config.upstreams)
    _check_overflow(config)
    return config


def _check_overflow(config: GatewayConfig) -> None:
    """Raise ConfigError for overflow upstreams whose cost would be unbounded."""
    overflow = [upstream for upstream in config.upstreams if upstream.overflow]
    if overflow and (config.budget is None or config.ledger is None):
        raise ConfigError(
            f"upstream {overflow[0].url} is marked overflow; give a budget, as in budget: {{hour: 1, day: 10}}, and a "
            "file as ledger, which stores the amounts",
            code="overflow-without-budget",
        )
    if config.budget is not None and config.budget.hour is None and config.budget.day is None:
        raise ConfigError("budget is empty; give hour or day in dollars", code="empty-budget")
    for upstream in overflow:
        if not upstream.models:
            raise ConfigError(
                f"upstream {upstream.url} is marked overflow; list the models that may go there", code="overflow-models"
            )


def check_upstreams(upstreams: Sequence[UpstreamConfig]) -> None:
    """Raise ConfigError for a wrong or repeated URL, a weight out of range, or a missing key."""
    seen: set[UpstreamUrl] = set()
    for upstream in upstreams:
        url = parse_url(upstream.url)
        if url in seen:
            raise ConfigError(
                f"upstream {upstream.url} is listed twice; give it a larger weight instead", code="duplicate-upstream"
            )
        seen.add(url)
        if not 0 < upstream.weight <= 1e6:
            raise ConfigError(
                f"weight of {upstream.url} is {upstream.weight:g}; it must be above 0", code="invalid-weight"
            )
        upstream_key(upstream, os.environ)


def upstream_key(upstream: UpstreamConfig, environment: Mapping[str, str]) -> str | None:
    """The key that an upstream requires, or None. Raises ConfigError if it is missing."""
    if upstream.key_env is not None:
        key = environment.get(upstream.key_env, "").strip()
        if not key:
            raise ConfigError(
                f"key_env of {upstream.url}: {upstream.key_env} is not set in the environment",
                code="upstream-key-unset",
            )
        return _sendable(key, f"{upstream.key_env} in the environment")
    if upstream.key_file is not None:
        key = _read_text(upstream.key_file, "upstream-key-unreadable").strip()
        if not key:
            raise ConfigError(f"key_file {upstream.key_file} is empty", code="upstream-key-unset")
        return _sendable(key, upstream.key_file)
    return None


def _sendable(key: str, source: str) -> str:
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"the key of {source} has characters that no header can carry", code="upstream-key-unusable")
    return key


def read_upstreams(path: str) -> list[UpstreamConfig]:
    """The upstreams of a discovery file. Raises ConfigError."""
    upstreams = _convert(_read_yaml(path) or [], list[UpstreamConfig], path)
    check_upstreams(upstreams)
    return upstreams


def convert_upstream(values: Any) -> UpstreamConfig:
    """One upstream, from the JSON of POST /gateway/add. Raises ConfigError."""
    upstream = _convert(values, UpstreamConfig, "the body")
    check_upstreams([upstream])
    return upstream


def _convert(values: Any, kind: Callable[..., T] | type[T], source: str) -> T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        unknown = UNKNOWN_FIELD.search(str(error))
        if unknown:
            fields = {
                field
                for struct in (GatewayConfig, UpstreamConfig, Timeouts, Discovery, Price, Objective, SpendingLimits)
                for field in struct.__struct_fields__
            }
            near = nearest_name(unknown[1], fields)
            raise ConfigError(f"{source}: {error}{near}", code="unknown-field") from None
        raise ConfigError(f"{source}: {error}", code="invalid-field") from None


def _read_yaml(path: str) -> Any:
    try:
        return load_yaml(_read_text(path, "cannot-read-config"))
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML: {error}", code="config-not-yaml") from None


def _read_text(path: str, code: str) -> str:
    try:
        return read_regular_text(path, SETTINGS_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error_reason(error)}", code=code) from None
