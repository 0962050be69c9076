"""The flags of weft hardware."""

from __future__ import annotations

from weft.cli.flags import Flag
from weft.cli.plan_flags import HARDWARE

DESCRIBED = tuple(flag for flag in HARDWARE if flag.name in ("gpus", "nodes", "network"))
LOOK = (
    Flag(name="measure", parse=None, help="measure what the cache does not know yet; --no-measure only looks"),
    *(flag for flag in HARDWARE if flag.name == "refresh-hardware"),
    Flag(name="json", parse=None, help="print one JSON object with all that was found"),
    Flag(name="yaml", parse=None, help="print it as the file that --gpus FILE.yaml takes"),
)
FLAGS = (("this machine", LOOK), ("described hardware, instead", DESCRIBED))
