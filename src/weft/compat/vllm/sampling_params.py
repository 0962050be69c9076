"""vLLM's module of sampling parameters."""

from weft.core.params import SamplingParams, StructuredOutputsParams

__all__ = ["SamplingParams", "StructuredOutputsParams"]
