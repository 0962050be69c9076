"""Flags of weft cluster."""

from __future__ import annotations

from typing import ClassVar

from weft.cli.flags import values
from weft.cli.flags.command_flags import AS_JSON
from weft.cli.flags.declared import Arguments, flag


class StatusArguments(Arguments):
    """weft cluster status."""

    title: ClassVar = "cluster"
    json: bool = AS_JSON


class UpArguments(Arguments):
    """weft cluster up HOSTS."""

    title: ClassVar = "cluster"
    dry_run: bool = flag(False, help="print the commands, without any secret, and start nothing")
    model: str = flag("", metavar="MODEL", help="the model, instead of the file's")


class ClusterPullArguments(Arguments):
    """weft cluster pull NAME."""

    title: ClassVar = "cluster"
    hosts: str = flag("hosts.yaml", metavar="FILE", help="the file that lists the machines (docs/several-machines.md)")


class CertArguments(Arguments):
    """weft cluster cert HOSTS."""

    title: ClassVar = "cluster"
    nodes: int | None = flag(parse=values.at_least(1), metavar="N", help="number of nodes, in place of a hosts file's")
    out: str = flag("certificates", metavar="DIR", help="directory for the certificates")
    days: int = flag(365, parse=values.at_least(1), help="days until the nodes' certificates expire")
