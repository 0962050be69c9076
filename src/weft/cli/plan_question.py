"""The question that `weft plan` and commands like it answer: the model, the cluster and the wishes of the flags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
from weft.cli.flags.declared import flags_of
from weft.cli.flags.plan_flags import REPEATED, Hardware, Layout, Source, Subject, WorkloadFlags
from weft.cli.parser import UsageError
from weft.errors import ConfigError, error_reason
from weft.formatting import join_commas
from weft.machine.hardware import hardware_file
from weft.machine.hardware.cluster import Cluster, is_several_nodes, parse_gpus, parse_nodes
from weft.machine.hardware.cpus import typical_cpu
from weft.machine.hardware.gpus import BF16_CAPABILITY
from weft.plan.determinism import ON_GPUS, against_model, not_deterministic
from weft.plan.limits import limits_of
from weft.plan.plan import DraftModel, Speculation
from weft.plan.speculation import resolve_speculation
from weft.planner.deployment import Workload, check_length, default_lengths
from weft.planner.question import Question
from weft.probes import machine
from weft.regular_files import SETTINGS_BYTES, read_regular_text

# Flags of REPEATED that are left out all the same; a map is a layout, and may be a long file.
NOT_REPEATED = ("refresh-hardware", "device-map", "cluster")
NOTHING_FITS = 3  # exit status: nothing fits, a claim is impossible, or a promise is not kept


def find_model(name: str, source: Source) -> Model:
    """The model of a name, from the catalogue, a file or the hub."""
    return lookup.look_up(name, refresh=source.refresh, revision=source.revision, hf_token=source.hf_token)


def planned_cluster(subject: Subject) -> Cluster:
    """The cluster to plan for: the described one, within --max-memory, shared out among the ranks of the flags. The CPU
    is used with the GPUs only if a flag names it."""
    hardware, layout = subject.hardware, subject.layout
    limited = layout_flags.limit_memory(layout, beside_cpu(hardware, layout, described_cluster(hardware)))
    return machine.split_cpu(limited, layout_flags.rank_count(layout))


def build_question(subject: Subject, model: Model, cluster: Cluster | None = None) -> Question:
    """The question for the planner, on `cluster` or the hardware of the flags.

    Raises UsageError for flags that contradict each other.
    """
    layout, counted, aim = subject.layout, subject.counted, subject.aim
    cluster = cluster or planned_cluster(subject)
    precisions = compared_precisions(compressed_precision(layout, aim.engine) or layout.precision, model, cluster)
    constraints = layout_flags.parse_layout_flags(layout, cluster, model, precisions[0])
    kv_dtype = None if layout.kv_cache_dtype == "auto" else layout.kv_cache_dtype
    if kv_dtype is not None:
        number_bytes(kv_dtype)  # or ConfigError
    return Question(
        model=model.name,
        shape=model.shape,
        cluster=cluster,
        engine=aim.engine,
        precisions=precisions,
        kv_dtype=kv_dtype,
        workload=planned_workload(subject.workload, layout.max_model_len, model),
        objective=aim.objective,
        constraints=constraints,
        price=cluster.price if subject.hardware.price is None else subject.hardware.price,
        gpu_memory_utilization=layout.gpu_memory_utilization,
        **limits_of(counted),
        max_num_batched_tokens=layout.max_num_batched_tokens,
        speculation=planned_speculation(subject, model),
        deterministic=planned_determinism(subject, model, cluster),
        remarks=layout_flags.remarks(layout, cluster),
        flags=tuple(repeated_flags(subject.model, subject.values())),
    )


def repeated_flags(model: str, values: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The model, as ("", MODEL), and the flags with their values as words, for a command with a similar question."""
    yield "", model
    for flag in (flag for group in REPEATED for flag in flags_of(group)):
        value = values.get(flag.dest)
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


def compressed_precision(flags: Layout, engine: str) -> str | None:
    """The precision of the weights with --quantization; None without the flag.

    Raises UsageError for another engine, or together with --precision.
    """
    name = flags.quantization
    if name is None:
        return None
    if engine != "weft":
        raise UsageError(
            f"--quantization {name} is for Weft's own engine; for {engine} give --precision",
            code="quantization-of-other-engine",
        )
    if flags.precision is not None:
        raise UsageError(
            f"--quantization {name} and --precision {flags.precision} both set it; give one of them",
            code="quantization-and-precision",
        )
    return ONLINE_QUANTIZATIONS[name]


def planned_speculation(subject: Subject, model: Model) -> Speculation | None:
    """The speculative decoding of --speculative-config.

    Raises UsageError for another engine, ConfigError for a wrong value and ModelError for an unknown draft model.
    """
    config, engine = subject.counted.speculative_config, subject.aim.engine
    if config is None:
        return None
    if engine != "weft":
        raise UsageError(
            f"--speculative-config is for Weft's own engine, not for {engine}; leave it out",
            code="speculation-of-other-engine",
        )

    def find_draft(name: str) -> DraftModel:
        source = msgspec.structs.replace(subject.source, revision=None)
        return DraftModel(model=name, checkpoint="", load_format="dummy", shape=find_model(name, source).shape)

    return resolve_speculation(config, model.name, model.shape, find_draft)


def planned_determinism(subject: Subject, model: Model, cluster: Cluster) -> bool:
    """True with --deterministic.

    Raises UsageError for another engine, ConfigError if Weft's own cannot be deterministic on this hardware, or with
    this model.
    """
    if not subject.counted.deterministic:
        return False
    if subject.aim.engine != "weft":
        raise UsageError(
            f"--deterministic is for Weft's own engine, not for {subject.aim.engine}; leave it out",
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


def planned_workload(flags: WorkloadFlags, length: int | None, model: Model) -> Workload:
    """The workload of the flags, with the usual lengths if they give none; `length` is --max-model-len.

    Raises UsageError and ConfigError.
    """
    longest = model.shape.longest
    if length is not None:
        check_length(length, model.name, longest)
    most = length or longest
    input_len, output_len = default_lengths(flags.input_len, flags.output_len, most)
    if length is not None and input_len + output_len > max(length, 2):
        raise UsageError(
            f"--input-len {input_len} and --output-len {output_len} make {input_len + output_len:,} tokens; "
            f"--max-model-len is {length:,}",
            code="lengths-above-max-model-len",
        )
    return Workload(input_len=input_len, output_len=output_len, concurrency=flags.concurrency, max_model_len=length)


def beside_cpu(hardware: Hardware, layout: Layout, cluster: Cluster) -> Cluster:
    """The cluster with the CPU next to its GPUs if the flags name the CPU, and without it otherwise.

    A CPU that is not described is this machine's, or for described GPUs a typical CPU.
    """
    if cluster.on_cpu or not layout_flags.asks_for_cpu(layout):
        return msgspec.structs.replace(cluster, cpu=None)
    if cluster.cpu is not None:
        return cluster
    is_here = hardware.gpus is None and hardware.nodes is None
    return cluster.with_cpu(machine.probe_cpu(refresh=hardware.refresh_hardware) if is_here else typical_cpu())


def measured_cluster(name: str, hardware: Hardware) -> Cluster:
    """The nodes of the last start; they are written to the file of --cluster, `name`.

    Raises UsageError if other hardware is given, and ConfigError for a file that exists, or if nothing has been
    measured.
    """
    from weft.engine.cluster.measured import load_cluster

    described = {"gpus": hardware.gpus, "nodes": hardware.nodes, "network": hardware.network}
    other = next((flag for flag, value in described.items() if value is not None), None)
    if other:
        raise UsageError(f"--cluster and --{other} both describe the hardware; give one", code="cluster-and-other")
    file = Path(name).expanduser()
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


def described_cluster(hardware: Hardware) -> Cluster:
    """The cluster of --gpus, --nodes or --cluster, or this machine."""
    gpus, nodes, network = hardware.gpus, hardware.nodes, hardware.network
    if hardware.cluster is not None:
        return measured_cluster(hardware.cluster, hardware)
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
        return machine.probe_cluster(refresh=hardware.refresh_hardware)
    return hardware_file.read_hardware_file(gpus) if hardware_file.is_hardware_file(gpus) else parse_gpus(gpus)
