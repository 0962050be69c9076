"""weft shard MODEL DIRECTORY: a checkpoint cut for the ranks of a layout, each rank's share in a file of its own."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from msgspec.structs import replace

from weft.checkpoint.checkpoint import Checkpoint
from weft.checkpoint.config.config_json import CONFIG
from weft.checkpoint.config.pooling import LOGIT_SCORE, POOLING
from weft.checkpoint.files import gguf, sharded
from weft.checkpoint.files.safetensors import INDEX
from weft.checkpoint.hub import hub
from weft.cli.flags.command_flags import ShardArguments
from weft.cli.flags.flags import engine_config
from weft.cli.parser import UsageError
from weft.config import EngineConfig
from weft.engine.executors.reading import ReadingProgress
from weft.errors import ConfigError
from weft.formatting import format_bytes
from weft.machine.hardware.host import Host, probe_host
from weft.plan.opening import resolve_checkpoint
from weft.plan.plan import Plan
from weft.plan.quantization import checkpoint_precision
from weft.plan.shards import cut_of
from weft.planner.execution.execution import plan_to_run

logger = logging.getLogger("weft")

WEIGHTS = 1 << 60  # bytes; more than any model: the shares are never in memory at once


def main(arguments: ShardArguments) -> int:
    """Write the files, and print their names, sizes and the command that runs them."""
    if len(arguments.argument) != 2:
        raise UsageError(
            "weft shard takes a model and a directory to write to, as in: weft shard demo shards -tp 2",
            code="shard-arguments",
        )
    model, folder = arguments.argument[0], Path(arguments.argument[1]).expanduser()
    config = engine_config(arguments, model=model, device="cpu")
    plan, state = plan_shards(config, folder)
    with new_folder(folder), contextlib.closing(ReadingProgress()) as progress:
        # By its name: the command line imports no torch.
        import_module("weft.ranks.worker.sharding").write_shards(plan, state, folder, progress.update)
        copy_texts(Path(plan.checkpoint), folder)
    for place in plan.places:
        print(f"{folder / sharded.file_name(place.rank)}: {format_bytes(plan.weight_bytes(place.rank))}")
    print(f"Run them with: weft run {folder} --load-format sharded_state {sharded.cut_words(state.cut)}")
    return 0


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make a directory that is filled; after an error or Ctrl-C, remove it with its files and all that was made."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in folder.iterdir():
            path.unlink()
        for path in made:
            path.rmdir()
        raise


def plan_shards(config: EngineConfig, folder: Path) -> tuple[Plan, sharded.ShardedState]:
    """The plan whose ranks get a file each, and what the files say about it.

    Raises ModelError, ConfigError and PlanError: also for a directory that has files, or has no room.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there and not an empty directory; give another one", code="shards-in-the-way")
    checkpoint = resolve_checkpoint(config)
    if checkpoint.sharded is not None:
        raise ConfigError(
            f"{config.model} is cut already, for {sharded.cut_words(checkpoint.sharded.cut)}; give the whole model",
            code="shards-of-shards",
        )
    host = roomy_host()
    plan = plan_to_run(config, checkpoint, host)
    check_room(plan, folder)
    return plan, state_of(config, checkpoint, plan)


def roomy_host() -> Host:
    """This machine, without GPUs and with room for every model: the ranks are never in memory at once."""
    return replace(probe_host(), gpus=(), memory_free_bytes=WEIGHTS)


def check_room(plan: Plan, folder: Path) -> None:
    """Raise ConfigError if the files do not fit the disk."""
    need = sum(plan.weight_bytes(place.rank) for place in plan.places)
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if need > free:
        raise ConfigError(
            f"the files take {format_bytes(need)}, and {parent} has {format_bytes(free)} free; make room, or give "
            "a directory on another disk",
            code="disk-full",
        )


def state_of(config: EngineConfig, checkpoint: Checkpoint, plan: Plan) -> sharded.ShardedState:
    """The description of a plan that its files hold."""
    return sharded.ShardedState(
        format=sharded.FORMAT,
        rank=0,
        model=config.model,
        shape=plan.shape,
        dtype=plan.dtype,
        precision=checkpoint_precision(config, checkpoint, plan.dtype, [device.name for device in plan.devices]),
        quantization=config.quantization,
        quantised=checkpoint.quantised,
        schemes=plan.schemes,
        places=plan.places,
        cut=cut_of(config),
        generation=checkpoint.generation,
    )


def copy_texts(checkpoint: Path, folder: Path) -> None:
    """Copy config and tokenizer; from a GGUF file, as a GGUF file without tensors. Raises OSError."""
    if not checkpoint.is_dir():
        (folder / sharded.TOKENIZER).write_bytes(gguf.without_tensors(str(checkpoint)))
        return
    for pattern in hub.TEXT_FILES:
        for path in sorted(checkpoint.glob(pattern)):
            if path.name != INDEX:
                shutil.copyfile(path, folder / path.name)
    for name in (POOLING, LOGIT_SCORE):
        if (path := checkpoint / name / CONFIG).is_file():
            (folder / name).mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name / CONFIG)
