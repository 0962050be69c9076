"""The fingerprint of a machine: what was measured on it holds as long as this stays the same."""

from __future__ import annotations

import hashlib

import msgspec

from weft.hardware.host import Host


def fingerprint(host: Host, *more: object) -> str:
    """Sixteen hexadecimal digits of the host's name, its CPU and the number of cores that compute, its GPUs and
    their driver, and whatever else (`more`) a measurement depends on, such as its own version."""
    cpu = host.cpu
    told = [
        host.hostname,
        cpu and [cpu.model, cpu.sockets, cpu.threads, cpu.features],
        len(host.compute_cores),
        host.driver,
        [[gpu.uuid, gpu.name, gpu.total_bytes] for gpu in host.gpus],
        [str(it) for it in more],
    ]
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()[:16]
