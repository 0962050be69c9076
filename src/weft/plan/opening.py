"""The checkpoint that an engine's config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from msgspec.structs import replace

from weft.checkpoint.checkpoint import Checkpoint, resolve
from weft.checkpoint.config.pooling import PoolingTask
from weft.config import EngineConfig, PoolingOptions
from weft.errors import ConfigError

# vLLM's overrides for Qwen3-Reranker (https://docs.vllm.ai/en/latest/models/supported_models), and the override that
# lets embeddings be cut, as Weft always does.
RERANKER: dict[str, Any] = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}
MATRYOSHKA = ("is_matryoshka", True)


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
        strict=config.strict_checkpoint,
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
        "hf_overrides": overridden_task(config.hf_overrides or {}),
    }
    given = {option: task for option, task in wanted.items() if task is not None}
    tasks = set(given.values())
    if ("generate" in tasks and len(tasks) > 1) or {"embed", "score"} <= tasks:
        raise ConfigError(f"{' and '.join(given)} contradict each other; give one of them", code="two-tasks")
    return next(iter(given.values()), "auto")


def overridden_task(overrides: Mapping[str, Any]) -> PoolingTask | None:
    """The use of the model that overrides of its config.json mean in vLLM; None for none. Raises ConfigError for
    others than those."""
    others = {name: value for name, value in overrides.items() if (name, value) != MATRYOSHKA}
    if not others:
        return None
    if others != RERANKER:
        raise ConfigError(
            f"hf_overrides is {dict(overrides)!r:.200}; Weft serves a model as its config.json describes it: change "
            f"that in a local copy of the model and give the directory. Only {RERANKER} is known: it makes a reranker",
            code="unknown-overrides",
        )
    return "score"
