"""Network namespaces as machines, and a link between two of them with a rate and a latency.

The link is a TUN device in each namespace. This process is the machine in the middle: it reads the packets of both
devices, holds each for the latency, and writes it to the other. `tc tbf` limits the rate of each device. Unlike `tc
netem`, all of that is in every kernel.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress

SET_INTERFACE, TUN, NO_HEADER = 0x400454CA, 0x0001, 0x1000  # TUNSETIFF, IFF_TUN and IFF_NO_PI of linux/if_tun.h
PACKET_BYTES = 65536
MAX_PACKETS = 16  # packets read at once, so that none is held much longer than the latency
MTU = 9000  # bytes, as of jumbo frames: Python relays no more than some 30,000 packets per second
ADDRESSES = ("10.231.78.1", "10.231.78.2")
DEVICE = "cable"


def ip(*words: str) -> None:
    """Run `ip` with these words. Raises CalledProcessError."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def remove_leftovers() -> None:
    """Remove the namespaces of runs that were killed, with the processes in them."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.strip()):
        owner = re.fullmatch(r"weft-(\d+)-\w+", name)
        if owner is None or os.path.exists(f"/proc/{owner[1]}"):
            continue
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
        for process in inside.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        ip("netns", "del", name)


class SlowLink:
    """Two namespaces, with ADDRESSES, and a link of a rate and a latency between them. A context manager."""

    def __init__(self, rate: str, latency_s: float) -> None:
        """`rate` is in the words of tc: 1gbit. `latency_s` is the time that each packet is held, in seconds."""
        self.names = tuple(f"weft-{os.getpid()}-{side}" for side in ("left", "right"))
        self._latency_s = latency_s
        self._ends = [self._open_end(*each, rate) for each in zip(self.names, ADDRESSES, strict=True)]
        self._ended, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._relay, name="relay", daemon=True)

    def __enter__(self) -> SlowLink:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        os.write(self._wake, b"\0")
        self._thread.join()
        for descriptor in (*self._ends, self._ended, self._wake):
            os.close(descriptor)
        for name in self.names:
            ip("netns", "del", name)

    def inside(self, side: int) -> list[str]:
        """Words that run a command in a namespace."""
        return ["ip", "netns", "exec", self.names[side]]

    def _open_end(self, name: str, address: str, rate: str) -> int:
        """Make a namespace with a device; return the descriptor of the device's packets."""
        device = f"weft{os.getpid() % 10**6}{name[-1]}"
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, SET_INTERFACE, struct.pack("16sH", device.encode(), TUN | NO_HEADER))
        ip("netns", "add", name)
        ip("link", "set", device, "netns", name, "name", DEVICE)
        ip("-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
        ip("-n", name, "link", "set", DEVICE, "mtu", str(MTU), "txqueuelen", "5000")
        for interface in ("lo", DEVICE):
            ip("-n", name, "link", "set", interface, "up")
        limit = ["qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", rate, "burst", "128kb", "latency", "100ms"]
        subprocess.run(["tc", "-n", name, *limit], check=True, capture_output=True)
        return descriptor

    def _relay(self) -> None:
        """Hold every packet for the latency, then pass it on."""
        others = dict(zip(self._ends, reversed(self._ends), strict=True))
        held: deque[tuple[float, int, bytes]] = deque()  # due at, to, packet
        while True:
            wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
            ready, _, _ = select.select([*self._ends, self._ended], [], [], wait_s)
            if self._ended in ready:
                return
            due_s = time.monotonic() + self._latency_s
            for end in ready:
                for _ in range(MAX_PACKETS):
                    packet = _read_packet(end)
                    if packet is None:
                        break
                    held.append((due_s, others[end], packet))
            while held and held[0][0] <= time.monotonic():
                _, end, packet = held.popleft()
                _write_packet(end, packet)


def _read_packet(end: int) -> bytes | None:
    try:
        return os.read(end, PACKET_BYTES)
    except BlockingIOError:
        return None


def _write_packet(end: int, packet: bytes) -> None:
    try:
        os.write(end, packet)
    except OSError:  # the device is down or its queue is full: a packet is lost, as on any network
        return
