"""Processes that a process has started."""

from __future__ import annotations

import psutil

SERVER = "weft.engine.processes.fork_server"
SANDBOX = "weft.engine.sandbox.process"


def family(pid: int | None = None, *, servers: bool = False) -> list[psutil.Process]:
    """Return the processes below one, of this process if none is given, in the order of their pids.

    Fork servers and sandboxes are left out unless `servers`: those of these tests stay for the next one.
    """
    members = psutil.Process(pid).children(recursive=True)
    return sorted((member for member in members if servers or not is_server(member)), key=lambda member: member.pid)


def command_line(member: psutil.Process) -> str:
    """The words of a process's command; "" for one that has ended, but whose parent does not know it yet."""
    try:
        return " ".join(member.cmdline())
    except psutil.Error:
        return ""


def is_server(member: psutil.Process) -> bool:
    """Return True for a fork server or a sandbox, False for a fork of the former that has no name of its own yet."""
    try:
        if SANDBOX in member.cmdline():
            return True
        parent = member.parent()
        return SERVER in member.cmdline() and not (parent and SERVER in parent.cmdline())
    except psutil.Error:
        return False
