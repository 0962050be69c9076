"""Conversations of the official clients with the scripted model: ten calls of a tool, of which one is cut.

Each answer goes back to the server as it came, a cut call too. Each conversation returns the model's last words.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import ollama
import openai

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
NAME = "bash"
SHELL = {"name": NAME, "description": "Run a command", "parameters": PARAMETERS}
TOO_LONG = "hello " * 20_000
ROUNDS = 20  # more than any conversation needs


def task(mark: str, turns: int, cut: int) -> str:
    return f"weft-task {mark} turns {turns} cut {cut}"


def said(call_arguments: str) -> str:
    """The words of the tool: of arguments that are cut, that they are."""
    try:
        return str(json.loads(call_arguments)["command"])
    except (ValueError, KeyError):
        return "the arguments are no JSON"


def openai_chat(url: str, mark: str, turns: int, cut: int) -> str:
    """A conversation over /v1/chat/completions, streamed and whole in turns."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    messages: list[Any] = [{"role": "user", "content": task(mark, turns, cut)}]
    tools: Any = [{"type": "function", "function": SHELL}]
    for number in range(ROUNDS):
        if number % 2:
            with client.chat.completions.stream(model="demo", messages=messages, tools=tools) as stream:
                message = _last(stream)
        else:
            message = client.chat.completions.create(model="demo", messages=messages, tools=tools).choices[0].message
        messages.append(message.model_dump(exclude_none=False))
        if not message.tool_calls:
            if "done" in (message.content or ""):
                return str(message.content)
            messages.append({"role": "user", "content": "go on"})
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said(call.function.arguments)})
    raise AssertionError("the conversation does not end")


def _last(stream: Any) -> Any:
    """The message of a stream, cut or not: the helper raises for one that max_tokens has cut."""
    try:
        return stream.get_final_completion().choices[0].message
    except openai.LengthFinishReasonError as error:
        return error.completion.choices[0].message


def openai_responses(url: str, mark: str, turns: int, cut: int) -> str:
    """A conversation over /v1/responses."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    items: list[Any] = [{"role": "user", "content": task(mark, turns, cut)}]
    tools: Any = [{"type": "function", "strict": False, **SHELL}]
    for _ in range(ROUNDS):
        response = client.responses.create(model="demo", input=items, tools=tools, instructions="be brief")
        calls = [item for item in response.output if item.type == "function_call"]
        items += [item.model_dump() for item in response.output]
        items += [
            {"type": "function_call_output", "call_id": one.call_id, "output": said(one.arguments)} for one in calls
        ]
        if not calls:
            if "done" in response.output_text:
                return response.output_text
            items.append({"role": "user", "content": "go on"})
    raise AssertionError("the conversation does not end")


def anthropic_messages(url: str, mark: str, turns: int, cut: int) -> str:
    """A conversation over /v1/messages."""
    client = anthropic.Anthropic(base_url=url, api_key="none")
    messages: list[Any] = [{"role": "user", "content": task(mark, turns, cut)}]
    tools: Any = [{"name": NAME, "description": "Run a command", "input_schema": PARAMETERS}]
    for _ in range(ROUNDS):
        answer = client.messages.create(model="demo", max_tokens=500, messages=messages, tools=tools, system="be brief")
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": one.id, "content": said(json.dumps(one.input))} for one in calls
        ]
        if not calls:
            text = "".join(block.text for block in answer.content if block.type == "text")
            if "done" in text:
                return text
        messages.append({"role": "user", "content": results or "go on"})
    raise AssertionError("the conversation does not end")


def ollama_chat(url: str, mark: str, turns: int, cut: int) -> str:
    """A conversation over /api/chat."""
    client = ollama.Client(host=url)
    messages: list[Any] = [{"role": "user", "content": task(mark, turns, cut)}]
    tools: Any = [{"type": "function", "function": SHELL}]
    for _ in range(ROUNDS):
        message = client.chat(model="demo", messages=messages, tools=tools).message
        messages.append(message.model_dump())
        if not message.tool_calls:
            if "done" in (message.content or ""):
                return str(message.content)
            messages.append({"role": "user", "content": "go on"})
        for call in message.tool_calls or ():
            text = said(json.dumps(dict(call.function.arguments)))
            messages.append({"role": "tool", "tool_name": call.function.name, "content": text})
    raise AssertionError("the conversation does not end")


def openai_overflow(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    for ask in (
        lambda: client.chat.completions.create(model="demo", messages=[{"role": "user", "content": TOO_LONG}]),
        lambda: client.responses.create(model="demo", input=TOO_LONG),
    ):
        try:
            ask()
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded", error
            continue
        raise AssertionError("a conversation that is too long was answered")


def anthropic_overflow(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none")
    try:
        client.messages.create(model="demo", max_tokens=5, messages=[{"role": "user", "content": TOO_LONG}])
    except anthropic.BadRequestError as error:
        assert "prompt is too long: " in str(error), error
        return
    raise AssertionError("a conversation that is too long was answered")


def ollama_overflow(url: str) -> None:
    try:
        ollama.Client(host=url).chat(model="demo", messages=[{"role": "user", "content": TOO_LONG}])
    except ollama.ResponseError as error:
        assert "maximum context length is" in error.error, error
        return
    raise AssertionError("a conversation that is too long was answered")


CLIENTS = (
    ("openai, chat", openai_chat, openai_overflow),
    ("openai, responses", openai_responses, openai_overflow),
    ("anthropic", anthropic_messages, anthropic_overflow),
    ("ollama", ollama_chat, ollama_overflow),
)
