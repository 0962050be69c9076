"""Processes of Weft on this machine, from /proc. Linux only: elsewhere nothing is found."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

Role = Literal["serve", "gateway", "rank", "other"]
SERVERS: tuple[Role, ...] = ("serve", "gateway")
API_SERVER = "weft.entrypoints.openai.api_server"  # `weft serve` under vLLM's name


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process of this user. `command` are its arguments; `role` is "other" if it is none of Weft's."""

    pid: int
    parent: int
    command: tuple[str, ...]
    role: Role


def own_processes(root: Path = Path("/")) -> Iterator[Process]:
    """Every process of this user whose arguments can be read."""
    for folder in sorted((root / "proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the process has ended in between
            if folder.stat().st_uid != os.geteuid():
                continue
            words = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            # The process name in brackets may hold anything.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            yield Process(pid=int(folder.name), parent=parent, command=tuple(words), role=process_role(words))


def process_role(words: Sequence[str]) -> Role:
    """Role of the process with these arguments: `weft serve`, `weft gateway`, or a helper process of an engine."""
    if "-m" in words:
        module, *rest = words[words.index("-m") + 1 :] or [""]
        if module == API_SERVER:
            return "serve"
        if module.startswith("weft."):
            return "rank"
        return _command_role(rest) if module == "weft" else "other"
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]  # python .../bin/weft
    return _command_role(words[1:]) if words and Path(words[0]).name == "weft" else "other"


def _command_role(words: Sequence[str]) -> Role:
    for role in SERVERS:
        if words[:1] == [role]:
            return role
    return "other"


def orphans(processes: Sequence[Process]) -> list[Process]:
    """Helper processes of engines that belong to the init process because their parent has died.

    In a container the engine itself may have number 1: its children are no orphans.
    """
    first = next((process for process in processes if process.pid == 1), None)
    if first is not None and (first.role != "other" or "python" in first.command[0]):
        return []
    return [process for process in processes if process.role == "rank" and process.parent == 1]


def own_pids() -> frozenset[int]:
    """This process, and all processes of this user that descend from it."""
    children: dict[int, list[int]] = {}
    for process in own_processes():
        children.setdefault(process.parent, []).append(process.pid)
    family, left = set[int](), [os.getpid()]
    while left:
        pid = left.pop()
        family.add(pid)
        left += children.get(pid, [])
    return frozenset(family)
