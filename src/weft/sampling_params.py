"""SamplingParams in a module of vLLM's name, so that in `from vllm.sampling_params import ...` one word changes."""

from weft.engine.core.params import SamplingParams, StructuredOutputsParams

__all__ = ["SamplingParams", "StructuredOutputsParams"]
