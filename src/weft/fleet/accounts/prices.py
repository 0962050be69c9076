"""Prices of requests at overflow upstreams, and the requests whose tokens bound their price."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.api.service.sampling import SHARED_FIELDS
from weft.fleet.upstreams.config import UpstreamConfig

MILLION = 1e6

# Fields of a completion whose only effect on the price is through tokens, which max_tokens and the body's length bound.
PRICED_FIELDS = frozenset(
    [
        *SHARED_FIELDS,
        "model",
        "messages",
        "prompt",
        "suffix",
        "echo",
        "stream",
        "stream_options",
        "best_of",
        "max_completion_tokens",
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

# Fields of a message, its parts, calls and tools that only add their tokens.
MESSAGE_FIELDS = frozenset(
    [
        "role",
        "content",
        "name",
        "refusal",
        "tool_calls",
        "tool_call_id",
        "function_call",
        "reasoning",
        "reasoning_content",
        "audio",
    ]
)
TEXT_PARTS = (frozenset(("type", "text")), frozenset(("type", "refusal")))
CALL_FIELDS = frozenset(("id", "index", "type", "function"))
TOOL_FIELDS = frozenset(("type", "function"))
FUNCTION_FIELDS = frozenset(("name", "description", "parameters", "strict"))
TOOL_TOKENS = 1000  # tokens that a vendor's template may add to a prompt with tools


def has_price(body: bytes) -> bool:
    """Return True for a completion of text alone, whose bytes and limits bound its price.

    Pictures, files, searches and faster tiers cost more than their tokens. An unknown field may ask for them.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if not isinstance(fields, dict) or not fields.keys() <= PRICED_FIELDS:
        return False
    return (
        all(_is_text(message) for message in _rows(fields, "messages"))
        and all(_is_tool(tool) for tool in _rows(fields, "tools"))
        and all(_is_function(function) for function in _rows(fields, "functions"))
    )


def _rows(fields: dict[str, Any], name: str) -> list[Any]:
    """A list in a body; [None] for any other value."""
    value = fields.get(name) or []
    return value if isinstance(value, list) else [None]


def _is_text(message: Any) -> bool:
    """Return True for a message of a chat with nothing but text."""
    if not isinstance(message, dict) or not message.keys() <= MESSAGE_FIELDS or message.get("audio") is not None:
        return False
    if not all(isinstance(call, dict) and call.keys() <= CALL_FIELDS for call in _rows(message, "tool_calls")):
        return False
    content = message.get("content")
    if not isinstance(content, list):
        return content is None or isinstance(content, str)
    return all(_is_text_part(part) for part in content)


def _is_text_part(part: Any) -> bool:
    """Return True for a part of a message that is a text, and marks nothing for a cache."""
    if not isinstance(part, dict) or part.keys() not in TEXT_PARTS:
        return False
    kind = part["type"]
    return kind in ("text", "refusal") and isinstance(part.get(kind), str)


def _is_tool(tool: Any) -> bool:
    """Return True for a tool that the client runs, not the vendor."""
    if not isinstance(tool, dict) or not tool.keys() <= TOOL_FIELDS or tool.get("type") != "function":
        return False
    return _is_function(tool.get("function") or {})


def _is_function(function: Any) -> bool:
    """Return True for the description of a function that marks nothing for a cache."""
    return isinstance(function, dict) and function.keys() <= FUNCTION_FIELDS


def price_of(upstream: UpstreamConfig, model: str, prompt: int, completion: int) -> float:
    """Dollars of a request at an upstream; 0 if it is not marked `overflow`. Raises ConfigError."""
    if not upstream.overflow:
        return 0.0
    if upstream.price is not None:
        return (prompt * upstream.price.input + completion * upstream.price.output) / MILLION
    from weft.planner.prices.api_prices import TokenUsage, find_quote

    return find_quote(model, TokenUsage(max(prompt, 1), 0, max(completion, 1))).dollars
