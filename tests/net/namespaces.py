"""Two hosts on one machine: network namespaces with a cable between them."""

from __future__ import annotations

import os
import shutil
import subprocess

from scripts.programs.bench.net.links import ip, remove_leftovers

HOSTS = ("10.231.77.1", "10.231.77.2")


def obstacle() -> str:
    """Reason why this system has no network namespaces for us; "" if it has."""
    if not shutil.which("ip"):
        return "network namespaces need the program ip (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"weft-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"network namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Cable:
    """Two namespaces, `names`, with the addresses HOSTS, and the cable between them."""

    def __init__(self) -> None:
        remove_leftovers()
        self.names = tuple(f"weft-{os.getpid()}-{host}" for host in "ab")
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        first, second = self.names
        ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip(self.names, HOSTS, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
        self.join()

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", "cable", "down")

    def join(self) -> None:
        for name in self.names:
            ip("-n", name, "link", "set", "cable", "up")

    def inside(self, host: int) -> list[str]:
        """Words that run a command on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def close(self) -> None:
        for name in self.names:
            ip("netns", "del", name)
