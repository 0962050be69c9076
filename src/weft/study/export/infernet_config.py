"""The configuration of an Infernet node, as its book describes it or as its code reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from weft.checkpoint.names import catalogue
from weft.errors import ConfigError, error_reason
from weft.regular_files import SETTINGS_BYTES, read_regular_text

# Keys that profullstack/infernet-protocol reads: apps/cli/lib/config.js and packages/engine, April 2026.
LIVE = ("controlPlane", "node", "engine", "supabase")
ENGINE = ("backend", "model", "ollamaHost", "ollama_num_thread")
# Keys that The Infernet Book has in its chapter on several GPUs and that the node's code does not read; what it does
# instead.
BOOK = {
    "backend": "engine.backend or INFERNET_ENGINE_BACKEND sets it",
    "vllm_host": "VLLM_HOST sets it",
    "vllm_model": "VLLM_MODEL sets it",
    "vllm_instances": "a node uses one server",
    "served_models": "a node lists the models of its server",
    "vram_tier": "the node takes each GPU's memory from the driver",
}
# Tiers by the driver's MiB of a GPU; each is below its figure.
TIERS = (("<8gb", 8192), ("8-16gb", 16384), ("16-24gb", 24576), ("24-48gb", 49152))
LARGEST, UNKNOWN = ">=48gb", "unknown"
MIB = 1 << 20


class ConfiguredServer(msgspec.Struct, frozen=True):
    """A server in the configuration: the model's name in requests, and its port."""

    model: str
    port: int | None


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The servers and the tier in a configuration, and a warning for each key that the node does not read."""

    instances: tuple[ConfiguredServer, ...]
    tier: str | None
    warnings: tuple[str, ...]

    def serving(self, model: str) -> ConfiguredServer | None:
        """The server for a model on the hub: the first whose tag begins the model's name, or the only one."""
        name = comparable_name(model)
        matching = [server for server in self.instances if name.startswith(comparable_name(server.model))]
        if matching:
            return matching[0]
        return self.instances[0] if len(self.instances) == 1 else None


def comparable_name(name: str) -> str:
    """Letters and digits of a name's last part, the same for qwen2.5:14b and Qwen/Qwen2.5-14B."""
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].casefold())


def model_of_tag(tag: str) -> str:
    """Model of the catalogue for a tag like llama3.1:8b, in its chat variant if there is one; else the tag itself."""
    return catalogue.full_name(tag) or tag


def vram_tier(memory_bytes: int) -> str:
    """A GPU's tier, as the node reports it: from one GPU's memory in whole MiB, never from a sum."""
    if memory_bytes <= 0:
        return UNKNOWN
    return next((name for name, limit in TIERS if memory_bytes // MIB < limit), LARGEST)


def read_node_config(path: str) -> NodeConfig:
    """Read the configuration in a file. Raises ConfigError that says what is wrong."""
    try:
        config = json.loads(read_regular_text(Path(path).expanduser(), SETTINGS_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read --infernet-config {path}: {error_reason(error)}", code="cannot-read-infernet-config"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--infernet-config {path} is not JSON: {error}", code="infernet-config-not-json") from None
    if not isinstance(config, dict):
        raise ConfigError(
            f'--infernet-config {path} must hold a JSON object, as in {{"vllm_model": "qwen2.5:14b"}}',
            code="infernet-config-not-object",
        )
    engine = config.get("engine", {})
    if not isinstance(engine, dict):
        raise ConfigError(
            f'engine in {path} is {engine!r}; it must be an object, as in {{"backend": "vllm"}}',
            code="infernet-engine-not-object",
        )
    return NodeConfig(
        instances=tuple(dict.fromkeys(_servers(config, engine, path))),
        tier=_text(config, "vram_tier", path),
        warnings=tuple(_warnings(config, engine)),
    )


def _servers(config: dict[str, Any], engine: dict[str, Any], path: str) -> Iterator[ConfiguredServer]:
    """Every server in the configuration; the server that the node would use comes first."""
    engine_model = _text(engine, "model", path)
    if engine_model:
        yield ConfiguredServer(engine_model, _port(_text(engine, "ollamaHost", path), path))
    model = _text(config, "vllm_model", path)
    if model:
        yield ConfiguredServer(model, _port(_text(config, "vllm_host", path), path))
    instances = _instances(config, path)
    yield from instances
    names = _served_names(config, path)
    if not (engine_model or model or instances):
        yield from (ConfiguredServer(name, _port(_text(config, "vllm_host", path), path)) for name in names)


def _served_names(config: dict[str, Any], path: str) -> list[str]:
    """The names under served_models."""
    names = config.get("served_models", [])
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        raise ConfigError(f"served_models in {path} must be a list of names", code="infernet-served-models-not-names")
    return names


def _instances(config: dict[str, Any], path: str) -> list[ConfiguredServer]:
    """The servers under vllm_instances."""
    entries = config.get("vllm_instances", [])
    is_list = isinstance(entries, list)
    if not is_list or not all(isinstance(entry, dict) and _text(entry, "model", path) for entry in entries):
        raise ConfigError(
            f'vllm_instances in {path} must be a list of {{"host": URL, "model": NAME}}',
            code="infernet-instances-not-objects",
        )
    return [ConfiguredServer(entry["model"], _port(_text(entry, "host", path), path)) for entry in entries]


def _warnings(config: dict[str, Any], engine: dict[str, Any]) -> Iterator[str]:
    for key in config:
        if key in BOOK:
            yield f"{key} is only in the book, the node does not read it: {BOOK[key]}"
        elif key not in LIVE:
            yield f"the node does not read {key}"
    for key in engine:
        if key not in ENGINE:
            yield f"the node does not read engine.{key}"


def _text(fields: dict[str, Any], key: str, path: str) -> str | None:
    """A field that is a text, or None if it is missing. Raises ConfigError for other values."""
    value = fields.get(key)
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise ConfigError(f"{key} in {path} is {value!r}; it must be a text", code="infernet-value-not-text")
    return value


def _port(host: str | None, path: str) -> int | None:
    if host is None:
        return None
    try:
        return urlsplit(host if "//" in host else f"//{host}").port
    except ValueError:
        raise ConfigError(
            f"{host!r} in {path} is not an address; write it as http://localhost:8000", code="infernet-host-not-address"
        ) from None
