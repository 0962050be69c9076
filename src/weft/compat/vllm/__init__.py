"""The package `vllm` for programs that import it, once a user has put the folder above on Python's path.

Nothing puts it there by itself:

export PYTHONPATH=$(python -m weft.compat.vllm)     # then: python -m vllm serve, from vllm import LLM, SamplingParams
"""

from __future__ import annotations

from typing import Any, NoReturn

import weft

# The version of vLLM whose arguments `client/data/vllm.toml` has: programs choose their arguments by it.
__version__ = "0.24.0"
__all__ = [*(name for name in weft.__all__ if name != "__version__"), "__version__"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(weft, name)
    return refuse_name(name)


def refuse_name(name: str) -> NoReturn:
    """Raise AttributeError for a name of vLLM's that Weft does not have."""
    raise AttributeError(f"this vllm is Weft's, which has no {name!r}; it has {', '.join(__all__)}")
