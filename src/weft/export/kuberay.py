"""KubeRay: a RayService in which Ray Serve starts vLLM for each replica."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from weft.export import hosts, vllm
from weft.export.deployment import Deployment
from weft.export.files import ExportFile
from weft.export.header import TargetRemarks, header_comment
from weft.export.shell import Placeholder
from weft.export.target import shares_experts
from weft.formats.yaml_text import Block, dump
from weft.planner.deployment import Layout
from weft.planner.domains import devices
from weft.planner.question import Question

# One version for the cluster and its images, of which each has its own Python and CUDA.
RAY_VERSION = "2.52.0"
IMAGE = f"rayproject/ray-llm:{RAY_VERSION}-py311-cu128"
ROCM_IMAGE = Placeholder("REPLACE_WITH_IMAGE", f"an image with Ray {RAY_VERSION} and vLLM for ROCm; Ray has none")
HEAD = {"cpu": "2", "memory": "8Gi"}
# Of a worker for each of its GPUs; vLLM reads weights through the page cache, which needs no reservation.
CPUS, MEMORY_GIB, SHM_GIB = 4, 16, 4
PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001, "serve": 8000}
SECRET = {"name": "hf-token", "key": "token", "optional": True}
NAME_LENGTH = 40  # KubeRay adds to it, up to the 63 of a DNS label


def unsupported(question: Question, layout: Layout) -> str:
    """What Ray Serve's LLM application does not do of what vLLM does."""
    if shares_experts(layout):
        return "its replicas share no experts: each is a vLLM of its own"
    return vllm.unsupported(question, layout)


def kuberay_files(deployment: Deployment) -> list[ExportFile]:
    """The manifest."""
    remarks = TargetRemarks(omitted_options(deployment), placeholders(deployment), next_steps(deployment))
    manifest = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": service_name(deployment)},
        "spec": {
            "serveConfigV2": Block(dump({"applications": [serve_application(deployment)]})),
            "rayClusterConfig": {
                "rayVersion": RAY_VERSION,
                "headGroupSpec": head_group_spec(deployment),
                "workerGroupSpecs": [
                    worker_group_spec(deployment, gpus, count) for gpus, count in worker_groups(deployment).items()
                ],
            },
        },
    }
    return [ExportFile("rayservice.yaml", f"{header_comment('kuberay', deployment, remarks)}\n\n{dump(manifest)}")]


def service_name(deployment: Deployment) -> str:
    """A DNS label. It does not begin with vllm: Kubernetes would set VLLM_ variables for it, which vLLM reads."""
    return f"llm-{dns_label(deployment.names[0].rpartition('/')[2])[:NAME_LENGTH] or 'model'}".rstrip("-")


def dns_label(name: str) -> str:
    """What of a name may be in a DNS label."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def container_image(deployment: Deployment) -> str:
    """With Ray and vLLM for the GPUs."""
    return ROCM_IMAGE.name if deployment.gpu.gfx else IMAGE


def serve_application(deployment: Deployment) -> dict[str, Any]:
    """Ray Serve's application: an OpenAI API over the replicas."""
    layout = deployment.candidate.layout
    config: dict[str, Any] = {}
    config["model_loading_config"] = {"model_id": deployment.names[0], "model_source": deployment.checkpoint.word}
    config["engine_kwargs"] = {
        name.replace("-", "_"): value for name, value in vllm.engine_flags(deployment).items() if value is not False
    }
    # All of a replica on one node where the plan has it so.
    strategy = "PACK" if deployment.spans_nodes else "STRICT_PACK"
    config["placement_group_config"] = {"bundles": [{"CPU": 1, "GPU": 1}] * layout.size, "strategy": strategy}
    config["deployment_config"] = {"num_replicas": layout.data_parallel, "max_ongoing_requests": deployment.batch[1]}
    if vllm.partition_variables(deployment):
        config["runtime_env"] = {"env_vars": vllm.partition_variables(deployment)}
    return {
        "name": "llm",
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [config]},
    }


def worker_groups(deployment: Deployment) -> Counter[tuple[str, ...]]:
    """How many workers there are of each kind: one for a node, with the GPUs, by name, that it gives."""
    there = devices(deployment.question.cluster)
    used = {
        node: tuple(there[at].gpu.name for at in deployment.candidate.layout.gpus if there[at].node == node)
        for node in deployment.nodes
    }
    return Counter(used.values())


def head_group_spec(deployment: Deployment) -> dict[str, Any]:
    """The head: it schedules, and runs no replica."""
    ports = [{"name": name, "containerPort": port} for name, port in PORTS.items()]
    resources = {"limits": HEAD, "requests": HEAD}
    container = {"name": "ray-head", "image": container_image(deployment), "ports": ports, "resources": resources}
    return {"rayStartParams": {"num-cpus": "0", "num-gpus": "0"}, "template": {"spec": {"containers": [container]}}}


def worker_group_spec(deployment: Deployment, gpus: Sequence[str], count: int) -> dict[str, Any]:
    """A group of equal workers."""
    resource, number = hosts.gpu_vendor(deployment).resource, len(gpus)
    resources = {"cpu": f"{number * CPUS}", "memory": f"{number * MEMORY_GIB}Gi", resource: f"{number}"}
    container = {
        "name": "ray-worker",
        "image": container_image(deployment),
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": SECRET}}],
        "resources": {"limits": resources, "requests": resources},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{number * SHM_GIB}Gi"}}
    spec: dict[str, Any] = {"containers": [container], "volumes": [shm]}
    if selects_nodes(deployment):
        spec["nodeSelector"] = {hosts.gpu_vendor(deployment).product: gpu_label(deployment, gpus[0]).name}
    kinds = "-".join(f"{number}x-{name}" for name, number in Counter(gpus).items())
    return {
        "groupName": dns_label(kinds),
        "replicas": count,
        "minReplicas": count,
        "maxReplicas": count,
        "rayStartParams": {"num-gpus": f"{number}"},
        "template": {"spec": spec},
    }


def selects_nodes(deployment: Deployment) -> bool:
    """Whether nodes differ in the type of their GPUs, so that each worker has to find its own."""
    return len(worker_groups(deployment)) > 1 and all(len(set(gpus)) == 1 for gpus in worker_groups(deployment))


def has_mixed_replicas(deployment: Deployment) -> bool:
    """Whether a replica has GPUs of several types."""
    size = deployment.candidate.layout.size
    names = [deployment.question.cluster.gpus[at].name for at in deployment.candidate.layout.gpus]
    return any(len(set(names[start : start + size])) > 1 for start in range(0, len(names), size))


def gpu_label(deployment: Deployment, gpu: str) -> Placeholder:
    """What a cluster's nodes call a type of GPU."""
    name = "LABEL_OF_" + re.sub(r"\W+", "_", gpu).upper()
    return Placeholder(name, f"the label {hosts.gpu_vendor(deployment).product} of nodes with {gpu}")


def placeholders(deployment: Deployment) -> list[Placeholder]:
    """What the manifest has words for in place of values."""
    found = (
        [] if deployment.checkpoint.name else [Placeholder(deployment.checkpoint.word, deployment.checkpoint.wanted)]
    )
    names = dict.fromkeys(gpus[0] for gpus in worker_groups(deployment) if selects_nodes(deployment))
    return [*found, *([ROCM_IMAGE] if deployment.gpu.gfx else []), *(gpu_label(deployment, name) for name in names)]


def omitted_options(deployment: Deployment) -> list[str]:
    """What is not in the manifest."""
    found = [
        *vllm.omitted_options(deployment),
        "the numbers of the GPUs: Kubernetes and Ray give them out",
        "an API key: Ray Serve's application asks for none, so keep it behind an ingress that does",
        f"CPUs and memory of the nodes: {CPUS} and {MEMORY_GIB} GiB for each GPU are a guess, the plan is of GPUs only",
    ]
    if len(deployment.names) > 1:
        found.append(f"other names than {deployment.names[0]}: an application has one for each model")
    if has_mixed_replicas(deployment):
        found.append(
            "which stage lies on which type of GPU: Ray does not know the plan's order; try it, or use one type"
        )
    if deployment.checkpoint.local:
        found.append(f"a volume with {deployment.checkpoint.name}: every worker has to find it under this path")
    return found


def next_steps(deployment: Deployment) -> list[str]:
    """How to go on."""
    return [
        "needs the KubeRay operator; kubectl apply -f rayservice.yaml",
        f"a Secret {SECRET['name']} with the key {SECRET['key']} gives HF_TOKEN, and may be missing",
        f"the API is the service {service_name(deployment)}-serve-svc, port {PORTS['serve']}",
    ]
