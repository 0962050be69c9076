"""One turn of a conversation, as the guides of the first Qwen models have it: a query and the turns before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.checkpoint.config.config_json import SAMPLING
from weft.engine.core.params import SamplingParams
from weft.engine.frontend.frontend import Frontend
from weft.errors import RequestError

SYSTEM = "You are a helpful assistant."
History = list[tuple[str, str]]


def read_turn(arguments: Sequence[Any], options: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]] | None:
    """Arguments of one turn, without the tokenizer that the guides pass first or by name; None for messages.

    The tokenizer is the caller's own object for the same model: the engine's is used.
    """
    given, named = list(arguments), dict(options)
    if given and is_tokenizer(given[0]):
        del given[0]
    elif is_tokenizer(named.get("tokenizer")) or named.get("tokenizer", ...) is None:
        del named["tokenizer"]
    return (given, named) if "query" in named or (given and isinstance(given[0], str)) else None


def is_tokenizer(value: object) -> bool:
    """Return True for a tokenizer of Weft's or of Transformers."""
    return callable(getattr(value, "encode", None)) and callable(getattr(value, "decode", None))


def copy_history(history: object) -> History:
    """Return a copy of pairs of a query and its response; [] for None. Raises RequestError for anything else."""
    pairs = [] if history is None else history
    if isinstance(pairs, Sequence) and all(map(_is_pair, pairs)):
        return [(query, response) for query, response in pairs]
    raise RequestError(
        "history must be a list of pairs of texts, a query and its response, or None",
        param="history",
        code="history-not-pairs",
    )


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(part, str) for part in pair)


def turn_messages(query: str, history: History, system: str) -> list[dict[str, str]]:
    """Return the messages of a conversation whose last one is `query`; without a system message for an empty one."""
    pairs = [("system", system)] if system else []
    for question, answered in history:
        pairs += [("user", question), ("assistant", answered)]
    return [{"role": role, "content": content} for role, content in (*pairs, ("user", query))]


def turn_params(frontend: Frontend, generation_config: object, sampling: Mapping[str, Any]) -> SamplingParams:
    """Return the SamplingParams of one turn: fields of `sampling`, then of `generation_config`, then the model's own.

    `generation_config` is an object or a mapping with Transformers' fields. Without `do_sample` it is greedy.
    `sampling` may have Transformers' `max_new_tokens` and `do_sample` too.
    """
    fields: dict[str, Any] = {"max_tokens": frontend.max_new_tokens}
    if generation_config is not None:
        fields |= _generation_fields(generation_config)
    own = {name: value for name, value in sampling.items() if name not in ("max_new_tokens", "do_sample")}
    if sampling.get("max_new_tokens") is not None:
        own["max_tokens"] = sampling["max_new_tokens"]
    if sampling.get("do_sample") is False:
        own["temperature"] = 0
    return frontend.sampling_params({**fields, **own}, max_tokens=None)


def _generation_fields(generation_config: object) -> dict[str, Any]:
    def value(name: str) -> Any:
        if isinstance(generation_config, Mapping):
            return generation_config.get(name)
        return getattr(generation_config, name, None)

    fields = {name: value(name) for name in SAMPLING}
    if value("do_sample") is False:
        fields["temperature"] = 0
    return {**fields, "max_tokens": value("max_new_tokens")}
