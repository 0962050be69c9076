"""/v1/embeddings."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from weft.api.service.pooled import check_inputs, limited, reply_pooled, usage_of
from weft.api.service.pooling_types import EmbeddingRow, Embeddings, EmbeddingsRequest
from weft.api.service.service import Service
from weft.engine.frontend.collector import Collector
from weft.engine.frontend.prompt import PromptLike
from weft.errors import RequestError

ENCODINGS = ("float", "base64")


@dataclass(frozen=True)
class PreparedEmbeddings:
    """A checked and tokenized request."""

    body: EmbeddingsRequest
    model: str
    collectors: list[Collector]


async def embeddings(request: Request) -> Response:
    """/v1/embeddings: the embeddings of texts."""
    service: Service = request.app.state.service
    prepared = await service.prepare(request, prepare_embeddings)

    def build() -> Embeddings:
        return _answer(service, prepared)

    numbers = len(prepared.collectors) * (prepared.body.dimensions or service.frontend.hidden)
    return await reply_pooled(request, prepared.collectors, build, numbers)


def prepare_embeddings(service: Service, content: bytes) -> PreparedEmbeddings:
    """Check a body and tokenize its inputs. Raises RequestError and HttpError."""
    body = service.decode_body(content, EmbeddingsRequest)
    model = service.resolve_model(body.model)
    service.pooler.require("embed")
    service.pooler.check_dimensions(body.dimensions)
    _check_form(body)
    inputs = split_inputs(body.input)
    check_inputs(len(inputs), "input")
    return PreparedEmbeddings(body, model, collect(service, inputs, body))


def collect(service: Service, inputs: Sequence[PromptLike], body: EmbeddingsRequest) -> list[Collector]:
    """The collectors of inputs."""
    now = time.monotonic()
    made = (
        service.pooler.embedding_collector(
            given if body.cache_salt is None else _salted(given, body.cache_salt),
            arrival_s=now,
            truncate=body.truncate_prompt_tokens,
            special=body.add_special_tokens is not False,
            priority=body.priority or 0,
            param="input",
        )
        for given in inputs
    )
    return limited(service, made, "input")


def _salted(source: PromptLike, salt: str) -> PromptLike:
    return {"prompt" if isinstance(source, str) else "prompt_token_ids": source, "cache_salt": salt}


def _check_form(body: EmbeddingsRequest) -> None:
    """Raise RequestError for another form of the numbers than float or base64 of float32."""
    wanted = {
        "encoding_format": (body.encoding_format, ENCODINGS),
        "embed_dtype": (body.embed_dtype, ("float32",)),
        "endianness": (body.endianness, ("native", "little")),
    }
    for name, (value, known) in wanted.items():
        if value is not None and value not in known:
            raise RequestError(
                f"{name} is {value!r:.60}; it must be {' or '.join(known)}", param=name, code="unknown-encoding"
            )


def split_inputs(inputs: str | list[str | int | list[int]]) -> list[PromptLike]:
    """List of inputs: one text or one list of ids is one input, a list of either is several."""
    if isinstance(inputs, str):
        return [inputs]
    kinds = {type(part) for part in inputs}
    if len(kinds) > 1:
        raise RequestError(
            "input is a text, token ids, or a list of only one of the two", param="input", code="mixed-prompts"
        )
    return [cast(list[int], inputs)] if kinds == {int} else cast(list[PromptLike], inputs)


def _answer(service: Service, prepared: PreparedEmbeddings) -> Embeddings:
    body, rows = prepared.body, []
    normalise = body.use_activation if body.normalize is None else body.normalize
    for index, collector in enumerate(prepared.collectors):
        vector = service.pooler.embedding(collector, dimensions=body.dimensions, normalise=normalise)
        rows.append(EmbeddingRow(index=index, embedding=_encoded(vector, body.encoding_format)))
    return Embeddings(
        id=f"embd-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=prepared.model,
        data=rows,
        usage=usage_of(prepared.collectors),
    )


def _encoded(vector: np.ndarray, form: str | None) -> Any:
    """A vector as base64, or as JSON: each on its own, so that other threads have their turns in between."""
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return msgspec.Raw(msgspec.json.encode(vector.tolist()))
