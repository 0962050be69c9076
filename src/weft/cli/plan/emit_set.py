"""weft plan --infernet-config FILE for a node with several models: one server with all of them, by their names."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from weft._version import __version__
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


def has_several(arguments: Namespace, config: NodeConfig) -> bool:
    """Return True if MODEL is not given and a node's configuration names several models."""
    return not getattr(arguments, "model", "") and len({server.model for server in config.instances}) > 1


def plan_configured(arguments: Namespace) -> int | None:
    """Plan the models of a node's configuration if there are several, and return the exit status.

    Else set `arguments.model` to the configuration's, unless it is given, and return None.
    """
    from weft.study.export.infernet_config import read_node_config

    config = read_node_config(arguments.infernet_config)
    if not has_several(arguments, config):
        emit_files.name_configured_model(arguments, config)
        return None
    return model_set.main(arguments, _models(arguments, config))


def main(arguments: Namespace, config: NodeConfig) -> int:
    """Write the files of a node whose one server has all models of its configuration. Raises PlanError."""
    from weft.cli.plan_question import planned_cluster
    from weft.fleet.hosting.catalogue import look_up_entry
    from weft.fleet.hosting.set_plan import plan_set as plan_models
    from weft.fleet.hosting.set_plan import with_gpus
    from weft.study.export import infernet

    flags = next((name for name in OF_ONE if hasattr(arguments, name)), None)
    if flags is not None:
        raise UsageError(
            f"--{flags.replace('_', '-')} is about one model, and {arguments.infernet_config} has several; leave it "
            "out, or give MODEL",
            code="emit-flag-beside-set",
        )
    cluster = planned_cluster(vars(arguments))
    models = _models(arguments, config)
    plan = plan_models(models, cluster, look_up_entry)
    if not cluster.on_cpu:
        models = with_gpus(models, [_gpu_numbers(model) for model in plan.models])
    infernet.check_name(models.entries[0].name)
    memory = [(gpu.name, gpu.memory_bytes) for gpu in cluster.gpus]
    for warning in (*models.warnings, *infernet.tier_warnings(config, memory)):
        logger.warning(warning)
    port = getattr(arguments, "port", None) or models.port or PORT
    return emit_files.output_files(arguments, set_files(models, plan, cluster, port))


def _models(arguments: Namespace, config: NodeConfig) -> ModelSet:
    return set_file.models_of_node(config, arguments.infernet_config)


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
