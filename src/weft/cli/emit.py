"""weft plan MODEL --emit TARGET: the plan as another system's files."""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.parser import UsageError
from weft.formats import catalogue, demo

if TYPE_CHECKING:
    from weft.architectures.model import Model
    from weft.export.choice import ExportChoice
    from weft.export.deployment import Deployment
    from weft.export.infernet_config import ConfiguredServer, NodeConfig
    from weft.export.target import ExportTarget
    from weft.planner.deployment import DeploymentLayout

logger = logging.getLogger("weft.cli")

LAST_PORT = 65535
DESCRIBED = ("gpus", "nodes")  # flags of hardware that may be elsewhere
BELONGING = ("emit_to", "force", "port", "served_model_name", "infernet_config")  # flags of --emit


def check(arguments: Namespace) -> None:
    """Raises UsageError for flags that contradict each other."""
    if not hasattr(arguments, "emit"):
        # The answer is the plan itself.
        alone = next((name for name in BELONGING if hasattr(arguments, name)), None)
        if alone:
            raise UsageError(f"--{alone.replace('_', '-')} belongs to --emit, which says what to write")
        return
    for other in ("check", "json", "html"):
        if getattr(arguments, other, False):
            raise UsageError(f"--emit and --{other} are two answers; give one of them")
    if getattr(arguments, "emit_to", None) == "":
        raise UsageError("--emit-to is empty; give a folder, or . for this one")
    if hasattr(arguments, "force") and not hasattr(arguments, "emit_to"):
        raise UsageError("--force is for files that --emit-to DIR would overwrite")


def main(arguments: Namespace) -> int:
    """Write the files of a target; 3, and nothing written, where no plan fits that it could carry out."""
    from weft.cli import dispatch, plan
    from weft.export import files, infernet, infernet_config
    from weft.export.choice import NothingFits, choose_plan
    from weft.export.targets import TARGETS

    target = TARGETS[arguments.emit]
    if arguments.engine not in ("weft", *target.engines):
        raise UsageError(
            f"--emit {target.name} writes for {' or '.join(target.engines)}, not --engine {arguments.engine}"
        )
    path = getattr(arguments, "infernet_config", None)
    config = infernet_config.read_node_config(path) if path is not None else None
    model = look_up(arguments, target, config)
    question = plan.ask(arguments, model)
    try:
        choice = choose_plan(question, target)
    except NothingFits as error:
        return dispatch.fail(str(error), plan.NOTHING_FITS)
    it = deployment(arguments, target, model, config, choice)
    warnings = list(it.gaps)
    if config:
        gpus = [(gpu.name, gpu.memory_bytes) for gpu in dict.fromkeys(question.cluster.gpus)]
        warnings += infernet.config_warnings(config, model.name, gpus)
    for warning in warnings:
        logger.warning(warning)
    made = target.create_files(it)
    folder = getattr(arguments, "emit_to", None)
    if folder is None:
        sys.stdout.write(files.joined_text(made))
        return 0
    for written in files.write_files(made, Path(folder).expanduser(), force=getattr(arguments, "force", False)):
        print(f"wrote {written}", file=sys.stderr)
    return 0


def look_up(arguments: Namespace, target: ExportTarget, config: NodeConfig | None) -> Model:
    """The model that was named, or that a node's configuration names."""
    from weft.cli import plan
    from weft.export import infernet_config

    if not getattr(arguments, "model", ""):
        if config is None or not config.instances:
            raise UsageError(f"which model? {arguments.infernet_config} names none")
        arguments.model = infernet_config.model_of_tag(config.instances[0].model)
    model = plan.look_up(arguments)
    if model.name == demo.NAME and not {"weft", "llama.cpp"} & set(target.engines):
        from weft.export.checkpoint import DEMO

        return catalogue.find(DEMO)
    return model


def deployment(
    arguments: Namespace, target: ExportTarget, model: Model, config: NodeConfig | None, choice: ExportChoice
) -> Deployment:
    """The plan with names and ports, from the flags or else from a node's configuration."""
    from weft.export.checkpoint import find_checkpoint
    from weft.export.deployment import Deployment, plan_servers

    instance = config.serving(model.name) if config else None
    layout, visible = choice.candidate.layout, names_here(arguments)
    found = find_checkpoint(arguments.model, model, layout.precision, choice.question.engine)
    names = tuple(getattr(arguments, "served_model_name", ())) or (*([instance.model] if instance else ()), found.title)
    for name in names:
        if not name.strip() or not name.isprintable() or name.startswith("-"):
            raise UsageError(f"{name!r} is no name that clients could ask for; --served-model-name takes one")
    if not found.name.isprintable():
        raise UsageError(f"the path {found.name!r} has characters that no file written here could hold; rename it")
    return Deployment(
        question=choice.question,
        candidate=choice.candidate,
        checkpoint=found,
        names=tuple(dict.fromkeys(names)),
        servers=plan_servers(choice.question, choice.candidate, port(arguments, target, instance, layout), visible),
        gaps=(*choice.gaps, *nameless(choice, visible)),
    )


def port(
    arguments: Namespace, target: ExportTarget, instance: ConfiguredServer | None, layout: DeploymentLayout
) -> int:
    """Of the first server; 0 where the target has none."""
    said = getattr(arguments, "port", None)
    if not target.port:
        if said is not None:
            raise UsageError(f"--port {said}: what --emit {target.name} writes has no port of its own")
        return 0
    first = said or (instance.port if instance else None) or target.port
    last = first + layout.data_parallel - 1
    if last > LAST_PORT:
        raise UsageError(f"--port {first} and {layout.data_parallel - 1} more for the replicas go beyond {LAST_PORT}")
    return first


def names_here(arguments: Namespace) -> list[str]:
    """The names of this machine's GPUs where the plan is for those that CUDA_VISIBLE_DEVICES leaves; UUIDs where a
    number is no name, or another card's in CUDA's own order."""
    from weft.hardware import cuda, host

    if any(hasattr(arguments, name) for name in DESCRIBED):
        return []
    there = host.probe_host().gpus
    if any(gpu.slice for gpu in there) or (there and cuda.has_other_order(os.environ)):
        return [gpu.uuid for gpu in there]
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


def nameless(choice: ExportChoice, names: Sequence[str]) -> tuple[str, ...]:
    """What to do about slices of GPUs that are elsewhere, whose names nobody here knows."""
    gpus = choice.question.cluster.gpus
    found = next((gpus[at].name for at in choice.candidate.layout.gpus if gpus[at].is_mig_slice), None)
    if found is None or names:
        return ()
    return (
        f"{found} is a MIG slice, which has no number: where a GPU is named, put its UUID, which nvidia-smi -L tells",
    )
