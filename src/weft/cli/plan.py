"""weft plan MODEL: what fits, how to cut it, how fast it will be, and why."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from weft.cli.parser import UsageError
from weft.errors import ConfigError
from weft.facts import host, lookup
from weft.facts.cluster import NETWORK, Cluster, Node, network_bytes, parse_gpus, parse_nodes, usual_link
from weft.facts.gpus import spec_of
from weft.facts.kv import number_bytes
from weft.facts.model import Model
from weft.facts.precision import canonical
from weft.planner.deployment import Workload
from weft.planner.objections import BF16_CAPABILITY
from weft.planner.question import Question, Wish
from weft.planner.search import search

LENGTH = 1024  # tokens of a prompt, and of an answer, where nobody says
NOTHING_FITS = 3  # exit status: nothing fits, or a claim is impossible


def main(arguments: Namespace) -> int:
    """Print the plan, or the verdict on a claim; 3 where nothing fits or the claim is impossible."""
    if hasattr(arguments, "check"):
        from weft.cli import check

        return check.main(arguments)
    model = look_up(arguments)
    question = ask(arguments, model)
    answer = search(question)
    if getattr(arguments, "json", False):
        from weft.planner.answer import as_json

        print(json.dumps(as_json(answer, model)))
    else:
        from weft.cli.plan_view import print_answer

        print_answer(answer, model)
    return 0 if answer.best else NOTHING_FITS


def look_up(arguments: Namespace) -> Model:
    """The model that was named."""
    return lookup.look_up(
        arguments.model,
        refresh=getattr(arguments, "refresh", False),
        revision=getattr(arguments, "revision", None),
        hf_token=getattr(arguments, "hf_token", None),
    )


def ask(arguments: Namespace, model: Model) -> Question:
    """The question that the flags make. Raises UsageError for flags that contradict each other."""
    said: dict[str, Any] = vars(arguments)
    cluster = hardware(said)
    wish = wished(said, len(cluster.gpus), model)
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
        precisions=precisions(said.get("precision"), model, cluster),
        kv_dtype=kv_dtype,
        workload=work,
        objective=said["objective"],
        wish=wish,
        price=said.get("price"),
        gpu_memory_utilization=said.get("gpu_memory_utilization"),
    )


def precisions(named: str | None, model: Model, cluster: Cluster) -> tuple[str, ...]:
    """Those that were named, or the model's own; what is stored in bfloat16 runs in float16 on GPUs too old for it."""
    if named in (None, "auto"):
        own = canonical(model.precision)
        old = any(gpu.capability < BF16_CAPABILITY for gpu in cluster.gpus)
        return ("fp16" if own == "bf16" and old else own,)
    found = tuple(dict.fromkeys(canonical(name) for name in named.split(",") if name.strip()))
    if not found:
        raise UsageError("--precision is empty; give one as in int4, or several as in bf16,int4")
    return found


def workload(said: dict[str, Any], model: Model) -> Workload:
    """Lengths that are not said are LENGTH tokens, or as many as leave room for the other one."""
    longest, length = model.shape.longest, said.get("max_model_len")
    if length is not None and length > longest:
        raise ConfigError(f"max_model_len is {length}; {model.name} goes up to {longest:,} tokens")
    most = length or longest
    input_len, output_len = lengths(said.get("input_len"), said.get("output_len"), most)
    if length is not None and input_len + output_len > max(length, 2):
        raise UsageError(
            f"--input-len {input_len} and --output-len {output_len} make {input_len + output_len:,} tokens; "
            f"--max-model-len is {length:,}"
        )
    return Workload(
        input_len=input_len, output_len=output_len, concurrency=said.get("concurrency"), max_model_len=length
    )


def lengths(input_len: int | None, output_len: int | None, most: int) -> tuple[int, int]:
    """Of prompt and answer, where `most` is both together."""
    if input_len is None and output_len is None:
        half = max(1, min(LENGTH, most // 2))
        return half, half
    if input_len is None:
        assert output_len is not None
        return max(1, min(LENGTH, most - output_len)), output_len
    return input_len, max(1, min(LENGTH, most - input_len)) if output_len is None else output_len


def wished(said: dict[str, Any], gpus: int, model: Model) -> Wish:
    """What the flags fix of the layout. Raises UsageError where they contradict each other or the hardware."""
    tensor, stages, replicas = (said.get(f"{kind}_parallel_size") for kind in ("tensor", "pipeline", "data"))
    weights, layers = said.get("tensor_split"), said.get("pipeline_split")
    if weights is not None:
        if any(not 0 < weight < float("inf") for weight in weights):
            raise UsageError(f"--tensor-split {_list(weights)}: each weight must be above 0")
        if tensor not in (None, len(weights)):
            raise UsageError(f"--tensor-split has {len(weights)} weights; --tensor-parallel-size is {tensor}")
        tensor = len(weights)
    if layers is not None:
        if any(count < 1 for count in layers) or sum(layers) != model.shape.layers:
            raise UsageError(
                f"--pipeline-split {_list(layers)} holds {sum(layers)} layers; {model.name} has {model.shape.layers}, "
                "at least one per stage"
            )
        if stages not in (None, len(layers)):
            raise UsageError(f"--pipeline-split has {len(layers)} stages; --pipeline-parallel-size is {stages}")
        stages = len(layers)
    if stages is not None and stages > model.shape.layers:
        raise UsageError(f"--pipeline-parallel-size is {stages}; {model.name} has {model.shape.layers} layers")
    if tensor is not None and tensor > model.shape.q_heads:
        raise UsageError(f"--tensor-parallel-size is {tensor}; {model.name} has {model.shape.q_heads} query heads")
    ranks = (tensor or 1) * (stages or 1) * (replicas or 1)
    if ranks > gpus:
        sizes = [str(size) for size in (tensor, stages, replicas) if size and size > 1]
        product = f"{' x '.join(sizes)} = {ranks}" if len(sizes) > 1 else str(ranks)
        raise UsageError(f"{product} ranks need as many GPUs; the hardware has {gpus}")
    experts = said.get("enable_expert_parallel")
    if experts and model.shape.experts is None:
        raise UsageError(f"--enable-expert-parallel: {model.name} has no experts")
    if experts is None and (tensor or stages or replicas):
        experts = False  # who gives the sizes, gives all of the layout
    return Wish(
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        data_parallel=replicas,
        expert_parallel=experts,
        tensor_split=weights,
        pipeline_split=layers,
    )


def _list(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)


def hardware(said: dict[str, Any]) -> Cluster:
    """The cluster that the flags describe, or this machine."""
    gpus, nodes, network = said.get("gpus"), said.get("nodes"), said.get("network")
    if gpus is not None and nodes is not None:
        raise UsageError("--gpus and --nodes both describe the hardware; give one of them")
    if nodes is not None:
        return parse_nodes(nodes, network)
    if network is not None:
        raise UsageError(f"--network {network} joins machines; describe those with --nodes, as in 2x8xH100")
    return parse_gpus(gpus) if gpus is not None else this_machine(host.probe())


def this_machine(here: host.Host) -> Cluster:
    """The GPUs that this process sees. Raises ConfigError where there are none."""
    if not here.gpus:
        raise ConfigError(
            f"no GPU is visible on {here.hostname}; describe the hardware that is meant, as in --gpus 4xRTX4090 or "
            "--nodes 2x8xH100"
        )
    gpus = tuple(spec_of(gpu) for gpu in here.gpus)
    return Cluster((Node(gpus, usual_link(gpus)),), network_bytes(NETWORK))
