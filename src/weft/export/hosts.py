"""Hosts: the variables of each GPU vendor, and of nodes that find each other over a network."""

from __future__ import annotations

import msgspec

from weft.export.deployment import Deployment, ReplicaServer
from weft.export.shell import Placeholder

INTERFACE = Placeholder(
    "NETWORK_INTERFACE", "name of the interface that joins the nodes, which ip route get ADDRESS tells"
)


class GpuVendor(msgspec.Struct, frozen=True):
    """`visible` is the variable that says which GPUs a process sees, `resource` what Kubernetes calls one, and
    `product` the label of nodes that tells their type (of NVIDIA's GPU feature discovery, of AMD's node labeller)."""

    visible: str
    resource: str
    product: str


NVIDIA = GpuVendor("CUDA_VISIBLE_DEVICES", "nvidia.com/gpu", "nvidia.com/gpu.product")
AMD = GpuVendor("HIP_VISIBLE_DEVICES", "amd.com/gpu", "amd.com/gpu.product-name")


def gpu_vendor(it: Deployment) -> GpuVendor:
    """Of the GPUs."""
    return AMD if it.gpu.gfx else NVIDIA


def visible_gpus(it: Deployment, server: ReplicaServer, node: int) -> dict[str, str]:
    """The GPUs that a server's process on a node shall see, numbered as nvidia-smi does."""
    if on_cpu(it):
        return {}
    found = {gpu_vendor(it).visible: ",".join(server.gpus(node))}
    return found if it.gpu.gfx else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **found}


def node_address(node: int) -> Placeholder:
    """Where the other nodes reach a node."""
    return Placeholder(f"NODE{node}_ADDRESS", f"address of node {node} on the network that joins the nodes")


def on_cpu(it: Deployment) -> bool:
    """Whether there is no GPU."""
    return it.gpu.kind == "cpu"
