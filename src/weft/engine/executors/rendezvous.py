"""A rank's part of the rendezvous over TCP, before torch is imported: rank 0 listens, and the others check that they
reach it."""

from __future__ import annotations

import socket
from collections.abc import Callable

from weft.engine.executors.messages import Launch, Listening
from weft.engine.processes.causes import CANNOT_REACH
from weft.errors import ConfigError, error_reason
from weft.plan.wiring import Network, Tcp

REACH_S = 20.0  # seconds to reach rank 0, which listens before its address is passed on


def join_rendezvous(launch: Launch, send: Callable[[Listening], None]) -> socket.socket | None:
    """Listen if this is rank 0, and report the address; else check that rank 0 is reached.

    Returns rank 0's socket, None for other ranks and for a rendezvous by file. Raises ConfigError.
    """
    address = launch.rendezvous
    if not isinstance(address, Tcp):
        return None
    if launch.rank:
        if _uses_network(launch):
            check_reachable(address)
        return None
    listener = listen(address)
    send(Listening(Tcp(address.host, listener.getsockname()[1])))
    return listener


def _uses_network(launch: Launch) -> bool:
    """False if all ranks of the plan share memory: rank 0 may have done without a rendezvous before others start."""
    return isinstance(launch.wiring, Network) or len({device.node for device in launch.plan.devices}) > 1


def listen(address: Tcp) -> socket.socket:
    """Listen at an address of this host. Raises ConfigError if it cannot be bound."""
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {_name(address)} for the other ranks: {error_reason(error)}; give an address of this "
            "machine, and a port that is free, or 0 for any",
            code="cannot-listen",
        ) from None


def check_reachable(address: Tcp, timeout_s: float = REACH_S) -> None:
    """Raise ConfigError if nothing listens at an address, or no answer comes within `timeout_s` seconds."""
    try:
        socket.create_connection((address.host, address.port), timeout_s).close()
    except OSError as error:
        raise ConfigError(
            f"cannot reach rank 0 at {_name(address)}: {error_reason(error)}; check that rank 0 still runs, and that "
            "no firewall is between the machines",
            code=CANNOT_REACH,
        ) from None


def _name(address: Tcp) -> str:
    return f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"
