"""weft cluster cert: certificates for the connections between nodes."""

from __future__ import annotations

from pathlib import Path

from weft.cli.flags.cluster_flags import CertArguments
from weft.cli.parser import UsageError
from weft.engine.cluster.hosts import read_hosts


def main(arguments: CertArguments) -> int:
    """Write the certificates, and say what to do with them."""
    positional, nodes = arguments.argument, arguments.nodes
    if len(positional) > 1 or bool(positional) == bool(nodes):
        raise UsageError("weft cluster cert takes a hosts file or --nodes N, the number of nodes", code="nodes-missing")
    folder = Path(arguments.out).expanduser()
    if positional:
        hosts = read_hosts(positional[0])
        nodes = len(hosts.hosts)
        folder = Path(hosts.certificates) if hosts.certificates else Path(positional[0]).expanduser().parent / folder
    from weft.engine.cluster.certificates import make_certificates

    paths = make_certificates(folder, nodes or 1, arguments.days)
    for path in paths:
        print(path)
    if positional:
        used = f"with certificates: {folder.resolve()} in {positional[0]}, weft cluster up uses them"
        print(f"valid for {arguments.days} days; {used}")
    else:
        print(
            f"valid for {arguments.days} days; copy each to its node, and give --cluster-cert-file there; "
            f"{folder / 'ca.key'} stays here"
        )
    return 0
