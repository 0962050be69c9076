"""/v1/score and /v1/rerank."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from weft.api.service.pooled import check_inputs, limited, reply_pooled, usage_of
from weft.api.service.pooling_types import (
    DocumentText,
    RankedDocument,
    Ranking,
    RerankRequest,
    ScoredRequest,
    ScoreRequest,
    ScoreRow,
    Scores,
)
from weft.api.service.service import Service
from weft.engine.frontend.pooling import PendingScores
from weft.engine.templates.limits import LIMITS
from weft.errors import RequestError

# Fields of Cohere's and Jina's that would change the scores.
UNSUPPORTED = ("max_tokens_per_doc", "max_chunks_per_doc", "rank_fields")


@dataclass(frozen=True)
class PreparedScores:
    """A checked and tokenized request of either endpoint. `raw`: scores are differences of logits."""

    model: str
    scoring: PendingScores
    raw: bool


@dataclass(frozen=True)
class PreparedRanking:
    """A checked and tokenized request to rank the texts of `documents`, and the number of documents to return."""

    scores: PreparedScores
    documents: list[str]
    top: int
    shows_documents: bool


async def score(request: Request) -> Response:
    """/v1/score: the similarity or relevance of texts to each other."""
    service: Service = request.app.state.service
    prepared = await service.prepare(request, prepare_scores)
    collectors = prepared.scoring.collectors

    def build() -> Scores:
        values = prepared.scoring.scores(raw=prepared.raw)
        return Scores(
            id=f"score-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=prepared.model,
            data=[ScoreRow(index=index, score=value) for index, value in enumerate(values)],
            usage=usage_of(collectors),
        )

    return await reply_pooled(request, collectors, build, len(collectors))


async def rerank(request: Request) -> Response:
    """/v1/rerank: documents in the order in which they answer a query."""
    service: Service = request.app.state.service
    prepared = await service.prepare(request, prepare_ranking)
    collectors = prepared.scores.scoring.collectors

    def build() -> Ranking:
        values = prepared.scores.scoring.scores(raw=prepared.scores.raw)
        order = sorted(range(len(values)), key=lambda index: -values[index])[: prepared.top]
        rows = [
            RankedDocument(
                index=index,
                document=DocumentText(text=prepared.documents[index]) if prepared.shows_documents else UNSET,
                relevance_score=values[index],
            )
            for index in order
        ]
        return Ranking(
            id=f"rerank-{uuid.uuid4().hex}", model=prepared.scores.model, usage=usage_of(collectors), results=rows
        )

    return await reply_pooled(request, collectors, build, len(collectors))


def prepare_scores(service: Service, content: bytes) -> PreparedScores:
    """Check a body of /v1/score, and tokenize its texts. Raises RequestError and HttpError."""
    body = service.decode_body(content, ScoreRequest)
    return _prepare(service, body, body.text_1, body.text_2, ("text_1", "text_2"))


def prepare_ranking(service: Service, content: bytes) -> PreparedRanking:
    """Check a body of /v1/rerank, and tokenize its texts. Raises RequestError and HttpError."""
    body = service.decode_body(content, RerankRequest)
    for name in UNSUPPORTED:
        if getattr(body, name) is not None:
            raise RequestError(f"{name} is not supported; leave it out", param=name, code="unsupported-field")
    if (body.top_n or 0) < 0:
        raise RequestError(
            f"top_n is {body.top_n}; it must be 1 or more, or 0 for all", param="top_n", code="invalid-top-n"
        )
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    prepared = _prepare(service, body, body.query, documents, ("query", "documents"))
    return PreparedRanking(prepared, documents, body.top_n or len(documents), body.return_documents is not False)


def _prepare(
    service: Service,
    body: ScoredRequest,
    firsts: str | Sequence[str],
    seconds: str | Sequence[str],
    params: tuple[str, str],
) -> PreparedScores:
    model = service.resolve_model(body.model)
    service.pooler.require("score", "embed")
    for name, texts in zip(params, (firsts, seconds), strict=True):
        check_inputs(1 if isinstance(texts, str) else len(texts), name)
    scoring = service.pooler.score_request(
        firsts,
        seconds,
        arrival_s=time.monotonic(),
        instruction=body.instruction,
        truncate=body.truncate_prompt_tokens,
        priority=body.priority or 0,
        salt=body.cache_salt,
        params=params,
        gather=lambda made: limited(service, made, params[1]),
        most_characters=LIMITS.pair_characters,
    )
    raw = False in (body.use_activation, body.activation, body.softmax)
    return PreparedScores(model, scoring, raw)
