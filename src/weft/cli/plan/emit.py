"""weft plan MODEL --emit TARGET: files with which another system runs the plan."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.checkpoint.hub import demo
from weft.checkpoint.names import catalogue
from weft.cli.flags.plan_flags import Hardware, PlanArguments
from weft.cli.parser import UsageError
from weft.cli.plan.emit_files import name_configured_model, output_files
from weft.cli.plan_question import NOTHING_FITS, build_question, find_model

if TYPE_CHECKING:
    from weft.checkpoint.architectures.model import Model
    from weft.planner.deployment import DeploymentLayout
    from weft.planner.note import Note
    from weft.planner.question import Question
    from weft.study.export.choice import ExportChoice, NothingFits
    from weft.study.export.deployment import Deployment
    from weft.study.export.infernet_config import ConfiguredServer, NodeConfig
    from weft.study.export.target import ExportTarget

logger = logging.getLogger("weft.cli")

# A target for each engine, to name the targets that can run what another cannot.
ENGINE_TARGETS = ("weft", "vllm", "ollama", "transformers")
LAST_PORT = 65535
EMIT_FLAGS = ("emit_to", "force", "port", "served_model_name")  # only for --emit


def _refuse_flags_of_emit(given: frozenset[str]) -> None:
    """Raise UsageError for a flag that needs --emit, which is not given."""
    alone = next((name for name in EMIT_FLAGS if name in given), None)
    if alone:
        raise UsageError(f"--{alone.replace('_', '-')} works only with --emit TARGET", code="emit-missing")


def check_emit_flags(arguments: PlanArguments) -> None:
    """Raise UsageError for flags that contradict each other, or that need --emit."""
    flags, answer = arguments.export, arguments.answer
    if flags.emit is None:
        _refuse_flags_of_emit(arguments.given)
        return
    others = {"check": answer.check, "json": answer.json, "html": answer.html}
    other = next((name for name, value in others.items() if value), None)
    if other:
        raise UsageError(
            f"--emit and --{other} print different answers; give one of them", code="emit-with-other-answer"
        )
    if flags.emit_to == "":
        raise UsageError("--emit-to is empty; give a folder, or . for this one", code="emit-to-empty")
    if "force" in arguments.given and flags.emit_to is None:
        raise UsageError("--force lets --emit-to DIR overwrite files; give --emit-to too", code="force-without-emit-to")


def main(arguments: PlanArguments, name: str) -> int:
    """Write the files of a target; return 3 and write nothing if no layout fits that the target can run."""
    from weft.cli import dispatch
    from weft.study.export import infernet, infernet_config
    from weft.study.export.choice import NothingFits, choose_plan
    from weft.study.export.targets import TARGETS

    target, engine = TARGETS[name], arguments.subject.aim.engine
    if engine not in ("weft", *target.engines):
        raise UsageError(
            f"--emit {target.name} writes for {' or '.join(target.engines)}, not --engine {engine}",
            code="emit-engine-mismatch",
        )
    path = arguments.export.infernet_config
    config = infernet_config.read_node_config(path) if path is not None else None
    if config is not None and path is not None and target.name == "infernet":
        from weft.cli.plan import emit_set

        if emit_set.has_several(arguments, config):
            return emit_set.main(arguments, config, path)
    if config is not None:
        arguments = name_configured_model(arguments, config)
    model = find_emitted_model(arguments, target)
    question = build_question(arguments.subject, model)
    try:
        choice = choose_plan(question, target)
    except NothingFits as error:
        return dispatch.fail(f"{error}{other_targets(question, target, error)}", NOTHING_FITS)
    deployment = named_deployment(arguments, target, model, config, choice)
    warnings = [str(gap) for gap in deployment.gaps]
    if config:
        gpus = [(gpu.name, gpu.memory_bytes) for gpu in dict.fromkeys(question.cluster.gpus)]
        warnings += infernet.config_warnings(config, model.name, gpus)
    for warning in warnings:
        logger.warning(warning)
    return output_files(arguments.export, target.create_files(deployment))


def other_targets(question: Question, target: ExportTarget, error: NothingFits) -> str:
    """Text behind an error of one target: the other engines' targets that can run the model; "" if memory is short."""
    from weft.study.export.choice import NothingFits, choose_plan
    from weft.study.export.targets import TARGETS

    if error.code != "target-cannot-run-plan" or "--emit" in str(error):
        return ""

    def can_run(name: str) -> bool:
        try:
            choose_plan(question, TARGETS[name])
        except NothingFits:
            return False
        return True

    possible = [name for name in ENGINE_TARGETS if name != target.name and can_run(name)]
    return f"; these can: {', '.join(f'--emit {name}' for name in possible)}" if possible else ""


def find_emitted_model(arguments: PlanArguments, target: ExportTarget) -> Model:
    """The model to run; the demo as Transformers' checkpoint if the target needs one."""
    model = find_model(arguments.model, arguments.subject.source)
    if model.name == demo.NAME and not {"weft", "llama.cpp"} & set(target.engines):
        from weft.study.export.checkpoint import DEMO

        return catalogue.find(DEMO)
    return model


def named_deployment(
    arguments: PlanArguments, target: ExportTarget, model: Model, config: NodeConfig | None, choice: ExportChoice
) -> Deployment:
    """The plan with names and ports from the flags, else from a node's configuration."""
    from weft.study.export.checkpoint import find_checkpoint
    from weft.study.export.deployment import Deployment, plan_servers

    instance = config.serving(model.name) if config else None
    layout, visible = choice.candidate.layout, visible_gpu_names(arguments.subject.hardware)
    source = find_checkpoint(arguments.model, model, layout.precision, choice.question.engine)
    names = arguments.export.served_model_name or (
        *([instance.model] if instance else ()),
        source.title,
    )
    for name in names:
        if not name.strip() or not name.isprintable() or name.startswith("-"):
            raise UsageError(
                f"{name!r} is not a name that clients can use; give another with --served-model-name",
                code="unusable-served-name",
            )
    if not source.name.isprintable():
        raise UsageError(
            f"the path {source.name!r} has characters that cannot be written to these files; rename it",
            code="unwritable-path",
        )
    return Deployment(
        question=choice.question,
        candidate=choice.candidate,
        checkpoint=source,
        names=tuple(dict.fromkeys(names)),
        servers=plan_servers(
            choice.question, choice.candidate, first_port(arguments.export.port, target, instance, layout), visible
        ),
        gaps=(*choice.gaps, *mig_gap(choice, visible)),
    )


def first_port(
    given: int | None, target: ExportTarget, instance: ConfiguredServer | None, layout: DeploymentLayout
) -> int:
    """Port of the first server, `given` by --port or not; 0 for a target without ports."""
    if not target.port:
        if given is not None:
            raise UsageError(
                f"--port {given}: the files of --emit {target.name} have no port; leave --port out",
                code="emit-without-port",
            )
        return 0
    first = given or (instance.port if instance else None) or target.port
    last = first + layout.parallelism.engines - 1
    if last > LAST_PORT:
        raise UsageError(
            f"--port {first} and the next {layout.parallelism.engines - 1} ports for the replicas exceed {LAST_PORT}",
            code="too-few-ports",
        )
    return first


def visible_gpu_names(hardware: Hardware) -> list[str]:
    """Names of this machine's GPUs for CUDA_VISIBLE_DEVICES; empty for described hardware, or if all are visible.

    They are UUIDs if a GPU is a MIG slice, which has no number, or if CUDA numbers the GPUs in another order.
    """
    from weft.machine.hardware import cuda, host

    if hardware.gpus is not None or hardware.nodes is not None:
        return []
    gpus = host.probe_host().gpus
    if any(gpu.slice for gpu in gpus) or (gpus and cuda.has_other_order(os.environ)):
        return [gpu.uuid for gpu in gpus]
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


def mig_gap(choice: ExportChoice, names: Sequence[str]) -> tuple[Note, ...]:
    """Note on MIG slices of other machines, whose names are not known here; empty if `names` has them."""
    from weft.planner.note import create_note

    gpus = choice.question.cluster.gpus
    slice_name = next((gpus[index].name for index in choice.candidate.layout.gpus if gpus[index].is_mig_slice), None)
    if slice_name is None or names:
        return ()
    return (create_note("mig_slice_unnamed", slice=slice_name),)
