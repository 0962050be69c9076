"""Frontend: turns a caller's texts, token ids, conversations and SamplingParams into the core's requests."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from typing import Any

from msgspec.structs import replace

from weft.checkpoint.checkpoint import Checkpoint
from weft.checkpoint.config.pooling import PoolingSettings
from weft.config import EngineConfig
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Request, prompt_too_long_error
from weft.engine.core.step import Pooling
from weft.engine.core.token_ids import TokenIds
from weft.engine.frontend.checks import check_cache_salt, check_ids, check_priority
from weft.engine.frontend.collector import Collector
from weft.engine.frontend.defaults import sampling_defaults, sampling_length
from weft.engine.frontend.outputs import RequestOutput
from weft.engine.frontend.prompt import Prompt, PromptLike, identity_of, list_ids
from weft.engine.frontend.text_tools import Rendering, TextTools
from weft.engine.structured.grammar import body_of, grammar_text
from weft.engine.templates.call_forms import HERMES, CallForm
from weft.engine.templates.rendering import Settings
from weft.engine.templates.template import ChatML
from weft.engine.text.tokenizer import Tokenizer
from weft.errors import RequestError

POOLED = SamplingParams(temperature=0.0, max_tokens=1)  # of requests for which nothing is sampled


def stream_key(*parts: object) -> int:
    """Return the 64-bit key of a random stream, which depends on `parts` alone."""
    return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little")


class Frontend:
    """Turns prompts into requests under the limits of one model.

    `vocab` is the number of embedding rows, `max_model_len` the limit on tokens of prompt and answer together, `eos`
    the token ids that end an answer. `defaults` are sampling parameters for requests that leave them out,
    `max_new_tokens` the length of an answer that the model's own code has by default, which `LLM.chat` takes. `hidden`
    is the length of the model's states, `pooling` how it embeds or scores prompts, if it does. Without a tokenizer,
    prompts are token ids and answers have no text. All methods raise RequestError, naming the field, for anything that
    cannot be served. The coroutines wait for sandboxed processes alone: `engine.sandbox.isolated` drives them, in a
    thread or in an event loop.
    """

    def __init__(
        self,
        *,
        vocab: int,
        max_model_len: int,
        eos: Sequence[int],
        text_tools: TextTools,
        defaults: Mapping[str, Any] | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        hidden: int = 0,
        pooling: PoolingSettings | None = None,
    ) -> None:
        self.vocab = vocab
        self.hidden = hidden
        self.pooling = pooling
        self.max_model_len = max_model_len
        self.max_new_tokens = max_new_tokens
        self._eos = tuple(eos)
        self._text_tools = text_tools
        self._defaults = dict(defaults or {})
        self._seed = seed
        self.examiner = text_tools.create_examiner(vocab, self._eos)
        self._unseeded = count()
        self._names = count()

    @classmethod
    def for_engine(
        cls, config: EngineConfig, checkpoint: Checkpoint, text_tools: TextTools, max_model_len: int
    ) -> Frontend:
        """Create the frontend of an engine that serves up to `max_model_len` tokens."""
        shape, tokenizer = checkpoint.shape, text_tools.tokenizer
        return cls(
            vocab=shape.vocab,
            max_model_len=max_model_len,
            eos=sorted({*shape.eos, *(tokenizer.end_ids if tokenizer else ())}),
            text_tools=text_tools,
            defaults=sampling_defaults(checkpoint.generation, config.generation_config),
            max_new_tokens=sampling_length(checkpoint.generation, config.generation_config),
            seed=config.seed,
            hidden=shape.hidden,
            pooling=checkpoint.pooling,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._text_tools.tokenizer

    @property
    def template_source(self) -> str | None:
        """The text of the model's chat template; None without one."""
        return self._text_tools.template.source if self._text_tools.template else None

    @property
    def tool_template_source(self) -> str | None:
        """The text of the chat template of requests with tools; None without one."""
        template = self._text_tools.template
        return (template.tool_source or template.source) if template else None

    def close(self) -> None:
        """End the sandboxed processes that it has."""
        self._text_tools.close()
        self.examiner.close()

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of the special tokens with these texts, as far as the vocabulary has them."""
        if self.tokenizer is None:
            return frozenset()
        ids = (self.tokenizer.id(text) for text in texts)
        return frozenset(id for id in ids if id is not None and id in self.tokenizer.special_ids)

    def sampling_params(self, fields: Mapping[str, Any], **defaults: Any) -> SamplingParams:
        """Return the SamplingParams with a caller's `fields`; None counts as left out.

        Fields that are left out come from `defaults`, then from the model's own defaults.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        return SamplingParams(**{**self._defaults, **defaults, **given})

    def parse_prompt(self, prompt: PromptLike, *, special: bool = True, param: str = "prompt") -> Prompt:
        """Return the prompt for a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.

        A dict may have a "cache_salt" too. `special` adds the model's own tokens (BOS) to a text that does not begin
        with them already. `param` names the field in errors.
        """
        if isinstance(prompt, Mapping):
            return self._parse_dict(prompt, special=special, param=param)
        if isinstance(prompt, str):
            self.check_text(prompt, param=param)
            return Prompt(self.pack_prompt(self.encode(prompt, special=special, param=param), param=param), prompt)
        return Prompt(self.pack_prompt(list_ids(prompt, param), param=param))

    def _parse_dict(self, prompt: Mapping[str, Any], *, special: bool, param: str) -> Prompt:
        text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        if ids is not None:
            return Prompt(self.parse_prompt(ids, param=param).ids, text, salt)
        if text is not None:
            return replace(self.parse_prompt(text, special=special, param=param), cache_salt=salt)
        raise RequestError(
            f'a prompt given as a dict needs "prompt" or "prompt_token_ids"; it has {sorted(prompt)}',
            param=param,
            code="prompt-dict-without-prompt",
        )

    def pack_prompt(self, ids: list[int], *, param: str = "prompt", answers: bool = True) -> TokenIds:
        """Pack a prompt's ids. Raises RequestError for no ids, too many of them, or one outside the vocabulary.

        A prompt that the model `answers` leaves room for a token.
        """
        if not ids:
            raise RequestError("the prompt is empty; give at least one token", param=param, code="empty-prompt")
        if len(ids) > self.max_model_len - answers:
            raise prompt_too_long_error(len(ids), self.max_model_len, param=param, answers=answers)
        self._check_ids(ids, param)
        return TokenIds.pack(ids)

    def encode(self, text: str, *, special: bool = True, param: str = "prompt") -> list[int]:
        """Return a text's token ids, without a limit on their number."""
        return self.require_tokenizer("a text", param).encode(text, add_special_tokens=special)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **keywords: Any) -> str:
        """Return a conversation as the text of a prompt, with BOS if the model wants it.

        `keywords` are as in `_rendering`.
        """
        return await self._rendering(**keywords).text(messages)

    def _rendering(
        self,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        call_form: CallForm = HERMES,
    ) -> Rendering:
        """Return the rendering of a conversation.

        `chat_template`, a file or the text itself, replaces the model's template; `template_variables` are passed to
        the template. With `continue_final_message`, the text ends where the last message ends. Calls of tools that the
        template does not show become text of `call_form`.
        """
        self.require_tokenizer("a conversation", "messages")
        template, isolated = self._text_tools.renderer(chat_template)
        variables = dict(template_variables or {})
        opens = bool(variables.pop("add_generation_prompt", add_generation_prompt)) and not continue_final_message
        return Rendering(template, isolated, Settings(opens, continue_final_message, call_form, variables))

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, least: int = 0, **keywords: Any
    ) -> tuple[str, list[int]]:
        """Return a conversation as the text of a prompt and as its token ids, without a limit on their number.

        `keywords` are as in `_rendering`, `least` as in `check_text`.
        """
        rendering = self._rendering(**keywords)
        text = await rendering.text(messages)
        self.check_text(text, param="messages", least=least)
        if not isinstance(rendering.template, ChatML):
            return text, self.encode(text, special=False, param="messages")
        settings = rendering.settings
        kept, ids = rendering.template.encode(
            messages,
            self.max_model_len - 1,
            opens=settings.opens,
            unfinished=settings.unfinished,
            call_form=settings.call_form,
        )
        return text if len(kept) == len(messages) else await rendering.text(kept), ids

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **rendering: Any) -> Prompt:
        """Return the prompt for a conversation; `rendering` are the keywords of `_rendering`."""
        text, ids = await self.encode_chat(messages, **rendering)
        return Prompt(self.pack_prompt(ids, param="messages"), text)

    def create_collector(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival_s: float,
        priority: int = 0,
        shown: Collection[int] = (),
        grammar: str = "",
    ) -> Collector:
        """Return the Collector of a prompt's answer, which holds the core's requests, one per choice.

        `shown` are special tokens that the answer's text has in any case. `grammar` constrains the answer; it comes
        from the `structured_outputs` of `params`, or is another one that has been checked.
        """
        check_priority(priority)
        if self.pooling is not None and not self.pooling.generates:
            raise RequestError(
                f"this model does not generate: it {self.pooling.task}s; send the request to another model, or start "
                "this one with --runner generate",
                param="model",
                code="model-does-not-generate",
            )
        assert grammar or params.structured_outputs is None, "answer_grammar comes first"
        check_cache_salt(prompt.cache_salt)
        choice = self._choice_params(prompt, params)
        stop_ids = (() if params.ignore_eos else self._eos) + params.stop_token_ids
        if prompt.answered:
            self._check_answered(list(prompt.answered), choice, params.n, stop_ids)
        name = str(next(self._names))
        check_ids(choice, self.vocab)
        # Without a seed, the same requests in the same order still get the same tokens.
        origin = ("seed", params.seed) if params.seed is not None else ("engine", self._seed, next(self._unseeded))
        identity = identity_of(prompt)
        requests = [
            Request(
                id=f"{name}-{index}",
                prompt=prompt.ids,
                params=choice,
                key=stream_key(*origin, index),
                stop_ids=stop_ids,
                priority=priority,
                identity=identity,
                answered=prompt.answered,
                grammar=grammar,
            )
            for index in range(params.n)
        ]
        return Collector(name, prompt.text, params, requests, self.tokenizer, arrival_s, shown)

    def create_pooling_collector(
        self, prompt: Prompt, pooling: Pooling, *, arrival_s: float, priority: int = 0
    ) -> Collector:
        """Return the Collector of what the model makes of a prompt as a whole, with the core's one request for it."""
        check_priority(priority)
        check_cache_salt(prompt.cache_salt)
        name = str(next(self._names))
        request = Request(
            id=f"{name}-0",
            prompt=prompt.ids,
            params=POOLED,
            priority=priority,
            identity=identity_of(prompt),
            pooling=pooling,
        )
        return Collector(name, prompt.text, POOLED, [request], None, arrival_s)

    async def answer_grammar(self, params: SamplingParams) -> str:
        """Return the checked text of the grammar of `structured_outputs`; "" without one."""
        if params.structured_outputs is None:
            return ""
        self.require_tokenizer("structured_outputs", "structured_outputs")
        grammar = grammar_text(body_of(params.structured_outputs))
        await self.examiner.check(grammar)
        return grammar

    def _check_answered(self, answered: list[int], choice: SamplingParams, n: int, stop_ids: Sequence[int]) -> None:
        """Raise RequestError for the beginning of an answer that cannot go on."""
        param = "continue_token_ids"
        self._check_ids(answered, param)
        if n > 1 or choice.prompt_logprobs is not None:
            raise RequestError(
                "continue_token_ids needs n = 1, and no prompt_logprobs", param=param, code="continuation-not-possible"
            )
        ended = answered[-1] in stop_ids and len(answered) > choice.min_tokens
        if ended or len(answered) >= (choice.max_tokens or 0):
            raise RequestError(
                f"continue_token_ids holds {len(answered)} tokens, and the answer ends there",
                param=param,
                code="nothing-to-continue",
            )

    def _choice_params(self, prompt: Prompt, params: SamplingParams) -> SamplingParams:
        """Return the parameters of one choice: limited to the model's length, and with the ids of bad words."""
        for field in ("stop", "bad_words"):
            if getattr(params, field):
                self.require_tokenizer(field, field)
        bad_word_ids: list[tuple[int, ...]] = []
        for word in params.bad_words:
            bad_word_ids += self.require_tokenizer("bad_words", "bad_words").word_ids(word)
        room = self.max_model_len - len(prompt.ids)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        return replace(
            params,
            n=1,
            max_tokens=most,
            min_tokens=min(params.min_tokens, most),
            bad_word_ids=tuple(bad_word_ids),
            structured_outputs=None,
        )

    def prompt_text(self, output: RequestOutput) -> str:
        """Return the prompt of an answer as text."""
        if output.prompt is not None:
            return output.prompt
        return self.decode(output.prompt_token_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        self._check_ids(ids, "tokens")
        return self.require_tokenizer("decoding", "tokens").decode(ids, skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        """Return the text that a token adds, with U+FFFD for a part of a character; "" without a tokenizer."""
        return self.tokenizer.token_text(token) if self.tokenizer else ""

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token adds; empty without a tokenizer."""
        return self.tokenizer.token_bytes(token) if self.tokenizer else b""

    def require_tokenizer(self, feature: str, param: str) -> Tokenizer:
        """Return the tokenizer; RequestError for `feature`, which needs it, if there is none."""
        return self._text_tools.require_tokenizer(feature, param)

    def check_text(self, text: str, *, param: str = "prompt", least: int = 0, answers: bool = True) -> None:
        """Raise RequestError for a text that is too long whatever its tokens are, before it is tokenized.

        A text of at most `least` characters is always accepted. `answers` as for `pack_prompt`.
        """
        if len(text) <= max(least, self.max_model_len):  # no token is shorter than a character
            return
        longest_token = self.require_tokenizer("a text", param).longest_token
        most = max(least, (self.max_model_len - answers) * longest_token)
        if len(text) > most:
            least_tokens = math.ceil(len(text) / longest_token)
            raise prompt_too_long_error(
                least_tokens, self.max_model_len, param=param, answers=answers, characters=len(text)
            )

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self.vocab:
                raise RequestError(
                    f"token id {token} is outside the vocabulary, 0 to {self.vocab - 1}",
                    param=param,
                    code="token-id-out-of-range",
                )
