"""Flags of weft hardware and weft topo."""

from __future__ import annotations

from typing import Annotated, ClassVar

from weft.cli.flags.declared import Arguments, Group, flag
from weft.cli.flags.plan_flags import REFRESH_HARDWARE, DescribedHardware


class TopologyArguments(Arguments):
    """weft topo."""

    title: ClassVar = "this machine"
    measure: bool = flag(True, help="measure what is not in the cache yet (default: on); --no-measure measures nothing")
    refresh_hardware: bool = REFRESH_HARDWARE
    json: bool = flag(False, help="print one JSON object with all figures")


class HardwareArguments(TopologyArguments):
    """weft hardware."""

    yaml: bool = flag(False, help="print a hardware file, which --gpus FILE.yaml takes")
    described: Annotated[DescribedHardware, Group("described hardware, instead of this machine")]
