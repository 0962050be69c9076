"""vLLM's module of outputs."""

from weft.client.outputs import CompletionOutput, EmbeddingOutput, RequestOutput

__all__ = ["CompletionOutput", "EmbeddingOutput", "RequestOutput"]
