"""vLLM: its command lines, and Ray's on every node if a replica spans several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.checkpoint.files import gguf_types
from weft.planner.deployment import DeploymentLayout
from weft.planner.question import Question
from weft.study.export import hosts
from weft.study.export.checkpoint import FLOATS
from weft.study.export.deployment import Deployment, ReplicaServer
from weft.study.export.files import SCRIPT, ExportFile
from weft.study.export.header import KEYS, TargetRemarks, header_comment
from weft.study.export.hosts import INTERFACE, node_address
from weft.study.export.shell import (
    Flags,
    Placeholder,
    Raw,
    Value,
    bash_script,
    command_line,
    export_lines,
    run_together,
)
from weft.study.export.target import crowded, spans_nodes

RAY_PORT = 6379  # Ray's own default
COUNT = 'import ray; ray.init("auto", log_to_driver=False); print(int(ray.cluster_resources().get("GPU", 0)))'
EXPERTS_PORT = 13345  # port of the rendezvous of replicas that share experts, as in vLLM's documentation


def unsupported(question: Question, layout: DeploymentLayout) -> str:
    """The reason why vLLM cannot run a layout that its planner profile allows, in words."""
    if question.cluster.gpus[layout.gpus[0]].kind == "cpu":
        return "vLLM for CPUs is a separate installation; describe GPUs with --gpus"
    if crowded(layout):
        return "it has one rank on a GPU"
    if layout.kv_dtype == "int8":
        return "its KV cache has no int8; --kv-cache-dtype fp8 takes as many bytes"
    if layout.parallelism.expert_size is not None and layout.parallelism.expert_parallel > 1:
        return "it deals whole experts out to all ranks, or cuts every expert over all of them"
    if layout.parallelism.shares_experts and layout.parallelism.pipeline_parallel > 1:
        return "its replicas share experts with tensor parallelism only, not in a pipeline"
    if layout.parallelism.shares_experts and spans_nodes(question, layout):
        return "a replica that shares experts must be on one node"
    return ""


def vllm_files(deployment: Deployment) -> list[ExportFile]:
    """One script for each node."""
    if len(deployment.nodes) > 1:
        return [node_script(deployment, node) for node in deployment.nodes]
    body = run_together([serve_command(deployment, server, server.node) for server in deployment.servers])
    return [_script(deployment, "vllm.sh", body, deployment.checkpoint.placeholders)]


def node_script(deployment: Deployment, node: int) -> ExportFile:
    """Script of one node of several."""
    spanning = [server for server in deployment.servers if len(server.nodes) > 1]
    demanded = list(deployment.checkpoint.placeholders)
    body: list[str] = []
    if spanning:
        head = spanning[0].node
        demanded += [*dict.fromkeys([node_address(node), node_address(head)]), INTERFACE]
        body += [*network_lines(deployment, node), ""]
    commands = [serve_command(deployment, server, node) for server in _servers_started_on(deployment, node)]
    body += _ray_lines(deployment, spanning, node, stays=not commands)
    if commands:
        body += run_together(commands)
    return _script(deployment, f"node-{node}.sh", body, demanded)


def _count_gpus(server: ReplicaServer) -> int:
    """The GPUs of a server on all of its nodes."""
    return sum(len(server.gpus(node)) for node in server.nodes)


def _ray_lines(deployment: Deployment, spanning: Sequence[ReplicaServer], node: int, *, stays: bool) -> list[str]:
    """Lines that start Ray on a node for the servers over several nodes; none if it has no part of them.

    Replicas that share experts run without Ray.
    """
    here = [server for server in spanning if node in server.nodes]
    if not here or has_shared_experts(deployment):
        return []
    gpus = sum(map(_count_gpus, spanning))
    names = ",".join(gpu for server in here for gpu in server.gpus(node))
    visible = {hosts.gpu_vendor(deployment).visible: names}
    return [*start_ray_lines(visible, node, spanning[0].node, gpus, stays=stays), ""]


def _servers_started_on(deployment: Deployment, node: int) -> list[ReplicaServer]:
    """Servers with a command on a node: its own, and with shared experts also the servers with GPUs there."""
    if has_shared_experts(deployment):
        return [server for server in deployment.servers if node in server.nodes]
    return [server for server in deployment.servers if server.node == node]


def _script(deployment: Deployment, name: str, body: Sequence[str], demanded: Sequence[Placeholder]) -> ExportFile:
    remarks = TargetRemarks(omitted_options(deployment), demanded, next_steps(deployment))
    return ExportFile(name, bash_script(header_comment("vllm", deployment, remarks), body, demanded), SCRIPT)


def network_lines(deployment: Deployment, node: int) -> list[str]:
    """Lines that set the address and interface of a node's processes, for each library in its own form."""
    return [
        "# Traffic between the nodes is neither encrypted nor authenticated: keep it on a private network.",
        *export_lines(
            {
                "VLLM_HOST_IP": node_address(node).shell,  # each node's own
                "GLOO_SOCKET_IFNAME": INTERFACE.shell,
                "NCCL_SOCKET_IFNAME": Raw("=$GLOO_SOCKET_IFNAME"),  # = means this interface, not all with this prefix
            }
        ),
        *export_lines(partition_variables(deployment)),
    ]


def start_ray_lines(visible: Mapping[str, str], node: int, head: int, gpus: int, *, stays: bool) -> list[str]:
    """Lines that start Ray on a node. The head waits for all `gpus`; another node runs in the foreground if it
    `stays`."""
    count = sum(len(numbers.split(",")) for numbers in visible.values())
    lines = export_lines({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **visible})
    flags: dict[str, Value] = {"node-ip-address": Raw("$VLLM_HOST_IP"), "num-gpus": count}
    if node != head:
        where = Raw(f"{node_address(head).shell}:{RAY_PORT}")
        return [*lines, command_line(["ray", "start"], {"address": where, **flags, "block": stays})]
    return [
        *lines,
        "python3 -c 'import ray'  # fails if python3 is not vLLM's, which has ray",
        command_line(["ray", "start", "--head"], {"port": RAY_PORT, **flags}),
        f"gpus() {{ python3 -c '{COUNT}' 2>/dev/null || echo 0; }}",
        f'until [ "$(gpus)" -ge {gpus} ]; do',
        f'    echo "waiting for the other nodes: {gpus} GPUs are needed, $(gpus) are connected" >&2',
        "    sleep 5",
        "done",
    ]


def serve_command(deployment: Deployment, server: ReplicaServer, node: int) -> str:
    """Command line of a server; if its replicas share experts, of a node's part of the server."""
    flags: dict[str, Value] = {**engine_flags(deployment, server), **placement_flags(deployment, server, node)}
    if node == server.node:
        flags |= {
            "served-model-name": deployment.names,
            "host": "127.0.0.1" if len(deployment.nodes) == 1 else "0.0.0.0",
        }
        flags["port"] = server.port
    else:
        flags["headless"] = True
    over_ray = len(server.nodes) > 1 and not has_shared_experts(deployment)
    variables = {} if over_ray else {**hosts.visible_gpus(deployment, server, node), **partition_variables(deployment)}
    return command_line(["vllm", "serve", deployment.checkpoint.shell], flags, variables)


def placement_flags(deployment: Deployment, server: ReplicaServer, node: int) -> Flags:
    """Flags that place a server's part on a node: data parallelism with shared experts, or Ray."""
    flags: dict[str, Value] = {}
    if has_shared_experts(deployment):
        flags["data-parallel-size"] = len(server.replicas)
        if len(server.nodes) > 1:
            local = [replica[0].node for replica in server.replicas]
            flags["data-parallel-size-local"] = local.count(node)
            if node != server.node:  # on the first node it would mean another load balancing
                flags["data-parallel-start-rank"] = local.index(node)
            flags["data-parallel-address"] = node_address(server.node).shell
            flags["data-parallel-rpc-port"] = EXPERTS_PORT
    elif len(server.nodes) > 1:
        flags["distributed-executor-backend"] = "ray"
    return flags


def engine_flags(deployment: Deployment, server: ReplicaServer | None = None) -> Flags:
    """Flags of a server's engine, or flags that suit all servers."""
    layout = deployment.candidate.layout
    tokens, requests = deployment.batch
    flags: dict[str, Value] = {
        **{f"{kind}-parallel-size": size for kind, size in parallel_sizes(layout).items() if size > 1},
        # With several attention groups and without this flag, vLLM cuts every expert over the ranks of all groups.
        "enable-expert-parallel": layout.parallelism.expert_parallel > 1,
        "max-model-len": deployment.max_model_len,
        "max-num-seqs": requests,
        "max-num-batched-tokens": tokens,
        # vLLM starts only if this share is free on each of its GPUs, and takes this share of each.
        "gpu-memory-utilization": min(max(deployment.memory_shares(server)), deployment.free_share(server)),
    }
    if layout.precision in FLOATS:
        flags["dtype"] = FLOATS[layout.precision]
    if deployment.checkpoint.quantised:
        flags["quantization"] = deployment.checkpoint.quantised
    if layout.kv_dtype.startswith("fp8"):
        flags["kv-cache-dtype"] = layout.kv_dtype
    if layout.precision in gguf_types.MIXES and not deployment.checkpoint.local:
        # A GGUF file's own is read slowly, and not always correctly.
        flags["tokenizer"] = deployment.checkpoint.whole or deployment.question.model
    return flags


def parallel_sizes(layout: DeploymentLayout) -> dict[str, int]:
    """Sizes of tensor and pipeline parallelism."""
    return {"tensor": layout.parallelism.tensor_parallel, "pipeline": layout.parallelism.pipeline_parallel}


def partition_variables(deployment: Deployment) -> dict[str, str]:
    """Variables with the number of layers of each stage, if there are several stages."""
    layers = deployment.candidate.layout.parallelism.pipeline_split
    return {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, layers))} if len(layers) > 1 else {}


def omitted_options(deployment: Deployment) -> list[str]:
    """Options that a reader may miss in the commands, in words."""
    layout = deployment.candidate.layout
    omissions = []
    if layout.precision in ("int4", "int8"):
        omissions.append(
            "--quantization: vLLM reads awq or gptq from the checkpoint and takes its faster kernels (awq_marlin, "
            "gptq_marlin), which naming awq or gptq would forbid"
        )
    if layout.precision in gguf_types.MIXES:
        omissions.append("vLLM calls its GGUF reader experimental; an AWQ or GPTQ checkpoint is faster there")
    if any(len(set(deployment.memory_shares(server))) > 1 for server in deployment.servers):
        omissions.append(
            "a share of the memory for each GPU: vLLM has one for all; the largest that any GPU needs is given, as far "
            "as it is free on each"
        )
    spanning = sum(len(server.nodes) > 1 for server in deployment.servers)
    if spanning > 1 and not has_shared_experts(deployment):
        omissions.append("the GPUs of each replica on the nodes: Ray chooses them, with the same numbers of GPUs")
    return omissions


def next_steps(deployment: Deployment) -> list[str]:
    """Next steps, in words."""
    steps = [KEYS]
    if len(deployment.nodes) > 1:
        steps.append("run node-N.sh on node N; every node needs the same vLLM, and the model under the same name")
        steps.append("the servers listen on all interfaces for the load balancer: block other access with a firewall")
    if deployment.spans_nodes:
        steps.append("InfiniBand is used if NCCL finds it; NCCL_DEBUG=INFO shows it, NCCL_IB_HCA selects it")
    if deployment.spans_nodes and not has_shared_experts(deployment):
        steps.append("ray stop on every node ends what ray start began there")
    if len(deployment.servers) > 1:
        steps.append("weft plan --emit nginx balances the ports")
    return steps


def has_shared_experts(deployment: Deployment) -> bool:
    """Return True if the replicas share their experts."""
    return deployment.candidate.layout.parallelism.shares_experts
