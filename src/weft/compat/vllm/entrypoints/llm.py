"""vLLM's module of the class LLM."""

from weft.llm import LLM

__all__ = ["LLM"]
