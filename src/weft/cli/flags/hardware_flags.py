"""Flags of weft hardware and weft topo."""

from __future__ import annotations

from weft.cli.flags.flags import Flag
from weft.cli.flags.plan_flags import HARDWARE

DESCRIBED = tuple(flag for flag in HARDWARE if flag.name in ("gpus", "nodes", "network"))
MACHINE = (
    Flag(
        name="measure",
        parse=None,
        help="measure what is not in the cache yet (default: on); --no-measure measures nothing",
    ),
    *(flag for flag in HARDWARE if flag.name == "refresh-hardware"),
    Flag(name="json", parse=None, help="print one JSON object with all figures"),
    Flag(name="yaml", parse=None, help="print a hardware file, which --gpus FILE.yaml takes"),
)
TOPOLOGY = (("this machine", tuple(flag for flag in MACHINE if flag.name != "yaml")),)
FLAGS = (("this machine", MACHINE), ("described hardware, instead of this machine", DESCRIBED))
