"""Pooler: turns texts into requests for embeddings and scores, and their results into vectors and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np

from weft.checkpoint.config.pooling import PoolingSettings
from weft.engine.core.step import Pooling
from weft.engine.frontend.collector import Collector
from weft.engine.frontend.frontend import Frontend
from weft.engine.frontend.outputs import EmbeddingOutput
from weft.engine.frontend.prompt import Prompt, PromptLike, list_ids
from weft.errors import RequestError

# The prompt of Qwen3-Reranker, https://huggingface.co/Qwen/Qwen3-Reranker-0.6B (usage with Transformers).
TURN = "<|im_start|>"
OPENING = (
    f"{TURN}system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    f'Note that the answer can only be "yes" or "no".<|im_end|>\n{TURN}user\n'
)
PAIR = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
CLOSING = f"<|im_end|>\n{TURN}assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
YES, NO = "yes", "no"
SPARE = 16  # tokens of a text that are read behind the kept ones
SMALLEST = 1e-12  # length below which a vector is not divided by its length


class Pooler:
    """Requests for the embeddings and scores of one model, and what comes back.

    A model that scores reads both texts of a pair at once. One that embeds gives the cosine of their embeddings.
    `truncate` is the number of tokens that a prompt is cut to, -1 for the model's length; None refuses longer ones.
    All methods raise RequestError, naming the field.
    """

    def __init__(self, frontend: Frontend, model: str) -> None:
        self._frontend, self._model = frontend, model

    @property
    def settings(self) -> PoolingSettings | None:
        """Settings of a model that embeds or scores; None if it only generates."""
        return self._frontend.pooling

    def require(self, *tasks: Literal["embed", "score"]) -> PoolingSettings:
        """Return the settings of a model that does one of `tasks`."""
        settings = self._frontend.pooling
        if settings is not None and settings.task in tasks:
            return settings
        verb = tasks[0]
        own = "generates text" if settings is None else f"{settings.task}s"
        kind, flag = ("an embedding model", "embed") if verb == "embed" else ("a reranker", "classify")
        raise RequestError(
            f"the model {self._model!r:.200} does not {verb}: it {own}; serve {kind}, or start this one with "
            f"--convert {flag}",
            param="model",
            code=f"model-does-not-{verb}",
        )

    # Embeddings

    def embedding_collector(
        self,
        given: PromptLike,
        *,
        arrival_s: float,
        truncate: int | None = None,
        special: bool = True,
        priority: int = 0,
        param: str = "prompt",
    ) -> Collector:
        """Return the Collector of the embedding of a prompt, which is one that `LLM.generate` takes.

        `special` adds the tokens that end a text, which these models embed by.
        """
        self.require("embed")
        salt = None
        if isinstance(given, Mapping):
            salt, given = given.get("cache_salt"), _prompt_of(given, param)
        limit = self._limit(truncate)
        text = given if isinstance(given, str) else None
        if isinstance(given, str):
            ids = self._text_ids(given, limit, special=special, param=param)
        else:
            ids = list_ids(given, param)
        if limit is not None:
            ids = ids[:limit]
        prompt = Prompt(self._frontend.pack_prompt(ids, param=param, answers=False), text, salt)
        return self._frontend.create_pooling_collector(prompt, Pooling(), arrival_s=arrival_s, priority=priority)

    def check_dimensions(self, dimensions: int | None) -> None:
        """Check the length that an embedding is to be cut to."""
        if dimensions is None:
            return
        allowed, width = self.require("embed").dimensions, self._frontend.hidden
        if type(dimensions) is not int or not 1 <= dimensions <= width or (allowed and dimensions not in allowed):
            wanted = f"one of {', '.join(map(str, allowed))}" if allowed else f"from 1 to {width}, the model's own"
            raise RequestError(
                f"dimensions is {dimensions!r:.60}; it must be {wanted}", param="dimensions", code="invalid-dimensions"
            )

    def embedding(
        self, collector: Collector, *, dimensions: int | None = None, normalise: bool | None = None
    ) -> np.ndarray:
        """Return the embedding [dimensions] float32 of a collector that has its result.

        It has length 1 after it was cut, if `normalise` or, by default, the model says so. Raises OutputError for a
        prompt of which the model makes no numbers.
        """
        vector = _numbers(collector)[:dimensions]
        if self.require("embed").normalises if normalise is None else normalise:
            vector = vector / max(float(np.linalg.norm(vector)), SMALLEST)
        return vector

    def embedding_output(self, collector: Collector, dimensions: int | None) -> EmbeddingOutput:
        """Return the embedding as the callers of `LLM.embed` get it."""
        output = collector.output
        vector = self.embedding(collector, dimensions=dimensions).tolist()
        return EmbeddingOutput(output.request_id, vector, output.prompt_ids, output.num_cached_tokens)

    # Scores

    def score_request(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        arrival_s: float,
        instruction: str | None = None,
        truncate: int | None = None,
        priority: int = 0,
        salt: str | None = None,
        params: tuple[str, str] = ("query", "documents"),
        gather: Callable[[Iterable[Collector]], list[Collector]] = list,
        most_characters: int | None = None,
    ) -> PendingScores:
        """Return the requests for the scores of pairs: of one query with each document, or of as many as there are
        documents, in order.

        `params` are the names of both fields in errors. `gather` lists the requests, and may end their making.
        `most_characters` bounds the texts of all pairs together, in which a query counts once for each document.
        """
        settings = self.require("score", "embed")
        firsts, seconds = _texts(queries, params[0]), _texts(documents, params[1])
        if len(firsts) not in (1, len(seconds)):
            raise RequestError(
                f"{params[0]} has {len(firsts)} texts and {params[1]} has {len(seconds)}; give one, or as many",
                param=params[0],
                code="queries-unlike-documents",
            )
        made: dict[str, Any] = {"arrival_s": arrival_s, "truncate": truncate, "priority": priority}
        if settings.task == "score":
            limit = self._limit(truncate)
            wanted, *rest = self._beginnings([instruction or INSTRUCTION, *firsts, *seconds], limit)
            firsts, seconds = rest[: len(firsts)], rest[len(firsts) :]
            if len(firsts) == 1:
                firsts = firsts * len(seconds)
            pairs = list(zip(firsts, seconds, strict=True))
            _check_work(sum(len(wanted) + len(one) + len(other) for one, other in pairs), most_characters, params[1])
            collectors = gather(self._pair_collector(*pair, wanted, salt, params[1], **made) for pair in pairs)
            return PendingScores(self, collectors)
        if instruction is not None:
            raise RequestError(
                "an instruction is for rerankers; this model embeds: write it into the query",
                param="instruction",
                code="instruction-to-embed",
            )
        collectors = gather(
            self.embedding_collector({"prompt": text, "cache_salt": salt}, param=param, **made)
            for param, texts in zip(params, (firsts, seconds), strict=True)
            for text in texts
        )
        return PendingScores(self, collectors, len(firsts))

    def _pair_collector(
        self,
        query: str,
        document: str,
        instruction: str,
        salt: str | None,
        param: str,
        *,
        arrival_s: float,
        truncate: int | None,
        priority: int,
    ) -> Collector:
        opening, closing = self._frame
        form, limit = len(opening) + len(closing), self._limit(truncate)
        if limit is not None and limit <= form:
            raise RequestError(
                f"truncate_prompt_tokens is {truncate}; the form of the prompt alone has {form} tokens",
                param="truncate_prompt_tokens",
                code="invalid-truncation",
            )
        text = PAIR.format(instruction=instruction, query=query, document=document)
        ids = [*opening, *self._literal_ids(text, None if limit is None else limit - form, param), *closing]
        prompt = Prompt(self._frontend.pack_prompt(ids, param=param, answers=False), None, salt)
        return self._frontend.create_pooling_collector(
            prompt, Pooling(self._answer_ids), arrival_s=arrival_s, priority=priority
        )

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """Token ids before and behind a pair of texts."""
        if self._frontend.require_tokenizer("a score", "model").id(TURN) is None:
            raise RequestError(
                f"the model {self._model!r:.200} does not score: its vocabulary lacks {TURN}, and so the prompt that "
                "Qwen3-Reranker is asked with",
                param="model",
                code="model-does-not-score",
            )
        return self._frontend.encode(OPENING, special=False), self._frontend.encode(CLOSING, special=False)

    @cached_property
    def _answer_ids(self) -> tuple[int, int]:
        """Token ids of yes and no."""
        named = self.require("score").tokens
        tokenizer = self._frontend.require_tokenizer("a score", "model")
        ids = named if named is not None else (tokenizer.id(YES), tokenizer.id(NO))
        if any(id is None or id >= self._frontend.vocab for id in ids):
            raise RequestError(
                f"the model {self._model!r:.200} does not score: {YES} and {NO} are no tokens of its vocabulary",
                param="model",
                code="model-does-not-score",
            )
        return cast(tuple[int, int], ids)

    # Prompts

    def _limit(self, truncate: int | None) -> int | None:
        """Most tokens of a prompt that is cut; None if none is."""
        longest = self._frontend.max_model_len
        if truncate is None:
            return None
        if type(truncate) is not int or (truncate != -1 and not 1 <= truncate <= longest):
            raise RequestError(
                f"truncate_prompt_tokens is {truncate!r:.60}; it must be from 1 to {longest}, the model's length, or "
                "-1 for that",
                param="truncate_prompt_tokens",
                code="invalid-truncation",
            )
        return longest if truncate == -1 else truncate

    def _text_ids(self, text: str, limit: int | None, *, special: bool, param: str) -> list[int]:
        """Token ids of a text; with `limit`, of its beginning and of the tokens that end every text."""
        frontend = self._frontend
        if limit is None:
            frontend.check_text(text, param=param, answers=False)
        else:
            text = self._beginning(text, limit)
        ids = frontend.encode(text, special=special, param=param)
        if limit is None or len(ids) <= limit or not special:
            return ids
        ending = self._ending[:limit]
        return ids[: limit - len(ending)] + ending

    def _literal_ids(self, text: str, limit: int | None, param: str) -> list[int]:
        """Token ids of the texts of a pair, in which no text stands for a special token."""
        if limit is None:
            self._frontend.check_text(text, param=param, answers=False)
        else:
            text = self._beginning(text, limit)
        ids = self._frontend.require_tokenizer("a text", param).encode_literally(text)
        return ids if limit is None else ids[:limit]

    def _beginnings(self, texts: list[str], limit: int | None) -> list[str]:
        """The beginnings of texts of which no prompt of `limit` tokens has more; all of them without a limit."""
        return texts if limit is None else [self._beginning(text, limit) for text in texts]

    def _beginning(self, text: str, limit: int) -> str:
        """The beginning of a text that has more than `limit` tokens, or all of it."""
        if len(text) <= limit:  # no token is shorter than a character
            return text
        return text[: (limit + SPARE) * self._frontend.require_tokenizer("a text", "prompt").longest_token]

    @cached_property
    def _ending(self) -> list[int]:
        """Token ids that end every text."""
        tokenizer = self._frontend.require_tokenizer("a text", "prompt")
        ids = tokenizer.encode("")
        return ids[1:] if ids[:1] == [tokenizer.bos_id] else ids


@dataclass(frozen=True)
class PendingScores:
    """The requests behind the scores of pairs.

    `embedded` is 0 if each request is of one pair; else the number of queries, whose requests come before the
    documents' requests.
    """

    pooler: Pooler
    collectors: list[Collector]
    embedded: int = 0

    def scores(self, *, raw: bool = False) -> list[float]:
        """Return the scores, once all collectors have their results: probabilities of yes, or cosines.

        `raw` probabilities are differences of logits. Raises OutputError.
        """
        if not self.embedded:
            differences = [float(yes) - float(no) for yes, no in map(_numbers, self.collectors)]
            return differences if raw else [_logistic(difference) for difference in differences]
        vectors = [self.pooler.embedding(collector, normalise=True) for collector in self.collectors]
        firsts, seconds = vectors[: self.embedded], vectors[self.embedded :]
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        return [float(first @ second) for first, second in zip(firsts, seconds, strict=True)]


def _logistic(value: float) -> float:
    # Never an exponent above 0, which could overflow.
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def _numbers(collector: Collector) -> np.ndarray:
    """The float32 numbers that have come for a collector. Raises OutputError if there are none."""
    collector.raise_failure()
    pooled = collector.output.pooled
    assert pooled is not None, "a request with pooling that has ended"
    return np.frombuffer(pooled, dtype="<f4")


def _prompt_of(given: Mapping[str, Any], param: str) -> str | Sequence[int]:
    """The token ids or the text of a prompt that is a dict."""
    ids, text = given.get("prompt_token_ids"), given.get("prompt")
    if ids is None and text is None:
        raise RequestError(
            f'a prompt given as a dict needs "prompt" or "prompt_token_ids"; it has {sorted(given)}',
            param=param,
            code="prompt-dict-without-prompt",
        )
    return cast("str | Sequence[int]", text if ids is None else ids)


def _check_work(characters: int, most: int | None, param: str) -> None:
    """Raise RequestError for pairs whose texts would take minutes to become tokens."""
    if most is not None and characters > most:
        raise RequestError(
            f"the pairs have {characters:,} characters, the query's counted once for each document, and one request "
            f"may have {most:,}; send several requests, or give truncate_prompt_tokens",
            param=param,
            code="too-many-characters",
        )


def _texts(given: str | Sequence[str], param: str) -> list[str]:
    texts: list[Any] = [given] if isinstance(given, str) else list(given)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{param} must be a text or a list of texts", param=param, code="invalid-texts")
    return texts
