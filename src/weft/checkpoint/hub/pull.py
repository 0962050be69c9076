"""Fetching a model by name, before anything is served: what `weft pull` and Ollama's /api/pull do."""

from __future__ import annotations

from pathlib import Path

from weft.checkpoint.hub import demo, hub, model_names
from weft.checkpoint.hub.files import CreateProgress, show_progress
from weft.checkpoint.names import catalogue, gguf_reference


def pull_model(
    name: str, *, token: str | None = None, folder: str | None = None, create_progress: CreateProgress = show_progress
) -> Path:
    """Fetch a model; return its file or directory.

    The name is `hf.co/OWNER/REPO:QUANT`, one of Ollama's tags that data/gguf.toml has, an id on the hub, or `demo`.
    Raises ModelError, with the first of these forms for an unknown tag.
    """
    name = name.removesuffix(":latest")
    if name == demo.NAME:
        return demo.fetch_demo()
    full = hub_id(name)
    if full is not None:
        return hub.fetch_repository(
            full, revision=None, token=token, folder=folder, weights=True, create_progress=create_progress
        )
    reference = gguf_reference.require(name)
    if gguf_reference.parse_tag(name) is not None:  # an address is fetched in any case
        model_names.check_runs(reference)
    return hub.fetch_gguf(reference, token=token, folder=folder, create_progress=create_progress)


def hub_id(name: str) -> str | None:
    """The repository with safetensors that a name means; None for a GGUF file, a tag and an unknown name."""
    if gguf_reference.parse_name(name) is not None or ":" in name:
        return None
    return name if "/" in name and hub.is_name(name) else catalogue.full_name(name)
