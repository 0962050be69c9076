"""Docker Compose: a service for each replica, and nginx in front of several."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.checkpoint.files.yaml_text import dump_yaml
from weft.planner.deployment import DeploymentLayout
from weft.planner.question import Question
from weft.study.export import engines, hosts, nginx, vllm, weft_serve
from weft.study.export.deployment import Deployment, ReplicaServer
from weft.study.export.files import ExportFile
from weft.study.export.header import TargetRemarks, header_comment
from weft.study.export.shell import Placeholder, Value, flag_words
from weft.study.export.target import spans_nodes

PORT = 8000  # inside every container
SHM = "16gb"  # ranks exchange data in /dev/shm, for which Docker's default is 64 MB; as in vLLM's documentation
CACHES = {"huggingface": "/root/.cache/huggingface"}
# Folders of the image's own user. weft: the demo's file, and kernels that are compiled for a GPU.
WEFT_CACHES = {"huggingface": "/var/lib/weft/.cache/huggingface", "weft": "/var/lib/weft/.cache/weft"}
HEALTH = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}{path}', timeout=5)"
START = "1h"  # the first start downloads the model
SOURCE = Placeholder("WEFT_SOURCE", "directory of a checkout of Weft, to build the image from")
IMAGE = "vllm/vllm-openai:latest"
ROCM_IMAGE = Placeholder("VLLM_IMAGE", "an image with vLLM for ROCm")
RECIPE = "containers/Containerfile"  # in a checkout
CPU_TORCH = "https://download.pytorch.org/whl/cpu"  # without gigabytes of CUDA


def unsupported(question: Question, layout: DeploymentLayout) -> str:
    """The reason why containers of one machine cannot run a layout, in words."""
    if spans_nodes(question, layout) or (layout.parallelism.shares_experts and len(question.cluster.nodes) > 1):
        return "a container is on one machine; --emit vllm or kuberay spans several"
    return engines.unsupported(question, layout)


def compose_files(deployment: Deployment) -> list[ExportFile]:
    """A Compose file for each node, and nginx's configuration for several replicas on one node."""
    files: list[ExportFile] = []
    for node in deployment.nodes:
        files += _node_files(deployment, node)
    return files


def _node_files(deployment: Deployment, node: int) -> list[ExportFile]:
    """Files of one node."""
    servers = [server for server in deployment.servers if server.node == node]
    alone = len(deployment.nodes) == 1
    balanced = alone and len(servers) > 1
    services = {service_name(server): replica_service(deployment, server, not balanced) for server in servers}
    if balanced:
        services["nginx"] = nginx_service(deployment, servers)
    content = {"services": services, "volumes": {volume: {} for volume in caches(deployment)}}
    remarks = TargetRemarks(omitted_options(deployment), placeholders(deployment), next_steps(deployment))
    described = without_ports(deployment) if balanced else deployment
    name = "compose.yaml" if alone else f"compose-node-{node}.yaml"
    files = [ExportFile(name, f"{header_comment('compose', described, remarks)}\n\n{dump_yaml(content)}")]
    if balanced:
        addresses = [f"{service_name(server)}:{PORT}" for server in servers]
        heading = header_comment("compose", described, TargetRemarks())
        files.append(ExportFile("nginx.conf", nginx.nginx_site(heading, addresses, tls=False)))
    return files


def without_ports(deployment: Deployment) -> Deployment:
    """The same deployment without the replicas' ports, which only nginx uses."""
    servers = tuple(msgspec.structs.replace(server, port=0) for server in deployment.servers)
    return msgspec.structs.replace(deployment, servers=servers)


def service_name(server: ReplicaServer) -> str:
    """Name of a replica's service, which is also its address for the other services."""
    return f"replica-{server.number}"


def replica_service(deployment: Deployment, server: ReplicaServer, published: bool) -> dict[str, Any]:
    """Service of one replica; `published` opens its port on the host."""
    is_weft = deployment.question.engine == "weft"
    service = _image(deployment)
    service["command"] = _command(deployment, server)
    service["environment"] = service_environment(deployment, server)
    service |= gpu_devices(deployment, server)
    service["shm_size"] = SHM
    volumes = [f"{name}:{path}" for name, path in caches(deployment).items()]
    service["volumes"] = [*volumes, *checkpoint_mount(deployment)]
    if published:
        host = "127.0.0.1:" if len(deployment.nodes) == 1 else ""
        service["ports"] = [f"{host}{server.port}:{PORT}"]
    path = "/health/ready" if is_weft else "/health"
    service["healthcheck"] = {
        "test": ["CMD", "python3", "-c", HEALTH.format(port=PORT, path=path)],
        "interval": "10s",
        "timeout": "10s",
        "retries": 3,
        "start_period": START,
    }
    # The grace period is longer than what running requests get.
    service |= {"restart": "unless-stopped", "stop_grace_period": "45s"}
    return service


def _image(deployment: Deployment) -> dict[str, Any]:
    """Image of the engine: Weft's is built from a checkout, vLLM's is pulled."""
    if deployment.question.engine != "weft":
        image = ROCM_IMAGE.demand if deployment.gpu.gfx else IMAGE
        return {"image": image, "entrypoint": ["vllm", "serve"]}
    build: dict[str, Any] = {"context": SOURCE.demand, "dockerfile": RECIPE}
    if hosts.on_cpu(deployment):
        build["args"] = {"TORCH_INDEX": CPU_TORCH}
    return {"build": build, "image": "weft"}


def _command(deployment: Deployment, server: ReplicaServer) -> list[str]:
    """The engine's arguments; a $ of their own is doubled."""
    checkpoint = deployment.checkpoint.compose
    flags: dict[str, Value]
    if deployment.question.engine == "weft":
        start = ["serve", checkpoint]
        flags = {**weft_serve.engine_flags(deployment, server), "served-model-name": deployment.names}
    else:
        start = [checkpoint]
        flags = {**vllm.engine_flags(deployment, server), "served-model-name": deployment.names}
        flags |= vllm.placement_flags(deployment, server, server.node)
    flags |= {"host": "0.0.0.0", "port": PORT}
    return [*start, *(word.replace("$", "$$") for flag in flag_words(flags) for word in flag)]


def caches(deployment: Deployment) -> dict[str, str]:
    """Volumes that outlive a container, and their paths in the container."""
    return WEFT_CACHES if deployment.question.engine == "weft" else CACHES


def service_environment(deployment: Deployment, server: ReplicaServer) -> dict[str, str]:
    """A service's variables: from the environment or the file .env next to the Compose file, and from the plan."""
    variables = {"HF_TOKEN": "${HF_TOKEN:-}", "VLLM_API_KEY": "${VLLM_API_KEY:-}"}
    if deployment.question.engine == "vllm":
        variables |= vllm.partition_variables(deployment)
    if deployment.gpu.gfx:
        return variables | hosts.visible_gpus(deployment, server, server.node)
    if hosts.on_cpu(deployment):
        return variables
    return {**variables, "NVIDIA_DRIVER_CAPABILITIES": "compute,utility", **cuda_order(server)}


def cuda_order(server: ReplicaServer) -> dict[str, str]:
    """Variables for the order of a container's GPUs.

    A container sees its GPUs in the order of the machine, however they are listed; CUDA would put the fastest first.
    """
    gpus = server.gpus(server.node)
    variables = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if not all(gpu.isdecimal() for gpu in gpus):
        return {**variables, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}  # names are the same inside
    in_container = sorted(gpus, key=int)
    if list(gpus) == in_container:
        return variables
    return {**variables, "CUDA_VISIBLE_DEVICES": ",".join(f"{in_container.index(gpu)}" for gpu in gpus)}


def gpu_devices(deployment: Deployment, server: ReplicaServer) -> dict[str, Any]:
    """Devices of a replica; inside the container they count from 0."""
    if hosts.on_cpu(deployment):
        return {}
    if deployment.gpu.gfx:  # ROCm has no reservations
        return {"devices": ["/dev/kfd", "/dev/dri"], "group_add": ["video"]}
    ids = list(server.gpus(server.node))
    device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def checkpoint_mount(deployment: Deployment) -> list[str]:
    """Volume with a local checkpoint, under the same path in the container."""
    return (
        [f"{deployment.checkpoint.compose}:{deployment.checkpoint.compose}:ro"] if deployment.checkpoint.local else []
    )


def nginx_service(deployment: Deployment, servers: list[ReplicaServer]) -> dict[str, Any]:
    """Service of nginx, on the port of the first replica."""
    return {
        "image": "nginx:stable",
        "volumes": ["./nginx.conf:/etc/nginx/conf.d/default.conf:ro"],
        "ports": [f"127.0.0.1:{deployment.servers[0].port}:80"],
        "depends_on": {service_name(server): {"condition": "service_started"} for server in servers},
        "restart": "unless-stopped",
    }


def placeholders(deployment: Deployment) -> list[Placeholder]:
    """Variables that .env or the environment must set."""
    demanded = list(deployment.checkpoint.placeholders)
    if deployment.question.engine == "weft":
        demanded.append(SOURCE)
    elif deployment.gpu.gfx:
        demanded.append(ROCM_IMAGE)
    return demanded


def omitted_options(deployment: Deployment) -> list[str]:
    """Parts that are not in the file, in words."""
    is_vllm = deployment.question.engine == "vllm"
    omissions = vllm.omitted_options(deployment) if is_vllm else weft_serve.omitted_options(deployment)
    if len(deployment.servers) > 1 and len(deployment.nodes) == 1:
        omissions.append("TLS: nginx listens on 127.0.0.1; weft plan --emit nginx writes a configuration with TLS")
    if len(deployment.nodes) > 1:
        omissions.append("a load balancer for the nodes: weft plan --emit nginx writes one")
    return omissions


def next_steps(deployment: Deployment) -> list[str]:
    """Next steps, in words."""
    file = "" if len(deployment.nodes) == 1 else " -f compose-node-N.yaml"
    needs_toolkit = not hosts.on_cpu(deployment) and not deployment.gpu.gfx
    steps = [
        f"docker compose{file} up --detach{'; Docker needs the NVIDIA container toolkit' if needs_toolkit else ''}"
    ]
    if len(deployment.nodes) > 1:
        steps.append(
            "the ports are open on every interface for a load balancer, and Docker opens them past the host's "
            "firewall: keep others out"
        )
    steps.append(
        "variables are read from the environment or from a file .env next to this one: HF_TOKEN for models that need "
        "it, VLLM_API_KEY for a key that clients must send"
    )
    return steps
