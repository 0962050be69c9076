"""Weft: a command line for each replica."""

from __future__ import annotations

import json

import msgspec

from weft.checkpoint.architectures.kv import number_bytes
from weft.config import KV_CACHE_DTYPES
from weft.plan import speculation
from weft.plan.backends import no_narrow_cache
from weft.plan.limits import limits_of
from weft.planner.deployment import DeploymentLayout, deploy
from weft.planner.question import Question
from weft.study.export import hosts
from weft.study.export.checkpoint import FLOATS
from weft.study.export.deployment import Deployment, ReplicaServer
from weft.study.export.files import SCRIPT, ExportFile
from weft.study.export.header import KEYS, TargetRemarks, header_comment
from weft.study.export.hosts import on_cpu
from weft.study.export.shell import Flags, Value, bash_script, command_line, run_together
from weft.study.export.target import crowded, spans_nodes, used_devices

SHORT = 4  # characters of a weight that is kept as the user typed it


def unsupported(question: Question, layout: DeploymentLayout) -> str:
    """The reason why Weft's engine cannot run a layout yet, in words."""
    if question.cluster.gpus[layout.gpus[0]].gfx:
        return "Weft runs on NVIDIA's GPUs and on CPUs; --emit vllm is for other GPUs"
    if spans_nodes(question, layout):
        return "Weft runs each replica on one node; --emit vllm spans several"
    if layout.parallelism.shares_experts and len({device.node for device in used_devices(question, layout)}) > 1:
        return "Weft runs all attention groups that share experts on one node; --emit vllm spans several"
    return ""


def narrow_cache(question: Question) -> bool:
    """Return True if Weft has a narrow KV cache of the model on all GPUs."""
    gpus = question.cluster.gpus
    if any(gpu.gfx for gpu in gpus):
        return False
    return not no_narrow_cache("fp8", [(gpu.name, gpu.capability) for gpu in gpus], question.shape)


def weft_files(deployment: Deployment, server_flags: Flags | None = None) -> list[ExportFile]:
    """One script for each node; `server_flags` are further flags of each server."""
    demanded = deployment.checkpoint.placeholders
    remarks = TargetRemarks(omitted_options(deployment), demanded, next_steps(deployment))
    header = header_comment("weft", deployment, remarks)
    files = []
    for node in deployment.nodes:
        body = run_together(
            [serve_command(deployment, server, server_flags) for server in deployment.servers if server.node == node]
        )
        name = "weft.sh" if len(deployment.nodes) == 1 else f"node-{node}.sh"
        files.append(ExportFile(name, bash_script(header, body, demanded), SCRIPT))
    return files


def serve_command(deployment: Deployment, server: ReplicaServer, server_flags: Flags | None = None) -> str:
    """Command line of a server."""
    where: dict[str, Value] = {
        "served-model-name": deployment.names,
        "host": "127.0.0.1" if len(deployment.nodes) == 1 else "0.0.0.0",
        "port": server.port,
    }
    start, visible = ["weft", "serve", deployment.checkpoint.shell], hosts.visible_gpus(deployment, server, server.node)
    return command_line(start, {**engine_flags(deployment, server), **where, **(server_flags or {})}, visible)


def engine_flags(deployment: Deployment, server: ReplicaServer) -> Flags:
    """Flags of a server's engine."""
    layout, checkpoint = deployment.candidate.layout, deployment.checkpoint
    flags = _layout_flags(deployment)
    flags["max-model-len"] = deployment.max_model_len
    flags |= {name.replace("_", "-"): limit for name, limit in limits_of(deployment.question).items() if limit}
    flags["max-num-batched-tokens"] = deployment.candidate.memory.replicas[0].batched_tokens
    flags |= _memory_flags(deployment, server)
    if layout.precision in FLOATS:
        flags["dtype"] = FLOATS[layout.precision]
    if checkpoint.quantised:
        flags["quantization"] = checkpoint.quantised
    if number_bytes(layout.kv_dtype) < 2:
        flags["kv-cache-dtype"] = "fp8"
    if deployment.question.deterministic:
        flags["deterministic"] = True
    if deployment.question.speculation:
        flags["speculative-config"] = json.dumps(speculation.to_speculative_config(deployment.question.speculation))
    return flags


def _layout_flags(deployment: Deployment) -> dict[str, Value]:
    layout = deployment.candidate.layout
    flags: dict[str, Value] = {}
    cut = layout.parallelism
    if cut.tensor_parallel > 1 and len(set(cut.weights)) == 1:
        flags["tensor-parallel-size"] = cut.tensor_parallel
    elif cut.tensor_parallel > 1:
        flags["tensor-split"] = ",".join(short_weights(deployment))
    if cut.pipeline_parallel > 1:
        flags["pipeline-split"] = ",".join(map(str, cut.pipeline_split))
    if cut.shares_experts:
        flags["data-parallel-size"] = cut.data_parallel
    flags["enable-expert-parallel"] = bool(cut.deals_experts)
    if cut.expert_size:
        flags["expert-parallel-size"] = cut.expert_size
    if crowded(layout) and not on_cpu(deployment):
        gpus = layout.gpus[: cut.replica_size]
        flags["device-ids"] = ",".join(f"{list(dict.fromkeys(gpus)).index(gpu)}" for gpu in gpus)
    return flags


def _memory_flags(deployment: Deployment, server: ReplicaServer) -> dict[str, Value]:
    if on_cpu(deployment):
        kv_bytes = max(rank.kv_room_bytes for rank in deployment.candidate.memory.ranks)
        return {"device": "cpu", "kv-cache-memory-bytes": kv_bytes}
    # Weft's share includes what other processes hold.
    shares = deployment.memory_shares(server, held=True)
    return {"gpu-memory-utilization": ",".join(map(str, shares)) if len(set(shares)) > 1 else shares[0]}


def short_weights(deployment: Deployment) -> list[str]:
    """Weights of an uneven tensor split in the fewest digits that give the same cut; a search gives bytes."""
    layout, weights = deployment.candidate.layout, deployment.candidate.layout.parallelism.weights
    exact = [f"{weight:g}" for weight in weights]
    tries = [[f"{weight / min(weights):.{digits}g}" for weight in weights] for digits in range(1, 17)]
    for words in [exact, *tries] if max(map(len, exact)) <= SHORT else tries:
        short = msgspec.structs.replace(layout.parallelism, tensor_split=tuple(map(float, words)))
        cut = deploy(deployment.question.shape, short, precision=layout.precision, kv_dtype=layout.kv_dtype)
        if cut.places == layout.places:
            return words
    return [f"{weight!r}" for weight in weights]


def omitted_options(deployment: Deployment) -> list[str]:
    """Differences between the plan and what Weft's engine does, in words."""
    kv_dtype = deployment.candidate.layout.kv_dtype
    if number_bytes(kv_dtype) < 2 and kv_dtype not in KV_CACHE_DTYPES:
        return [f"a KV cache in {kv_dtype}: Weft's is fp8 (e4m3), which takes as many bytes"]
    return []


def next_steps(deployment: Deployment) -> list[str]:
    """Next steps, in words."""
    steps = [KEYS]
    if len(deployment.nodes) > 1:
        steps.append("run node-N.sh on node N; the servers listen on all interfaces for the load balancer")
    if len(deployment.servers) > 1:
        steps.append("weft plan --emit nginx balances the ports")
    return steps
