"""weft cluster status: the nodes of a cluster, who runs what on them, and what is free."""

from __future__ import annotations

import os

import msgspec

from weft.cli.flags.cluster_flags import StatusArguments


def main(arguments: StatusArguments) -> int:
    """Print the status as lines, or as one JSON object."""
    from weft.api.service.run_files import running_servers
    from weft.engine.cluster.status import NodeUser, cluster_status, status_lines
    from weft.machine.hardware.host import probe_host

    servers = [
        NodeUser(name=", ".join(server.names), model=server.names[0], state="running", ranks=None, url=server.url)
        for server in running_servers()
        if server.names
    ]
    status = cluster_status(probe_host(), os.environ, servers)
    if arguments.json:
        print(msgspec.json.encode(status).decode())
    else:
        print("\n".join(status_lines(status)))
    return 0
