"""`python -m weft.cli.cluster.node_agent`: the program that `weft cluster` starts on a node through ssh."""

from __future__ import annotations

from weft import logs
from weft.api.service.run_files import running_servers
from weft.engine.cluster.agent import run_agent


def find_url(pid: int) -> str | None:
    """The address of a server, once it answers requests."""
    return next((server.url for server in running_servers() if server.pid == pid), None)


if __name__ == "__main__":
    logs.configure("INFO")
    run_agent(find_url)
