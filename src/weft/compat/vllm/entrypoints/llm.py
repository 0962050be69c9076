"""vLLM's module of the class LLM."""

from weft.engine.llm import LLM

__all__ = ["LLM"]
