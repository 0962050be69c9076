"""Settings of a node, from the options of the engine and torchrun's variables."""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
from collections.abc import Mapping

import msgspec

from weft.config import EngineConfig
from weft.engine.processes.keys import load_key
from weft.engine.processes.tls import load_certificate
from weft.errors import ConfigError
from weft.machine.hardware.addresses import check_private
from weft.plan.nodes import divide_nodes

MASTER_PORT = 29501  # vLLM's default


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a node before it meets the others.

    `address` is the head's, as numbers; the timeout is in seconds. `replicas` is the number of engines. `certificate`
    is this node's bundle in PEM, "" without TLS.
    """

    nodes: int
    node: int
    address: str
    port: int
    start_timeout_s: float
    allow_public: bool
    key: bytes
    certificate: str = ""
    replicas: int = 1

    @property
    def groups(self) -> list[range]:
        """The nodes of each replica."""
        return divide_nodes(self.nodes, self.replicas)

    @property
    def head(self) -> str:
        """The head's address and port, as text."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def served_config(config: EngineConfig, environment: Mapping[str, str]) -> EngineConfig:
    """Return the config of `weft serve`, with torchrun's GROUP_WORLD_SIZE as the number of nodes if none is given.

    An `LLM` in a program under torchrun is an engine of its own process, so only the server asks. Raises ConfigError.
    """
    if config.nnodes is not None or config.executor == "ray":
        return config
    nodes = _number(environment, "GROUP_WORLD_SIZE") or 1
    return config if nodes == 1 else dataclasses.replace(config, nnodes=nodes)


def node_settings(config: EngineConfig, environment: Mapping[str, str]) -> NodeSettings | None:
    """Return the settings of this node; None if one node runs the whole engine, without a look at the environment.

    With several nodes, torchrun's GROUP_RANK, MASTER_ADDR and MASTER_PORT count where the options are left out. Raises
    ConfigError for options that are missing, or that do not fit together.
    """
    nodes = config.nnodes or 1
    if nodes == 1:
        if config.headless or config.node_rank:
            flag = "--headless" if config.headless else f"--node-rank {config.node_rank}"
            raise ConfigError(f"{flag} needs --nnodes, the number of nodes", code="node-without-nnodes")
        return None
    node = config.node_rank if config.node_rank is not None else _number(environment, "GROUP_RANK") or 0
    if node >= nodes:
        raise ConfigError(
            f"--node-rank is {node}; the {nodes} nodes have the numbers 0 to {nodes - 1}", code="node-beyond-nnodes"
        )
    if config.headless and node == 0:
        raise ConfigError(
            "--headless is for the other nodes; node 0 answers requests: leave it out, or give --node-rank",
            code="headless-head",
        )
    return NodeSettings(
        nodes=nodes,
        node=node,
        address=_head_address(config, environment, nodes, node),
        port=_head_port(config, environment),
        start_timeout_s=config.start_timeout,
        allow_public=config.allow_public,
        key=load_key(config.cluster_key_file, environment, nodes),
        replicas=replica_count(config),
        certificate=load_certificate(config.cluster_cert_file),
    )


def replica_count(config: EngineConfig) -> int:
    """Number of engines that the config asks for; attention groups that share experts are one."""
    return 1 if config.enable_expert_parallel else config.data_parallel_size or 1


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    if text and not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}; it must be a number", code="bad-torchrun-variable")
    return int(text) if text else None


def _head_address(config: EngineConfig, environment: Mapping[str, str], nodes: int, node: int) -> str:
    """The head's address, as numbers. Raises ConfigError if it is missing, unknown, public, or only this machine's."""
    name = config.master_addr or environment.get("MASTER_ADDR", "")
    if not name:
        raise ConfigError(
            f"--nnodes {nodes} needs --master-addr, the address of node 0 that the others reach (`hostname -I` there "
            "lists its addresses)",
            code="nodes-without-master-addr",
        )
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        raise ConfigError(
            f"--master-addr {name} is no known host; give node 0's address as numbers", code="unknown-master-addr"
        ) from None
    check_private(address, config.allow_public)
    if node == 0 and name not in (address, "localhost") and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise ConfigError(
            f"--master-addr {name} is {address} on this machine (see /etc/hosts), which other nodes do not reach; give "
            "node 0's address as numbers (`hostname -I` lists them)",
            code="loopback-master-addr",
        )
    return address


def _head_port(config: EngineConfig, environment: Mapping[str, str]) -> int:
    port = config.master_port
    if port is None:
        port = _number(environment, "MASTER_PORT")
        # There torchrun itself listens.
        if port is not None and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1
    port = MASTER_PORT if port is None else port
    if not 0 < port < 65536:
        raise ConfigError(f"--master-port is {port}; ports are 1 to 65535", code="bad-master-port")
    return port
