"""Facts that a node reports about itself before it joins."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from weft._version import __version__
from weft.checkpoint.checkpoint import Checkpoint
from weft.engine.cluster.messages import Facts
from weft.engine.cluster.settings import NodeSettings
from weft.errors import WeftError
from weft.machine.hardware.addresses import check_private, interface_of, own_address, own_interfaces
from weft.machine.hardware.host import Host
from weft.regular_files import open_regular

HEADER_BYTES = 4 << 20  # bytes of each file that are compared, at most: headers and the first tensors
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
DESCRIBING = (".safetensors", ".gguf", "config.json", "index.json", "tokenizer.json", "rank.json")


def gather_facts(
    settings: NodeSettings, host: Host, model: str, checkpoint: Checkpoint | WeftError, environment: Mapping[str, str]
) -> Facts:
    """Gather this node's facts; `checkpoint` may be the error of a model that is missing here.

    Raises ConfigError if the address is public without `allow_public` or none of this machine's, or if there is no
    route to the head.
    """
    address = own_address(settings.address, settings.port, environment) if settings.node else settings.address
    check_private(address, settings.allow_public)
    interfaces = own_interfaces()
    missing = isinstance(checkpoint, WeftError)
    return Facts(
        node=settings.node,
        nodes=settings.nodes,
        host=host,
        address=address,
        interface=interface_of(address),
        interfaces=tuple(sorted(set(interfaces.values()))),
        host_ip=environment.get("VLLM_HOST_IP", ""),
        machine=machine_id(),
        weft=__version__,
        torch=torch_version(),
        model=model,
        model_digest="" if isinstance(checkpoint, WeftError) else model_digest(Path(checkpoint.path)),
        problem=str(checkpoint) if missing else "",
        wrong_interface=wrong_interface(environment, set(interfaces.values())),
        shm_free_bytes=_shm_free_bytes(),
        open_files=_open_files(),
        clock_s=time.time(),
        replicas=settings.replicas,
    )


def model_digest(path: Path) -> str:
    """SHA-256 of the sizes and the beginnings of a model's files, without their weights' greater part."""
    digest = hashlib.sha256()
    for file in _model_files(path):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with open_regular(file) as opened:
            digest.update(opened.read(HEADER_BYTES))
    return digest.hexdigest()


def _model_files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for file in sorted(path.iterdir()):
        if file.name.endswith(DESCRIBING) and file.is_file():
            yield file


def wrong_interface(environment: Mapping[str, str], interfaces: set[str]) -> str:
    """First variable that names only interfaces that this node does not have, as NAME=VALUE; "" if there is none."""
    for name in INTERFACE_VARIABLES:
        value = environment.get(name, "")
        if not value or value.startswith("^"):
            continue
        exact = value.startswith("=") or name.startswith("GLOO")
        wanted = value.lstrip("=").split(",")
        if not any(have == one if exact else have.startswith(one) for one in wanted for have in interfaces):
            return f"{name}={value}"
    return ""


def machine_id() -> str:
    """Id of the running system, "" if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def torch_version() -> str:
    """Version of the installed torch, without its build; "" without torch."""
    try:
        return metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def _shm_free_bytes() -> int | None:
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None


def _open_files() -> int:
    import resource  # not on Windows

    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]
