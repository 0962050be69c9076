"""Variables of hosts: for each GPU vendor, and for addresses of nodes."""

from __future__ import annotations

import msgspec

from weft.study.export.deployment import Deployment, ReplicaServer
from weft.study.export.shell import Placeholder

INTERFACE = Placeholder(
    "NETWORK_INTERFACE", "name of the network interface that joins the nodes, as ip route get ADDRESS shows it"
)


class GpuVendor(msgspec.Struct, frozen=True):
    """Names of a vendor's GPUs: `visible` is the variable with the GPUs that a process sees, `resource` a GPU in
    Kubernetes, `product` the node label with its type (from NVIDIA's GPU feature discovery, from AMD's node
    labeller)."""

    visible: str
    resource: str
    product: str


NVIDIA = GpuVendor("CUDA_VISIBLE_DEVICES", "nvidia.com/gpu", "nvidia.com/gpu.product")
AMD = GpuVendor("HIP_VISIBLE_DEVICES", "amd.com/gpu", "amd.com/gpu.product-name")


def gpu_vendor(deployment: Deployment) -> GpuVendor:
    """Vendor of the deployment's GPUs."""
    return AMD if deployment.gpu.gfx else NVIDIA


def visible_gpus(deployment: Deployment, server: ReplicaServer, node: int) -> dict[str, str]:
    """Variables that limit a server's process on a node to its GPUs, numbered as nvidia-smi numbers them."""
    if on_cpu(deployment):
        return {}
    variables = {gpu_vendor(deployment).visible: ",".join(server.gpus(node))}
    return variables if deployment.gpu.gfx else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **variables}


def node_address(node: int) -> Placeholder:
    """Placeholder for the address at which the other nodes reach a node."""
    return Placeholder(f"NODE{node}_ADDRESS", f"address of node {node} on the network that joins the nodes")


def on_cpu(deployment: Deployment) -> bool:
    """Return True if the deployment runs on a CPU."""
    return deployment.gpu.kind == "cpu"
