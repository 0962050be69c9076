"""/api/embed and /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from weft.api.ollama.loading import load_or_unload, may_unload
from weft.api.ollama.names import requested_name, resolve_served
from weft.api.ollama.types import ModelRequest, OllamaOptions
from weft.api.service.pooled import check_inputs, limited, reply_pooled
from weft.api.service.service import Service
from weft.engine.frontend.collector import Collector

NS = 10**9
TO_LENGTH = -1  # cut prompts to the model's length


class CommonEmbedRequest(ModelRequest, kw_only=True):
    """Fields of both endpoints. `options` change nothing: they are about answers."""

    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class EmbedRequest(CommonEmbedRequest, kw_only=True):
    """A request for embeddings. `truncate`, unless false, cuts texts to the model's length."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddingsRequest(CommonEmbedRequest, kw_only=True):
    """A request of the older endpoint, for the embedding of one text."""

    prompt: str | None = None


class EmbedAnswer(Struct, kw_only=True):
    """Embeddings, with times in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class EmbeddingsAnswer(Struct, kw_only=True):
    embedding: list[float]


@dataclass(frozen=True)
class PreparedEmbed:
    """A checked and tokenized request; without collectors it asks only for the model to be loaded."""

    name: str
    collectors: list[Collector]
    dimensions: int | None = None
    keep_alive: float | str | None = None


async def embed(request: Request) -> Response:
    """/api/embed: the embeddings of texts."""
    service: Service = request.app.state.service
    began_s = time.monotonic()
    prepared = await service.prepare(request, prepare_embed)

    def build() -> EmbedAnswer:
        return EmbedAnswer(
            model=prepared.name,
            embeddings=_vectors(service, prepared),
            total_duration=int((time.monotonic() - began_s) * NS),
            prompt_eval_count=sum(len(collector.output.prompt_ids) for collector in prepared.collectors),
        )

    return await _reply(request, prepared, build)


async def embeddings(request: Request) -> Response:
    """/api/embeddings: the embedding of one text, as older clients ask for it."""
    service: Service = request.app.state.service
    prepared = await service.prepare(request, prepare_embeddings)

    def build() -> EmbeddingsAnswer:
        return EmbeddingsAnswer(embedding=next(iter(_vectors(service, prepared)), []))

    return await _reply(request, prepared, build)


async def _reply(request: Request, prepared: PreparedEmbed, build: Callable[[], Struct]) -> Response:
    service: Service = request.app.state.service
    unloads = may_unload(request, prepared.keep_alive)
    try:
        return await reply_pooled(request, prepared.collectors, build, _numbers(service, prepared))
    finally:
        if unloads or not prepared.collectors:
            load_or_unload(service, unloads)


def prepare_embed(service: Service, content: bytes) -> PreparedEmbed:
    """Check a body of /api/embed, and tokenize its texts. Raises RequestError and HttpError."""
    body = service.decode_body(content, EmbedRequest)
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    truncate = None if body.truncate is False else TO_LENGTH
    return _prepare(service, body, texts, truncate, body.dimensions, "input")


def prepare_embeddings(service: Service, content: bytes) -> PreparedEmbed:
    """Check a body of /api/embeddings, and tokenize its text. Raises RequestError and HttpError."""
    body = service.decode_body(content, OllamaEmbeddingsRequest)
    return _prepare(service, body, [body.prompt] if body.prompt else [], TO_LENGTH, None, "prompt")


def _prepare(
    service: Service,
    body: CommonEmbedRequest,
    texts: Sequence[str],
    truncate: int | None,
    dimensions: int | None,
    param: str,
) -> PreparedEmbed:
    name = requested_name(body)
    resolve_served(service, name)
    service.pooler.require("embed")
    service.pooler.check_dimensions(dimensions)
    if texts:
        check_inputs(len(texts), param)
    now = time.monotonic()
    made = (service.pooler.embedding_collector(text, arrival_s=now, truncate=truncate, param=param) for text in texts)
    return PreparedEmbed(name, limited(service, made, param), dimensions, body.keep_alive)


def _vectors(service: Service, prepared: PreparedEmbed) -> list[list[float]]:
    return [
        service.pooler.embedding(collector, dimensions=prepared.dimensions).tolist()
        for collector in prepared.collectors
    ]


def _numbers(service: Service, prepared: PreparedEmbed) -> int:
    return len(prepared.collectors) * (prepared.dimensions or service.frontend.hidden)
