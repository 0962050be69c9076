"""Sampling fields of a request, limits on their lengths, and unsupported fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from weft.api.service.openai_types import SamplingRequest
from weft.engine.core.params import SamplingParams
from weft.engine.templates.limits import LIMITS
from weft.errors import RequestError

# Fields that SamplingParams has under the same name, and whose values it checks.
SHARED_FIELDS = [
    name
    for name in SamplingRequest.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name != "structured_outputs"
]

# Fields that clients of OpenAI or vLLM send, and that do not change the response here.
IGNORED = [
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "request_id",
    "best_of",
]

MIN_TOP_P = 1e-6  # in place of 0, by which clients mean the likeliest token

# Features that Weft does not have, or not in every endpoint: the field, and the values of it that request nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "chat_template": (),
    "documents": ([],),
    "mcp_servers": ([],),
    "container": (),
}
ACCEPTED_FIELDS = frozenset((*IGNORED, *UNSUPPORTED))

# By field: most items of a list or an object, and most characters of all items together.
MAX_LENGTHS: Mapping[str, tuple[int, int | None]] = {
    "stop": (LIMITS.stops, LIMITS.stop_characters),
    "bad_words": (LIMITS.bad_words, LIMITS.bad_word_characters),
    "stop_token_ids": (LIMITS.stop_token_ids, None),
    "logit_bias": (LIMITS.logit_bias, None),
    "messages": (LIMITS.messages, None),
}


def check_lengths(raw: Mapping[str, Any], *, vocab: int, max_model_len: int) -> None:
    """Raise RequestError for a field with more items or more text than any use of the field needs."""
    model_lengths = {
        "allowed_token_ids": (vocab, None),
        "continue_token_ids": (max_model_len, None),
        "tokens": (max(LIMITS.detokenize_ids, max_model_len), None),
    }
    for name, (items, characters) in {**MAX_LENGTHS, **model_lengths}.items():
        value = raw.get(name)
        if isinstance(value, list | dict) and len(value) > items:
            raise RequestError(
                f"{name} has {len(value):,} items; the limit is {items:,}", param=name, code="too-many-items"
            )
        total = 0 if characters is None else _characters(value)
        if characters is not None and total > characters:
            raise RequestError(
                f"{name} has {total:,} characters in all; the limit is {characters:,}",
                param=name,
                code="too-many-characters",
            )


def _characters(value: object) -> int:
    """Number of characters of a text, or of all texts in a list."""
    texts = value if isinstance(value, list) else [value]
    return sum(len(text) for text in texts if isinstance(text, str))


def check_supported(raw: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Raise RequestError for a known feature that Weft does not have, except the endpoint's own features in `known`."""
    for name, harmless in UNSUPPORTED.items():
        value = raw.get(name)
        if value is None or value in harmless or name in known:
            continue
        of_type = f" of type {value.get('type')!r:.80}" if isinstance(value, dict) and "type" in value else ""
        raise RequestError(f"{name}{of_type} is not supported; leave it out", param=name, code="unsupported-field")
    best_of = raw.get("best_of")
    if best_of is not None and best_of != (raw.get("n") or 1):
        raise RequestError(
            "best_of other than n is not supported; leave it out", param="best_of", code="unsupported-field"
        )


def sampling_fields(request: SamplingRequest) -> dict[str, Any]:
    """The request's fields that SamplingParams shares; None for a field that the request does not set."""
    fields = {name: getattr(request, name) for name in SHARED_FIELDS}
    if fields["top_p"] == 0:
        fields["top_p"] = MIN_TOP_P
    return fields
