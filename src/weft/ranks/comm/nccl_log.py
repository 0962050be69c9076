"""NCCL's own log: what it really chose between nodes, in a few lines."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

FILE_VARIABLE = "NCCL_DEBUG_FILE"
OUR_FILES = "weft-nccl-"  # begins the names of files that executors ask for
# Lines of NCCL 2.18 to 2.28 (src/transport/net*.cc, src/init.cc, src/misc/param.cc).
NETWORK = re.compile(r"NCCL INFO (NET/\w+) ?: Using (.+)")
PLUGIN = re.compile(r"NCCL INFO Using network (\S+)")
DIRECT = re.compile(r"NCCL INFO .*GPU Direct RDMA (Enabled|Disabled) for (.+)")
CHANNEL = re.compile(r"\[(?:send|receive)\] via (NET/\S+)")
SETTING = re.compile(r"NCCL INFO (NCCL_(?:IB|NET|SOCKET|CROSS_NIC|P2P)\w*) set by environment to (.+)")
PATTERNS = (SETTING, NETWORK, PLUGIN, DIRECT)


def choices(text: str) -> list[str]:
    """The variables that NCCL has read, its network, GPUDirect RDMA, and the way of its channels, each once."""
    facts: dict[str, None] = {}
    channels: dict[str, int] = {}
    for line in text.splitlines():
        if channel := CHANNEL.search(line):
            # NET/IB/0/GDRDMA(PXN) and NET/Socket/0: the transport, the card, and the way into GPU memory.
            channels[channel[1]] = channels.get(channel[1], 0) + 1
            continue
        for pattern in PATTERNS:
            if match := pattern.search(line):
                facts[_words(pattern, match)] = None
    ways = [f"{count} channel ends via {way}" for way, count in sorted(channels.items())]
    return [*facts, *ways]


def _words(pattern: re.Pattern[str], match: re.Match[str]) -> str:
    first, second = match[1].strip(), match[match.re.groups].strip()
    if pattern is SETTING:
        return f"{first}={second.rstrip('.')}"
    if pattern is NETWORK:
        return f"{first}: {second}"
    return f"network {first}" if pattern is PLUGIN else f"GPUDirect RDMA {first.lower()} for {second}"


def read_choices(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The `choices` in the file that the rank's environment names, which is removed; [] without one."""
    path = Path(environment.get(FILE_VARIABLE, "").replace("%p", str(os.getpid())))
    if not path.name.startswith(OUR_FILES):
        return []
    try:
        text = path.read_text("utf-8", "replace")
        path.unlink()
    except OSError:
        return []
    return choices(text)
