"""ChatTemplate: from messages to the prompt, by the Jinja template that comes with a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import ConfigError, ModelError, RequestError
from weft.text.messages import checked

if TYPE_CHECKING:
    from jinja2 import Template

    from weft.text.tokenizer import Tokenizer

# ChatML, for models that have its tokens but no template: Qwen's first ones.
CHATML_TOKEN = "<|im_start|>"
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


# A template that treats this role in its own way names it.
DEVELOPER = re.compile("""['"]developer['"]""")


class ChatTemplate:
    """A template's `source` with the texts of `special_tokens` ("bos_token": "<s>") that it may name.

    It runs sandboxed: it can neither reach Python nor change what it is given, and it is bounded in time and in the
    length of what it makes (`LIMITS`). Without a source every `render` is refused. Raises ModelError for a source that
    is no template.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special_tokens = dict(special_tokens or {})
        self._template: Template | None = None
        if source is not None:
            self._developer = DEVELOPER.search(source) is not None
            self._template = _compile(source)

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer, given: str | None = None) -> ChatTemplate:
        """The template `given` with --chat-template (a file or the text itself), else the model's own, else ChatML
        where the vocabulary has its tokens. ConfigError for a file that cannot be read."""
        if given is not None:
            source: str | None = _given(given)
        elif tokenizer.chat_template is None and tokenizer.id(CHATML_TOKEN) is not None:
            source = CHATML
        else:
            source = tokenizer.chat_template
        return cls(source, tokenizer.special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt of a conversation. `kwargs` are further names that the template knows: tools,
        enable_thinking, ... It holds BOS already where the model wants it: encode it without special tokens.

        Raises RequestError for messages that are none, and with the template's own words where it refuses them.
        """
        template = self._template
        if template is None:
            raise RequestError("this model has no chat template; give one with --chat-template", param="messages")
        from weft.text.sandbox import bounded

        names = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        names["messages"] = checked(messages, developer=self._developer)
        names["add_generation_prompt"] = add_generation_prompt
        try:
            return bounded(lambda: template.render(names))
        except Exception as error:  # a template may fail in any way that an expression can
            raise RequestError(
                f"the chat template refuses these messages: {error!s:.2000}", param="messages"
            ) from error


def _given(text: str) -> str:
    """--chat-template is the name of a file unless it looks like a template."""
    if "{{" in text or "{%" in text:
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--chat-template {text!r:.200} is neither a file that can be read nor a Jinja template: {error}"
        ) from error


def _compile(source: str) -> Template:
    from jinja2 import TemplateSyntaxError

    from weft.text.sandbox import ChatEnvironment

    try:
        return ChatEnvironment().from_string(source)
    except TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template is no valid Jinja (line {error.lineno}: {error.message}); "
            "give another with --chat-template"
        ) from error
    except (RecursionError, MemoryError, SyntaxError):  # of the Python code that Jinja makes of it
        raise ModelError("the chat template is nested too deeply; give another with --chat-template") from None
