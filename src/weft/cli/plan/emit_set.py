"""weft plan --infernet-config FILE for a node with several models: one server with all of them, by their names."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from weft._version import __version__
from weft.cli.flags.plan_flags import PlanArguments
from weft.cli.parser import UsageError
from weft.cli.plan import emit_files, model_set
from weft.cli.serve import set_file
from weft.fleet.hosting.model_set import ModelEntry, ModelSet
from weft.formatting import format_counts

if TYPE_CHECKING:
    from weft.fleet.hosting.set_plan import ModelPlan, SetPlan
    from weft.machine.hardware.cluster import Cluster
    from weft.study.export.files import ExportFile
    from weft.study.export.infernet_config import NodeConfig

logger = logging.getLogger("weft.cli")

SET_FILE = "models.yaml"
PORT = 8000
# Flags that fix a layout or a name: the plan of several models has one for each.
OF_ONE = ("nodes", "served_model_name", "config")


def has_several(arguments: PlanArguments, config: NodeConfig) -> bool:
    """Return True if MODEL is not given and a node's configuration names several models."""
    return not arguments.model and len({server.model for server in config.instances}) > 1


def plan_configured(arguments: PlanArguments, path: str) -> int | PlanArguments:
    """Plan the models of a node's configuration if there are several, and return the exit status.

    Else return the arguments with the configuration's model, unless one is given.
    """
    from weft.study.export.infernet_config import read_node_config

    config = read_node_config(path)
    if not has_several(arguments, config):
        return emit_files.name_configured_model(arguments, config)
    return model_set.main(arguments, set_file.models_of_node(config, path))


def main(arguments: PlanArguments, config: NodeConfig, path: str) -> int:
    """Write the files of a node whose one server has all models of its configuration. Raises PlanError."""
    from weft.cli.plan_question import planned_cluster
    from weft.fleet.hosting.catalogue import look_up_entry
    from weft.fleet.hosting.set_plan import plan_set as plan_models
    from weft.fleet.hosting.set_plan import with_gpus
    from weft.study.export import infernet

    flags = next((name for name in OF_ONE if name in arguments.given), None)
    if flags is not None:
        raise UsageError(
            f"--{flags.replace('_', '-')} is about one model, and {path} has several; leave it out, or give MODEL",
            code="emit-flag-beside-set",
        )
    cluster = planned_cluster(arguments.subject)
    models = set_file.models_of_node(config, path)
    plan = plan_models(models, cluster, look_up_entry)
    if not cluster.on_cpu:
        models = with_gpus(models, [_gpu_numbers(model) for model in plan.models])
    infernet.check_name(models.entries[0].name)
    memory = [(gpu.name, gpu.memory_bytes) for gpu in cluster.gpus]
    for warning in (*models.warnings, *infernet.tier_warnings(config, memory)):
        logger.warning(warning)
    port = arguments.export.port or models.port or PORT
    return emit_files.output_files(arguments.export, set_files(models, plan, cluster, port))


def _gpu_numbers(model: ModelPlan) -> tuple[int, ...]:
    return tuple(int(device.removeprefix("cuda:")) for device in model.devices)


def set_files(models: ModelSet, plan: SetPlan, cluster: Cluster, port: int) -> list[ExportFile]:
    """The node's two files, the set, and the script that serves it."""
    from weft.checkpoint.files.yaml_text import dump_yaml
    from weft.study.export import infernet
    from weft.study.export.files import SCRIPT, ExportFile
    from weft.study.export.shell import bash_script, command_line

    origin = [
        f"{len(models.entries)} models on {format_counts(gpu.name for gpu in cluster.gpus)}, one server on port {port}",
        f"Written by weft {__version__}: weft plan --emit infernet",
    ]
    steps = ["Use:", *(f"- {line}" for step in infernet.NEXT_STEPS for line in step.splitlines())]
    header = _comment([*origin, *steps])
    content: dict[str, Any] = {"host": "127.0.0.1", "port": port, **dict.fromkeys(infernet.NODE_FLAGS, True)}
    content["models"] = [_row(entry) for entry in models.entries]
    table = _comment([*origin, *model_set.plan_text(models, plan).splitlines()])
    serve = command_line(["weft", "serve", "--config", SET_FILE], {}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    return [
        *infernet.node_files(header, models.entries[0].name, f"http://127.0.0.1:{port}"),
        ExportFile(SET_FILE, f"{table}\n{dump_yaml(content)}"),
        ExportFile("weft.sh", bash_script(header, ['cd "$(dirname "$0")"', f"exec {serve}"]), SCRIPT),
    ]


def _comment(lines: list[str]) -> str:
    return "\n".join(f"# {line}".rstrip() for line in lines)


def _row(entry: ModelEntry) -> dict[str, Any]:
    gpus = entry.config.device_ids
    placed = {"device-ids": ",".join(map(str, gpus))} if gpus else {}
    return {"name": list(entry.names), "model": entry.config.model, **placed}
