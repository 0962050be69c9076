"""ChatTemplate: renders messages to a prompt with the Jinja template of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from weft.checkpoint.files import limits
from weft.engine.templates.call_forms import HERMES, CallForm
from weft.engine.templates.histories import adapt_history
from weft.engine.templates.messages import Message, normalize_messages
from weft.engine.templates.traits import Traits
from weft.errors import ConfigError, ModelError, RequestError
from weft.regular_files import read_regular_text

if TYPE_CHECKING:
    from jinja2 import Template

    from weft.engine.templates.renderer import Renderer
    from weft.engine.text.tokenizer import Tokenizer

# ChatML, for models that have its tokens but no template: the first Qwen models.
CHATML_START, CHATML_END = "<|im_start|>", "<|im_end|>"
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
# The prompt of models that only continue a text: the last message.
RAW = "{{- messages[-1].content }}"


class ChatTemplate:
    """A chat template; `special_tokens` ("bos_token": "<s>") are names that its `source` may use.

    `tool_source` is the template of conversations with tools; None if `source` is for all conversations.

    Only a sandboxed process may `render` it (`engine.templates.rendering`). It can neither reach Python nor change
    its arguments,
    and `LIMITS` bound its time and the length of its texts as far as Python can. Without a source every `render` raises
    RequestError. Raises ModelError for a source that is not a template.
    """

    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str] | None = None, tool_source: str | None = None
    ) -> None:
        self.special_tokens = dict(special_tokens or {})
        self.source = source
        self.tool_source = tool_source
        for text in (source, tool_source):
            if text is not None:
                _check_syntax(text)

    @cached_property
    def _renderer(self) -> Renderer:
        return self._compile(self.source)

    @cached_property
    def _tool_renderer(self) -> Renderer:
        return self._compile(self.tool_source)

    def _compile(self, source: str | None) -> Renderer:
        from weft.engine.templates.renderer import Renderer

        assert source is not None
        return Renderer(_compile(source), source, self.special_tokens)

    @classmethod
    def for_tokenizer(
        cls, tokenizer: Tokenizer, given: str | None = None, chat_format: str | None = None, window: int | None = None
    ) -> ChatTemplate:
        """The template `given` with --chat-template (a file or the text itself), or the model's own.

        A model without one gets ChatML if its vocabulary has the tokens, with a `window` in tokens, unless its
        `chat_format` is "raw". Raises ConfigError for an unreadable file.
        """
        if given is not None:
            return cls(_read_option(given), tokenizer.special_tokens)
        if tokenizer.chat_template is not None:
            return cls(tokenizer.chat_template, tokenizer.special_tokens, tokenizer.tool_template)
        if chat_format == "raw":
            return cls(RAW)
        ids = [tokenizer.id(token) for token in (CHATML_START, CHATML_END)]
        return ChatML(tokenizer, window) if None not in ids else cls(None)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        unfinished: bool = False,
        call_form: CallForm = HERMES,
        **kwargs: Any,
    ) -> str:
        """Render a conversation to a prompt. `kwargs`: further variables of the template (tools, enable_thinking, ...).

        A history that the template refuses or shows in part is rendered in a form that it shows, in which calls of
        tools may become text of `call_form`. `unfinished`: the prompt ends with the text of the last message. The
        prompt contains BOS if the model wants it: encode it without special tokens. Raises RequestError for invalid
        messages, and with the template's own message if the template refuses them in any form.
        """
        if self.source is None:
            raise RequestError(
                "this model has no chat template; give one with --chat-template",
                param="messages",
                code="no-chat-template",
            )
        variables = {**kwargs, "add_generation_prompt": add_generation_prompt}
        renderer = self._renderer if self.tool_source is None or not kwargs.get("tools") else self._tool_renderer
        return renderer.render(messages, variables, call_form, unfinished=unfinished)


class ChatML(ChatTemplate):
    """ChatML as the first Qwen models have it: their code encodes the content of a message by itself, as plain text.

    A content can therefore hold no special token, and begin or end no turn. `window`: tokens of a conversation without
    its last turn; the oldest turns beyond are left out. None: no turn is left out.
    """

    def __init__(self, tokenizer: Tokenizer, window: int | None = None) -> None:
        super().__init__(CHATML)
        start, end = tokenizer.id(CHATML_START), tokenizer.id(CHATML_END)
        assert start is not None and end is not None
        self._tokenizer, self._window, self._start, self._end = tokenizer, window, start, end
        self._newline = tokenizer.encode_literally("\n")

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        room: int,
        *,
        opens: bool,
        unfinished: bool,
        call_form: CallForm = HERMES,
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """The messages that a prompt of `room` tokens keeps, and its token ids.

        `opens`: an answer begins after the messages. `unfinished`: the last message goes on after the prompt, instead.
        """
        checked = adapt_history(normalize_messages(messages, developer=False), CHATML_TRAITS, call_form)
        system, *turns = _divide_turns(checked)
        before, last = self._encode_turn(system), self._encode_turn(turns[-1]) if turns else []
        if opens:
            last += [self._start, *self._tokenizer.encode_literally("assistant"), *self._newline]
        kept, ids = turns[-1:], last
        for turn in reversed(turns[:-1]):
            older = self._encode_turn(turn)
            size = len(before) + len(older) + len(ids)
            if self._window is not None and (size - len(last) >= self._window or size > room):
                break
            kept, ids = [turn, *kept], older + ids
        ids = before + ids
        return [*system, *chain(*kept)], ids[: -1 - len(self._newline)] if unfinished else ids

    def _encode_turn(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [token for message in messages for token in self._encode_message(message)]

    def _encode_message(self, message: Mapping[str, Any]) -> list[int]:
        encode = self._tokenizer.encode_literally
        inner = [*encode(message["role"]), *self._newline, *encode(message["content"] or "")]
        return [self._start, *inner, self._end, *self._newline]


def _chatml_text(messages: Sequence[Message]) -> str | None:
    """The text of messages in ChatML; None for a message without content, which is no text."""
    if any(message["content"] is None for message in messages):
        return None
    return "".join(f"{CHATML_START}{message['role']}\n{message['content']}{CHATML_END}\n" for message in messages)


CHATML_TRAITS = Traits(_chatml_text)


def _divide_turns(messages: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The messages before the first of a user, then the turns, each of which begins with a user's message."""
    turns: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        if message["role"] == "user":
            turns.append([])
        turns[-1].append(message)
    return turns


def _read_option(text: str) -> str:
    """The template in --chat-template: a file name, unless it looks like a template."""
    if "{{" in text or "{%" in text:
        return text
    try:
        return read_regular_text(text, limits.TEMPLATE_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--chat-template {text!r:.200} is neither a file that can be read nor a Jinja template: {error}",
            code="bad-chat-template-flag",
        ) from error


def _check_syntax(source: str) -> None:
    """Raise ModelError for a text that is no template. Nothing of it is computed."""
    from weft.engine.templates.chat_environment import ChatEnvironment

    with _template_errors():
        ChatEnvironment().parse(source)


def _compile(source: str) -> Template:
    """Compile a template, for which its constant expressions are computed."""
    from weft.engine.templates.budget import run_within_budget
    from weft.engine.templates.chat_environment import ChatEnvironment

    with _template_errors():
        template = run_within_budget(lambda: ChatEnvironment().from_string(source))
    template.globals = dict(template.globals)  # a chain of mappings, which each rendering would read in full, twice
    return template


@contextmanager
def _template_errors() -> Iterator[None]:
    """Turn what Jinja raises for a wrong template into ModelError."""
    from jinja2 import TemplateSyntaxError

    try:
        yield
    except TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template is no valid Jinja (line {error.lineno}: {error.message}); "
            "give another with --chat-template",
            code="invalid-chat-template",
        ) from error
    except (RecursionError, MemoryError, SyntaxError):  # of the Python code that Jinja generates
        raise ModelError(
            "the chat template is nested too deeply; give another with --chat-template",
            code="chat-template-nested-too-deeply",
        ) from None
