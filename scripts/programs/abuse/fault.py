"""Fault of servers under abuse: one prompt ends the process that gets it, as a bug of the engine would.

A server has it that is started with `environment_of(folder, kind)`: Python imports `sitecustomize` by itself.
"""

from __future__ import annotations

import os
from pathlib import Path

from scripts.programs.abuse.server import ROOT

DEADLY = [11, 7, 11, 7, 11, 7, 11]  # token ids
# The core is started by the server, or forked from the process of the second module, which the server has started.
SOURCE = """
import os, signal, sys

if {{"weft.engine.replicas.process", "weft.engine.processes.fork_server"}} & {{*sys.orig_argv}}:
    from weft.engine.core.engine import EngineCore

    add, server = EngineCore.add, os.getppid()

    def add_or_end(self, request):
        if list(request.prompt) == {deadly}:
            with open({deaths!r}, "a") as deaths:
                deaths.write("x")
            os.kill(server if {of_server} else os.getpid(), signal.SIGKILL)
            signal.pause()
        add(self, request)

    EngineCore.add = add_or_end
"""


def environment_of(folder: Path, *, of_server: bool) -> dict[str, str]:
    """Variables of a server with the fault, of which `folder` keeps the file and the count.

    `of_server`: not the engine ends, but all of the server.
    """
    source = SOURCE.format(deadly=DEADLY, deaths=str(folder / "deaths"), of_server=of_server)
    (folder / "sitecustomize.py").write_text(source)
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")])}


def deaths(folder: Path) -> int:
    """Deaths of all servers with this folder."""
    path = folder / "deaths"
    return path.stat().st_size if path.exists() else 0
