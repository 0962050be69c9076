"""Sampling defaults of a model, from its generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.checkpoint.config.config_json import SAMPLING


def sampling_defaults(generation: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """Return the model's own sampling defaults; none if `policy` (--generation-config) is "vllm"."""
    if policy == "vllm":
        return {}
    return {name: generation[name] for name in SAMPLING if generation.get(name) is not None}


def sampling_length(generation: Mapping[str, Any], policy: str) -> int | None:
    """Return the model's own default of the length of an answer; None without one, or if `policy` is "vllm"."""
    length = generation.get("max_new_tokens")
    return None if policy == "vllm" or length is None else int(length)
