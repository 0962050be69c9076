"""weft plan [MODEL]: what fits, how to cut it, how fast it will be, and why."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from weft.architectures.kv import number_bytes
from weft.architectures.model import Model
from weft.cli import emit, plan_flags, plan_outputs, wishes
from weft.cli.parser import UsageError
from weft.errors import ConfigError
from weft.formats import lookup
from weft.formats.precision import canonical
from weft.formats.schemes import ONLINE_QUANTIZATIONS
from weft.formatting import join_commas
from weft.hardware import hardware_file
from weft.hardware.cluster import Cluster, parse_gpus, parse_nodes
from weft.hardware.gpus import BF16_CAPABILITY
from weft.plan.plan import DraftModel, Speculation
from weft.plan.speculation import resolve_speculation
from weft.planner.deployment import Workload, default_lengths
from weft.planner.question import Question
from weft.planner.search import search
from weft.probes import machine

NOT_REPEATED = ("refresh-hardware", "device-map")  # a map is a layout, and may be a long file
REPEATED = (*plan_flags.HARDWARE, *plan_flags.CUT, *plan_flags.ENGINE, *plan_flags.LOAD, *plan_flags.PROMISE)
NOTHING_FITS = 3  # exit status: nothing fits, a claim is impossible, or a promise is not kept


def main(arguments: Namespace) -> int:
    """Print the plan, the verdict on a claim, or without a model what fits; 3 if nothing fits, the claim is impossible
    or the promise is not kept."""
    promised = any(hasattr(arguments, flag.dest) for flag in plan_flags.PROMISE)
    if promised:
        from weft.cli import plan_promise  # the simulation, which other plans do without

        plan_promise.check(arguments)
    emit.check(arguments)
    if hasattr(arguments, "check"):
        from weft.cli import check

        return check.main(arguments)
    if not getattr(arguments, "model", "") and not hasattr(arguments, "infernet_config"):
        from weft.cli import plan_models

        return plan_models.main(arguments)
    if hasattr(arguments, "emit"):
        return emit.main(arguments)
    plan_outputs.check(arguments)
    model = look_up(arguments)
    if promised:
        from weft.cli import plan_promise

        return plan_promise.main(arguments, model)
    answer = search(ask(arguments, model))
    plan_outputs.tell(arguments, answer, model)
    return 0 if answer.best else NOTHING_FITS


def look_up(arguments: Namespace) -> Model:
    """The model that was named."""
    return lookup.look_up(
        arguments.model,
        refresh=getattr(arguments, "refresh", False),
        revision=getattr(arguments, "revision", None),
        hf_token=getattr(arguments, "hf_token", None),
    )


def described(said: dict[str, Any]) -> Cluster:
    """The cluster that the flags describe, with what they leave of it for this many ranks."""
    return machine.split_cpu(wishes.capped(said, hardware(said)), wishes.ranks(said))


def ask(arguments: Namespace, model: Model, cluster: Cluster | None = None) -> Question:
    """The question that the flags make, on `cluster` or what they describe. Raises UsageError for flags that contradict
    each other."""
    said: dict[str, Any] = vars(arguments)
    cluster = cluster or described(said)
    compared = precisions(made(said) or said.get("precision"), model, cluster)
    constraints = wishes.wished(said, cluster, model, compared[0])
    kv_dtype = said.get("kv_cache_dtype")
    if kv_dtype == "auto":
        kv_dtype = None
    if kv_dtype is not None:
        number_bytes(kv_dtype)  # or ConfigError
    work = workload(said, model)
    return Question(
        model=model.name,
        shape=model.shape,
        cluster=cluster,
        engine=said["engine"],
        precisions=compared,
        kv_dtype=kv_dtype,
        workload=work,
        objective=said["objective"],
        constraints=constraints,
        price=said.get("price", cluster.price),
        gpu_memory_utilization=said.get("gpu_memory_utilization"),
        max_num_seqs=said.get("max_num_seqs"),
        max_num_batched_tokens=said.get("max_num_batched_tokens"),
        speculation=guessing(arguments, model),
        remarks=wishes.remarks(said, cluster),
        flags=tuple(repeated(said)),
    )


def repeated(said: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The model and the flags that a command which asks something like it repeats, with their values as words."""
    yield "", said.get("model", "")
    for flag in REPEATED:
        value = said.get(flag.dest)
        if value in (None, False, flag.default) or flag.name in NOT_REPEATED:
            continue
        if isinstance(value, dict):
            yield flag.option, json.dumps(value)
        elif flag.parse is None:
            yield (flag.option,)
        else:
            yield flag.short or flag.option, join_commas(value) if isinstance(value, tuple) else f"{value}"


def made(said: dict[str, Any]) -> str | None:
    """The precision that --quantization comes to. Raises UsageError beside what contradicts it."""
    if "quantization" not in said:
        return None
    asked = said["quantization"]
    if said["engine"] != "weft":
        raise UsageError(f"--quantization {asked} is what weft makes; of {said['engine']} give the --precision")
    if "precision" in said:
        raise UsageError(f"--quantization {asked} and --precision {said['precision']} both say it; give one of them")
    return ONLINE_QUANTIZATIONS[asked]


def guessing(arguments: Namespace, model: Model) -> Speculation | None:
    """How --speculative-config has our engine guess ahead. Raises UsageError for another engine, ConfigError for what
    is none and ModelError for a draft model that is not known."""
    said: dict[str, Any] | None = getattr(arguments, "speculative_config", None)
    if said is None:
        return None
    if arguments.engine != "weft":
        raise UsageError(f"--speculative-config is planned for weft's engine, not for {arguments.engine}; leave it out")

    def find(name: str) -> DraftModel:
        named = Namespace(**{**vars(arguments), "model": name, "revision": None})
        return DraftModel(model=name, checkpoint="", load_format="dummy", shape=look_up(named).shape)

    return resolve_speculation(said, model.name, model.shape, find)


def precisions(named: str | None, model: Model, cluster: Cluster) -> tuple[str, ...]:
    """Those that were named, or the model's own; what is stored in bfloat16 runs in float16 on GPUs too old for it."""
    if named in (None, "auto"):
        own = canonical(model.precision)
        old = any(gpu.kind == "gpu" and gpu.capability < BF16_CAPABILITY for gpu in cluster.gpus)
        return ("fp16" if own == "bf16" and old else own,)
    found = tuple(dict.fromkeys(canonical(name) for name in named.split(",") if name.strip()))
    if not found:
        raise UsageError("--precision is empty; give one as in int4, or several as in bf16,int4")
    return found


def workload(said: dict[str, Any], model: Model) -> Workload:
    """As the flags say, the usual lengths where they do not. Raises UsageError where they contradict each other."""
    longest, length = model.shape.longest, said.get("max_model_len")
    if length is not None and length > longest:
        raise ConfigError(f"max_model_len is {length}; {model.name} goes up to {longest:,} tokens: give that or less")
    most = length or longest
    input_len, output_len = default_lengths(said.get("input_len"), said.get("output_len"), most)
    if length is not None and input_len + output_len > max(length, 2):
        raise UsageError(
            f"--input-len {input_len} and --output-len {output_len} make {input_len + output_len:,} tokens; "
            f"--max-model-len is {length:,}"
        )
    return Workload(
        input_len=input_len, output_len=output_len, concurrency=said.get("concurrency"), max_model_len=length
    )


def hardware(said: dict[str, Any]) -> Cluster:
    """The cluster that the flags describe, or this machine."""
    gpus, nodes, network = said.get("gpus"), said.get("nodes"), said.get("network")
    if gpus is not None and nodes is not None:
        raise UsageError("--gpus and --nodes both describe the hardware; give one of them")
    if nodes is not None:
        return parse_nodes(nodes, network)
    if network is not None:
        raise UsageError(f"--network {network} joins machines; describe those with --nodes, as in 2x8xH100")
    if gpus is None:
        return machine.probe_cluster(refresh=said.get("refresh_hardware", False))
    return hardware_file.read_hardware_file(gpus) if hardware_file.is_hardware_file(gpus) else parse_gpus(gpus)
