"""Frontend: from what a caller says (texts, ids, conversations, SamplingParams) to the core's requests."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Any

import msgspec

from weft.client.checks import check_ids, check_priority
from weft.client.collector import Collector
from weft.client.outputs import RequestOutput
from weft.config import EngineConfig
from weft.core.params import SamplingParams
from weft.core.request import Request
from weft.errors import RequestError
from weft.formats.checkpoint import Checkpoint
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer, load_tokenizer

PromptLike = str | Sequence[int] | Mapping[str, Any]

# What generation_config.json may say of sampling that SamplingParams has a word for.
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids, and as text where the caller gave text."""

    ids: list[int]
    text: str | None = None


def sampling_defaults(generation: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """The model's own sampling defaults, unless `policy` (--generation-config) is "vllm"."""
    if policy == "vllm":
        return {}
    return {name: generation[name] for name in GENERATION_DEFAULTS if generation.get(name) is not None}


def stream_key(*parts: object) -> int:
    """64 bits that depend on `parts` alone."""
    return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Words:
    """A model's tokenizer and chat template; both None with skip_tokenizer_init."""

    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None

    @classmethod
    def load(cls, config: EngineConfig, checkpoint: Checkpoint) -> Words:
        """Read from `config.tokenizer` where it is given, else from the checkpoint. Raises ModelError."""
        if config.skip_tokenizer_init:
            return cls()
        loaded = load_tokenizer(config.tokenizer or checkpoint.path)
        return cls(loaded, ChatTemplate.for_tokenizer(loaded, config.chat_template))


class Frontend:
    """Knows one model's limits and words. `vocab` is the number of embedding rows, `max_model_len` the most
    tokens of prompt and answer together, `eos` the ids that end an answer, `defaults` what a request that
    says nothing of a sampling parameter gets. Without a tokenizer prompts are ids, and answers have no text.
    Everything raises RequestError, naming the field, for what cannot be served.
    """

    def __init__(
        self,
        *,
        vocab: int,
        max_model_len: int,
        eos: Sequence[int],
        words: Words,
        defaults: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.vocab = vocab
        self.max_model_len = max_model_len
        self._eos = tuple(eos)
        self._words = words
        self._defaults = dict(defaults or {})
        self._seed = seed
        self._unseeded = count()
        self._names = count()

    @classmethod
    def of(cls, config: EngineConfig, checkpoint: Checkpoint, words: Words, max_model_len: int) -> Frontend:
        """The frontend of an engine that serves up to `max_model_len` tokens."""
        shape, tokenizer = checkpoint.shape, words.tokenizer
        return cls(
            vocab=shape.vocab,
            max_model_len=max_model_len,
            eos=sorted({*shape.eos, *(tokenizer.end_ids if tokenizer else ())}),
            words=words,
            defaults=sampling_defaults(checkpoint.generation, config.generation_config),
            seed=config.seed,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._words.tokenizer

    def params(self, said: Mapping[str, Any], **ours: Any) -> SamplingParams:
        """SamplingParams from what a caller said (None counts as unsaid), over `ours`, over the model's own."""
        return SamplingParams(**{**self._defaults, **ours, **{k: v for k, v in said.items() if v is not None}})

    def prompt(self, prompt: PromptLike, *, special: bool = True, param: str = "prompt") -> Prompt:
        """A text, ids, {"prompt": text} or {"prompt_token_ids": ids}. `special` adds the model's own tokens
        (BOS) to a text that does not begin with them already; `param` names the field in errors."""
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if ids is not None:
                return Prompt(self.prompt(ids, param=param).ids, text)
            if text is not None:
                return self.prompt(text, special=special, param=param)
            raise RequestError(
                f'a prompt given as a dict needs "prompt" or "prompt_token_ids"; it has {sorted(prompt)}', param=param
            )
        if isinstance(prompt, str):
            self.check_text(prompt, param=param)
            return self.checked(Prompt(self.encode(prompt, special=special, param=param), prompt), param=param)
        if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise RequestError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}", param=param)
        try:
            ids = [operator.index(token) for token in prompt]
        except TypeError:
            raise RequestError("a prompt given as a list must hold token ids, all integers", param=param) from None
        return self.checked(Prompt(ids), param=param)

    def checked(self, prompt: Prompt, *, param: str = "prompt") -> Prompt:
        """The prompt, if it is neither empty nor too long, and its ids are known."""
        if not prompt.ids:
            raise RequestError("the prompt is empty; give at least one token", param=param)
        if len(prompt.ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt.ids)} tokens and this model's maximum context length is "
                f"{self.max_model_len}, answer included; send at most {self.max_model_len - 1}",
                param=param,
            )
        self._check_ids(prompt.ids, param)
        return prompt

    def encode(self, text: str, *, special: bool = True, param: str = "prompt") -> list[int]:
        """A text as ids, however long."""
        return self._needed("a text", param).encode(text, add_special_tokens=special)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        names: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as the text of a prompt, which holds BOS where the model wants it. `chat_template`, a
        file or the text itself, takes the place of the model's; `names` are variables for it. With
        `continue_final_message` the text ends where the last message does."""
        tokenizer = self._needed("a conversation", "messages")
        template = (
            self._words.template if chat_template is None else ChatTemplate.for_tokenizer(tokenizer, chat_template)
        )
        assert template is not None, "a tokenizer comes with a template"
        known = dict(names or {})
        opens = bool(known.pop("add_generation_prompt", add_generation_prompt)) and not continue_final_message
        text = template.render(messages, add_generation_prompt=opens, **known)
        return _cut_after(text, messages[-1].get("content")) if continue_final_message else text

    def conversation(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> Prompt:
        """Messages, rendered as by `render`, as a prompt."""
        return self.prompt(self.render(messages, **how), special=False, param="messages")

    def collect(self, prompt: Prompt, params: SamplingParams, *, arrival_s: float, priority: int = 0) -> Collector:
        """The core's requests for a prompt, one per choice, in the Collector that will make its answer."""
        check_priority(priority)
        for field in ("stop", "bad_words"):
            if getattr(params, field):
                self._needed(field, field)
        words = [ids for word in params.bad_words for ids in self._needed("bad_words", "bad_words").word_ids(word)]
        name = str(next(self._names))
        room = self.max_model_len - len(prompt.ids)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        choice = msgspec.structs.replace(
            params, n=1, max_tokens=most, min_tokens=min(params.min_tokens, most), bad_word_ids=tuple(words)
        )
        check_ids(choice, self.vocab)
        # Without a seed, the same requests in the same order still get the same tokens.
        origin = ("seed", params.seed) if params.seed is not None else ("engine", self._seed, next(self._unseeded))
        requests = [
            Request(
                id=f"{name}-{index}",
                prompt=prompt.ids,
                params=choice,
                key=stream_key(*origin, index),
                stop_ids=(() if params.ignore_eos else self._eos) + params.stop_token_ids,
                priority=priority,
            )
            for index in range(params.n)
        ]
        return Collector(name, prompt.text, params, requests, self.tokenizer, arrival_s)

    def text(self, output: RequestOutput) -> str:
        """The prompt of an answer as text."""
        if output.prompt is not None:
            return output.prompt
        return self.decode(output.prompt_token_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        self._check_ids(ids, "tokens")
        return self._needed("decoding", "tokens").decode(ids, skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        """What a token adds to a text, U+FFFD for a part of a character."""
        return self.tokenizer.token_text(token) if self.tokenizer else ""

    def token_bytes(self, token: int) -> bytes:
        """The same as UTF-8."""
        return self.tokenizer.token_bytes(token) if self.tokenizer else b""

    def _needed(self, what: str, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and this engine runs without (skip_tokenizer_init)", param=param
            )
        return self.tokenizer

    def check_text(self, text: str, *, param: str = "prompt", least: int = 0) -> None:
        """Refuse a text that is too long whatever its tokens are, before it is cut into them. `least` characters are
        taken in any case."""
        if len(text) <= max(least, self.max_model_len):  # no token is shorter than a character
            return
        most = max(least, (self.max_model_len - 1) * self._needed("a text", param).longest_token)
        if len(text) > most:
            raise RequestError(
                f"the prompt has {len(text):,} characters and this model's maximum context length is "
                f"{self.max_model_len} tokens, answer included; at most {most:,} characters are cut into tokens",
                param=param,
            )

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self.vocab:
                raise RequestError(f"token id {token} is outside the vocabulary, 0 to {self.vocab - 1}", param=param)


def _cut_after(text: str, content: object) -> str:
    """A rendered conversation without what the template puts behind its last message's content."""
    last = content.strip() if isinstance(content, str) else ""
    at = text.rfind(last) if last else -1
    if at < 0:
        raise RequestError(
            "continue_final_message needs a last message whose content is a text that the template shows",
            param="messages",
        )
    return text[: at + len(last)]
