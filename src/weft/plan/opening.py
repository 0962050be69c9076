"""The checkpoint that an engine's config names."""

from __future__ import annotations

from weft.config import EngineConfig
from weft.formats.checkpoint import Checkpoint, resolve


def resolve_checkpoint(config: EngineConfig) -> Checkpoint:
    """Open the checkpoint of a config, downloading it if needed. Raises ModelError."""
    return resolve(
        config.model,
        revision=config.revision,
        hf_token=config.hf_token,
        download_dir=config.download_dir,
        load_format=config.load_format,
        model_impl=config.model_impl,
    )
