"""The file of clients' keys, which weft serve and the gateway read."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from weft.checkpoint.files.yaml_text import load_yaml
from weft.errors import ConfigError, error_reason, nearest_name
from weft.http.keys import digest_key
from weft.regular_files import SETTINGS_BYTES, read_regular_text

UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")


class SpendingLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits for the current hour, and for the last 24 hours with it: dollars of a gateway, or tokens of a key."""

    hour: Annotated[float, msgspec.Meta(ge=0)] | None = None
    day: Annotated[float, msgspec.Meta(ge=0)] | None = None


class ClientKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key that clients send: either `key` or `sha256`, its hash in hexadecimal, is set.

    `models`: the only models that it may ask for; None for all. `admin`: it may change the server. `rpm`, `tpm`:
    requests and tokens per minute. `concurrent`: requests at once. `quota`: tokens per hour and day, of a gateway with
    a ledger. `weight`: its share of a gateway's `concurrent` requests, and of a server's tokens under the policy
    "fair", in proportion to the other keys'.
    """

    name: str
    key: str | None = None
    sha256: str | None = None
    admin: bool = False
    models: list[str] | None = None
    rpm: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tpm: Annotated[int, msgspec.Meta(ge=1)] | None = None
    concurrent: Annotated[int, msgspec.Meta(ge=1)] | None = None
    quota: SpendingLimits | None = None
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None

    def __post_init__(self) -> None:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError(f"{self.name!r} needs key or sha256")
        if self.sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", self.sha256):
            raise ValueError(f"sha256 of {self.name!r} is not 64 hexadecimal digits")

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        return bytes.fromhex(self.sha256) if self.sha256 is not None else digest_key(self.key or "")


def read_keys(path: str, other_keys: Mapping[str, str | None] | None = None) -> list[ClientKey]:
    """The keys of a YAML file. `other_keys` are keys from other sources, by their names in errors.

    Raises ConfigError for a bad file, for a file with plain keys that other users may read, for two keys with one name,
    and for a repeated key or a key in `other_keys`.
    """
    keys = _convert(_read_yaml(path), path)
    names = [key.name for key in keys]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{path} has two keys of the name {twice!r}", code="duplicate-key-name")
    if not keys:
        raise ConfigError(f"{path} has no key; without keys leave the file out", code="no-keys")
    if any(key.key is not None for key in keys):
        _check_private(path)
    _check_distinct(keys, path, other_keys or {})
    return keys


def _check_distinct(keys: Sequence[ClientKey], path: str, other_keys: Mapping[str, str | None]) -> None:
    """Raise ConfigError for a key in two places: the limits and models of one of them would not apply."""
    places = {digest_key(key): name for name, key in other_keys.items() if key}
    for key in keys:
        other = places.setdefault(key.digest, repr(key.name))
        if other != repr(key.name):
            raise ConfigError(
                f"{path}: the key of {key.name!r} is that of {other} too; give each its own", code="duplicate-key"
            )


def _check_private(path: str) -> None:
    """Raise ConfigError for a file that users other than its owner may read or write; its group may read it."""
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if mode & 0o027:
        raise ConfigError(
            f"others may read or write {path}, which holds keys (mode {mode:04o}); chmod 600 {path}, or give the keys "
            "as sha256",
            code="open-key-file",
        )


def _convert(values: Any, path: str) -> list[ClientKey]:
    try:
        return msgspec.convert(values or [], list[ClientKey])
    except msgspec.ValidationError as error:
        unknown = UNKNOWN_FIELD.search(str(error))
        if unknown:
            near = nearest_name(unknown[1], {*ClientKey.__struct_fields__, *SpendingLimits.__struct_fields__})
            raise ConfigError(f"{path}: {error}{near}", code="unknown-field") from None
        raise ConfigError(f"{path}: {error}", code="invalid-field") from None


def _read_yaml(path: str) -> Any:
    try:
        return load_yaml(read_regular_text(path, SETTINGS_BYTES), quote=False)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error_reason(error)}", code="cannot-read-config") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML: {error}", code="config-not-yaml") from None
