"""Flags of weft cluster up, down, pull and cert."""

from __future__ import annotations

from weft.cli.flags import values
from weft.cli.flags.flags import Flag

UP = (
    Flag(name="dry-run", parse=None, help="print the commands, without any secret, and start nothing"),
    Flag(name="model", metavar="MODEL", help="the model, instead of the file's"),
)
PULL = (
    Flag(
        name="hosts",
        metavar="FILE",
        default="hosts.yaml",
        help="the file that lists the machines (docs/several-machines.md)",
    ),
)
CERT = (
    Flag(name="nodes", parse=values.at_least(1), metavar="N", help="number of nodes, in place of a hosts file's"),
    Flag(name="out", metavar="DIR", default="certificates", help="directory for the certificates"),
    Flag(name="days", parse=values.at_least(1), default=365, help="days until the nodes' certificates expire"),
)
