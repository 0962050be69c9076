"""Fingerprint of a machine: its measurements are valid as long as the fingerprint stays the same."""

from __future__ import annotations

import hashlib

import msgspec

from weft.machine.hardware.host import Host


def fingerprint(host: Host, *versions: object) -> str:
    """Sixteen hexadecimal digits of the host's name, CPU, number of cores that compute, GPUs and driver.

    `versions` are other things that a measurement depends on, such as its own version.
    """
    cpu = host.cpu
    parts = [
        host.hostname,
        cpu and [cpu.model, cpu.sockets, cpu.threads, cpu.features],
        len(host.compute_cores),
        host.driver,
        [[gpu.uuid, gpu.name, gpu.total_bytes] for gpu in host.gpus],
        [str(version) for version in versions],
    ]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]
