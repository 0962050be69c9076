"""Commands as LLM, AsyncLLM and `weft serve` create them, and the rows that they make of the replies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict, fields, replace

from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.quantised.schemes import ONLINE_QUANTIZATIONS
from weft.config import EngineConfig
from weft.engine.core.commands import Profile, RankReport, Replies, SwapWeights, TraceFile
from weft.engine.replicas.running import RunningReplica
from weft.errors import RequestError, error_reason
from weft.plan.opening import pooling_task
from weft.plan.plan import Plan
from weft.plan.quantization import held_tensors
from weft.plan.shards import shard_difference
from weft.planner.report.table import layout_json

STAT_FIELDS = ("steps", "compute_s", "communication_s", "waiting_s", "allocated_bytes", "reserved_bytes")
MEMORY_FIELDS = tuple(name for name in RankReport.__struct_fields__ if name.endswith("_bytes"))


def swap_command(model: str | os.PathLike[str], config: EngineConfig, plan: Plan) -> SwapWeights:
    """Find the checkpoint that `model` names, downloading it if needed, for an engine that runs `plan`.

    Raises ModelError as `checkpoint.checkpoint.resolve` does, and RequestError for a checkpoint of other shapes.
    """
    name = os.fspath(model)
    checkpoint = resolve(
        name,
        hf_token=config.hf_token,
        download_dir=config.download_dir,
        model_impl=config.model_impl,
        task=pooling_task(config),
        strict=config.strict_checkpoint,
    )
    difference = shape_difference(checkpoint.shape, plan.shape)
    # Tensors that are quantised as they are loaded, or not at all, may be stored in any type.
    stored = plan.schemes and plan.quantization not in ONLINE_QUANTIZATIONS
    if not difference and stored and held_tensors(checkpoint.shape, checkpoint.quantised) != plan.schemes:
        difference = "its tensors are quantised otherwise"
    if not difference and checkpoint.sharded is not None:
        difference = shard_difference(plan, checkpoint.sharded)
    if difference:
        raise RequestError(
            f"{name} cannot take the place of the weights of {plan.model}: {difference}; start another engine for it",
            param="checkpoint",
            code="swap-of-other-shapes",
        )
    return SwapWeights(checkpoint.path, checkpoint.format)


def shape_difference(new: ModelShape, old: ModelShape) -> str:
    """The first difference between two shapes, apart from the dtype of their files; "" if there is none."""
    new = replace(new, dtype=old.dtype)
    return "" if new == old else f"its {_first_difference('', new, old)}"


def _first_difference(name: str, new: Any, old: Any) -> str:
    """The innermost part in which two unlike values differ first, as "layers[2].ffn.width is 96, not 160"."""
    parts: Iterable[tuple[str, Any, Any]] = ()
    if isinstance(old, msgspec.Struct) and type(new) is type(old):
        parts = ((f"{name}.{part.name}", getattr(new, part.name), getattr(old, part.name)) for part in fields(old))
    elif isinstance(old, tuple) and isinstance(new, tuple):
        if len(new) != len(old):
            return f"{name} are {len(new)}, not {len(old)}"
        parts = ((f"{name}[{number}]", *pair) for number, pair in enumerate(zip(new, old, strict=True)))
    for part, value, wanted in parts:
        if value != wanted:
            return _first_difference(part.removeprefix("."), value, wanted)
    return f"{name} is {new!r:.80}, not {old!r:.80}"


def profile_command(steps: int, directory: str | os.PathLike[str]) -> Profile:
    """Trace `steps` steps into `directory`, which is created.

    Raises RequestError if nothing can be written there.
    """
    folder = Path(directory).absolute()
    try:
        if steps < 0:
            raise RequestError(
                f"steps is {steps}; it must be 1 or more, or 0 to end a trace", param="steps", code="profile-steps"
            )
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "no permission to write")
    except OSError as error:
        raise RequestError(
            f"cannot write traces into {folder}: {error_reason(error)}; give another directory",
            param="directory",
            code="profile-directory",
        ) from None
    return Profile(steps, str(folder))


def trace_paths(replies: Replies) -> list[str]:
    """Paths of the traces, one per process."""
    return [reply.path for reply in replies if isinstance(reply, TraceFile) and reply.path]


def stat_rows(answers: Sequence[tuple[RunningReplica, Replies]]) -> list[dict[str, Any]]:
    """Rows of `rank_stats`, in rank order."""
    return [
        {"rank": replica.first_rank + rank, **{name: getattr(report, name) for name in STAT_FIELDS}}
        for replica, replies in answers
        for rank, report in enumerate(replies)
    ]


def memory_rows(answers: Sequence[tuple[RunningReplica, Replies]]) -> list[dict[str, Any]]:
    """Rows of `layout`, in rank order: what the plan gives a rank, and the memory that it has reported.

    Ranks of a replica that is being started again are left out.
    """
    rows = []
    for replica, replies in answers:
        nodes = {capacity.rank: capacity.node or capacity.host for capacity in replica.ready.ranks}
        for row, report in zip(replica_rows(replica), replies, strict=True):
            assert isinstance(report, RankReport)
            figures = asdict(report)
            node = nodes[row["rank"] - replica.first_rank]
            rows.append({**row, "node": node, **{name: figures[name] for name in MEMORY_FIELDS}})
    return rows


def replica_rows(replica: RunningReplica) -> list[dict[str, Any]]:
    """Rows of `layout_json` for a replica; ranks are counted over all replicas."""
    rows = layout_json(replica.plan, replica.ready.num_blocks)
    for row in rows:
        row["rank"] += replica.first_rank
        row["replica"] += replica.number
    return rows
