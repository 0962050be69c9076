"""Anthropic's, Ollama's and OpenAI's later API: shapes, the order of events, tools and errors."""

from __future__ import annotations

from typing import Any

from scripts.programs.conformance.case import Api, Case, check, equal, has, valid
from scripts.programs.conformance.openai_cases import ARGUMENTS, ASK, SCHEMA, WEATHER, error_of

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FUNCTION = {"type": "function", "name": "weather", "parameters": ARGUMENTS}
SHORT = {"temperature": 0, "max_output_tokens": 12}

# /v1/responses


def check_response(body: Any, *statuses: str) -> None:
    has(
        body, {"id": str, "object": str, "created_at": int, "model": str, "output": list, "usage": dict}, "the response"
    )
    equal(body["object"], "response", "object")
    check(body["status"] in statuses, f"status is {body['status']!r}")
    has(body["usage"], {"input_tokens": int, "output_tokens": int, "total_tokens": int}, "usage")


async def responses_whole(api: Api) -> None:
    body = (await api.post(RESPONSES, input="Say hello.", **SHORT)).json
    check_response(body, "completed", "incomplete")
    (item,) = body["output"]
    equal((item["type"], item["role"], item["content"][0]["type"]), ("message", "assistant", "output_text"), "the item")


async def responses_events(api: Api) -> None:
    events = (await api.post(RESPONSES, input="Say hello.", stream=True, **SHORT)).events
    for name, data in events:
        has(data, {"type": str, "sequence_number": int}, "an event")
        equal(data["type"], name, "an event's name")
    equal([data["sequence_number"] for _, data in events], list(range(len(events))), "the sequence numbers")
    names = [name.removeprefix("response.") for name, _ in events]
    equal(names[:4], ["created", "in_progress", "output_item.added", "content_part.added"], "the first events")
    equal(names[-4:-1], ["output_text.done", "content_part.done", "output_item.done"], "the events of the end")
    equal(set(names[4:-4]), {"output_text.delta"}, "the events between")
    whole = events[-1][1]["response"]
    check_response(whole, "completed", "incomplete")
    streamed = "".join(data["delta"] for name, data in events if name == "response.output_text.delta")
    equal(whole["output"][0]["content"][0]["text"], streamed, "the text of the last event")


async def responses_tools(api: Api) -> None:
    asked: dict[str, Any] = {"input": "Weather?", "tools": [FUNCTION], "tool_choice": "required", "temperature": 0}
    asked |= {"parallel_tool_calls": False, "max_output_tokens": 200}
    (call,) = (await api.post(RESPONSES, **asked)).json["output"]
    has(call, {"type": str, "id": str, "call_id": str, "name": str, "arguments": str}, "the item")
    equal((call["type"], call["name"]), ("function_call", "weather"), "the item")
    valid(call["arguments"], ARGUMENTS)
    events = (await api.post(RESPONSES, stream=True, **asked)).events
    parts = [data["delta"] for name, data in events if name == "response.function_call_arguments.delta"]
    (streamed,) = events[-1][1]["response"]["output"]
    equal("".join(parts), streamed["arguments"], "the streamed arguments")
    valid(streamed["arguments"], ARGUMENTS)
    history = [
        {"role": "user", "content": "Weather?"},
        {key: call[key] for key in ("type", "call_id", "name", "arguments")},
        {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"},
    ]
    check_response(
        (await api.post(RESPONSES, input=history, tools=[FUNCTION], **SHORT)).json, "completed", "incomplete"
    )


async def responses_schema(api: Api) -> None:
    text = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}
    body = (await api.post(RESPONSES, input="A place.", text=text, max_output_tokens=200)).json
    check_response(body, "completed")
    valid(body["output"][0]["content"][0]["text"], SCHEMA)


async def responses_errors(api: Api) -> None:
    for fields in ({"input": 5}, {"input": "a", "max_output_tokens": -1}, {}):
        error_of(await api.refused(RESPONSES, 400, **fields))


# /v1/messages


def check_message(body: Any) -> None:
    has(body, {"id": str, "type": str, "role": str, "content": list, "model": str, "usage": dict}, "the message")
    equal((body["type"], body["role"]), ("message", "assistant"), "type and role")
    has(body["usage"], {"input_tokens": int, "output_tokens": int}, "usage")


async def messages_whole(api: Api) -> None:
    body = (await api.post(MESSAGES, messages=ASK, max_tokens=12, temperature=0)).json
    check_message(body)
    equal(body["content"][0]["type"], "text", "the first block's type")
    check(body["stop_reason"] in ("end_turn", "max_tokens"), f"stop_reason is {body['stop_reason']!r}")


async def messages_events(api: Api) -> None:
    asked = {"messages": ASK, "max_tokens": 12, "temperature": 0}
    text = (await api.post(MESSAGES, **asked)).json["content"][0]["text"]
    events = (await api.post(MESSAGES, stream=True, **asked)).events
    for name, data in events:
        equal(data.get("type"), name, "an event's name")
    names = [name for name, _ in events if name != "ping"]
    equal(names[:2], ["message_start", "content_block_start"], "the first events")
    equal(names[-3:], ["content_block_stop", "message_delta", "message_stop"], "the last events")
    equal(set(names[2:-3]), {"content_block_delta"}, "the events between")
    streamed = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    equal(streamed, text, "the streamed text")


async def messages_tools(api: Api) -> None:
    tool = {"name": "weather", "input_schema": ARGUMENTS}
    asked: dict[str, Any] = {"messages": ASK, "max_tokens": 200, "tools": [tool], "temperature": 0}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
        body = (await api.post(MESSAGES, tool_choice=choice, **asked)).json
        uses = [block for block in body["content"] if block["type"] == "tool_use"]
        equal([use["name"] for use in uses], ["weather"], "the calls")
        has(uses[0], {"id": str, "input": dict}, "a call")
        equal(body["stop_reason"], "tool_use", "stop_reason")
        events = (await api.post(MESSAGES, stream=True, tool_choice=choice, **asked)).events
        parts = [data["delta"].get("partial_json", "") for name, data in events if name == "content_block_delta"]
        valid("".join(parts), ARGUMENTS)


async def messages_stop(api: Api) -> None:
    asked = {"messages": ASK, "max_tokens": 12, "temperature": 0}
    text = (await api.post(MESSAGES, **asked)).json["content"][0]["text"]
    body = (await api.post(MESSAGES, stop_sequences=[text[2:4]], **asked)).json
    equal((body["stop_reason"], body["stop_sequence"]), ("stop_sequence", text[2:4]), "the end")


async def messages_count(api: Api) -> None:
    counted = (await api.post(f"{MESSAGES}/count_tokens", messages=ASK)).json["input_tokens"]
    usage = (await api.post(MESSAGES, messages=ASK, max_tokens=1)).json["usage"]
    equal(usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0), counted, "the tokens of the prompt")


async def messages_errors(api: Api) -> None:
    wrong: list[tuple[dict[str, Any], int]] = [
        ({"messages": ASK}, 400),
        ({"messages": ASK, "max_tokens": "a"}, 400),
        ({"max_tokens": 1}, 400),
        ({"model": "no-such-model", "messages": ASK, "max_tokens": 1}, 404),
    ]
    for fields, status in wrong:
        made = await api.ask("POST", MESSAGES, json={"model": api.model, **fields})
        equal(made.status, status, f"the status for {fields}")
        has(made.json, {"type": str, "error": dict}, "the body of an error")
        equal(made.json["type"], "error", "type")
        has(made.json["error"], {"type": str, "message": str}, "error")


# Ollama

OPTIONS = {"temperature": 0, "num_predict": 12}
COUNTS = dict.fromkeys(("total_duration", "load_duration", "prompt_eval_count", "eval_count", "eval_duration"), int)


async def ollama_chat(api: Api) -> None:
    whole = (await api.post("/api/chat", messages=ASK, stream=False, options=OPTIONS)).json
    has(whole, {"model": str, "created_at": str, "message": dict, "done": bool, "done_reason": str, **COUNTS}, "it")
    lines = (await api.post("/api/chat", messages=ASK, options=OPTIONS)).lines
    for line in lines:
        has(line, {"model": str, "created_at": str, "message": dict, "done": bool}, "a line")
    equal([line["done"] for line in lines], [False] * (len(lines) - 1) + [True], "done")
    has(lines[-1], COUNTS, "the last line")
    streamed = "".join(line["message"]["content"] for line in lines)
    equal(streamed, whole["message"]["content"], "the streamed text")


async def ollama_generate(api: Api) -> None:
    whole = (await api.post("/api/generate", prompt="Say hello.", stream=False, options=OPTIONS)).json
    lines = (await api.post("/api/generate", prompt="Say hello.", options=OPTIONS)).lines
    equal("".join(line["response"] for line in lines), whole["response"], "the streamed text")


async def ollama_format(api: Api) -> None:
    options = {"num_predict": 200}
    body = (await api.post("/api/chat", messages=ASK, stream=False, format=SCHEMA, options=options)).json
    valid(body["message"]["content"], SCHEMA)


async def ollama_tools(api: Api) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    history = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]
    asked = {"messages": history, "tools": [WEATHER], "stream": False, "options": OPTIONS}
    has((await api.post("/api/chat", **asked)).json["message"], {"role": str, "content": str}, "the message")


async def ollama_lists(api: Api) -> None:
    names = [row["name"] for row in (await api.ask("GET", "/api/tags")).json["models"]]
    check(api.model in names or f"{api.model}:latest" in names, f"{api.model!r} is not in {names}")
    has((await api.ask("GET", "/api/version")).json, {"version": str}, "the version")
    has((await api.ask("GET", "/api/ps")).json, {"models": list}, "the running models")
    has((await api.post("/api/show")).json, {"details": dict, "model_info": dict}, "the model")
    equal((await api.ask("GET", "/")).text, "Ollama is running", "the text of /")
    equal((await api.ask("HEAD", "/")).status, 200, "the status of HEAD /")


async def ollama_errors(api: Api) -> None:
    made = await api.ask("POST", "/api/chat", json={"model": "no-such-model", "messages": ASK})
    equal(made.status, 404, "the status for an unknown model")
    has(made.json, {"error": str}, "the body of an error")
    has(await api.refused("/api/chat", 400, messages="hi"), {"error": str}, "the body of an error")


CASES = (
    Case("responses: whole answer", responses_whole),
    Case("responses: events", responses_events),
    Case("responses: tools", responses_tools),
    Case("responses: json_schema", responses_schema),
    Case("responses: errors", responses_errors),
    Case("messages: whole answer", messages_whole),
    Case("messages: events", messages_events),
    Case("messages: tools", messages_tools),
    Case("messages: stop_sequences", messages_stop),
    Case("messages: count_tokens", messages_count),
    Case("messages: errors", messages_errors),
    Case("ollama: chat", ollama_chat),
    Case("ollama: generate", ollama_generate),
    Case("ollama: format", ollama_format),
    Case("ollama: tools", ollama_tools),
    Case("ollama: models and versions", ollama_lists),
    Case("ollama: errors", ollama_errors),
)
