"""vLLM's arguments that Weft does not have: which of them are ignored, and why the others are refused.

One table, data/vllm.toml, for the flags of `vllm serve` and the keywords of vLLM's LLM.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

ARITIES = {"switches": 0, "valued": 1, "lists": -1}
# What a keyword or a flag that is as good as left out has for a value.
UNSAID = ("", "none", "false", "{}", "[]")


@dataclass(frozen=True, kw_only=True)
class VLLMArgument:
    """An argument of vLLM by its flag's name, without dashes. `arity`: 0 for a switch, 1 for a value, -1 for several.
    `why` tells why it is refused, or, where it is ignored, why that makes no difference. Values in `fine` say what
    Weft does anyway."""

    name: str
    topic: str
    arity: int
    refused: bool
    why: str
    fine: tuple[str, ...] = ()

    def refusal(self, value: Any) -> str:
        """Why Weft cannot start with this value, and the way out; "" if it can."""
        return self.why if self.refused and not self.same_as_ours(value) else ""

    def same_as_ours(self, value: Any) -> bool:
        """Whether Weft does what the value asks for without being told."""
        text = str(value).strip().lower()
        return text in UNSAID or text in self.fine

    @property
    def warning(self) -> str:
        """What a user is told of an argument that is ignored."""
        return self.why or "Weft does not have it; it is ignored"


@cache
def vllm_arguments() -> dict[str, VLLMArgument]:
    """Every argument of the table, by name."""
    return {
        name: VLLMArgument(
            name=name,
            topic=group["topic"],
            arity=arity,
            refused=verdict == "refused",
            why=group.get("why", ""),
            fine=tuple(group.get("fine", {}).get(name, ())),
        )
        for verdict in ("refused", "ignored")
        for group in _table()[verdict]
        for kind, arity in ARITIES.items()
        for name in group.get(kind, "").split()
    }


@cache
def short_forms() -> dict[str, str]:
    """The names behind vLLM's short flags: `-dp` is data-parallel-size."""
    return {f"-{short}": name for short, name in _table()["short"].items()}


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((files("weft.client") / "data/vllm.toml").read_text(encoding="utf-8"))
