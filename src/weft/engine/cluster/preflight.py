"""Checks of all nodes before a byte of weights is read: facts in, failures out."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence

from weft.config import EngineConfig
from weft.engine.cluster.messages import Facts, Speed
from weft.errors import printable
from weft.formatting import format_bytes

MAX_SKEW_S = 30.0  # difference of clocks; beyond it, logs of several nodes cannot be read together
MIN_OPEN_FILES = 1024  # files that a process must be allowed to open
NAME = 253  # characters of a host's name that are shown: the longest of DNS
MIN_SHM_BYTES = 64 << 20  # bytes free in /dev/shm, for NCCL's buffers between GPUs of a node


def failures(facts: Sequence[Facts], speeds: Sequence[Speed], fetch: str) -> list[str]:
    """Failures of all nodes, each with node, value and remedy; [] if the engine may start.

    `facts` are the head's first, then any other nodes'. `fetch` is a command that fetches the model.
    """
    checks: tuple[Callable[[Sequence[Facts]], Iterator[str]], ...] = (
        _versions,
        lambda nodes: _models(nodes, fetch),
        _addresses,
        _interfaces,
        _clocks,
        _limits,
    )
    problems = [failure for check in checks for failure in check(facts)]
    labels = {one.node: label(one) for one in facts}
    problems += [
        f"{labels[speed.first]} does not reach {labels[speed.second]} at {speed.problem}; check the "
        "firewall between them: nodes connect at ports that the system chooses"
        for speed in speeds
        if speed.problem
    ]
    return [printable(failure) for failure in problems]


def fetch_command(config: EngineConfig) -> str:
    """Command that fetches the model on another node."""
    if os.path.exists(config.model):
        path = os.path.abspath(config.model)
        return f"rsync -a NODE0:{shlex.quote(path)} {shlex.quote(os.path.dirname(path))}/"
    return f"weft pull {shlex.quote(config.model)}"


def label(facts: Facts) -> str:
    """A node in messages to the user."""
    return printable(f"node {facts.node} ({facts.host.hostname:.{NAME}}, {facts.address:.{NAME}})")


def _versions(nodes: Sequence[Facts]) -> Iterator[str]:
    head = nodes[0]
    for node in nodes[1:]:
        if node.weft != head.weft:
            yield f"{label(node)} has Weft {node.weft}, and node 0 has {head.weft}; install the same on both"
        if node.torch != head.torch:
            yield (
                f"{label(node)} has torch {node.torch or 'not installed'}, and node 0 has {head.torch}; "
                f"pip install torch=={head.torch} there"
            )


def _models(nodes: Sequence[Facts], fetch: str) -> Iterator[str]:
    head = nodes[0]
    for node in nodes[1:]:
        if node.problem:
            yield f"{label(node)} does not have the model: {node.problem}; run there: {fetch}"
        elif node.model_digest != head.model_digest:
            yield (
                f"{label(node)} has other files of {node.model} (digest {node.model_digest[:12]}) than node 0 "
                f"({head.model_digest[:12]}); run there: {fetch}"
            )


def _addresses(nodes: Sequence[Facts]) -> Iterator[str]:
    seen: dict[str, Facts] = {}
    for node in nodes:
        other = seen.setdefault(node.host_ip, node)
        if node.host_ip and other is not node and other.machine != node.machine:
            yield f"{label(node)} and {label(other)} have the same VLLM_HOST_IP, {node.host_ip}; give each its own"


def _interfaces(nodes: Sequence[Facts]) -> Iterator[str]:
    for node in nodes:
        if node.wrong_interface:
            yield (
                f"{label(node)} has no interface as in {node.wrong_interface}, it has {', '.join(node.interfaces)}; "
                f"unset the variable there ({node.interface} routes to the others)"
            )


def _clocks(nodes: Sequence[Facts]) -> Iterator[str]:
    for node in nodes:
        if abs(node.skew_s) > MAX_SKEW_S:
            yield (
                f"the clock of {label(node)} is {abs(node.skew_s):.0f} s {'ahead' if node.skew_s > 0 else 'behind'}; "
                "set it there: timedatectl set-ntp true"
            )


def _limits(nodes: Sequence[Facts]) -> Iterator[str]:
    for node in nodes:
        if 0 <= node.open_files < MIN_OPEN_FILES:
            yield (
                f"{label(node)} may open {node.open_files} files, {MIN_OPEN_FILES} are needed; "
                f"ulimit -n {MIN_OPEN_FILES}"
            )
        shm = node.shm_free_bytes
        if node.host.gpus and shm is not None and shm < MIN_SHM_BYTES:
            yield (
                f"{label(node)} has {format_bytes(shm)} free in /dev/shm, NCCL needs {format_bytes(MIN_SHM_BYTES)}; "
                "in a container: --shm-size 8g or --ipc host"
            )


def summary(facts: Sequence[Facts], speeds: Sequence[Speed]) -> list[str]:
    """Log lines: each node, and the network between every two."""
    lines = [
        f"{label(node)}: interface {node.interface}, {len(node.host.gpus)} GPUs, {len(node.host.cores)} cores, "
        f"{format_bytes(node.host.memory_free_bytes)} of memory free"
        for node in facts
    ]
    lines += [
        f"network {speed.first}-{speed.second}: {8 * speed.bytes_per_s / 1e9:.2f} Gb/s, "
        f"{1e6 * speed.round_trip_s:.0f} us there and back"
        for speed in speeds
        if not speed.problem
    ]
    return lines
