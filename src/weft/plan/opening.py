"""The checkpoint that an engine's config names."""

from __future__ import annotations

from typing import cast

from msgspec.structs import replace

from weft.config import EngineConfig, PoolingOptions
from weft.errors import ConfigError
from weft.formats.checkpoint import Checkpoint, resolve
from weft.formats.pooling import PoolingTask


def resolve_checkpoint(config: EngineConfig) -> Checkpoint:
    """Open the checkpoint of a config, downloading it if needed. Raises ModelError."""
    checkpoint = resolve(
        config.model,
        revision=config.revision,
        hf_token=config.hf_token,
        download_dir=config.download_dir,
        load_format=config.load_format,
        model_impl=config.model_impl,
        task=pooling_task(config),
    )
    if config.runner == "pooling" and checkpoint.pooling is not None:
        return replace(checkpoint, pooling=replace(checkpoint.pooling, generates=False))
    return checkpoint


def pooling_task(config: PoolingOptions) -> PoolingTask:
    """The use of the model that `task`, `runner` and `convert` ask for. Raises ConfigError if they contradict."""
    by_convert: dict[str, PoolingTask] = {"none": "generate", "embed": "embed", "classify": "score"}
    by_runner: dict[str, PoolingTask] = {"generate": "generate", "pooling": "pooling"}
    wanted = {
        f"task {config.task}": None if config.task == "auto" else cast(PoolingTask, config.task),
        f"convert {config.convert}": by_convert.get(config.convert),
        f"runner {config.runner}": by_runner.get(config.runner),
    }
    given = {said: task for said, task in wanted.items() if task is not None}
    tasks = set(given.values())
    if ("generate" in tasks and len(tasks) > 1) or {"embed", "score"} <= tasks:
        raise ConfigError(f"{' and '.join(given)} contradict each other; give one of them", code="two-tasks")
    return next(iter(given.values()), "auto")
