"""OpenAI's chats and completions: shapes, ends, schemas, tools and errors."""

from __future__ import annotations

from typing import Any

from scripts.programs.conformance.case import Api, Case, check, equal, has, valid

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "Say hello."}]
FIXED: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["large", "small"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "size", "kind", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "weather", "parameters": ARGUMENTS}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, CLOCK]
CALLING: dict[str, Any] = {"messages": ASK, "tools": TOOLS, "temperature": 0, "max_tokens": 200}


def usage_of(value: Any) -> None:
    has(value, {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int}, "usage")
    equal(value["total_tokens"], value["prompt_tokens"] + value["completion_tokens"], "total_tokens")


def choice_of(body: Any) -> Any:
    has(body, {"choices": list}, "the answer")
    equal(len(body["choices"]), 1, "the number of choices")
    return body["choices"][0]


async def chat_whole(api: Api) -> None:
    body = (await api.post(CHAT, messages=ASK, **FIXED)).json
    has(body, {"id": str, "object": str, "created": int, "model": str, "usage": dict}, "the answer")
    equal(body["object"], "chat.completion", "object")
    usage_of(body["usage"])
    choice = choice_of(body)
    has(choice, {"index": int, "message": dict, "finish_reason": str}, "the choice")
    equal((choice["index"], choice["message"]["role"]), (0, "assistant"), "index and role")
    check(isinstance(choice["message"]["content"], str), "content is no text")
    check(choice["finish_reason"] in ("stop", "length"), f"finish_reason is {choice['finish_reason']!r}")


async def chunks_of(api: Api, path: str, **fields: Any) -> list[Any]:
    """The chunks of a stream, checked."""
    events = (await api.post(path, stream=True, **fields)).events
    check(events and events[-1][1] == "[DONE]", "the stream does not end with [DONE]")
    chunks = [data for _, data in events[:-1]]
    check("[DONE]" not in chunks, "[DONE] comes twice")
    for chunk in chunks:
        has(chunk, {"id": str, "object": str, "created": int, "model": str, "choices": list}, "a chunk")
    equal(len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}), 1, "the number of chunks' heads")
    return chunks


async def chat_stream(api: Api) -> None:
    chunks = await chunks_of(api, CHAT, messages=ASK, **FIXED)
    equal({chunk["object"] for chunk in chunks}, {"chat.completion.chunk"}, "object")
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    equal(choices[0]["delta"].get("role"), "assistant", "the first delta's role")
    check(all("role" not in choice["delta"] for choice in choices[1:]), "the role comes twice")
    reasons = [choice.get("finish_reason") for choice in choices]
    check(reasons[-1] and not any(reasons[:-1]), f"finish_reason is {reasons}")
    check(all(not chunk.get("usage") for chunk in chunks), "a usage comes that nobody asked for")


async def chat_stream_usage(api: Api) -> None:
    chunks = await chunks_of(api, CHAT, messages=ASK, stream_options={"include_usage": True}, **FIXED)
    equal(chunks[-1]["choices"], [], "the last chunk's choices")
    usage_of(chunks[-1]["usage"])
    check(all(not chunk.get("usage") for chunk in chunks[:-1]), "an earlier chunk has a usage")


async def chat_stream_is_the_whole(api: Api) -> None:
    whole = choice_of((await api.post(CHAT, messages=ASK, **FIXED)).json)["message"]["content"]
    chunks = await chunks_of(api, CHAT, messages=ASK, **FIXED)
    streamed = "".join(row["delta"].get("content") or "" for chunk in chunks for row in chunk["choices"])
    equal(streamed, whole, "the streamed text")


async def chat_length(api: Api) -> None:
    body = (await api.post(CHAT, messages=ASK, temperature=0, max_tokens=2)).json
    equal(choice_of(body)["finish_reason"], "length", "finish_reason")
    equal(body["usage"]["completion_tokens"], 2, "completion_tokens")


async def chat_stop(api: Api) -> None:
    text = choice_of((await api.post(CHAT, messages=ASK, **FIXED)).json)["message"]["content"]
    check(len(text) > 3, f"the model says only {text!r}")
    stop = text[2:4]
    choice = choice_of((await api.post(CHAT, messages=ASK, stop=[stop], **FIXED)).json)
    equal(choice["message"]["content"], text[: text.index(stop)], "the text before a stop string")
    equal(choice["finish_reason"], "stop", "finish_reason")
    chunks = await chunks_of(api, CHAT, messages=ASK, stop=stop, **FIXED)
    streamed = "".join(row["delta"].get("content") or "" for chunk in chunks for row in chunk["choices"])
    equal(streamed, text[: text.index(stop)], "the streamed text before a stop string")


async def chat_choices(api: Api) -> None:
    body = (await api.post(CHAT, messages=ASK, n=2, max_tokens=3)).json
    equal([choice["index"] for choice in body["choices"]], [0, 1], "the choices' indices")


async def chat_seed(api: Api) -> None:
    asked = {"messages": ASK, "max_tokens": 12, "temperature": 1, "seed": 7}
    texts = [choice_of((await api.post(CHAT, **asked)).json)["message"]["content"] for _ in range(2)]
    equal(texts[0], texts[1], "the second answer with the same seed")


async def chat_logprobs(api: Api) -> None:
    choice = choice_of((await api.post(CHAT, messages=ASK, logprobs=True, top_logprobs=2, **FIXED)).json)
    rows = choice["logprobs"]["content"]
    check(rows, "there are no logprobs")
    for row in rows:
        has(row, {"token": str, "logprob": (int, float), "bytes": list, "top_logprobs": list}, "a token")
        equal(len(row["top_logprobs"]), 2, "the number of top_logprobs")


async def json_object(api: Api) -> None:
    asked = [{"role": "user", "content": "Answer with a short JSON object."}]
    made = (await api.post(CHAT, messages=asked, response_format={"type": "json_object"}, max_tokens=400)).json
    choice = choice_of(made)
    if choice["finish_reason"] != "length":
        valid(choice["message"]["content"], {"type": "object"})


async def json_schema(api: Api) -> None:
    for temperature in (0, 1):
        asked = {"messages": ASK, "response_format": FORMAT, "max_tokens": 200, "temperature": temperature, "seed": 3}
        choice = choice_of((await api.post(CHAT, **asked)).json)
        equal(choice["finish_reason"], "stop", "finish_reason")
        valid(choice["message"]["content"], SCHEMA)
        chunks = await chunks_of(api, CHAT, **asked)
        valid("".join(row["delta"].get("content") or "" for chunk in chunks for row in chunk["choices"]), SCHEMA)


async def json_schema_cut(api: Api) -> None:
    choice = choice_of((await api.post(CHAT, messages=ASK, response_format=FORMAT, max_tokens=4)).json)
    equal(choice["finish_reason"], "length", "finish_reason")


async def json_schema_broken(api: Api) -> None:
    broken = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
    error_of(await api.refused(CHAT, 400, messages=ASK, response_format=broken))


# Tools


def check_call(call: Any, named: str | None = None) -> None:
    has(call, {"id": str, "type": str, "function": dict}, "a call")
    function = call["function"]
    has(function, {"name": str, "arguments": str}, "the function of a call")
    equal(call["type"], "function", "a call's type")
    check(function["name"] in ("weather", "clock") if named is None else function["name"] == named, "another name")
    valid(function["arguments"], ARGUMENTS if function["name"] == "weather" else {"type": "object"})


async def tools_required(api: Api) -> None:
    choice = choice_of((await api.post(CHAT, **CALLING, tool_choice="required", parallel_tool_calls=False)).json)
    calls = choice["message"].get("tool_calls") or []
    equal(len(calls), 1, "the number of calls")
    check_call(calls[0])
    equal(choice["finish_reason"], "tool_calls", "finish_reason")


async def tools_named(api: Api) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    choice = choice_of((await api.post(CHAT, **CALLING, tool_choice=named)).json)
    calls = choice["message"].get("tool_calls") or []
    equal(len(calls), 1, "the number of calls")
    check_call(calls[0], "weather")
    equal(choice["finish_reason"], "stop", "finish_reason")


async def tools_none(api: Api) -> None:
    choice = choice_of((await api.post(CHAT, **{**CALLING, "max_tokens": 12}, tool_choice="none")).json)
    check(not choice["message"].get("tool_calls"), "there are calls")


async def tools_streamed(api: Api) -> None:
    asked = {**CALLING, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    chunks = await chunks_of(api, CHAT, **asked)
    parts = [part for chunk in chunks for row in chunk["choices"] for part in row["delta"].get("tool_calls") or ()]
    check(parts, "no call is streamed")
    equal({part["index"] for part in parts}, {0}, "the calls' indices")
    has(parts[0], {"index": int, "id": str, "type": str, "function": dict}, "the first part")
    equal(parts[0]["function"]["name"], "weather", "the first part's name")
    check(all(not part.get("id") and not part["function"].get("name") for part in parts[1:]), "id or name come twice")
    arguments = "".join(part["function"].get("arguments") or "" for part in parts)
    valid(arguments, ARGUMENTS)
    check(len(parts) > 2, "the arguments come at once")


async def tools_history(api: Api) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    choice_of((await api.post(CHAT, messages=history, tools=TOOLS, **FIXED)).json)


async def tools_wrong(api: Api) -> None:
    for fields in (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "unknown"}}},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
    ):
        error_of(await api.refused(CHAT, 400, messages=ASK, **fields))


# Errors


def error_of(body: Any) -> Any:
    has(body, {"error": dict}, "the body of an error")
    error = body["error"]
    has(error, {"message": str, "type": str}, "error")
    check({"param", "code"} <= set(error), f"error has only {sorted(error)}")
    return error


async def errors_of_values(api: Api) -> None:
    fields: dict[str, Any]
    for fields in (
        {"messages": ASK, "temperature": -1},
        {"messages": ASK, "temperature": "hot"},
        {"messages": ASK, "max_tokens": -1},
        {"messages": ASK, "top_p": 2},
        {"messages": "hello"},
        {"messages": []},
        {"messages": ASK, "response_format": {"type": "poem"}},
        {},
    ):
        error = error_of(await api.refused(CHAT, 400, **fields))
        equal(error["type"], "invalid_request_error", f"the type of {fields}")


async def errors_of_models(api: Api) -> None:
    made = await api.ask("POST", CHAT, json={"model": "no-such-model", "messages": ASK})
    equal(made.status, 404, "the status for an unknown model")
    error_of(made.json)


async def errors_of_bodies(api: Api) -> None:
    for content in (b"", b"{", b"[1]", b'"a"', b"\xff"):
        made = await api.ask("POST", CHAT, content=content, headers={"content-type": "application/json"})
        equal(made.status, 400, f"the status for the body {content!r}")
        error_of(made.json)


async def errors_of_paths(api: Api) -> None:
    made = await api.ask("GET", "/v1/no-such-path")
    equal(made.status, 404, "the status of an unknown path")
    made = await api.ask("GET", CHAT)
    equal(made.status, 405, "the status of another method")


async def models(api: Api) -> None:
    body = (await api.ask("GET", "/v1/models")).json
    equal(body.get("object"), "list", "object")
    rows = [row for row in body["data"] if row["id"] == api.model]
    check(rows, f"{api.model!r} is not listed")
    has(rows[0], {"id": str, "object": str, "created": int, "owned_by": str}, "a model")


# Completions


async def completions_whole(api: Api) -> None:
    body = (await api.post(COMPLETIONS, prompt="Once upon", **FIXED)).json
    has(body, {"id": str, "object": str, "created": int, "model": str, "usage": dict}, "the answer")
    equal(body["object"], "text_completion", "object")
    usage_of(body["usage"])
    has(choice_of(body), {"index": int, "text": str, "finish_reason": str}, "the choice")


async def completions_stream(api: Api) -> None:
    whole = choice_of((await api.post(COMPLETIONS, prompt="Once upon", **FIXED)).json)["text"]
    chunks = await chunks_of(api, COMPLETIONS, prompt="Once upon", **FIXED)
    equal("".join(row["text"] for chunk in chunks for row in chunk["choices"]), whole, "the streamed text")


async def completions_prompts(api: Api) -> None:
    body = (await api.post(COMPLETIONS, prompt=["a", "b"], n=2, max_tokens=2)).json
    equal([choice["index"] for choice in body["choices"]], [0, 1, 2, 3], "the choices' indices")


async def completions_best_of(api: Api) -> None:
    made = await api.ask("POST", COMPLETIONS, json={"model": api.model, "prompt": "a", "best_of": 2, "n": 1})
    check(made.status in (200, 400), f"status {made.status}")
    if made.status == 400:
        error_of(made.json)
    else:
        choice_of(made.json)


CASES = (
    Case("chat: whole answer", chat_whole),
    Case("chat: stream", chat_stream),
    Case("chat: stream with usage", chat_stream_usage),
    Case("chat: streamed and whole are the same", chat_stream_is_the_whole),
    Case("chat: max_tokens", chat_length),
    Case("chat: stop strings", chat_stop),
    Case("chat: n", chat_choices),
    Case("chat: seed", chat_seed),
    Case("chat: logprobs", chat_logprobs),
    Case("schema: json_object", json_object),
    Case("schema: json_schema", json_schema),
    Case("schema: cut by max_tokens", json_schema_cut),
    Case("schema: broken", json_schema_broken),
    Case("tools: required", tools_required),
    Case("tools: named", tools_named),
    Case("tools: none", tools_none),
    Case("tools: streamed", tools_streamed),
    Case("tools: history", tools_history),
    Case("tools: wrong", tools_wrong),
    Case("errors: values", errors_of_values),
    Case("errors: unknown model", errors_of_models),
    Case("errors: bodies", errors_of_bodies),
    Case("errors: paths", errors_of_paths),
    Case("models: list", models),
    Case("completions: whole answer", completions_whole),
    Case("completions: stream", completions_stream),
    Case("completions: several prompts", completions_prompts),
    Case("completions: best_of", completions_best_of),
)
