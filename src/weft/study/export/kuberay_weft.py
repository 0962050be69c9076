"""KubeRay for Weft: Ray Serve's application and the command of an offline batch, whose engines are actors of Ray."""

from __future__ import annotations

import json
from typing import Any

from weft.planner.deployment import DeploymentLayout
from weft.planner.question import Question
from weft.study.export import weft_serve
from weft.study.export.deployment import Deployment
from weft.study.export.shell import Placeholder, flag_words, quote

RAY_VERSION = "2.60.0"  # version of the image, see containers/Containerfile
IMAGE = Placeholder("REPLACE_WITH_IMAGE", "Weft's image, built from containers/Containerfile, in your registry")
CLAIM = Placeholder(
    "REPLACE_WITH_CLAIM", "the PersistentVolumeClaim with rows.jsonl, to which answers.jsonl is written"
)
DATA = "/data"  # where the claim is mounted
TTL_S = 600  # seconds that a finished job's cluster stays, for its log
RETRIES = 3  # retries of a job, each in a new cluster: it goes on with the rows that have no answer
SEPARATED = {  # flags whose text has commas, and the type of the parts
    "tensor-split": float,
    "pipeline-split": int,
    "device-ids": int,
    "gpu-memory-utilization": float,
}


def unsupported(question: Question, layout: DeploymentLayout) -> str:
    """The reason why Weft's engines cannot run a layout in a Ray cluster, in words."""
    gpu = question.cluster.gpus[layout.gpus[0]]
    if gpu.kind == "cpu":
        return "its nodes have GPUs; --emit compose is for a CPU, or describe GPUs with --gpus"
    if gpu.gfx or layout.parallelism.shares_experts:
        return weft_serve.unsupported(question, layout)
    return ""


def engine_arguments(deployment: Deployment) -> dict[str, Any]:
    """Keywords of an engine."""
    flags = {**weft_serve.engine_flags(deployment, deployment.servers[0])}
    shares = deployment.memory_shares(held=True)
    flags["gpu-memory-utilization"] = ",".join(map(str, shares)) if len(set(shares)) > 1 else shares[0]
    arguments: dict[str, Any] = {}
    for name, value in flags.items():
        if name in SEPARATED and isinstance(value, str):
            arguments[name.replace("-", "_")] = [SEPARATED[name](part) for part in value.split(",")]
        elif name == "speculative-config":
            arguments[name.replace("-", "_")] = json.loads(str(value))
        elif value is not False:
            arguments[name.replace("-", "_")] = value
    if deployment.spans_nodes:
        arguments["distributed_executor_backend"] = "ray"
    return arguments


def serve_application(deployment: Deployment) -> dict[str, Any]:
    """Ray Serve's application, whose replicas have the API of weft serve."""
    # The ranks of an engine that spans nodes are actors with the GPUs; else its replica has them.
    gpus = 0 if deployment.spans_nodes else len(deployment.servers[0].gpus(deployment.servers[0].node))
    options: dict[str, Any] = {"num_replicas": len(deployment.servers)}
    options["ray_actor_options"] = {"num_cpus": 1, "num_gpus": gpus}
    if deployment.question.max_num_seqs:
        options["max_ongoing_requests"] = 2 * deployment.question.max_num_seqs
    return {
        "name": "llm",
        "route_prefix": "/",
        "import_path": "weft.ray.serve:build",
        "args": {
            "model": deployment.checkpoint.word,
            "engine": engine_arguments(deployment),
            "server": {"served_model_name": list(deployment.names)},
            "deployment": options,
        },
    }


def batch_command(deployment: Deployment) -> str:
    """Command of an offline batch on all engines of the plan."""
    flags = {**weft_serve.engine_flags(deployment, deployment.servers[0])}
    if not deployment.candidate.layout.parallelism.shares_experts:
        flags["data-parallel-size"] = len(deployment.servers)
    if deployment.spans_nodes:
        flags["distributed-executor-backend"] = "ray"
    words = ["weft", "batch", f"{DATA}/rows.jsonl", f"{DATA}/answers.jsonl", "--ray", "--model"]
    lines = flag_words(flags)
    return " ".join(map(quote, [*words, deployment.checkpoint.word, *(word for line in lines for word in line)]))


def job_spec(deployment: Deployment, cluster: dict[str, Any]) -> dict[str, Any]:
    """Spec of the RayJob that runs the batch in a cluster of its own."""
    pod = cluster["headGroupSpec"]["template"]["spec"]
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": CLAIM.name}}
    container = {**pod["containers"][0], "volumeMounts": [{"name": "data", "mountPath": DATA}]}
    head = {
        **cluster["headGroupSpec"],
        "template": {"spec": {**pod, "containers": [container], "volumes": [*pod.get("volumes", []), claim]}},
    }
    return {
        "entrypoint": batch_command(deployment),
        "backoffLimit": RETRIES,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": TTL_S,
        "rayClusterSpec": {**cluster, "headGroupSpec": head},
    }
