"""vLLM: its command lines, and Ray's on every node where a replica spans several."""

from __future__ import annotations

from collections.abc import Mapping

from weft.export import hosts
from weft.export.checkpoint import FLOATS
from weft.export.deployment import Deployment, ReplicaServer
from weft.export.files import SCRIPT, ExportFile
from weft.export.header import KEYS, TargetRemarks, header_comment
from weft.export.hosts import INTERFACE, node_address
from weft.export.shell import Flags, Raw, Value, bash_script, command_line, export_lines, run_together
from weft.export.target import crowded, shares_experts, spans_nodes
from weft.formats import gguf_types
from weft.planner.deployment import Layout
from weft.planner.question import Question

RAY_PORT = 6379  # Ray's own default
COUNT = 'import ray; ray.init("auto", log_to_driver=False); print(int(ray.cluster_resources().get("GPU", 0)))'
EXPERTS_PORT = 13345  # over which replicas that share experts find each other, as in vLLM's documentation


def unsupported(question: Question, layout: Layout) -> str:
    """What vLLM does not do of what its planner's profile allows."""
    if question.cluster.gpus[layout.gpus[0]].kind == "cpu":
        return "on CPUs it is another program to install; describe GPUs with --gpus"
    if crowded(layout):
        return "it has one rank on a GPU"
    if layout.kv_dtype == "int8":
        return "its KV cache has no int8; --kv-cache-dtype fp8 takes as many bytes"
    if shares_experts(layout) and layout.pipeline_parallel > 1:
        return "its replicas share experts with tensor parallelism only, not in a pipeline"
    if shares_experts(layout) and spans_nodes(question, layout):
        return "replicas that share experts each lie on one node"
    return ""


def vllm_files(deployment: Deployment) -> list[ExportFile]:
    """One script, or one for each node."""
    if len(deployment.nodes) == 1:
        replace = deployment.checkpoint.placeholders
        body = run_together([serve_command(deployment, server, server.node) for server in deployment.servers])
        told = header_comment(
            "vllm", deployment, TargetRemarks(omitted_options(deployment), replace, next_steps(deployment))
        )
        return [ExportFile("vllm.sh", bash_script(told, body, replace), SCRIPT)]
    return [node_script(deployment, node) for node in deployment.nodes]


def node_script(deployment: Deployment, node: int) -> ExportFile:
    """Everything that one of several nodes runs."""
    linked = [server for server in deployment.servers if len(server.nodes) > 1]
    here = [
        server
        for server in deployment.servers
        if server.node == node or (node in server.nodes and has_shared_experts(deployment))
    ]
    rayed = [] if has_shared_experts(deployment) else [server for server in linked if node in server.nodes]
    replace = list(deployment.checkpoint.placeholders)
    body: list[str] = []
    if linked:
        head = linked[0].node
        replace += [*dict.fromkeys([node_address(node), node_address(head)]), INTERFACE]
        body += [*network_lines(deployment, node), ""]
    commands = [serve_command(deployment, server, node) for server in here]
    if rayed:
        gpus = sum(len(server.gpus(n)) for server in linked for n in server.nodes)
        local = {hosts.gpu_vendor(deployment).visible: ",".join(gpu for server in rayed for gpu in server.gpus(node))}
        body += [*start_ray_lines(local, node, linked[0].node, gpus, stays=not commands), ""]
    body += run_together(commands) if commands else []
    told = header_comment(
        "vllm", deployment, TargetRemarks(omitted_options(deployment), replace, next_steps(deployment))
    )
    return ExportFile(f"node-{node}.sh", bash_script(told, body, replace), SCRIPT)


def network_lines(deployment: Deployment, node: int) -> list[str]:
    """Which address and interface the processes of a node take; each library wants them in its own form."""
    return [
        "# Traffic between the nodes is neither encrypted nor authenticated: keep it on a private network.",
        *export_lines(
            {
                "VLLM_HOST_IP": node_address(node).shell,  # each node's own
                "GLOO_SOCKET_IFNAME": INTERFACE.shell,
                "NCCL_SOCKET_IFNAME": Raw("=$GLOO_SOCKET_IFNAME"),  # = is: this one, not all that begin so
            }
        ),
        *export_lines(partition_variables(deployment)),
    ]


def start_ray_lines(visible: Mapping[str, str], node: int, head: int, gpus: int, *, stays: bool) -> list[str]:
    """Ray on a node: the head waits until all `gpus` are there; another node's `stays` in front, or goes behind."""
    count = sum(len(numbers.split(",")) for numbers in visible.values())
    lines = export_lines({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **visible})
    flags: dict[str, Value] = {"node-ip-address": Raw("$VLLM_HOST_IP"), "num-gpus": count}
    if node != head:
        where = Raw(f"{node_address(head).shell}:{RAY_PORT}")
        return [*lines, command_line(["ray", "start"], {"address": where, **flags, "block": stays})]
    return [
        *lines,
        "python3 -c 'import ray'  # or there is another Python in front of vLLM's, which cannot count them",
        command_line(["ray", "start", "--head"], {"port": RAY_PORT, **flags}),
        f"gpus() {{ python3 -c '{COUNT}' 2>/dev/null || echo 0; }}",
        f'until [ "$(gpus)" -ge {gpus} ]; do',
        f'    echo "waiting for the other nodes: {gpus} GPUs are needed, $(gpus) are there" >&2',
        "    sleep 5",
        "done",
    ]


def serve_command(deployment: Deployment, server: ReplicaServer, node: int) -> str:
    """The command line of a server; of one whose replicas share experts, that of a node's part."""
    flags: dict[str, Value] = {**engine_flags(deployment, server), **placement_flags(deployment, server, node)}
    if node == server.node:
        flags |= {
            "served-model-name": deployment.names,
            "host": "127.0.0.1" if len(deployment.nodes) == 1 else "0.0.0.0",
        }
        flags["port"] = server.port
    else:
        flags["headless"] = True
    rayed = len(server.nodes) > 1 and not has_shared_experts(deployment)
    variables = {} if rayed else {**hosts.visible_gpus(deployment, server, node), **partition_variables(deployment)}
    return command_line(["vllm", "serve", deployment.checkpoint.shell], flags, variables)


def placement_flags(deployment: Deployment, server: ReplicaServer, node: int) -> Flags:
    """The flags that say which part of the deployment this is."""
    flags: dict[str, Value] = {}
    if has_shared_experts(deployment):
        flags["data-parallel-size"] = len(server.replicas)
        if len(server.nodes) > 1:
            local = [replica[0].node for replica in server.replicas]
            flags["data-parallel-size-local"] = local.count(node)
            if node != server.node:  # on the first one it would mean another way of balancing
                flags["data-parallel-start-rank"] = local.index(node)
            flags["data-parallel-address"] = node_address(server.node).shell
            flags["data-parallel-rpc-port"] = EXPERTS_PORT
    elif len(server.nodes) > 1:
        flags["distributed-executor-backend"] = "ray"
    return flags


def engine_flags(deployment: Deployment, server: ReplicaServer | None = None) -> Flags:
    """The arguments of a server's engine, or those that do for all, whoever starts it."""
    layout = deployment.candidate.layout
    tokens, requests = deployment.batch
    flags: dict[str, Value] = {
        **{f"{kind}-parallel-size": size for kind, size in parallel_sizes(layout).items() if size > 1},
        "enable-expert-parallel": layout.expert_parallel > 1,
        "max-model-len": deployment.max_model_len,
        "max-num-seqs": requests,
        "max-num-batched-tokens": tokens,
        # It starts only where as much is free on each of its GPUs, and takes as much of each.
        "gpu-memory-utilization": min(max(deployment.memory_shares(server)), deployment.free_share(server)),
    }
    if layout.precision in FLOATS:
        flags["dtype"] = FLOATS[layout.precision]
    if deployment.checkpoint.quantised:
        flags["quantization"] = deployment.checkpoint.quantised
    if layout.kv_dtype.startswith("fp8"):
        flags["kv-cache-dtype"] = layout.kv_dtype
    if layout.precision in gguf_types.MIXES and not deployment.checkpoint.local:
        flags["tokenizer"] = deployment.question.model  # a GGUF file's own is read slowly, and not always rightly
    return flags


def parallel_sizes(layout: Layout) -> dict[str, int]:
    """Of tensor and pipeline parallelism."""
    return {"tensor": layout.tensor_parallel, "pipeline": layout.pipeline_parallel}


def partition_variables(deployment: Deployment) -> dict[str, str]:
    """The layers of each stage."""
    layers = deployment.candidate.layout.stage_layers
    return {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, layers))} if len(layers) > 1 else {}


def omitted_options(deployment: Deployment) -> list[str]:
    """What is not in the commands though a reader may look for it."""
    layout = deployment.candidate.layout
    found = []
    if layout.precision in ("int4", "int8"):
        found.append(
            "--quantization: vLLM reads awq or gptq from the checkpoint and takes its faster kernels (awq_marlin, "
            "gptq_marlin), which naming awq or gptq would forbid"
        )
    if layout.precision in gguf_types.MIXES:
        found.append("vLLM calls its GGUF reader experimental; an AWQ or GPTQ checkpoint is faster there")
    if any(len(set(deployment.memory_shares(server))) > 1 for server in deployment.servers):
        found.append(
            "a share of the memory for each GPU: vLLM has one for all, so the largest that any needs is given, as far "
            "as it is free on each"
        )
    if (
        deployment.spans_nodes
        and sum(len(server.nodes) > 1 for server in deployment.servers) > 1
        and not has_shared_experts(deployment)
    ):
        found.append("which GPUs of the nodes hold which replica: Ray decides that, by the same numbers of GPUs")
    return found


def next_steps(deployment: Deployment) -> list[str]:
    """How to go on."""
    found = [KEYS]
    if len(deployment.nodes) > 1:
        found.append("run node-N.sh on node N; every node needs the same vLLM, and the model under the same name")
        found.append("the servers listen on every interface, so that a balancer reaches them: keep others out")
    if deployment.spans_nodes:
        found.append("InfiniBand is used where NCCL finds it; NCCL_DEBUG=INFO tells, NCCL_IB_HCA chooses")
    if deployment.spans_nodes and not has_shared_experts(deployment):
        found.append("ray stop on every node ends what ray start began there")
    if len(deployment.servers) > 1:
        found.append("weft plan --emit nginx balances the ports")
    return found


def has_shared_experts(deployment: Deployment) -> bool:
    """Whether the replicas share their experts."""
    return shares_experts(deployment.candidate.layout)
