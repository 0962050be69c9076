"""ChatTemplate: renders messages to a prompt with the Jinja template of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import ConfigError, ModelError, RequestError
from weft.text.messages import normalize_messages

if TYPE_CHECKING:
    from jinja2 import Template

    from weft.text.tokenizer import Tokenizer

# ChatML, for models that have its tokens but no template: the first Qwen models.
CHATML_TOKEN = "<|im_start|>"
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


# A template that handles this role contains its name.
DEVELOPER = re.compile("""['"]developer['"]""")


class ChatTemplate:
    """A chat template; `special_tokens` ("bos_token": "<s>") are names that its `source` may use.

    The template runs sandboxed: it can neither reach Python nor change its arguments, and `LIMITS` bound its time and
    the length of its texts. Without a source every `render` raises RequestError. Raises ModelError for a source that is
    not a template.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special_tokens = dict(special_tokens or {})
        self._template: Template | None = None
        if source is not None:
            self._developer = DEVELOPER.search(source) is not None
            self._template = _compile(source)

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer, given: str | None = None) -> ChatTemplate:
        """The template `given` with --chat-template (a file or the text itself), or the model's own.

        A model without one gets ChatML if its vocabulary has the tokens. Raises ConfigError for an unreadable file.
        """
        if given is not None:
            source: str | None = _read_option(given)
        elif tokenizer.chat_template is None and tokenizer.id(CHATML_TOKEN) is not None:
            source = CHATML
        else:
            source = tokenizer.chat_template
        return cls(source, tokenizer.special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Render a conversation to a prompt. `kwargs`: further variables of the template (tools, enable_thinking, ...).

        The prompt contains BOS if the model wants it: encode it without special tokens. Raises RequestError for invalid
        messages, and with the template's own message if the template refuses them.
        """
        template = self._template
        if template is None:
            raise RequestError(
                "this model has no chat template; give one with --chat-template",
                param="messages",
                code="no-chat-template",
            )
        from weft.text.sandbox import run_within_budget

        variables = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        variables["messages"] = normalize_messages(messages, developer=self._developer)
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            return run_within_budget(lambda: template.render(variables))
        except Exception as error:  # a template can raise anything that an expression can
            raise RequestError(
                f"the chat template refuses these messages: {error!s:.2000}",
                param="messages",
                code="chat-template-refused",
            ) from error


def _read_option(text: str) -> str:
    """The template in --chat-template: a file name, unless it looks like a template."""
    if "{{" in text or "{%" in text:
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--chat-template {text!r:.200} is neither a file that can be read nor a Jinja template: {error}",
            code="bad-chat-template-flag",
        ) from error


def _compile(source: str) -> Template:
    from jinja2 import TemplateSyntaxError

    from weft.text.sandbox import ChatEnvironment

    try:
        return ChatEnvironment().from_string(source)
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
