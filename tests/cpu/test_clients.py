"""The official clients over all that they can ask, of `weft serve` itself and through `weft gateway`.

The model is random: grammars make its answers valid, and where they are free, streamed and whole ones must agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion import Choice

from tests.cpu.test_agents import write_long
from tests.cpu.test_serve import HI, Server, eventually
from tests.pure.letters import TEMPLATE

# The tiny model's template, in a form that shows tools and knows of reasoning.
THINKING = (
    TEMPLATE.removesuffix("{% endif %}{% if shout %}LOUD{% endif %}")
    + "{% if enable_thinking is true %}<think>{% else %}<think></think>{% endif %}{% endif %}{# <tool_call> #}"
)
LENGTH = 4096
LIMITS = ("--kv-cache-memory-bytes", "16M", "--max-num-seqs", "8")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"enum": ["here", "there"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
    },
    "required": ["place", "days", "words"],
    "additionalProperties": False,
}
FUNCTION = {"name": "forecast", "description": "tells the weather", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
OTHER: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "forecast"}}
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
TOKENS = 24
PATIENCE_S = 30.0


class Gateway(Server):
    program = ("-m", "weft", "gateway")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    said = ("--load-format", "dummy", "--dtype", "float32", "--port", "0", "--served-model-name", "tiny")
    more = ("--convert", "embed", "--storage-directory", str(folder / "storage"), "--chat-template", THINKING)
    with Server(write_long(folder / "tiny", LENGTH), *said, *LIMITS, *more) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: Server) -> Iterator[Server]:
    with Gateway("--upstream", server.url, "--port", "0") as running:
        yield running


@pytest.fixture(params=["server", "gateway"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param).url)


@pytest.fixture
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def llama(url: str) -> Iterator[ollama.Client]:
    client = ollama.Client(host=url, timeout=PATIENCE_S)
    yield client
    client.close()


def check_arguments(made: Any) -> None:
    """Bounds of SCHEMA."""
    assert made.keys() == {"place", "days", "words"} and made["place"] in ("here", "there") and 1 <= made["days"] <= 9
    assert 1 <= len(made["words"]) <= 2 and all(len(word) <= 3 for word in made["words"])


# OpenAI


def put_together(stream: openai.Stream[ChatCompletionChunk]) -> Choice:
    """The choice of a stream, as the client itself puts it together."""
    state = ChatCompletionStreamState()
    for chunk in stream:
        state.handle_chunk(chunk)
    return state.current_completion_snapshot.choices[0]


@pytest.mark.parametrize(
    ("choice", "parallel"),
    [("auto", True), ("required", True), ("required", False), ("none", True), (NAMED, True)],
    ids=str,
)
def test_openai_tools(api: openai.OpenAI, choice: Any, parallel: bool) -> None:
    named = not isinstance(choice, str)
    forced = named or choice == "required"
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": HI,
        "tools": [TOOL, OTHER],
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "max_tokens": 1000 if forced else TOKENS,
        "seed": 5,
    }
    whole = api.chat.completions.create(**asked).choices[0]
    streamed = put_together(api.chat.completions.create(**asked, stream=True))
    calls = whole.message.tool_calls or []
    assert [call.function.name for call in streamed.message.tool_calls or []] == [call.function.name for call in calls]
    assert streamed.finish_reason == whole.finish_reason
    assert (streamed.message.content or "") == (whole.message.content or "")
    if forced:
        assert calls and whole.finish_reason == ("stop" if named else "tool_calls"), whole
        assert len(calls) == 1 or (parallel and not named)
    else:
        assert whole.message.content
    for call, other in zip(calls, streamed.message.tool_calls or [], strict=True):
        assert call.id and other.id and other.function.arguments == call.function.arguments
        made = json.loads(call.function.arguments)
        if call.function.name == "forecast":
            check_arguments(made)
    if calls:  # the answer goes back as it came
        back = [*HI, whole.message, *({"role": "tool", "tool_call_id": c.id, "content": "fine"} for c in calls)]
        assert api.chat.completions.create(**{**asked, "messages": back, "tool_choice": "none"}).choices[0].message


@pytest.mark.parametrize(
    "wanted",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
        {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
        {"extra_body": {"structured_outputs": {"regex": "[ab]{3}"}}},
        {"extra_body": {"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}},
        {"response_format": {"type": "json_object"}},
    ],
    ids=["strict", "schema", "choice", "regex", "grammar", "object"],
)
def test_openai_structured_answers(api: openai.OpenAI, wanted: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 300, "seed": 2, **wanted}
    whole = api.chat.completions.create(**asked).choices[0]
    chunks = api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    parts = list(chunks)
    text = whole.message.content or ""
    assert "".join(choice.delta.content or "" for part in parts for choice in part.choices) == text
    assert parts[-1].usage and parts[-1].usage.completion_tokens
    if "response_format" in wanted and wanted["response_format"]["type"] == "json_object":
        assert text.startswith("{") and (whole.finish_reason == "length" or isinstance(json.loads(text), dict))
        return
    assert whole.finish_reason == "stop"
    if "{" in text:
        check_arguments(json.loads(text))
    assert text in ("yes", "no") or len(text) in (2, 3) or "{" in text


def test_openai_reasoning(api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": TOKENS, "seed": 1}
    thought = api.chat.completions.create(**asked, extra_body=THINK).choices[0].message
    reasoning = thought.model_extra and thought.model_extra["reasoning_content"]
    assert reasoning and not thought.content
    streamed = api.chat.completions.create(**asked, extra_body=THINK, stream=True)
    deltas = [choice.delta.model_extra or {} for part in streamed for choice in part.choices]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == reasoning
    plain = api.chat.completions.create(**asked, reasoning_effort="none").choices[0].message
    assert plain.content and not (plain.model_extra or {}).get("reasoning_content")


def test_openai_completions(api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["ab", "cd"], "max_tokens": TOKENS, "seed": 4}
    whole = api.completions.create(**asked, n=2, logprobs=2, echo=True)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs and choice.text.startswith(("ab", "cd")) for choice in whole.choices)
    texts = dict.fromkeys(range(2), "")
    for part in api.completions.create(**asked, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in api.completions.create(**asked).choices]
    for refused in ({"suffix": "x"}, {"best_of": 3}):
        with pytest.raises(openai.BadRequestError, match=next(iter(refused))):
            api.completions.create(**asked, **refused)


def test_openai_responses(api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": TOKENS, "temperature": 0}
    text = api.responses.create(**asked).output_text
    events = list(api.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    tool: Any = {"type": "function", "strict": True, **FUNCTION}
    called = api.responses.create(**{**asked, "max_output_tokens": 300}, tools=[tool], tool_choice="required")
    calls = [item for item in called.output if item.type == "function_call"]
    assert calls and calls[0].name == "forecast"
    check_arguments(json.loads(calls[0].arguments))
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}
    check_arguments(json.loads(api.responses.create(**{**asked, "max_output_tokens": 300}, text=form).output_text))
    for refused in ({"store": True}, {"previous_response_id": "r"}):
        with pytest.raises(openai.BadRequestError, match=next(iter(refused))):
            api.responses.create(**{**asked, **refused})


def test_openai_models_and_embeddings(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["tiny"] and api.models.retrieve("tiny").id == "tiny"
    made = api.embeddings.create(model="tiny", input=["a", "b"])
    floats = api.embeddings.create(model="tiny", input=["a", "b"], encoding_format="float")
    assert len(made.data) == 2 and made.usage.prompt_tokens == floats.usage.prompt_tokens
    for one, other in zip(made.data, floats.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-4)
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model="other", messages=HI)


def test_openai_files_and_batches(api: openai.OpenAI) -> None:
    bodies = [{"model": "tiny", "messages": HI, "max_tokens": 4, "seed": n} for n in range(3)]
    rows = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/chat/completions", "body": b} for n, b in enumerate(bodies)
    ]
    file = api.files.create(file=("in.jsonl", "\n".join(map(json.dumps, rows)).encode()), purpose="batch")
    assert api.files.retrieve(file.id).filename == "in.jsonl" and file.id in {one.id for one in api.files.list()}
    batch = api.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    eventually(lambda: api.batches.retrieve(batch.id).status == "completed")
    done = api.batches.retrieve(batch.id)
    assert batch.id in {one.id for one in api.batches.list()} and done.output_file_id
    answers = [json.loads(row) for row in api.files.content(done.output_file_id).text.splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == ["0", "1", "2"]
    assert api.files.delete(file.id).deleted


# Anthropic


@pytest.mark.parametrize("choice", ["auto", "any", "tool", "none"])
def test_anthropic_tools(claude: anthropic.Anthropic, choice: str) -> None:
    tool: Any = {"name": "forecast", "description": "tells the weather", "input_schema": SCHEMA}
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 1000 if choice in ("any", "tool") else TOKENS,
        "messages": HI,
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [tool],
        "tool_choice": {"type": choice, **({"name": "forecast"} if choice == "tool" else {})},
        "temperature": 0,
    }
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == [block.type for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert bool(calls) == (choice in ("any", "tool")) and (whole.stop_reason == "tool_use") == bool(calls)
    for call, other in zip(calls, (b for b in streamed.content if b.type == "tool_use"), strict=True):
        check_arguments(call.input)
        assert other.input == call.input
    if calls:
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "fine"} for call in calls]
        back = [*HI, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
        assert claude.messages.create(**{**asked, "messages": back, "tool_choice": {"type": "none"}}).content


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": TOKENS, "messages": HI, "temperature": 0}
    text = claude.messages.create(**asked).content[0].text  # type: ignore[union-attr]
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == text
    cut = claude.messages.create(**asked, stop_sequences=[text[3:5]])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", text[3:5])
    assert claude.messages.count_tokens(model="tiny", messages=HI, system="Be brief.").input_tokens > 10  # type: ignore[arg-type]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**asked, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(**{**asked, "temperature": -1})


def test_anthropic_thinking(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": TOKENS, "messages": HI, "temperature": 0}
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    whole = claude.messages.create(**asked, thinking=thinking)
    with claude.messages.stream(**asked, thinking=thinking) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking"] == [block.type for block in streamed.content]
    assert whole.content[0].thinking == streamed.content[0].thinking  # type: ignore[union-attr]


# Ollama


def test_ollama_answers(llama: ollama.Client) -> None:
    options = {"num_predict": TOKENS, "temperature": 0}
    whole = llama.chat("tiny", HI, options=options)
    parts = list(llama.chat("tiny:latest", HI, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    last = parts[-1]
    assert last.done and last.done_reason in ("stop", "length") and last.eval_count == whole.eval_count
    times = (last.created_at, last.total_duration, last.load_duration, last.prompt_eval_duration, last.eval_duration)
    assert None not in times and last.prompt_eval_count
    text = llama.generate("tiny", "hi", options=options).response
    assert "".join(part.response for part in llama.generate("tiny", "hi", options=options, stream=True)) == text
    thought = llama.chat("tiny", HI, options=options, think=True).message
    assert thought.thinking and not thought.content
    formed = llama.chat("tiny", HI, options={"num_predict": 300, "seed": 3}, format=SCHEMA).message.content
    check_arguments(json.loads(formed or ""))
    assert llama.chat("tiny", HI, options=options, tools=[TOOL], keep_alive="5m").done
    with pytest.raises(ollama.ResponseError, match="other") as refused:
        llama.chat("other", HI)
    assert refused.value.status_code == 404


def test_ollama_models(llama: ollama.Client) -> None:
    assert "tiny:latest" in {model.model for model in llama.list().models}
    assert [model.model for model in llama.ps().models] == ["tiny:latest"]
    shown = llama.show("tiny")
    assert shown.modelinfo and "completion" in (shown.capabilities or [])
    made = llama.embed("tiny", ["a", "b"])
    assert len(made.embeddings) == 2 and made.prompt_eval_count
    assert llama.embeddings("tiny", "a").embedding == pytest.approx(made.embeddings[0], abs=1e-4)
    for refused in (
        lambda: llama.copy("tiny", "b"),
        lambda: llama.create("b", from_="tiny"),
        lambda: llama.push("tiny"),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            refused()
        assert caught.value.status_code == 501
