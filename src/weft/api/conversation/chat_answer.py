"""Chat answers as values: text, reasoning and tool calls, for every API that answers a conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from weft.api.conversation.answer_ids import AnswerIds
from weft.api.conversation.chat_prompt import PreparedChat, prepare_chat
from weft.api.conversation.client_tools import ToolForm, call_text
from weft.api.parsers.reader import CallArguments, CallBegin, Content, Event, Reasoning, StreamParser
from weft.api.service.engine_stream import EngineStream
from weft.api.service.openai_types import Usage
from weft.api.service.service import Service
from weft.engine.frontend.collector import Delta
from weft.engine.frontend.outputs import Logprob

__all__ = [
    "AnswerChoice",
    "AnswerDelta",
    "ChatAnswers",
    "PreparedChat",
    "ToolCall",
    "ToolCallDelta",
    "open_answers",
    "prepare_chat",
]


class ToolCallDelta(msgspec.Struct, frozen=True):
    """New text of a call's `arguments`, which are JSON. `id` and `name` come with the call's first delta only.

    A call of a tool that has another `form` for the client is whole; `arguments` are the input of a custom tool.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    form: ToolForm | None = None


class AnswerDelta(msgspec.Struct, frozen=True):
    """New content of one choice: text of the answer and of its reasoning, parts of tool calls, and its tokens.

    `finish_reason` comes with the choice's last delta: "stop", "length", "tool_calls" or "abort".
    """

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: Sequence[dict[int, Logprob]] | None = None
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def continued_calls(self) -> tuple[ToolCallDelta, ...]:
        """Parts of a call that an earlier delta began. They come before this delta's text."""
        return tuple(call for call in self.tool_calls if call.id is None)

    @property
    def new_calls(self) -> tuple[ToolCallDelta, ...]:
        """Calls that begin here. They come after this delta's text."""
        return tuple(call for call in self.tool_calls if call.id is not None)

    @property
    def empty(self) -> bool:
        """True if no text, call or end is in it."""
        return not (self.content or self.reasoning or self.tool_calls or self.finish_reason)


@dataclass(slots=True)
class ToolCall:
    """A call of the tool `name`. `arguments` is JSON as the model wrote it, which need not be valid.

    If the tool has another `form` for the client and is a custom tool, they are its input.
    """

    id: str
    name: str
    arguments: str = ""
    form: ToolForm | None = None


@dataclass(slots=True)
class AnswerChoice:
    """One choice up to now."""

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: Sequence[dict[int, Logprob]] | None = None
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChoiceReader:
    """Turns one choice's text into AnswerDeltas, and keeps the whole."""

    def __init__(self, index: int, parser: StreamParser | None, prepared: PreparedChat, ids: AnswerIds) -> None:
        self.choice = AnswerChoice(index)
        self._parser = parser
        self._ids, self._tools = ids, prepared.format.tools
        self._most_calls = prepared.most_calls
        self._named = prepared.named_tool
        self._forms = prepared.use.forms
        self._held: ToolCallDelta | None = None  # the call of such a tool, until it is whole
        self._calls = 0  # calls that have begun; calls over the limit are left out
        self._is_cut = False  # the answer has ended within its last call

    def read_text(self, text: str, *, last: bool, cut: bool = False) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
        """Content, reasoning and calls of new text. `last`: nothing follows. `cut`: the answer was cut off."""
        if self._parser is None:
            self.choice.content += text
            return text, "", ()
        events = self._parser.push(text) if text else []
        if last:
            events += self._parser.finish(cut=cut)
        return self._add(events, last=last)

    def _add(self, events: Iterable[Event], *, last: bool) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
        content, reasoning = "", ""
        calls: list[ToolCallDelta] = []
        for event in events:
            match event:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallBegin(name, id):
                    calls += self._release()
                    self._calls += 1
                    if self._calls <= self._most_calls:
                        calls += self._begin_call(name, id)
                case CallArguments(text) if 0 < self._calls <= self._most_calls:
                    calls += self._add_arguments(text)
        if last:
            self._is_cut = any(not _is_json(call.arguments) for call in self.choice.tool_calls[-1:])
            calls += self._release()
        self.choice.content += content
        self.choice.reasoning += reasoning
        return content, reasoning, tuple(_joined(calls))

    def _begin_call(self, name: str, id: str | None) -> list[ToolCallDelta]:
        form = self._forms.get(name)
        call = ToolCall(id or self._tools.id_prefix + self._ids.letters(self._tools.id_letters), name, form=form)
        self.choice.tool_calls.append(call)
        delta = ToolCallDelta(len(self.choice.tool_calls) - 1, call.id, call.name, form=form)
        if form is None or form.kind == "function":
            return [delta]
        self._held = delta
        return []

    def _add_arguments(self, text: str) -> list[ToolCallDelta]:
        self.choice.tool_calls[-1].arguments += text
        return [] if self._held else [ToolCallDelta(len(self.choice.tool_calls) - 1, arguments=text)]

    def _release(self) -> list[ToolCallDelta]:
        """Return the held call, which is now complete."""
        held, self._held = self._held, None
        if held is None or held.form is None:
            return []
        call = self.choice.tool_calls[held.index]
        call.arguments = call_text(held.form, call.arguments)
        return [msgspec.structs.replace(held, arguments=call.arguments)]

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason as OpenAI's API says it.

        A call that the caller named does not count as the model's, nor does a call that a stop string cuts.
        """
        if reason == "stop" and self.choice.tool_calls and not self._named and not self._is_cut:
            return "tool_calls"
        return reason


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _joined(calls: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Deltas, with the deltas of each call joined."""
    joined: list[ToolCallDelta] = []
    for call in calls:
        if joined and joined[-1].index == call.index:
            first = joined[-1]
            joined[-1] = msgspec.structs.replace(first, arguments=first.arguments + call.arguments)
        else:
            joined.append(call)
    return joined


class ChatAnswers:
    """The answers to one chat request. Iterating gives AnswerDeltas of all choices as they arrive, until all ended.

    `begun`: the deltas of tokens that another server has generated and sent. `ids` makes the ids of the answer.

    `aclose` must be called; it aborts unfinished choices. Raises what `EngineStream` raises.
    """

    def __init__(self, service: Service, prepared: PreparedChat) -> None:
        self.prepared = prepared
        self.collector = prepared.collectors[0]
        prompt = service.frontend.prompt_text(self.collector.output) if prepared.parsed else ""
        self.ids = AnswerIds(prepared.state)
        self._choices = [
            ChoiceReader(output.index, prepared.new_parser(prompt), prepared, self.ids)
            for output in self.collector.output.outputs
        ]
        self.begun = list(self._read_begun())
        self.stream: EngineStream = service.open_stream(prepared.collectors)

    @property
    def continued(self) -> bool:
        """True if the answer began at another server, and continues here."""
        return bool(self.collector.requests[0].answered)

    async def __aiter__(self) -> AsyncIterator[AnswerDelta]:
        async for _, delta in self.stream:
            yield self.read_delta(delta)

    async def finish(self) -> None:
        """Wait until every choice has ended."""
        async for _, delta in self.stream:
            self.read_delta(delta)

    def whole(self) -> list[AnswerChoice]:
        """The choices up to now, by index."""
        for reader, output in zip(self._choices, self.collector.output.outputs, strict=True):
            choice = reader.choice
            choice.logprobs, choice.token_ids = output.logprobs, output.token_ids
            choice.finish_reason = reader.finish_reason(output.finish_reason)
            choice.stop_reason = output.stop_reason
        return [reader.choice for reader in self._choices]

    def usage(self) -> Usage:
        """Token counts up to now, over all choices."""
        return self.stream.usage

    async def aclose(self) -> None:
        """Abort unfinished choices."""
        await self.stream.aclose()

    def _read_begun(self) -> Iterator[AnswerDelta]:
        """Read the answered tokens one by one, as the other server did."""
        reader = self._choices[0]
        for token, text in zip(self.collector.requests[0].answered, self.collector.begun, strict=True):
            content, reasoning, calls = reader.read_text(text, last=False)
            yield AnswerDelta(0, content, reasoning, calls, token_ids=[token])

    def add_text(self, delta: Delta) -> None:
        """Add the text of the next delta of `stream`, in an answer that is not `PreparedChat.parsed`."""
        self._choices[delta.index].choice.content += delta.text

    def read_delta(self, delta: Delta) -> AnswerDelta:
        """Read the next delta of `stream`, for a caller that iterates over that itself."""
        reader = self._choices[delta.index]
        last = delta.finish_reason is not None
        content, reasoning, calls = reader.read_text(delta.text, last=last, cut=delta.interrupted)
        return AnswerDelta(
            index=delta.index,
            content=content,
            reasoning=reasoning,
            tool_calls=calls,
            logprobs=delta.logprobs,
            token_ids=delta.token_ids,
            finish_reason=reader.finish_reason(delta.finish_reason),
            stop_reason=delta.stop_reason,
        )


def open_answers(service: Service, prepared: PreparedChat) -> ChatAnswers:
    """Submit a chat request to the engine. Refusals are raised here, before the response begins."""
    return ChatAnswers(service, prepared)
