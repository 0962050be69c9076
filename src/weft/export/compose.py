"""Docker Compose: a service for each replica, and nginx in front where there are several."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.export import engines, hosts, nginx, vllm, weft_serve
from weft.export.deployment import Deployment, ReplicaServer
from weft.export.files import ExportFile
from weft.export.header import TargetRemarks, header_comment
from weft.export.shell import Placeholder, flag_words
from weft.export.target import shares_experts, spans_nodes
from weft.formats.yaml_text import Block, dump
from weft.planner.deployment import Layout
from weft.planner.question import Question

PORT = 8000  # inside of every container
SHM = "16gb"  # ranks exchange through /dev/shm, of which Docker gives 64 MB; as in vLLM's documentation
CACHES = {"huggingface": "/root/.cache/huggingface"}
OURS = {**CACHES, "weft": "/root/.cache/weft"}  # the demo's file, kernels compiled for the machine
HEALTH = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}{path}', timeout=5)"
START = "1h"  # the first one downloads the model
SOURCE = Placeholder("WEFT_SOURCE", "directory of a checkout of Weft, which the image is built from")
IMAGE = "vllm/vllm-openai:latest"
ROCM_IMAGE = Placeholder("VLLM_IMAGE", "an image with vLLM for ROCm")
# Triton and the CPU's kernels are compiled where they run. Of a checkout nothing else is needed.
DOCKERFILE = """\
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /weft
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir {index}.
ENTRYPOINT ["weft"]
"""
CPU_TORCH = "--extra-index-url https://download.pytorch.org/whl/cpu "  # without gigabytes of CUDA


def unsupported(question: Question, layout: Layout) -> str:
    """What containers of one machine do not do."""
    if spans_nodes(question, layout) or (shares_experts(layout) and len(question.cluster.nodes) > 1):
        return "a container is on one machine; --emit vllm or kuberay spans several"
    return engines.unsupported(question, layout)


def compose_files(deployment: Deployment) -> list[ExportFile]:
    """A Compose file for each node, and nginx's configuration."""
    found: list[ExportFile] = []
    for node in deployment.nodes:
        servers = [server for server in deployment.servers if server.node == node]
        alone = len(deployment.nodes) == 1
        balanced = alone and len(servers) > 1
        name = "compose.yaml" if alone else f"compose-node-{node}.yaml"
        content: dict[str, Any] = {
            "services": {service_name(server): replica_service(deployment, server, not balanced) for server in servers}
        }
        if balanced:
            content["services"]["nginx"] = nginx_service(deployment, servers)
        content["volumes"] = {name: {} for name in caches(deployment)}
        remarks = TargetRemarks(omitted_options(deployment), placeholders(deployment), next_steps(deployment))
        told = without_ports(deployment) if balanced else deployment
        found.append(ExportFile(name, f"{header_comment('compose', told, remarks)}\n\n{dump(content)}"))
        if balanced:
            ends = [f"{service_name(server)}:{PORT}" for server in servers]
            heading = header_comment("compose", told, TargetRemarks())
            found.append(ExportFile("nginx.conf", nginx.nginx_site(heading, ends, tls=False)))
    return found


def without_ports(deployment: Deployment) -> Deployment:
    """The same where the replicas' ports are nginx's to know."""
    return msgspec.structs.replace(
        deployment, servers=tuple(msgspec.structs.replace(s, port=0) for s in deployment.servers)
    )


def service_name(server: ReplicaServer) -> str:
    """Its name, which is also its address for the others."""
    return f"replica-{server.number}"


def replica_service(deployment: Deployment, server: ReplicaServer, published: bool) -> dict[str, Any]:
    """The service of one replica."""
    ours = deployment.question.engine == "weft"
    engine = weft_serve.engine_flags(deployment, server) if ours else vllm.engine_flags(deployment, server)
    flags = {**engine, "served-model-name": deployment.names}
    if not ours:
        flags |= vllm.placement_flags(deployment, server, server.node)
    flags |= {"host": "0.0.0.0", "port": PORT}
    found: dict[str, Any] = {}
    if ours:
        dockerfile = DOCKERFILE.format(index=CPU_TORCH if hosts.on_cpu(deployment) else "")
        found["build"] = {"context": SOURCE.demand, "dockerfile_inline": Block(dockerfile)}
        found["image"] = "weft"
    else:
        found["image"] = ROCM_IMAGE.demand if deployment.gpu.gfx else IMAGE
        found["entrypoint"] = ["vllm", "serve"]
    start = ["serve", deployment.checkpoint.compose] if ours else [deployment.checkpoint.compose]
    found["command"] = [*start, *(word.replace("$", "$$") for flag in flag_words(flags) for word in flag)]
    found["environment"] = service_environment(deployment, server)
    found |= gpu_devices(deployment, server)
    found["shm_size"] = SHM
    found["volumes"] = [*(f"{name}:{path}" for name, path in caches(deployment).items()), *checkpoint_mount(deployment)]
    if published:
        host = "127.0.0.1:" if len(deployment.nodes) == 1 else ""
        found["ports"] = [f"{host}{server.port}:{PORT}"]
    path = "/health/ready" if ours else "/health"
    found["healthcheck"] = {
        "test": ["CMD", "python3", "-c", HEALTH.format(port=PORT, path=path)],
        "interval": "10s",
        "timeout": "10s",
        "retries": 3,
        "start_period": START,
    }
    found |= {"restart": "unless-stopped", "stop_grace_period": "45s"}  # longer than running requests get
    return found


def caches(deployment: Deployment) -> dict[str, str]:
    """The volumes that outlive a container, and where they lie in it."""
    return OURS if deployment.question.engine == "weft" else CACHES


def service_environment(deployment: Deployment, server: ReplicaServer) -> dict[str, str]:
    """From the environment, or from a file .env beside the Compose file; and what the plan says."""
    found = {"HF_TOKEN": "${HF_TOKEN:-}", "VLLM_API_KEY": "${VLLM_API_KEY:-}"}
    if deployment.question.engine == "vllm":
        found |= vllm.partition_variables(deployment)
    if deployment.gpu.gfx:
        return found | hosts.visible_gpus(deployment, server, server.node)
    return (
        found
        if hosts.on_cpu(deployment)
        else {**found, "NVIDIA_DRIVER_CAPABILITIES": "compute,utility", **cuda_order(server)}
    )


def cuda_order(server: ReplicaServer) -> dict[str, str]:
    """The order of a container's GPUs: they come as they are in the machine, however they are listed, and CUDA would
    put the fastest first."""
    gpus = server.gpus(server.node)
    found = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if not all(gpu.isdecimal() for gpu in gpus):
        return {**found, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}  # names, which are the same inside
    there = sorted(gpus, key=int)
    places = [f"{there.index(gpu)}" for gpu in gpus]
    return found if list(gpus) == there else {**found, "CUDA_VISIBLE_DEVICES": ",".join(places)}


def gpu_devices(deployment: Deployment, server: ReplicaServer) -> dict[str, Any]:
    """The devices of a replica; inside they count from 0."""
    if hosts.on_cpu(deployment):
        return {}
    if deployment.gpu.gfx:  # ROCm has no reservations
        return {"devices": ["/dev/kfd", "/dev/dri"], "group_add": ["video"]}
    ids = list(server.gpus(server.node))
    device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def checkpoint_mount(deployment: Deployment) -> list[str]:
    """A checkpoint that lies here, under its own name."""
    return (
        [f"{deployment.checkpoint.compose}:{deployment.checkpoint.compose}:ro"] if deployment.checkpoint.local else []
    )


def nginx_service(deployment: Deployment, servers: list[ReplicaServer]) -> dict[str, Any]:
    """nginx, which takes the port that the first replica would have."""
    return {
        "image": "nginx:stable",
        "volumes": ["./nginx.conf:/etc/nginx/conf.d/default.conf:ro"],
        "ports": [f"127.0.0.1:{deployment.servers[0].port}:80"],
        "depends_on": {service_name(server): {"condition": "service_started"} for server in servers},
        "restart": "unless-stopped",
    }


def placeholders(deployment: Deployment) -> list[Placeholder]:
    """What .env has to say."""
    found = list(deployment.checkpoint.placeholders)
    if deployment.question.engine == "weft":
        found.append(SOURCE)
    return [*found, *([ROCM_IMAGE] if deployment.gpu.gfx and deployment.question.engine != "weft" else [])]


def omitted_options(deployment: Deployment) -> list[str]:
    """What is not in the file."""
    found = (
        vllm.omitted_options(deployment)
        if deployment.question.engine == "vllm"
        else weft_serve.omitted_options(deployment)
    )
    if len(deployment.servers) > 1 and len(deployment.nodes) == 1:
        found.append("TLS: nginx listens on 127.0.0.1; weft plan --emit nginx writes a configuration with TLS")
    if len(deployment.nodes) > 1:
        found.append("a balancer before the nodes: weft plan --emit nginx writes one")
    return found


def next_steps(deployment: Deployment) -> list[str]:
    """How to go on."""
    file = "" if len(deployment.nodes) == 1 else " -f compose-node-N.yaml"
    needs = "" if hosts.on_cpu(deployment) or deployment.gpu.gfx else "; Docker needs the NVIDIA container toolkit"
    found = []
    if len(deployment.nodes) > 1:
        found.append(
            "the ports are open on every interface, so that a balancer reaches them, and Docker opens them past the "
            "firewall of the host: keep others out"
        )
    return [
        f"docker compose{file} up --detach{needs}",
        *found,
        "variables are read from the environment or from a file .env beside this one: HF_TOKEN for models that ask for "
        "it, VLLM_API_KEY for a key that clients have to show",
    ]
