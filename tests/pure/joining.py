"""A head and nodes that join it: settings of this machine, and facts of machines that are alike."""

from __future__ import annotations

import socket
from typing import Any

from tests.pure.machines import host
from weft.engine.cluster.messages import Facts
from weft.engine.cluster.settings import NodeSettings


def facts(node: int, **others: Any) -> Facts:
    values: dict[str, Any] = {
        "node": node,
        "nodes": 2,
        "host": host(hostname=f"host{node}"),
        "address": f"10.0.0.{node + 1}",
        "interface": "eth0",
        "interfaces": ("eth0", "lo"),
        "host_ip": "",
        "machine": f"machine{node}",
        "weft": "1.0",
        "torch": "2.13.0",
        "model": "m",
        "model_digest": "abcdefabcdefabcd",
        "problem": "",
        "wrong_interface": "",
        "shm_free_bytes": 10**10,
        "open_files": 65536,
        "clock_s": 0.0,
    }
    return Facts(**(values | others))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def joining_settings(port: int, **others: Any) -> NodeSettings:
    values: dict[str, Any] = {"nodes": 2, "node": 0, "address": "127.0.0.1", "port": port}
    values |= {"start_timeout_s": 30.0, "allow_public": False, "key": b"a" * 32}
    return NodeSettings(**(values | others))
