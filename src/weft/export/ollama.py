"""Ollama: a Modelfile, and a script that starts a server for each replica."""

from __future__ import annotations

import re

from weft.export import hosts
from weft.export.deployment import Deployment, ReplicaServer
from weft.export.files import SCRIPT, ExportFile
from weft.export.header import TargetRemarks, header_comment
from weft.export.shell import bash_script, command_line, export_lines
from weft.export.target import shares_experts, spans_nodes
from weft.formats import gguf_types
from weft.planner.deployment import Layout
from weft.planner.question import Question

# GGUF's in place of the precisions that it does not read, with about as many bits.
INSTEAD = {"int4": "q4_k_m", "nvfp4": "q4_k_m", "int8": "q8_0", "fp8": "q8_0"}
PORT = 11434  # Ollama's own


def unsupported(question: Question, layout: Layout) -> str:
    """What Ollama does not do."""
    if shares_experts(layout):
        return "its replicas share no experts: each has all of them"
    return "it knows the GPUs of its own node only" if spans_nodes(question, layout) else ""


def ollama_files(deployment: Deployment) -> list[ExportFile]:
    """The Modelfile, and a script, one for each node where there are several."""
    remarks = TargetRemarks(omitted_options(deployment), use=next_steps(deployment))
    found = [
        ExportFile(
            "Modelfile", "\n".join([header_comment("ollama", deployment, remarks), *modelfile(deployment)]) + "\n"
        )
    ]
    for node in deployment.nodes:
        servers = [server for server in deployment.servers if server.node == node]
        name = "ollama.sh" if len(deployment.nodes) == 1 else f"node-{node}.sh"
        found.append(
            ExportFile(
                name,
                bash_script(header_comment("ollama", deployment, remarks), start_lines(deployment, servers)),
                SCRIPT,
            )
        )
    return found


def modelfile(deployment: Deployment) -> list[str]:
    """Which weights, and what they run with."""
    checkpoint = deployment.checkpoint
    source = [f"FROM {checkpoint.name}"]
    if not checkpoint.name:
        source = [
            f"# Replace this by {checkpoint.wanted}: its path, or hf.co/OWNER/REPOSITORY:QUANTISATION.",
            f"FROM ./{checkpoint.word}",
        ]
    elif not checkpoint.local:
        source = [
            f"# Replace this by the directory that {checkpoint.name} was downloaded to.",
            "FROM ./REPLACE_WITH_DIRECTORY",
        ]
    return [
        "",
        *source,
        f"PARAMETER num_ctx {deployment.max_model_len}",
        # All layers and the head: with fewer, or by itself, it would put what does not fit on the CPU unasked.
        f"PARAMETER num_gpu {0 if hosts.on_cpu(deployment) else deployment.question.shape.layers + 1}",
    ]


def model_name(deployment: Deployment) -> str:
    """As Ollama names models: qwen2.5-7b-instruct."""
    name, _, tag = (re.sub(r"[^a-z0-9._:-]+", "-", deployment.names[0].rpartition("/")[2].lower())).partition(":")
    return ":".join(filter(None, (name.strip("._-") or "model", tag.replace(":", "-").strip("._-"))))


def start_lines(deployment: Deployment, servers: list[ReplicaServer]) -> list[str]:
    """A server for each replica, which share the model's files, and the model loaded in each."""
    name = model_name(deployment)
    body = [*export_lines(server_variables(deployment)), ""]
    for server in servers:
        host = {"OLLAMA_HOST": f"127.0.0.1:{server.port}" if len(deployment.nodes) == 1 else f"0.0.0.0:{server.port}"}
        body += [
            f"{command_line(['ollama', 'serve'], {}, {**hosts.visible_gpus(deployment, server, server.node), **host})} &"
        ]
    body += ["trap 'kill $(jobs -p); wait' INT TERM", ""]
    for server in servers:
        at = {"OLLAMA_HOST": f"127.0.0.1:{server.port}"}
        body.append(f"until {command_line(['ollama', 'list'], {}, at)} >/dev/null 2>&1; do sleep 1; done")
        if server is servers[0]:
            body.append(command_line(["ollama", "create", name, "--file", "Modelfile"], {}, at))
        body.append(command_line(["ollama", "run", name, ""], {}, at))  # no prompt: it loads
    return [*body, "wait"]


def server_variables(deployment: Deployment) -> dict[str, str]:
    """The environment of every server."""
    found = {
        "OLLAMA_NUM_PARALLEL": f"{parallel_requests(deployment)}",
        "OLLAMA_MAX_LOADED_MODELS": "1",
        "OLLAMA_KEEP_ALIVE": "-1",  # for ever
        "OLLAMA_FLASH_ATTENTION": "1",
    }
    if deployment.candidate.layout.size > 1:
        found["OLLAMA_SCHED_SPREAD"] = "1"
    if deployment.candidate.layout.kv_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2", "int8"):
        found["OLLAMA_KV_CACHE_TYPE"] = "q8_0"
    return found


def parallel_requests(deployment: Deployment) -> int:
    """Requests at once: each has room for num_ctx tokens of its own, whether it needs them or not."""
    tokens = min(replica.kv_tokens for replica in deployment.candidate.memory.replicas)
    return max(1, min(deployment.batch[1], tokens // deployment.max_model_len))


def omitted_options(deployment: Deployment) -> list[str]:
    """What Ollama does in its own way."""
    layout, found = deployment.candidate.layout, []
    if layout.pipeline_parallel > 1:
        split = " + ".join(map(str, layout.stage_layers))
        found += [
            f"the split of {split} layers: Ollama deals layers out by each GPU's free memory, and takes no orders",
            "more speed from more GPUs: their memory adds up, but a token passes them one after the other; with tensor "
            "parallelism (weft plan --emit weft or vllm) they work at the same time",
        ]
    if layout.size == 1 and len(deployment.question.cluster.gpus) > 1:
        found.append(
            "the GPUs' numbers inside Ollama: it takes one GPU where a model fits it, here the only one that it sees"
        )
    if layout.precision not in gguf_types.MIXES:
        found.append(
            f"a check that Ollama reads {deployment.question.shape.architecture} from safetensors: it does so for some "
            "architectures, and GGUF for all that llama.cpp has"
        )
    found.append("an API key: Ollama has none; keep it on 127.0.0.1, or behind a proxy that asks for one")
    return found


def next_steps(deployment: Deployment) -> list[str]:
    """How to go on."""
    found = ["run the script beside the Modelfile; ollama ps must then say 100% GPU"]
    if len(deployment.servers) > 1:
        found.append("each replica is a server with a port of its own; Ollama does not balance between them")
    return found
