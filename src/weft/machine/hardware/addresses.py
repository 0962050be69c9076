"""Addresses of this machine: its address on the route to a peer, its interface, and the ranges that are private."""

from __future__ import annotations

import array
import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from weft.errors import ConfigError, error_reason

# RFC 1918, RFC 4193, RFC 3927, RFC 4291 and RFC 1122.
PRIVATE = tuple(
    ipaddress.ip_network(block)
    for block in (
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "fc00::/7",
        "169.254.0.0/16",
        "fe80::/10",
        "127.0.0.0/8",
        "::1/128",
    )
)
LIST_ADDRESSES = 0x8912  # SIOCGIFCONF of linux/sockios.h: every IPv4 address, with its interface
ENTRY_BYTES, MAX_ENTRIES = 40, 1024  # size and number of struct ifreq


def check_private(address: str, allow_public: bool) -> None:
    """Raise ConfigError for an address outside the private, link-local and loopback ranges, and for a name."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        raise ConfigError(
            f"{address!r:.60} is no IP address; give VLLM_HOST_IP as numbers, such as 10.0.0.1", code="not-an-address"
        ) from None
    if not allow_public and not any(parsed in block for block in PRIVATE if block.version == parsed.version):
        raise ConfigError(
            f"{address} is a public address, and the tensors between nodes are neither encrypted nor checked; connect "
            "the nodes through a private network or a VPN, or give --allow-public",
            code="public-address",
        )


def own_address(peer: str, port: int, environment: Mapping[str, str]) -> str:
    """Return this machine's address that routes to a peer: VLLM_HOST_IP if it is set, else the system's choice.

    Raises ConfigError if there is no route.
    """
    if chosen := environment.get("VLLM_HOST_IP"):
        return chosen
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, port))  # sends nothing
        except OSError as error:
            raise ConfigError(
                f"there is no route to {peer}: {error_reason(error)}; check --master-addr and this machine's network",
                code="no-route",
            ) from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the name of the interface with this address of this machine. Raises ConfigError if it has none."""
    interface = own_interfaces().get(address.partition("%")[0])
    if interface is None:
        known = ", ".join(sorted(own_interfaces())) or "none"
        raise ConfigError(
            f"{address} is no address of this machine, which has {known}; check --master-addr, --node-rank and "
            "VLLM_HOST_IP",
            code="address-of-another-machine",
        )
    return interface


def own_interfaces() -> dict[str, str]:
    """Interface of each address of this machine."""
    if sys.platform != "linux":
        return {"127.0.0.1": "lo0"}
    return _interfaces_v4() | _interfaces_v6()


def _interfaces_v4() -> dict[str, str]:
    import fcntl

    buffer = array.array("B", bytes(ENTRY_BYTES * MAX_ENTRIES))
    place, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        reply = fcntl.ioctl(any_socket, LIST_ADDRESSES, struct.pack("iL", size, place))
    used = struct.unpack("iL", reply)[0]
    entries = (buffer[at : at + ENTRY_BYTES].tobytes() for at in range(0, used, ENTRY_BYTES))
    # A second address of an interface may have a label: eth0:1.
    return {socket.inet_ntoa(entry[20:24]): entry[:16].split(b"\0")[0].decode().partition(":")[0] for entry in entries}


def _interfaces_v6() -> dict[str, str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {str(ipaddress.ip_address(bytes.fromhex(field[0]))): field[5] for field in fields}
