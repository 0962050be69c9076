"""Types of /v1/embeddings, /v1/score and /v1/rerank: OpenAI's and Jina's, with vLLM's additional fields."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from weft.api.service.openai_types import PromptTokensDetails


class PoolingRequest(Struct, kw_only=True):
    """Fields of all three. `truncate_prompt_tokens`: length to which prompts are cut, -1: the model's length."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None


class EmbeddingsRequest(PoolingRequest, kw_only=True):
    """A request for embeddings of one text or several, or of token ids. `dimensions` cuts the embeddings.

    `normalize`: scale them to length 1; by default as the model does. `embed_dtype` and `endianness` apply to base64.
    """

    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    embed_dtype: str | None = None
    endianness: str | None = None


class ScoredRequest(PoolingRequest, kw_only=True):
    """Fields of both endpoints about pairs of texts. `instruction` tells a reranker what to look for.

    `use_activation` False, or an earlier name of it, asks for the difference of both logits instead of a probability.
    """

    instruction: str | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None


class ScoreRequest(ScoredRequest, kw_only=True):
    """A request to score one text with each of several, or the texts of two lists with each other, in order."""

    text_1: str | list[str]
    text_2: str | list[str]


class DocumentText(Struct, kw_only=True):
    text: str


class RerankRequest(ScoredRequest, kw_only=True):
    """A request to rank documents by a query. `top_n`: results to return; None and 0 mean all."""

    query: str
    documents: list[str | DocumentText]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None
    max_chunks_per_doc: int | None = None
    rank_fields: list[str] | None = None


class PoolingUsage(Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails


class EmbeddingRow(Struct, kw_only=True):
    """One embedding: numbers, or the base64 of little-endian float32 numbers."""

    index: int
    object: str = "embedding"
    embedding: list[float] | str


class Embeddings(Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[EmbeddingRow]
    usage: PoolingUsage


class ScoreRow(Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class Scores(Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ScoreRow]
    usage: PoolingUsage


class RankedDocument(Struct, kw_only=True):
    """A document by its place in the request."""

    index: int
    document: DocumentText | UnsetType = UNSET
    relevance_score: float


class Ranking(Struct, kw_only=True):
    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedDocument]
