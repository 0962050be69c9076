"""Tokenizer and chat template of a model, and the rendering of its conversations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from weft.checkpoint.checkpoint import Checkpoint
from weft.checkpoint.config.config_json import chat_settings
from weft.config import EngineConfig
from weft.engine.sandbox.isolated import Isolated, run_blocking
from weft.engine.sandbox.limits import Limits
from weft.engine.structured.compiler import GrammarCompiler
from weft.engine.structured.examiner import GrammarExaminer
from weft.engine.templates import rendering
from weft.engine.templates.limits import LIMITS
from weft.engine.templates.template import ChatTemplate
from weft.engine.text import probing
from weft.engine.text.tokenizer import Tokenizer, load_tokenizer
from weft.errors import ModelError, RequestError

PROBE_LIMITS = Limits(cpu_s=8, wall_s=60.0, memory=3 << 29)  # of a tokenizer's reading and of its first texts
TEMPLATES = 8  # of callers of `LLM.chat`, whose processes are kept
# The largest texts and all their parts take a fraction of that memory.
RENDERING_LIMITS = Limits(cpu_s=math.ceil(LIMITS.template_s), wall_s=2 * LIMITS.template_s, memory=1 << 30)


@dataclass(frozen=True)
class TextTools:
    """A model's tokenizer and chat template; both None with skip_tokenizer_init."""

    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None

    @classmethod
    def load(cls, config: EngineConfig, checkpoint: Checkpoint) -> TextTools:
        """Load from `config.tokenizer` if it is set, else from the checkpoint. Raises ModelError."""
        if config.skip_tokenizer_init:
            return cls()
        path = config.tokenizer or checkpoint.path
        probe_tokenizer(Path(path))
        loaded = load_tokenizer(path)
        chat = chat_settings(Path(checkpoint.path))
        return cls(
            loaded, ChatTemplate.for_tokenizer(loaded, config.chat_template, chat.chat_format, window=chat.window)
        )

    def require_tokenizer(self, feature: str, param: str) -> Tokenizer:
        """Return the tokenizer; RequestError for `feature`, which needs it, if there is none."""
        if self.tokenizer is None:
            raise RequestError(
                f"{feature} needs a tokenizer, and this engine runs without one (skip_tokenizer_init)",
                param=param,
                code="tokenizer-missing",
            )
        return self.tokenizer

    def create_grammars(self, vocab: int, eos: Sequence[int]) -> GrammarCompiler:
        """Create the compiler of grammars for a model with `vocab` embedding rows, whose answers end with `eos`."""
        return GrammarCompiler(self._grammar_tokenizer, vocab, eos)

    def create_examiner(self, vocab: int, eos: Sequence[int]) -> GrammarExaminer:
        """Create what checks grammars before they are compiled there."""
        return GrammarExaminer(self._grammar_tokenizer, vocab, eos)

    async def warm(self) -> None:
        """Start the process that renders the model's template, before the first conversation."""
        if self.template is not None and self.template.source is not None:
            await self.renderer(None)[1].pool.warm()

    def close(self) -> None:
        """End the processes that render templates."""
        for isolated in list(self._isolated):
            isolated.close()

    def _grammar_tokenizer(self) -> Tokenizer:
        return self.require_tokenizer("a grammar", "structured_outputs")

    @cached_property
    def renderer(self) -> Callable[[str | None], tuple[ChatTemplate, Isolated]]:
        """The model's template, or one that a caller gives instead, and its rendering in sandboxed processes."""

        @lru_cache(maxsize=TEMPLATES)
        def renderer(given: str | None) -> tuple[ChatTemplate, Isolated]:
            template = self.template
            if given is not None:
                assert self.tokenizer is not None, "templates need a tokenizer"
                template = ChatTemplate.for_tokenizer(self.tokenizer, given)
            assert template is not None, "a tokenizer comes with a template"
            isolated = render_isolated(template)
            self._isolated.add(isolated)
            return template, isolated

        return renderer

    @cached_property
    def _isolated(self) -> WeakSet[Isolated]:
        """The renderings of these templates, as far as they are kept."""
        return WeakSet()

    def prepare_vocabulary(self) -> None:
        """Compute the longest token now, rather than for the first long prompt.

        It takes 50 to 200 ms, in which no other thread runs. To be called in a thread while the engine starts.
        """
        if self.tokenizer is not None:
            self.tokenizer.longest_token  # noqa: B018  # cached by the tokenizer


def probe_tokenizer(path: Path) -> None:
    """Raise ModelError for a tokenizer whose steps break limits. Steps that have passed once are not tried again."""
    file = path / "tokenizer.json" if path.is_dir() else path
    mark = probing.probe_mark(file) if file.name == "tokenizer.json" else None
    if mark is None or probing.has_passed(mark):
        return
    probe = Isolated(
        "weft.engine.text.probing:prepare",
        bytes,
        PROBE_LIMITS,
        refusal=f"{file} breaks or does not come to an end with a text of some thousand characters",
        param="",
        code=probing.TOO_EXPENSIVE,
        lasting=False,
    )
    try:
        run_blocking(probe.call(str(file).encode()))
    except RequestError as error:
        raise ModelError(str(error), code=error.code) from None
    probing.note_passed(mark)


def render_isolated(template: ChatTemplate) -> Isolated:
    """Return the rendering of a template in sandboxed processes."""
    return Isolated(
        "weft.engine.templates.rendering:prepare",
        partial(rendering.encode_setup, template),
        RENDERING_LIMITS,
        refusal="the chat template does not come to an end with these messages",
        param="messages",
        code="chat-template-too-expensive",
    )


class Rendering(NamedTuple):
    """A chat template and the settings of one rendering."""

    template: ChatTemplate
    isolated: Isolated
    settings: rendering.Settings

    async def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return a conversation as text."""
        return rendering.decode_text(await self.isolated.call(rendering.encode_rendering(messages, self.settings)))
