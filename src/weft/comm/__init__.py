"""How the ranks of one stage sum and gather, and how a stage hands over to the next."""

from __future__ import annotations

from weft.comm.base import Comm, Links, Solo

__all__ = ["Comm", "Links", "Solo"]
