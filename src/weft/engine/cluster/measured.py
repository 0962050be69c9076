"""Nodes that a start has checked, with the network between them, for `weft plan --cluster`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from weft.cache import cache_path, warn_damaged, write_cache_file
from weft.engine.cluster.messages import Facts, Speed
from weft.errors import ConfigError, WeftError
from weft.machine.hardware.cluster import Cluster
from weft.machine.hardware.host import Host
from weft.probes import machine
from weft.probes.stored_speeds import load_speeds

log = logging.getLogger("weft.cluster")

FILE = "cluster.json"
START = "start the engine once with --nnodes, or with weft cluster up: its checks measure them"


class MeasuredCluster(msgspec.Struct, frozen=True):
    """The machines, the head's first, and the slowest network between two of them: bytes per second, and seconds of a
    small message, one way (None in files of earlier versions). `speeds` are the speeds of all pairs, by the numbers of
    `hosts`, whose `addresses` are in the same order."""

    hosts: tuple[Host, ...]
    network_Bps: float
    network_s: float | None = None
    addresses: tuple[str, ...] = ()
    speeds: tuple[Speed, ...] = ()


def store_cluster(facts: Sequence[Facts], speeds: Sequence[Speed]) -> None:
    """Keep what the checks have found, if there are speeds; a cache that cannot be written is logged."""
    if not speeds:
        return
    measured = MeasuredCluster(
        hosts=tuple(node.host for node in facts),
        network_Bps=min(speed.bytes_per_s for speed in speeds),
        network_s=max(speed.round_trip_s for speed in speeds) / 2,
        addresses=tuple(node.address for node in facts),
        speeds=tuple(speeds),
    )
    try:
        write_cache_file(cache_path() / FILE, msgspec.json.format(msgspec.json.encode(measured)))
    except (OSError, RuntimeError, WeftError) as error:
        log.info("weft plan --cluster will not know these nodes: %s", error)


def load_measured() -> MeasuredCluster | None:
    """The nodes of the last start here; None if there has been none. Logs a file that is damaged."""
    try:
        return msgspec.json.decode((cache_path() / FILE).read_bytes(), type=MeasuredCluster)
    except (OSError, RuntimeError):
        return None
    except msgspec.DecodeError as error:
        warn_damaged(cache_path() / FILE, str(error), START)
        return None


def load_cluster() -> Cluster:
    """The nodes of the last start as hardware to plan for.

    GPUs have the measured speeds of the same type on this machine, else the data sheet's. Raises ConfigError if there
    has been no start here, or if a node has no GPU.
    """
    measured = load_measured()
    if measured is None:
        raise ConfigError(f"no nodes have been measured here yet; {START}", code="no-measured-cluster")
    for number, host in enumerate(measured.hosts):
        if not host.gpus:
            raise ConfigError(
                f"node {number} ({host.hostname}) has no GPU, and several machines are planned with GPUs only; plan "
                "for one machine, without --cluster",
                code="measured-node-without-gpu",
            )
    speeds = load_speeds(measured.hosts[0])
    nodes = tuple(machine.gpu_node(host, speeds) for host in measured.hosts)
    return Cluster(nodes, measured.network_Bps, network_s=measured.network_s)
