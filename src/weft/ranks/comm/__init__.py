"""Communication between ranks: the operations of groups, and hand-over from stage to stage."""

from __future__ import annotations

from weft.ranks.comm.base import Group, Links, Solo, StageLink

__all__ = ["Group", "Links", "Solo", "StageLink"]
