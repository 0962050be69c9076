"""Ollama: a Modelfile, and a script that starts a server for each replica."""

from __future__ import annotations

import re

from weft.checkpoint.files import gguf_types
from weft.checkpoint.names import gguf_reference
from weft.planner.deployment import DeploymentLayout
from weft.planner.question import Question
from weft.study.export import hosts
from weft.study.export.deployment import Deployment, ReplicaServer
from weft.study.export.files import SCRIPT, ExportFile
from weft.study.export.header import TargetRemarks, header_comment
from weft.study.export.shell import bash_script, command_line, export_lines
from weft.study.export.target import spans_nodes

# Precisions of GGUF with about as many bits, for precisions that Ollama does not read.
PRECISION_SUBSTITUTES = {"int4": "q4_k_m", "nvfp4": "q4_k_m", "int8": "q8_0", "fp8": "q8_0"}
PORT = 11434  # Ollama's default


def unsupported(question: Question, layout: DeploymentLayout) -> str:
    """The reason why Ollama cannot run a layout, in words."""
    if layout.parallelism.shares_experts:
        return "its replicas share no experts: each has all of them"
    return "it uses the GPUs of its own node only" if spans_nodes(question, layout) else ""


def ollama_files(deployment: Deployment) -> list[ExportFile]:
    """The Modelfile, and a script for each node."""
    remarks = TargetRemarks(omitted_options(deployment), next_steps=next_steps(deployment))
    header = header_comment("ollama", deployment, remarks)
    files = [ExportFile("Modelfile", "\n".join([header, *modelfile(deployment)]) + "\n")]
    for node in deployment.nodes:
        servers = [server for server in deployment.servers if server.node == node]
        name = "ollama.sh" if len(deployment.nodes) == 1 else f"node-{node}.sh"
        files.append(ExportFile(name, bash_script(header, start_lines(deployment, servers)), SCRIPT))
    return files


def modelfile(deployment: Deployment) -> list[str]:
    """Lines of the Modelfile: the weights and their parameters."""
    checkpoint = deployment.checkpoint
    source = [f"FROM {checkpoint.name}"]
    if not checkpoint.name:
        source = [
            f"# Replace this by {checkpoint.wanted}: its path, or hf.co/OWNER/REPOSITORY:QUANTISATION.",
            f"FROM ./{checkpoint.word}",
        ]
    elif not checkpoint.local and gguf_reference.parse_address(checkpoint.name) is None:
        source = [
            f"# Replace this by the directory that {checkpoint.name} was downloaded to.",
            "FROM ./REPLACE_WITH_DIRECTORY",
        ]
    return [
        "",
        *source,
        f"PARAMETER num_ctx {deployment.max_model_len}",
        # All layers and the head: with a lower number, or its default, Ollama would move the rest to the CPU unasked.
        f"PARAMETER num_gpu {0 if hosts.on_cpu(deployment) else len(deployment.question.shape.layers) + 1}",
    ]


def model_name(deployment: Deployment) -> str:
    """A model's name in Ollama's form: qwen2.5-7b-instruct."""
    name, _, tag = (re.sub(r"[^a-z0-9._:-]+", "-", deployment.names[0].rpartition("/")[2].lower())).partition(":")
    return ":".join(filter(None, (name.strip("._-") or "model", tag.replace(":", "-").strip("._-"))))


def start_lines(deployment: Deployment, servers: list[ReplicaServer]) -> list[str]:
    """Script lines that start a server for each replica, all with the same model files, and load the model in each."""
    name = model_name(deployment)
    body = [*export_lines(server_variables(deployment)), ""]
    bind = "127.0.0.1" if len(deployment.nodes) == 1 else "0.0.0.0"
    for server in servers:
        gpus = hosts.visible_gpus(deployment, server, server.node)
        variables = {**gpus, "OLLAMA_HOST": f"{bind}:{server.port}"}
        body += [f"{command_line(['ollama', 'serve'], {}, variables)} &"]
    body += ["trap 'kill $(jobs -p); wait' INT TERM", ""]
    for server in servers:
        address = {"OLLAMA_HOST": f"127.0.0.1:{server.port}"}
        body.append(f"until {command_line(['ollama', 'list'], {}, address)} >/dev/null 2>&1; do sleep 1; done")
        if server is servers[0]:
            body.append(command_line(["ollama", "create", name, "--file", "Modelfile"], {}, address))
        body.append(command_line(["ollama", "run", name, ""], {}, address))  # an empty prompt loads the model
    return [*body, "wait"]


def server_variables(deployment: Deployment) -> dict[str, str]:
    """Environment of every server."""
    variables = {
        "OLLAMA_NUM_PARALLEL": f"{parallel_requests(deployment)}",
        "OLLAMA_MAX_LOADED_MODELS": "1",
        "OLLAMA_KEEP_ALIVE": "-1",  # never unload the model
        "OLLAMA_FLASH_ATTENTION": "1",
    }
    if deployment.candidate.layout.parallelism.replica_size > 1:
        variables["OLLAMA_SCHED_SPREAD"] = "1"
    if deployment.candidate.layout.kv_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2", "int8"):
        variables["OLLAMA_KV_CACHE_TYPE"] = "q8_0"
    return variables


def parallel_requests(deployment: Deployment) -> int:
    """Number of requests at once; Ollama reserves num_ctx tokens for each."""
    tokens = min(replica.kv_tokens for replica in deployment.candidate.memory.replicas)
    return max(1, min(deployment.batch[1], tokens // deployment.max_model_len))


def omitted_options(deployment: Deployment) -> list[str]:
    """Differences between the plan and what Ollama does, in words."""
    layout, omissions = deployment.candidate.layout, []
    if layout.parallelism.pipeline_parallel > 1:
        split = " + ".join(map(str, layout.parallelism.pipeline_split))
        omissions += [
            f"the split of {split} layers: Ollama distributes layers by each GPU's free memory and accepts no split",
            "more speed from more GPUs: their memory adds up, but a token passes them one after the other; with tensor "
            "parallelism (weft plan --emit weft or vllm) they work at the same time",
        ]
    if layout.parallelism.replica_size == 1 and len(deployment.question.cluster.gpus) > 1:
        omissions.append(
            "the GPUs' numbers inside Ollama: it takes one GPU if the model fits, here the only one that it sees"
        )
    if layout.precision not in gguf_types.MIXES:
        omissions.append(
            f"a check that Ollama reads {deployment.question.shape.architecture} from safetensors: it does so for some "
            "architectures, and GGUF for all that llama.cpp has"
        )
    omissions.append("an API key: Ollama has none; keep it on 127.0.0.1, or behind a proxy that checks one")
    return omissions


def next_steps(deployment: Deployment) -> list[str]:
    """Next steps, in words."""
    steps = ["run the script next to the Modelfile; ollama ps must then show 100% GPU"]
    if len(deployment.servers) > 1:
        steps.append("each replica is a server with its own port; Ollama does not balance between them")
    return steps
