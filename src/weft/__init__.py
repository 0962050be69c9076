"""Weft runs one large language model across the GPUs you really have.

from weft import LLM, SamplingParams

with LLM("demo", tensor_parallel_size=2) as llm:
    print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}])[0].outputs[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft._version import __version__

if TYPE_CHECKING:
    from weft.engine.client.async_llm import AsyncLLM
    from weft.engine.core.params import SamplingParams, StructuredOutputsParams
    from weft.engine.frontend.outputs import CompletionOutput, EmbeddingOutput, RequestOutput
    from weft.engine.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "StructuredOutputsParams",
    "RequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "__version__",
]

# The module of each public name. It is imported on first use, so that `import weft` costs nothing.
_HOMES = {
    "LLM": "weft.engine.llm",
    "AsyncLLM": "weft.engine.client.async_llm",
    "SamplingParams": "weft.engine.core.params",
    "StructuredOutputsParams": "weft.engine.core.params",
    "RequestOutput": "weft.engine.frontend.outputs",
    "CompletionOutput": "weft.engine.frontend.outputs",
    "EmbeddingOutput": "weft.engine.frontend.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
