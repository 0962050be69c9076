"""A model's words by heart: every byte is a token with its own value as id, and three special ones follow."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken

from weft.engine.core.request import FinishReason, Output
from weft.engine.core.step import TokenLogprobs
from weft.engine.frontend.frontend import Frontend
from weft.engine.frontend.text_tools import TextTools
from weft.engine.templates.template import ChatTemplate
from weft.engine.text.byte_level import ALPHABET, build_byte_level
from weft.engine.text.pretokenizers import GPT2
from weft.engine.text.settings import TokenizerSettings
from weft.engine.text.tokenizer import Tokenizer

BOS, START, END = 256, 257, 258
VOCAB = 260  # one more than the tokenizer has: an embedding is often padded

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}{% if shout %}LOUD{% endif %}"
)


@cache
def text_tools() -> TextTools:
    hf_tokenizer = build_byte_level(
        {char: byte for byte, char in enumerate(ALPHABET)}, [], GPT2.create_pre_tokenizer(), whole_words=False
    )
    hf_tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<bos>", "<s>", "<e>")])
    tokenizer = Tokenizer(
        hf_tokenizer, TokenizerSettings(tokens={"bos_token": "<bos>", "eos_token": "<e>"}, add_bos=True)
    )
    return TextTools(tokenizer, ChatTemplate(TEMPLATE, tokenizer.special_tokens))


def frontend(**changes: object) -> Frontend:
    said = {"vocab": VOCAB, "max_model_len": 64, "eos": (END,), "text_tools": text_tools(), **changes}
    return Frontend(**said)  # type: ignore[arg-type]


def output(id: str, text: str | bytes | int, reason: FinishReason | None = None, **fields: object) -> Output:
    """One token, by its character, its byte or its id, as the core tells it, with a logprob of -token/1000."""
    token = text if isinstance(text, int) else (text.encode() if isinstance(text, str) else text)[0]
    logprob = TokenLogprobs(-token / 1000, 3, [65, 66], [-0.1, -0.2])
    return Output(id, [token], [logprob], reason, **fields)  # type: ignore[arg-type]
