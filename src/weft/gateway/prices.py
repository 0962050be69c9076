"""Prices of requests at overflow upstreams, and the requests whose tokens bound their price."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.gateway.config import UpstreamConfig

MILLION = 1e6

# The fields of a completion that change no price but by tokens, which max_tokens and the length of the body bound.
PRICED_FIELDS = frozenset(
    [
        "model",
        "messages",
        "prompt",
        "suffix",
        "echo",
        "stream",
        "stream_options",
        "n",
        "best_of",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "functions",
        "function_call",
        "response_format",
        "structured_outputs",
        "reasoning_effort",
        "chat_template_kwargs",
        "add_generation_prompt",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "return_token_ids",
        "continue_token_ids",
        "user",
        "session_id",
        "prompt_cache_key",
        "metadata",
        "store",
        "priority",
    ]
)


def has_price(body: bytes) -> bool:
    """Return True for a completion of text alone, whose bytes and limits bound its price.

    Pictures, files, searches and faster tiers cost more than their tokens. A field that is not known may be one of
    them.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if not isinstance(fields, dict) or not fields.keys() <= PRICED_FIELDS:
        return False
    return all(_is_text(message) for message in _rows(fields, "messages")) and all(
        isinstance(tool, dict) and tool.get("type") == "function" for tool in _rows(fields, "tools")
    )


def _rows(fields: dict[str, Any], name: str) -> list[Any]:
    """A list in a body; [None] for anything else that is there."""
    value = fields.get(name) or []
    return value if isinstance(value, list) else [None]


def _is_text(message: Any) -> bool:
    """Return True for a message of a chat with nothing but text."""
    if not isinstance(message, dict):
        return False
    if message.get("audio") is not None:
        return False
    content = message.get("content")
    if not isinstance(content, list):
        return content is None or isinstance(content, str)
    return all(isinstance(part, dict) and part.get("type") in ("text", "refusal") for part in content)


def price_of(upstream: UpstreamConfig, model: str, prompt: int, completion: int) -> float:
    """Dollars of a request at an upstream; 0 at one that is not marked `overflow`. Raises ConfigError."""
    if not upstream.overflow:
        return 0.0
    if upstream.price is not None:
        return (prompt * upstream.price.input + completion * upstream.price.output) / MILLION
    from weft.planner.api_prices import Usage, find_quote

    return find_quote(model, Usage(max(prompt, 1), 0, max(completion, 1))).dollars
