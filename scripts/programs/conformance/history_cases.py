"""Ten turns with tools on each API: what the server answers is sent back as it came, and once with a call cut off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.programs.conformance.case import Api, Case, has
from scripts.programs.conformance.openai_cases import ARGUMENTS, ASK, CHAT, TOOLS, choice_of
from scripts.programs.conformance.other_cases import FUNCTION, MESSAGES, RESPONSES

TURNS = 10
CALLING_TURNS, CUT_TURN = (1, 4), 4
LENGTH = 100  # tokens of a call, at most
SAYING_LENGTH = 6
RESULT = "sunny"


def turns() -> Iterator[tuple[int, bool, int]]:
    """Number of each turn, True if it must call a tool, and its length in tokens."""
    for number in range(TURNS):
        calls = number in CALLING_TURNS
        yield number, calls, LENGTH if calls else SAYING_LENGTH


async def chat_history(api: Api) -> None:
    messages: list[dict[str, Any]] = [*ASK]
    for number, calls, length in turns():
        forced = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False} if calls else {}
        body = (await api.post(CHAT, messages=messages, max_tokens=length, temperature=0, **forced)).json
        message = choice_of(body)["message"]
        messages.append(message)
        for call in message.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": RESULT})
            if number == CUT_TURN:
                call["function"]["arguments"] = call["function"]["arguments"][:-1]
        messages.append({"role": "user", "content": f"{number}?"})
        if number == CUT_TURN:
            messages.append({"role": "system", "content": "Be kind."})


async def messages_history(api: Api) -> None:
    tools = [{"name": "weather", "input_schema": ARGUMENTS}]
    messages: list[dict[str, Any]] = [*ASK]
    for number, calls, length in turns():
        choice = {"type": "any" if calls else "auto", "disable_parallel_tool_use": True}
        asked = {"max_tokens": length, "temperature": 0, "tools": tools, "tool_choice": choice}
        body = (await api.post(MESSAGES, messages=messages, **asked)).json
        messages.append({"role": "assistant", "content": body["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT}
            for block in body["content"]
            if block["type"] == "tool_use"
        ]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": f"{number}?"}]})


async def responses_history(api: Api) -> None:
    items: list[dict[str, Any]] = [*ASK]
    for number, calls, length in turns():
        asked: dict[str, Any] = {"max_output_tokens": max(length, 16), "temperature": 0, "parallel_tool_calls": False}
        if calls:
            asked |= {"tools": [FUNCTION], "tool_choice": "required"}
        output = (await api.post(RESPONSES, input=items, instructions="Be brief.", **asked)).json["output"]
        items += output
        for item in output:
            if item["type"] == "function_call":
                items.append({"type": "function_call_output", "call_id": item["call_id"], "output": RESULT})
                item["arguments"] = item["arguments"][:-1] if number == CUT_TURN else item["arguments"]
        role = "developer" if number == CUT_TURN else "user"
        items.append({"role": role, "content": f"{number}?"})


async def ollama_history(api: Api) -> None:
    messages: list[dict[str, Any]] = [*ASK]
    for number, calls, _ in turns():
        asked = {"stream": False, "options": {"temperature": 0, "num_predict": SAYING_LENGTH}, "tools": TOOLS}
        message = (await api.post("/api/chat", messages=messages, **asked)).json["message"]
        has(message, {"role": str, "content": str}, "the message")
        messages.append(message)
        if calls:  # the API cannot ask for one
            call = {"function": {"name": "weather", "arguments": {"city": "Rome", "unit": "C"}}}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call, call]},
                {"role": "tool", "tool_name": "weather", "content": RESULT},
                {"role": "tool", "tool_name": "weather", "content": RESULT},
            ]
        messages.append({"role": "user", "content": f"{number}?"})


CASES = [
    Case("history: chat", chat_history),
    Case("history: messages", messages_history),
    Case("history: responses", responses_history),
    Case("history: ollama", ollama_history),
]
