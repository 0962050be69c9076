"""A configuration of an Infernet node, as its book describes it or as its code reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from weft.errors import ConfigError, error_reason
from weft.formats import catalogue

# What profullstack/infernet-protocol reads: apps/cli/lib/config.js and packages/engine, April 2026.
LIVE = ("controlPlane", "node", "engine", "supabase")
ENGINE = ("backend", "model", "ollamaHost", "ollama_num_thread")
# What the chapter on several GPUs in The Infernet Book has, and no code of the node reads; how it is instead.
BOOK = {
    "backend": "engine.backend or INFERNET_ENGINE_BACKEND sets it",
    "vllm_host": "VLLM_HOST sets it",
    "vllm_model": "VLLM_MODEL sets it",
    "vllm_instances": "a node talks to one server",
    "served_models": "a node lists what its server serves",
    "vram_tier": "it takes each GPU's memory from the driver",
}
# From the driver's MiB of a GPU, each below the figure.
TIERS = (("<8gb", 8192), ("8-16gb", 16384), ("16-24gb", 24576), ("24-48gb", 49152))
LARGEST, UNKNOWN = ">=48gb", "unknown"
MIB = 1 << 20


class Instance(msgspec.Struct, frozen=True):
    """A server that the configuration names: the model by the name that it is asked for, and its port."""

    model: str
    port: int | None


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a configuration says of servers, and a sentence for each thing that the node does not read."""

    instances: tuple[Instance, ...]
    tier: str | None
    warnings: tuple[str, ...]

    def serving(self, model: str) -> Instance | None:
        """The instance that stands for a model on the hub: the one whose tag its name begins with, or the only one."""
        tags = [it for it in self.instances if plain(model).startswith(plain(it.model))]
        return tags[0] if tags else self.instances[0] if len(self.instances) == 1 else None


def plain(name: str) -> str:
    """What qwen2.5:14b and Qwen/Qwen2.5-14B have in common: letters and figures of the last part."""
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].casefold())


def known(tag: str) -> str:
    """The model of the catalogue that a tag like llama3.1:8b stands for, the variant that answers where there is one;
    else the tag itself."""
    return catalogue.full_name(tag) or tag


def vram_tier(memory_bytes: int) -> str:
    """A GPU's tier, as the node tells it: from one GPU's memory in whole MiB, never from a sum."""
    if memory_bytes <= 0:
        return UNKNOWN
    return next((name for name, limit in TIERS if memory_bytes // MIB < limit), LARGEST)


def read(path: str) -> NodeConfig:
    """The configuration in a file. Raises ConfigError with what is wrong with it."""
    try:
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --infernet-config {path}: {error_reason(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--infernet-config {path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f'--infernet-config {path} must hold a JSON object, as in {{"vllm_model": "qwen2.5:14b"}}')
    engine = found.get("engine", {})
    if not isinstance(engine, dict):
        raise ConfigError(f'engine in {path} is {engine!r}; it must be an object, as in {{"backend": "vllm"}}')
    return NodeConfig(
        instances=tuple(dict.fromkeys(_instances(found, engine, path))),
        tier=_text(found, "vram_tier", path),
        warnings=tuple(_warnings(found, engine)),
    )


def _instances(found: dict[str, Any], engine: dict[str, Any], path: str) -> Iterator[Instance]:
    """Every server that is named, the one that the node would talk to first."""
    live = _text(engine, "model", path)
    if live:
        yield Instance(live, _port(_text(engine, "ollamaHost", path), path))
    model = _text(found, "vllm_model", path)
    if model:
        yield Instance(model, _port(_text(found, "vllm_host", path), path))
    listed = found.get("vllm_instances", [])
    if not isinstance(listed, list) or not all(isinstance(it, dict) and _text(it, "model", path) for it in listed):
        raise ConfigError(f'vllm_instances in {path} must be a list of {{"host": URL, "model": NAME}}')
    for it in listed:
        yield Instance(it["model"], _port(_text(it, "host", path), path))
    names = found.get("served_models", [])
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        raise ConfigError(f"served_models in {path} must be a list of names")
    if not (live or model or listed):
        yield from (Instance(name, _port(_text(found, "vllm_host", path), path)) for name in names)


def _warnings(found: dict[str, Any], engine: dict[str, Any]) -> Iterator[str]:
    for key in found:
        if key in BOOK:
            yield f"{key} is in the book only, the node does not read it: {BOOK[key]}"
        elif key not in LIVE:
            yield f"the node does not read {key}"
    for key in engine:
        if key not in ENGINE:
            yield f"the node does not read engine.{key}"


def _text(found: dict[str, Any], key: str, path: str) -> str | None:
    value = found.get(key)
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise ConfigError(f"{key} in {path} is {value!r}; it must be a text")
    return value


def _port(host: str | None, path: str) -> int | None:
    if host is None:
        return None
    try:
        return urlsplit(host if "//" in host else f"//{host}").port
    except ValueError:
        raise ConfigError(f"{host!r} in {path} is no address, as in http://localhost:8000") from None
