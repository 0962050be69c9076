"""Renderer: conversations as text, by a compiled template that may refuse messages or leave them out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.engine.templates.budget import BudgetExceeded, run_within_budget
from weft.engine.templates.call_forms import CallForm
from weft.engine.templates.histories import GIVEN, HistoryTraits, adapt_history, list_attempts
from weft.engine.templates.messages import Message, normalize_messages
from weft.engine.templates.traits import TOOL, WORD, Traits
from weft.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Template

# A template that handles this role contains its name.
DEVELOPER = re.compile("""['"]developer['"]""")
MARK = WORD + "end"  # behind the text of a message that the answer continues
PLACED = re.compile(rf"{WORD}\d+x")
NEAR = 4096  # characters between two messages, mostly
SIMPLE: list[Message] = [{"role": "user", "content": "Hello."}]
OPTIONAL = ("description", "parameters", "strict")  # fields of a function that clients send as null
MAX_DEPTH = 64  # of schemas within each other that are completed


class Rendered(NamedTuple):
    """The text of a rendering, or why the template refuses it."""

    text: str | None
    refusal: Exception | None = None


class Renderer:
    """Renders conversations with a compiled template, in the form that it shows."""

    def __init__(self, template: Template, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self._developer = DEVELOPER.search(source) is not None
        self._defaults = {"tools": None, "documents": None, **special_tokens}
        self._traits = cache(self._learn_traits)

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], form: CallForm, *, unfinished: bool
    ) -> str:
        """Return a conversation as text. Calls that the template does not show have the `form`.

        `unfinished`: the text ends with the last message's. Raises RequestError.
        """
        checked = normalize_messages(messages, developer=self._developer)
        variables = {**self._defaults, **variables}
        if isinstance(variables["tools"], list):
            variables["tools"] = drop_nulls(variables["tools"])
        if unfinished:
            return self._render_unfinished(checked, variables, form)
        return self._render_history(checked, variables, form)

    def _render_unfinished(self, checked: list[Message], variables: Mapping[str, Any], form: CallForm) -> str:
        """Render up to a mark behind the last message's text, which keeps its trailing space if the template does."""
        *before, last = checked
        content = last["content"] if "tool_calls" not in last else None
        if content is not None:
            for text in (content, content.rstrip()):
                marked = {**last, "content": f"{text}{MARK} "}
                rendered = self._render_history([*before, marked], variables, form)
                at = rendered.rfind(MARK)
                if at >= 0 and (text == content.rstrip() or rendered.startswith(f"{MARK} ", at)):
                    return rendered[:at]
        raise RequestError(
            "continue_final_message needs a last message whose content is a text that the template shows",
            param="messages",
            code="nothing-to-continue",
        )

    def _render_history(self, checked: list[Message], variables: Mapping[str, Any], form: CallForm) -> str:
        """Render with the traits of the template; if that refuses or hides a message, plainer ones."""
        traits = self._traits(bool(variables["tools"]))
        refusal: Exception | None = None
        hidden: Message | None = None
        for attempt in list_attempts(traits):
            history = adapt_history(checked, attempt, form)
            text, error = self._run_template(history, variables)
            if error is not None and refusal is None and isinstance(variables["tools"], list):
                variables = self._complete(variables, error)
                text, error = self._run_template(history, variables)
            if text is not None:
                missing = None if attempt is GIVEN else self._hidden(history, text, variables)
                if missing is None:
                    return text
                hidden = hidden or missing
            refusal = refusal or error
        if refusal is not None:
            raise _refused(refusal, "messages")
        assert hidden is not None
        raise RequestError(
            f"the chat template leaves out the message of the role {hidden['role']} that begins "
            f"{str(hidden['content'])[:60]!r}; send it in another role",
            param="messages",
            code="message-left-out",
        )

    def _complete(self, variables: Mapping[str, Any], refusal: Exception) -> Mapping[str, Any]:
        """The variables with tools that the template takes. Raises RequestError if there are none."""
        if self._run_template(SIMPLE, variables).refusal is None:
            return variables
        completed = {**variables, "tools": complete_tools(variables["tools"])}
        if self._run_template(SIMPLE, completed).refusal is not None:
            raise _refused(refusal, "tools")
        return completed

    def _run_template(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> Rendered:
        try:
            return Rendered(run_within_budget(lambda: self._template.render({**variables, "messages": messages})))
        except MemoryError:
            raise
        except BudgetExceeded as error:
            raise _refused(error, "messages") from error
        except Exception as error:  # a template can raise anything that an expression can
            return Rendered(None, error)

    def _learn_traits(self, tools: bool) -> HistoryTraits:
        """The traits of the template; it gets messages as they are if it does not even show a user and an assistant."""
        variables = {**self._defaults, "tools": [TOOL] if tools else None, "add_generation_prompt": False}
        traits = Traits(lambda messages: self._run_template(messages, variables).text)
        return traits if traits.shows_turns else GIVEN

    def _hidden(self, history: Sequence[Message], text: str, variables: Mapping[str, Any]) -> Message | None:
        """The first message of which the template shows nothing."""
        first = _find_suspect(history, text)
        suspects = [index for index in range(first, len(history)) if _has_words(history[index])]
        if not suspects:
            return None
        words = {index: f"{WORD}{index}x" for index in suspects}
        replaced = [_replace(message, words.get(index)) for index, message in enumerate(history)]
        shown = self._run_template(replaced, variables).text
        if shown is None:
            return None
        shown_words = set(PLACED.findall(shown))
        return next((history[index] for index, word in words.items() if word not in shown_words), None)


def _has_words(message: Message) -> bool:
    return bool((message["content"] or "").strip() or message.get("tool_calls"))


def _find_suspect(history: Sequence[Message], text: str) -> int:
    """Index of the first message that is not in `text` behind those before it, as it is or as JSON writes it.

    If there is none, it is the number of messages.
    """
    at = 0
    for index, message in enumerate(history):
        at = _end_of((message["content"] or "").strip(), text, at)
        for call in message.get("tool_calls", ()):
            at = at if at < 0 else _end_of(call["function"]["name"], text, at)
        if at < 0:
            return index
    return len(history)


def _end_of(part: str, text: str, at: int) -> int:
    """The place behind `part` in a text from `at`; -1 without it."""
    start = text.find(part, at, at + len(part) + NEAR)
    if start >= 0 or not part:
        return max(start, at) + len(part)
    in_json = json.dumps(part, ensure_ascii=False)[1:-1]
    for reach in (NEAR, len(text)):  # near first: a form that the template does not have is looked for in vain
        for form in (part, in_json):
            start = text.find(form, at, at + len(form) + reach)
            if start >= 0:
                return start + len(form)
    return -1


def _replace(message: Message, word: str | None) -> Message:
    """A message with the word in place of its text, or of its calls' names if it has none."""
    if word is None:
        return message
    if message["content"]:
        return {**message, "content": word}
    calls = [{**call, "function": {**call["function"], "name": word}} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _refused(error: Exception, param: str) -> RequestError:
    return RequestError(
        f"the chat template refuses these {param}: {error!s:.2000}", param=param, code="chat-template-refused"
    )


def drop_nulls(tools: Sequence[Any]) -> list[Any]:
    """Return tools without the optional fields that are null, which templates would print."""
    return [_drop_nulls(tool) for tool in tools]


def _drop_nulls(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or all(function.get(name, "") is not None for name in OPTIONAL):
        return tool
    kept = {key: value for key, value in function.items() if value is not None or key not in OPTIONAL}
    return {**tool, "function": kept}


def complete_tools(tools: Sequence[Any]) -> list[Any]:
    """Return tools with descriptions and parameters, and with texts as defaults, as a template may need them."""
    return [_complete_tool(tool) for tool in tools]


def _complete_tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    parameters = _complete_schema(function.get("parameters") or {}, 0)
    if isinstance(parameters, Mapping):
        parameters = {"type": "object", "properties": {}, **parameters}
    described = {**function, "description": function.get("description") or "", "parameters": parameters}
    return {**tool, "function": described}


def _complete_schema(schema: Any, depth: int) -> Any:
    """A schema whose defaults are texts, and whose properties are objects with a description."""
    if depth > MAX_DEPTH:
        return schema
    if isinstance(schema, list | tuple):
        return [_complete_schema(part, depth + 1) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "default":
            made[key] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        elif key == "properties" and isinstance(value, Mapping):
            made[key] = {name: _complete_property(part, depth + 1) for name, part in value.items()}
        elif key in ("enum", "const", "examples", "required"):
            made[key] = value
        else:
            made[key] = _complete_schema(value, depth + 1)
    return made


def _complete_property(schema: Any, depth: int) -> Any:
    if isinstance(schema, Mapping):
        return {"description": "", **_complete_schema(schema, depth)}
    return {"description": ""} if isinstance(schema, bool) else schema
