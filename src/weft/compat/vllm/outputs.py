"""vLLM's module of outputs."""

from weft.engine.frontend.outputs import CompletionOutput, EmbeddingOutput, RequestOutput

__all__ = ["CompletionOutput", "EmbeddingOutput", "RequestOutput"]
