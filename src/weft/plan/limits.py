"""EngineLimits: the options of an engine that go through the planner under one name."""

from __future__ import annotations

from typing import Any

import msgspec


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an engine that the planner counts, and passes on as they are.

    Each is an option of `EngineConfig` and a flag of weft plan. The question has it, the plan's JSON, the plan file and
    the commands that an export writes. None is the engine's own default.
    """

    max_num_seqs: int | None = None


def limits_of(options: object) -> dict[str, Any]:
    """The limits among the options of a config, a plan, a question or flags, by name."""
    return {name: getattr(options, name) for name in EngineLimits.__struct_fields__}
