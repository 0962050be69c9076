"""Request logs in the shapes of coding agents, from the public documents of the two APIs.

An agent sends a long system prompt and its tools with every request, and the history grows by what the model called and
what came of it. Texts are made up: numbers in words, the same for the same turn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

SENTENCE = "read the file and change the test so that it fails when the value is wrong then run all of them again"
WORDS = tuple(SENTENCE.split())


def text(seed: str, words: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


def schema(*names: str) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": text(name, 4)} for name in names}
    return {"type": "object", "properties": properties, "required": list(names)}


TOOLS = {
    "shell": schema("command", "workdir"),
    "read_file": schema("path"),
    "apply_patch": schema("path", "patch"),
}


def calls(turn: int) -> tuple[str, str, str]:
    """Name, arguments and result of the tool that a turn calls."""
    name = list(TOOLS)[turn % len(TOOLS)]
    return name, json.dumps({"path": f"src/part_{turn}.py", "why": text(f"call {turn}", 4)}), text(f"result {turn}", 12)


def responses_log(name: str, turns: int, size: int) -> Iterator[dict[str, Any]]:
    """Bodies of /v1/responses. `size`: words of the instructions."""
    items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": text(f"task {name}", 20)}]
    common = {
        "instructions": text(f"instructions {name}", size),
        "tools": [{"type": "function", "name": tool, "parameters": given} for tool, given in TOOLS.items()],
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": name,
    }
    for turn in range(turns):
        yield {**common, "input": list(items)}
        tool, arguments, result = calls(turn)
        items += [
            {"type": "reasoning", "summary": [], "encrypted_content": "kept elsewhere"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text(f"{turn}", 6)}]},
            {"type": "function_call", "call_id": f"call_{turn}", "name": tool, "arguments": arguments},
            {"type": "function_call_output", "call_id": f"call_{turn}", "output": result},
        ]


def messages_log(name: str, turns: int, size: int) -> Iterator[dict[str, Any]]:
    """Bodies of /v1/messages: system in blocks, cache breakpoints that move with the history."""
    history: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": text(f"task {name}", 20)}]}]
    system = [
        {"type": "text", "text": text(f"who {name}", 8)},
        {"type": "text", "text": text(f"system {name}", size), "cache_control": {"type": "ephemeral"}},
    ]
    common = {
        "system": system,
        "tools": [{"name": tool, "description": tool, "input_schema": given} for tool, given in TOOLS.items()],
        "metadata": {"user_id": name},
    }
    for turn in range(turns):
        messages = json.loads(json.dumps(history))
        messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        yield {**common, "messages": messages}
        tool, arguments, result = calls(turn)
        use = {"type": "tool_use", "id": f"toolu_{turn}", "name": tool, "input": json.loads(arguments)}
        done = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": [{"type": "text", "text": result}]}
        history += [
            {"role": "assistant", "content": [{"type": "text", "text": text(f"{turn}", 6)}, use]},
            {"role": "user", "content": [done]},
        ]
