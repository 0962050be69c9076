"""vLLM's module of sampling parameters."""

from weft.engine.core.params import SamplingParams, StructuredOutputsParams

__all__ = ["SamplingParams", "StructuredOutputsParams"]
