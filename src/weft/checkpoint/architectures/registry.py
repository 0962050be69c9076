"""All architectures by name: those that the engine runs, and others that only the planner knows."""

from __future__ import annotations

from weft.checkpoint.architectures.architecture import Architecture, ConfigFields
from weft.checkpoint.architectures.families import deepseek, gemma, gpt, llama, mixtral, qwen
from weft.checkpoint.architectures.library import PREFIX
from weft.errors import ModelError

_FAMILIES = (llama, qwen, mixtral, deepseek, gemma, gpt)
ARCHITECTURES: dict[str, Architecture] = {entry.name: entry for family in _FAMILIES for entry in family.FAMILY}
RUNNABLE = tuple(name for name, entry in ARCHITECTURES.items() if entry.runs)


def find_architecture(name: str) -> Architecture:
    """The architecture with this class name. Raises ModelError for an unknown one.

    An architecture that runs through Transformers' class has no names: its shape has its tensors' names.
    """
    if name.startswith(PREFIX):
        return Architecture(name=name, config=ConfigFields(model_type="", max_positions=0), runs=True)
    if name not in ARCHITECTURES:
        raise ModelError(
            f"unknown architecture {name!r}; known: {', '.join(ARCHITECTURES)}", code="unknown-architecture"
        )
    return ARCHITECTURES[name]
