"""The question that `weft plan` and commands like it answer: the model, the cluster and the wishes of the flags."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from weft.checkpoint import lookup
from weft.checkpoint.architectures.kv import number_bytes
from weft.checkpoint.architectures.model import Model
from weft.checkpoint.quantised.precision import canonical
from weft.checkpoint.quantised.schemes import ONLINE_QUANTIZATIONS
from weft.cli import layout_flags
from weft.cli.flags import plan_flags
from weft.cli.parser import UsageError
from weft.errors import ConfigError, error_reason
from weft.formatting import join_commas
from weft.machine.hardware import hardware_file
from weft.machine.hardware.cluster import Cluster, is_several_nodes, parse_gpus, parse_nodes
from weft.machine.hardware.cpus import typical_cpu
from weft.machine.hardware.gpus import BF16_CAPABILITY
from weft.plan.determinism import ON_GPUS, against_model, not_deterministic
from weft.plan.plan import DraftModel, Speculation
from weft.plan.speculation import resolve_speculation
from weft.planner.deployment import Workload, check_length, default_lengths
from weft.planner.question import Question
from weft.probes import machine
from weft.regular_files import SETTINGS_BYTES, read_regular_text

# Flags that a command for a similar question repeats.
REPEATED = (*plan_flags.HARDWARE, *plan_flags.LAYOUT, *plan_flags.ENGINE, *plan_flags.LOAD, *plan_flags.PROMISE)
NOT_REPEATED = ("refresh-hardware", "device-map", "cluster")  # a map is a layout, and may be a long file
NOTHING_FITS = 3  # exit status: nothing fits, a claim is impossible, or a promise is not kept


def find_model(arguments: Namespace) -> Model:
    """The model of the argument, from the catalogue, a file or the hub."""
    return lookup.look_up(
        arguments.model,
        refresh=getattr(arguments, "refresh", False),
        revision=getattr(arguments, "revision", None),
        hf_token=getattr(arguments, "hf_token", None),
    )


def planned_cluster(flags: dict[str, Any]) -> Cluster:
    """The cluster to plan for: the described one, within --max-memory, shared out among the ranks of the flags. The CPU
    is used with the GPUs only if a flag names it."""
    limited = layout_flags.limit_memory(flags, beside_cpu(flags, described_cluster(flags)))
    return machine.split_cpu(limited, layout_flags.rank_count(flags))


def build_question(arguments: Namespace, model: Model, cluster: Cluster | None = None) -> Question:
    """The question for the planner, on `cluster` or the hardware of the flags.

    Raises UsageError for flags that contradict each other.
    """
    flags: dict[str, Any] = vars(arguments)
    cluster = cluster or planned_cluster(flags)
    precisions = compared_precisions(compressed_precision(flags) or flags.get("precision"), model, cluster)
    constraints = layout_flags.parse_layout_flags(flags, cluster, model, precisions[0])
    kv_dtype = flags.get("kv_cache_dtype")
    if kv_dtype == "auto":
        kv_dtype = None
    if kv_dtype is not None:
        number_bytes(kv_dtype)  # or ConfigError
    return Question(
        model=model.name,
        shape=model.shape,
        cluster=cluster,
        engine=flags["engine"],
        precisions=precisions,
        kv_dtype=kv_dtype,
        workload=planned_workload(flags, model),
        objective=flags["objective"],
        constraints=constraints,
        price=flags.get("price", cluster.price),
        gpu_memory_utilization=flags.get("gpu_memory_utilization"),
        max_num_seqs=flags.get("max_num_seqs"),
        max_num_batched_tokens=flags.get("max_num_batched_tokens"),
        speculation=planned_speculation(arguments, model),
        deterministic=planned_determinism(flags, model, cluster),
        remarks=layout_flags.remarks(flags, cluster),
        flags=tuple(repeated_flags(flags)),
    )


def repeated_flags(flags: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The model, as ("", MODEL), and the flags with their values as words, for a command with a similar question."""
    yield "", flags.get("model", "")
    for flag in REPEATED:
        value = flags.get(flag.dest)
        if value in (None, False, flag.default) or flag.name in NOT_REPEATED:
            continue
        if flag.name == "max-memory":
            yield flag.long, ",".join(f"{device}={limit}" for device, limit in value.items())
        elif isinstance(value, dict):
            yield flag.long, json.dumps(value)
        elif flag.parse is None:
            yield (flag.long,)
        else:
            yield flag.short or flag.long, join_commas(value) if isinstance(value, tuple) else f"{value}"


def compressed_precision(flags: dict[str, Any]) -> str | None:
    """The precision of the weights with --quantization; None without the flag.

    Raises UsageError for another engine, or together with --precision.
    """
    if "quantization" not in flags:
        return None
    name = flags["quantization"]
    if flags["engine"] != "weft":
        raise UsageError(
            f"--quantization {name} is for Weft's own engine; for {flags['engine']} give --precision",
            code="quantization-of-other-engine",
        )
    if "precision" in flags:
        raise UsageError(
            f"--quantization {name} and --precision {flags['precision']} both set it; give one of them",
            code="quantization-and-precision",
        )
    return ONLINE_QUANTIZATIONS[name]


def planned_speculation(arguments: Namespace, model: Model) -> Speculation | None:
    """The speculative decoding of --speculative-config.

    Raises UsageError for another engine, ConfigError for a wrong value and ModelError for an unknown draft model.
    """
    config: dict[str, Any] | None = getattr(arguments, "speculative_config", None)
    if config is None:
        return None
    if arguments.engine != "weft":
        raise UsageError(
            f"--speculative-config is for Weft's own engine, not for {arguments.engine}; leave it out",
            code="speculation-of-other-engine",
        )

    def find_draft(name: str) -> DraftModel:
        named = Namespace(**{**vars(arguments), "model": name, "revision": None})
        return DraftModel(model=name, checkpoint="", load_format="dummy", shape=find_model(named).shape)

    return resolve_speculation(config, model.name, model.shape, find_draft)


def planned_determinism(flags: dict[str, Any], model: Model, cluster: Cluster) -> bool:
    """True with --deterministic.

    Raises UsageError for another engine, ConfigError if Weft's own cannot be deterministic on this hardware, or with
    this model.
    """
    if not flags.get("deterministic"):
        return False
    if flags["engine"] != "weft":
        raise UsageError(
            f"--deterministic is for Weft's own engine, not for {flags['engine']}; leave it out",
            code="deterministic-other-engine",
        )
    against = () if cluster.on_cpu else (ON_GPUS,)
    if reason := next(chain(against, against_model(model.shape)), None):
        raise not_deterministic(reason)
    return True


def compared_precisions(names: str | None, model: Model, cluster: Cluster) -> tuple[str, ...]:
    """The named precisions, or the model's own; float16 instead of bfloat16 on GPUs that lack it."""
    if names in (None, "auto"):
        own = canonical(model.precision)
        old = any(gpu.kind == "gpu" and gpu.capability < BF16_CAPABILITY for gpu in cluster.gpus)
        return ("fp16" if own == "bf16" and old else own,)
    precisions = tuple(dict.fromkeys(canonical(name) for name in names.split(",") if name.strip()))
    if not precisions:
        raise UsageError(
            "--precision is empty; give one as in int4, or several as in bf16,int4", code="precision-empty"
        )
    return precisions


def planned_workload(flags: dict[str, Any], model: Model) -> Workload:
    """The workload of the flags, with the usual lengths if they give none. Raises UsageError and ConfigError."""
    longest, length = model.shape.longest, flags.get("max_model_len")
    if length is not None:
        check_length(length, model.name, longest)
    most = length or longest
    input_len, output_len = default_lengths(flags.get("input_len"), flags.get("output_len"), most)
    if length is not None and input_len + output_len > max(length, 2):
        raise UsageError(
            f"--input-len {input_len} and --output-len {output_len} make {input_len + output_len:,} tokens; "
            f"--max-model-len is {length:,}",
            code="lengths-above-max-model-len",
        )
    return Workload(
        input_len=input_len, output_len=output_len, concurrency=flags.get("concurrency"), max_model_len=length
    )


def beside_cpu(flags: dict[str, Any], cluster: Cluster) -> Cluster:
    """The cluster with the CPU next to its GPUs if the flags name the CPU, and without it otherwise.

    A CPU that is not described is this machine's, or for described GPUs a typical CPU.
    """
    if cluster.on_cpu or not layout_flags.asks_for_cpu(flags):
        return msgspec.structs.replace(cluster, cpu=None)
    if cluster.cpu is not None:
        return cluster
    is_here = flags.get("gpus") is None and flags.get("nodes") is None
    refresh = flags.get("refresh_hardware", False)
    return cluster.with_cpu(machine.probe_cpu(refresh=refresh) if is_here else typical_cpu())


def measured_cluster(flags: dict[str, Any]) -> Cluster:
    """The nodes of the last start; they are written to the file of --cluster.

    Raises UsageError if other hardware is given, and ConfigError for a file that exists, or if nothing has been
    measured.
    """
    from weft.engine.cluster.measured import load_cluster

    other = next((name for name in ("gpus", "nodes", "network") if flags.get(name) is not None), None)
    if other:
        raise UsageError(f"--cluster and --{other} both describe the hardware; give one", code="cluster-and-other")
    file = Path(flags["cluster"]).expanduser()
    if not hardware_file.is_hardware_file(file.name):
        raise UsageError(
            f"--cluster {file} is no name of a hardware file; give one that ends in .yaml", code="cluster-not-yaml"
        )
    cluster = load_cluster()
    text = hardware_file.hardware_yaml(cluster)
    try:
        if file.exists() and read_regular_text(file, SETTINGS_BYTES) != text:
            raise ConfigError(
                f"{file} exists and has other machines; give --cluster a new name, or plan for it with --gpus {file}",
                code="cluster-exists",
            )
        file.write_text(text, "utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot write {file}: {error_reason(error)}", code="cannot-write-cluster") from None
    return cluster


def described_cluster(flags: dict[str, Any]) -> Cluster:
    """The cluster of --gpus, --nodes or --cluster, or this machine."""
    gpus, nodes, network = flags.get("gpus"), flags.get("nodes"), flags.get("network")
    if flags.get("cluster") is not None:
        return measured_cluster(flags)
    if gpus is not None and nodes is not None:
        raise UsageError("--gpus and --nodes both describe the hardware; give one of them", code="gpus-and-nodes")
    if nodes is None and gpus is not None and is_several_nodes(gpus):
        nodes = gpus
    if nodes is not None:
        return parse_nodes(nodes, network)
    if network is not None:
        raise UsageError(
            f"--network {network} is for several machines; give them with --nodes, as in 2x8xH100",
            code="network-of-one-machine",
        )
    if gpus is None:
        return machine.probe_cluster(refresh=flags.get("refresh_hardware", False))
    return hardware_file.read_hardware_file(gpus) if hardware_file.is_hardware_file(gpus) else parse_gpus(gpus)
