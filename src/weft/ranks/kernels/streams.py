"""Constants of random streams and of sampling, which torch, Triton and C++ share."""

from __future__ import annotations

from weft.machine.native.structures import NOT_FINITE, SAMPLING_BLOCK, SPLITMIX_FIRST, SPLITMIX_SECOND, SPLITMIX_STEP

__all__ = ["NOT_FINITE", "SAMPLING_BLOCK", "SPLITMIX_FIRST", "SPLITMIX_SECOND", "SPLITMIX_STEP"]
