"""Communication between ranks: sums and gathers within a stage, and hand-over from stage to stage."""

from __future__ import annotations

from weft.comm.base import Comm, Links, Solo

__all__ = ["Comm", "Links", "Solo"]
