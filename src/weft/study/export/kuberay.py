"""KubeRay: a RayService whose replicas are engines of Weft, or vLLM's, and a RayJob for an offline batch of Weft."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from weft.checkpoint.files.yaml_text import YamlBlock, dump_yaml
from weft.planner.deployment import DeploymentLayout
from weft.planner.question import Question
from weft.planner.search.domains import cluster_devices
from weft.study.export import hosts, kuberay_weft, vllm, weft_serve
from weft.study.export.deployment import Deployment
from weft.study.export.files import ExportFile
from weft.study.export.header import TargetRemarks, header_comment
from weft.study.export.shell import Placeholder

# Version of vLLM's cluster and its images; each image has its own Python and CUDA.
RAY_VERSION = "2.52.0"
IMAGE = f"rayproject/ray-llm:{RAY_VERSION}-py311-cu128"
ROCM_IMAGE = Placeholder("REPLACE_WITH_IMAGE", f"an image with Ray {RAY_VERSION} and vLLM for ROCm; Ray has none")
HEAD = {"cpu": "2", "memory": "8Gi"}
# Resources of a worker for each of its GPUs; vLLM reads weights through the page cache, which needs no reservation.
CPUS, MEMORY_GIB, SHM_GIB = 4, 16, 4
PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001, "serve": 8000}
SECRET = {"name": "hf-token", "key": "token", "optional": True}
API_KEY = {"name": "weft-api-key", "key": "key", "optional": True}
NAME_LENGTH = 40  # KubeRay appends to the name, up to the 63 characters of a DNS label
JOB_LENGTH = 47  # of KubeRay itself


def unsupported(question: Question, layout: DeploymentLayout) -> str:
    """The reason why the engine cannot run a layout in a Ray cluster, in words."""
    if question.engine == "weft":
        return kuberay_weft.unsupported(question, layout)
    if layout.parallelism.shares_experts:
        return "its replicas share no experts: each is a separate vLLM"
    return vllm.unsupported(question, layout)


def is_weft(deployment: Deployment) -> bool:
    return deployment.question.engine == "weft"


def kuberay_files(deployment: Deployment) -> list[ExportFile]:
    """The manifest of the RayService, and for Weft the manifest of a RayJob."""
    cluster = {
        "rayVersion": kuberay_weft.RAY_VERSION if is_weft(deployment) else RAY_VERSION,
        "headGroupSpec": head_group_spec(deployment),
        "workerGroupSpecs": [
            worker_group_spec(deployment, gpus, count) for gpus, count in worker_groups(deployment).items()
        ],
    }
    application = kuberay_weft.serve_application(deployment) if is_weft(deployment) else vllm_application(deployment)
    service = {"serveConfigV2": YamlBlock(dump_yaml({"applications": [application]})), "rayClusterConfig": cluster}
    files = [_manifest(deployment, "RayService", service_name(deployment), service)]
    if is_weft(deployment):
        job = kuberay_weft.job_spec(deployment, cluster)
        files.append(_manifest(deployment, "RayJob", f"batch-{service_name(deployment)}"[:JOB_LENGTH].rstrip("-"), job))
    return files


def _manifest(deployment: Deployment, kind: str, name: str, spec: dict[str, Any]) -> ExportFile:
    remarks = TargetRemarks(
        omitted_options(deployment, kind), placeholders(deployment, kind), next_steps(deployment, kind)
    )
    manifest = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    return ExportFile(
        f"{kind.lower()}.yaml", f"{header_comment('kuberay', deployment, remarks)}\n\n{dump_yaml(manifest)}"
    )


def service_name(deployment: Deployment) -> str:
    """Name of the service, a DNS label. It must not begin with vllm: Kubernetes would set VLLM_ variables for it, which
    vLLM reads."""
    return f"llm-{dns_label(deployment.names[0].rpartition('/')[2])[:NAME_LENGTH] or 'model'}".rstrip("-")


def dns_label(name: str) -> str:
    """A name reduced to the characters of a DNS label."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def container_image(deployment: Deployment) -> str:
    """Image with Ray and the engine, for the vendor's GPUs."""
    if is_weft(deployment):
        return kuberay_weft.IMAGE.name
    return ROCM_IMAGE.name if deployment.gpu.gfx else IMAGE


def vllm_application(deployment: Deployment) -> dict[str, Any]:
    """Ray Serve's application of vLLM: an OpenAI API for the replicas."""
    cut = deployment.candidate.layout.parallelism
    config: dict[str, Any] = {}
    config["model_loading_config"] = {"model_id": deployment.names[0], "model_source": deployment.checkpoint.word}
    config["engine_kwargs"] = {
        name.replace("-", "_"): value for name, value in vllm.engine_flags(deployment).items() if value is not False
    }
    # All of a replica is on one node if the plan has it so.
    strategy = "PACK" if deployment.spans_nodes else "STRICT_PACK"
    config["placement_group_config"] = {"bundles": [{"CPU": 1, "GPU": 1}] * cut.replica_size, "strategy": strategy}
    config["deployment_config"] = {"num_replicas": cut.data_parallel, "max_ongoing_requests": deployment.batch[1]}
    if vllm.partition_variables(deployment):
        config["runtime_env"] = {"env_vars": vllm.partition_variables(deployment)}
    return {
        "name": "llm",
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [config]},
    }


def worker_groups(deployment: Deployment) -> Counter[tuple[str, ...]]:
    """Number of workers of each kind; a worker is a node, and its kind the names of the GPUs in use there."""
    gpus = cluster_devices(deployment.question.cluster)
    used = {
        node: tuple(gpus[index].gpu.name for index in deployment.candidate.layout.gpus if gpus[index].node == node)
        for node in deployment.nodes
    }
    return Counter(used.values())


def head_group_spec(deployment: Deployment) -> dict[str, Any]:
    """The head node, which schedules and runs no replica."""
    ports = [{"name": name, "containerPort": port} for name, port in PORTS.items()]
    resources = {"limits": HEAD, "requests": HEAD}
    container = {"name": "ray-head", "image": container_image(deployment), "ports": ports, "resources": resources}
    return {"rayStartParams": {"num-cpus": "0", "num-gpus": "0"}, "template": {"spec": {"containers": [container]}}}


def worker_group_spec(deployment: Deployment, gpus: Sequence[str], count: int) -> dict[str, Any]:
    """A group of `count` equal workers, each with these GPUs."""
    resource, number = hosts.gpu_vendor(deployment).resource, len(gpus)
    resources = {"cpu": f"{number * CPUS}", "memory": f"{number * MEMORY_GIB}Gi", resource: f"{number}"}
    secrets = {"HF_TOKEN": SECRET} | ({"VLLM_API_KEY": API_KEY} if is_weft(deployment) else {})
    container = {
        "name": "ray-worker",
        "image": container_image(deployment),
        "env": [{"name": name, "valueFrom": {"secretKeyRef": secret}} for name, secret in secrets.items()],
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
    """Return True if the types of GPUs differ between nodes, so that each worker must select its nodes by a label."""
    return len(worker_groups(deployment)) > 1 and all(len(set(gpus)) == 1 for gpus in worker_groups(deployment))


def has_mixed_replicas(deployment: Deployment) -> bool:
    """Return True if a replica has GPUs of several types."""
    size = deployment.candidate.layout.parallelism.replica_size
    names = [deployment.question.cluster.gpus[index].name for index in deployment.candidate.layout.gpus]
    return any(len(set(names[start : start + size])) > 1 for start in range(0, len(names), size))


def gpu_label(deployment: Deployment, gpu: str) -> Placeholder:
    """Placeholder for the node label of a type of GPU."""
    name = "LABEL_OF_" + re.sub(r"\W+", "_", gpu).upper()
    return Placeholder(name, f"the label {hosts.gpu_vendor(deployment).product} of nodes with {gpu}")


def placeholders(deployment: Deployment, kind: str) -> list[Placeholder]:
    """Words in a manifest that the user must replace."""
    checkpoint = deployment.checkpoint
    missing = [] if checkpoint.name else [Placeholder(checkpoint.word, checkpoint.wanted)]
    image = [kuberay_weft.IMAGE] if is_weft(deployment) else [ROCM_IMAGE] if deployment.gpu.gfx else []
    types = dict.fromkeys(gpus[0] for gpus in worker_groups(deployment) if selects_nodes(deployment))
    claim = [kuberay_weft.CLAIM] if kind == "RayJob" else []
    return [*missing, *image, *claim, *(gpu_label(deployment, name) for name in types)]


def omitted_options(deployment: Deployment, kind: str) -> list[str]:
    """Parts that are not in a manifest, in words."""
    by_engine = weft_serve.omitted_options if is_weft(deployment) else vllm.omitted_options
    omissions = [
        *by_engine(deployment),
        "the numbers of the GPUs: Kubernetes and Ray assign them",
        f"CPUs and memory of the nodes: {CPUS} and {MEMORY_GIB} GiB for each GPU are a guess; the plan has GPUs only",
    ]
    if not is_weft(deployment):
        omissions.append(
            "an API key: Ray Serve's application does not check one, so keep it behind an ingress that does"
        )
        if len(deployment.names) > 1:
            omissions.append(f"other names than {deployment.names[0]}: an application has one name for each model")
    elif kind == "RayJob":
        omissions.append("sampling parameters: the rows have them, or flags such as --max-tokens for all rows")
    if has_mixed_replicas(deployment):
        omissions.append(
            "the type of GPU of each stage: Ray does not know the plan's order; try it, or use one type of GPU"
        )
    if deployment.checkpoint.local:
        omissions.append(f"a volume with {deployment.checkpoint.name}: every worker must find it under this path")
    return omissions


def next_steps(deployment: Deployment, kind: str) -> list[str]:
    """Next steps, in words."""
    steps = [
        f"needs the KubeRay operator; kubectl apply -f {kind.lower()}.yaml",
        f"a Secret {SECRET['name']} with the key {SECRET['key']} gives HF_TOKEN; it may be missing",
    ]
    if kind == "RayJob":
        return [*steps, "a job that is run again, or retried, goes on with the rows that have no answer yet"]
    if is_weft(deployment):
        steps.append(
            f"a Secret {API_KEY['name']} with the key {API_KEY['key']} is the key that clients must send; without it "
            "they need none"
        )
    return [*steps, f"the API is the service {service_name(deployment)}-serve-svc, port {PORTS['serve']}"]
