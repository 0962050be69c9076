"""A fork server that the engines of a process's tests use one after the other: torch is imported once for all."""

from __future__ import annotations

from collections.abc import Mapping

from weft.engine.processes.fork_client import ForkClient


class KeptServer(ForkClient):
    """A fork server that its user leaves to the next one."""

    lent = False

    def end(self) -> None:
        self.lent = False


_kept: list[KeptServer] = []


def lend_server(environment: Mapping[str, str]) -> ForkClient:
    """Return a fork server for processes with these variables: the kept one, or a new one while that is in use."""
    if _kept and _kept[0].lent:
        return ForkClient(environment)
    if _kept and not (_kept[0].alive and _kept[0].suits(environment)):
        end_kept_server()
    if not _kept:
        _kept.append(KeptServer(environment))
    _kept[0].lent = True
    return _kept[0]


def take_back() -> None:
    """Leave the kept server to the next user."""
    for server in _kept:
        server.end()


def end_kept_server() -> None:
    while _kept:
        ForkClient.end(_kept.pop())
