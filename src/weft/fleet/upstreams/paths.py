"""Paths of upstreams that are open to every client of a gateway; the others may change an upstream."""

from __future__ import annotations

import re

OPENAI = (
    "chat/completions",
    "completions",
    "embeddings",
    "responses",
    "messages",
    "messages/count_tokens",
    "rerank",
    "score",
    "moderations",
    "audio/transcriptions",
    "audio/translations",
    "audio/speech",
    "images/generations",
)
OLLAMA = ("chat", "generate", "embed", "embeddings", "tags", "show", "ps", "version")
# Paths of vLLM, SGLang and llama-server, except paths that load, unload, flush, trace or put to sleep.
OWN = (
    "tokenize",
    "detokenize",
    "version",
    "ping",
    "load",
    "rerank",
    "reranking",
    "score",
    "pooling",
    "classify",
    "embedding",
    "embeddings",
    "completion",
    "completions",
    "chat/completions",
    "generate",
    "infill",
    "apply-template",
)
PUBLIC = frozenset(
    ("/", "/openapi.json", "/v2/rerank", *(f"/v1/{name}" for name in OPENAI), *(f"/api/{name}" for name in OLLAMA))
).union(f"/{name}" for name in OWN)

# Resources that upstreams of Weft keep for each key of the gateway.
BATCHES = "/v1/batches"
KEPT = ("/v1/files", BATCHES)
KEPT_PATH = re.compile(r"/v1/(?:files|batches)(?:/[A-Za-z0-9_-]+(?:/content|/cancel)?)?")

# Ollama's paths about models on an upstream's disk, which it need not serve.
DISK = (*(f"/api/{name}" for name in ("pull", "delete", "create", "copy", "push")), "/api/blobs/")
ON_DISK = (*KEPT, *DISK)  # always sent to the same upstream

WITH_FORMS = frozenset(("/v1/audio/transcriptions", "/v1/audio/translations"))  # bodies with files, not JSON


REPEATABLE = (b"GET", b"HEAD", b"DELETE")  # a repetition changes nothing


def is_repeatable(method: bytes, path: str) -> bool:
    """Return False for a request that creates files or batches: sent twice, it may create two."""
    return method in REPEATABLE or not path.startswith(ON_DISK)


def is_public(path: str, raw_path: bytes) -> bool:
    """Return True if any client may send requests to a path: exactly one of `PUBLIC`, spelled without escapes.

    `path`: percent escapes decoded. `raw_path`: as it was sent, and as the upstream gets it.
    """
    return path in PUBLIC and raw_path == path.encode()


def is_kept(path: str, raw_path: bytes) -> bool:
    """Return True for a path of files or batches, spelled without escapes."""
    return KEPT_PATH.fullmatch(path) is not None and raw_path == path.encode()
