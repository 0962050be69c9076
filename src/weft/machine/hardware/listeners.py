"""Listening TCP sockets of this machine, and the processes behind them. Linux only: elsewhere nothing is found."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

LISTENING = "0A"  # state of a socket in /proc/net/tcp


class Listener(msgspec.Struct, frozen=True, kw_only=True):
    """A listening socket: its address, its port, and its inode number."""

    address: str
    port: int
    inode: str

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can connect."""
        return ipaddress.ip_address(self.address).is_loopback


def listeners(root: Path = Path("/")) -> Iterator[Listener]:
    """Every listening TCP socket of this network namespace."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (root / "proc/net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == LISTENING:
                address, _, port = fields[1].rpartition(":")
                yield Listener(address=decode_address(address), port=int(port, 16), inode=fields[9])


def decode_address(digits: str) -> str:
    """An address as the kernel prints it, 32-bit words in the machine's byte order, in the usual notation."""
    words = [bytes.fromhex(digits[start : start + 8]) for start in range(0, len(digits), 8)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def socket_inodes(pid: int, root: Path = Path("/")) -> set[str]:
    """Inode numbers of the sockets that a process holds; empty if this user may not see them."""
    inodes = set()
    with contextlib.suppress(OSError):
        for file in (root / "proc" / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(file)
                if target.startswith("socket:["):
                    inodes.add(target[len("socket:[") : -1])
    return inodes


def port_holder(port: int, root: Path = Path("/")) -> str | None:
    """The program that listens on a port, such as "nginx (process 42)", if this user may see it."""
    inodes = {listener.inode for listener in listeners(root) if listener.port == port}
    for folder in (root / "proc").glob("[0-9]*") if inodes else ():
        if inodes & socket_inodes(int(folder.name), root):
            with contextlib.suppress(OSError):
                return f"{(folder / 'comm').read_text().strip()} (process {folder.name})"
    return None
