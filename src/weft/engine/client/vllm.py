"""vLLM's arguments that Weft does not have: some are ignored, others are refused, with the reason.

One table, data/vllm.toml, for the flags of `vllm serve` and the keywords of vLLM's LLM.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

ARITIES = {"switches": 0, "valued": 1, "lists": -1}
# Values with which a keyword or a flag is as good as left out.
EMPTY_VALUES = ("", "none", "false", "{}", "[]")


@dataclass(frozen=True, kw_only=True)
class VLLMArgument:
    """An argument of vLLM, under its flag's name without dashes.

    `arity` is 0 for a switch, 1 for a value, -1 for several values. `why` is the reason why the argument is refused or,
    if it is ignored, why that makes no difference. Values in `fine` ask for what Weft does anyway.
    """

    name: str
    topic: str
    arity: int
    refused: bool
    why: str
    fine: tuple[str, ...] = ()

    def refusal(self, value: Any) -> str:
        """Return the reason why Weft cannot start with this value, and the way out; "" if it can."""
        return self.why if self.refused and not self.same_as_ours(value) else ""

    def same_as_ours(self, value: Any) -> bool:
        """Return True if Weft does what the value asks for by default."""
        text = str(value).strip().lower()
        return text in EMPTY_VALUES or text in self.fine

    @property
    def warning(self) -> str:
        """The warning about an ignored argument."""
        return self.why or "Weft does not have it; it is ignored"


@cache
def vllm_arguments() -> dict[str, VLLMArgument]:
    """Return every argument of the table, by name."""
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
        for group in _load_table()[verdict]
        for kind, arity in ARITIES.items()
        for name in group.get(kind, "").split()
    }


@cache
def short_forms() -> dict[str, str]:
    """Return the names behind vLLM's short flags: `-dp` is data-parallel-size."""
    return {f"-{short}": name for short, name in _load_table()["short"].items()}


@cache
def _load_table() -> dict[str, Any]:
    return tomllib.loads((files("weft.engine.client") / "data/vllm.toml").read_text(encoding="utf-8"))
