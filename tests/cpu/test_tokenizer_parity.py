"""Tokenisers and chat templates against Transformers, which most models were published with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from tests.pure.vocabularies import (
    SPECIALS,
    TEXTS,
    byte_level,
    byte_level_fields,
    sentencepiece_fields,
    sentencepiece_model,
    write_gguf,
)
from weft.engine.templates.template import ChatTemplate
from weft.engine.text.pretokenizers import PRE_TOKENIZERS
from weft.engine.text.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("flag", [None, True, False])
def test_a_saved_tokenizer(tmp_path: Path, bos: bool, flag: bool | None) -> None:
    hf_tokenizer = byte_level()
    if bos:
        hf_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    said = {} if flag is None else {"add_bos_token": flag}
    saved = PreTrainedTokenizerFast(tokenizer_object=hf_tokenizer, bos_token=SPECIALS[1], eos_token=SPECIALS[2], **said)
    saved.add_tokens(["<tool>"])
    saved.save_pretrained(tmp_path)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    this = load_tokenizer(str(tmp_path))
    assert (this.bos_id, this.eos_id, this.vocab_size) == (oracle.bos_token_id, oracle.eos_token_id, len(oracle))
    assert this.special_ids == set(oracle.all_special_ids) | {0}
    for text in (*TEXTS, "", "<tool>weft<|im_end|>"):
        assert this.encode(text) == oracle.encode(text)
        assert this.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False)
        ids = oracle.encode(text)
        for skip in (True, False):
            assert this.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


# Transformers has no words of its own for the others: it takes GPT-2's for all of them.
@pytest.mark.parametrize("pre", [*sorted(PRE_TOKENIZERS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()), "gpt-2", "default"])
def test_gguf_words(tmp_path: Path, pre: str) -> None:
    write_gguf(tmp_path / "m.gguf", **byte_level_fields(byte_level(), pre), add_bos_token=False)
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    this = load_tokenizer(str(tmp_path / "m.gguf"))
    # What is whole in one and merged in the other shows in the ids, not in how a text is cut.
    for text in (*TEXTS, "a1234 b\r\n\r\nc  d'LL e/\n/f"):
        cut = PRE_TOKENIZERS[pre].create_pre_tokenizer().pre_tokenize_str(text)
        assert cut == oracle.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        if not PRE_TOKENIZERS[pre].whole:
            assert this.encode(text) == oracle.encode(text)
        assert this.decode(this.encode(text)) == text


def test_gguf_sentencepiece(tmp_path: Path) -> None:
    model = sentencepiece_model()
    write_gguf(tmp_path / "m.gguf", **sentencepiece_fields(model))
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    this = load_tokenizer(str(tmp_path / "m.gguf"))
    for text in TEXTS:
        if text.startswith(" "):
            continue  # Transformers puts no second space before it, SentencePiece does
        assert this.encode(text) == oracle.encode(text)
        assert this.decode(oracle.encode(text)) == oracle.decode(oracle.encode(text), skip_special_tokens=True)


ADDED = ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize("listed", ["added_tokens.json", "tokenizer_config.json"])
@pytest.mark.parametrize("legacy", [None, True, False])
@pytest.mark.parametrize("kind", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_a_folder_with_a_sentencepiece_model(tmp_path: Path, kind: str, legacy: bool | None, listed: str) -> None:
    """Its added tokens, its ends, and the spaces after special tokens."""
    model = sentencepiece_model()
    ids = dict(zip(ADDED, (500, 501), strict=True))
    config: dict[str, Any] = {
        "tokenizer_class": kind,
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
    }
    config |= {"add_bos_token": True} | ({} if legacy is None else {"legacy": legacy})
    if listed == "added_tokens.json":
        (tmp_path / listed).write_text(json.dumps(ids))
    else:
        config["added_tokens_decoder"] = {str(id): {"content": text, "special": True} for text, id in ids.items()}
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    this, oracle = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert this.end_ids == (2, 501) and (this.id(ADDED[0]), this.vocab_size) == (500, 502)
    for text in (*TEXTS, f"{ADDED[0]}user\nhello{ADDED[1]}and", f"a{ADDED[1]}"):
        if text.startswith(" ") and legacy is not False and (legacy or kind != "LlamaTokenizer"):
            continue  # Transformers puts no second space before it, SentencePiece does
        expected = oracle.encode(text, add_special_tokens=False)
        assert this.encode(text, add_special_tokens=False) == expected, text


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Why is the sky <blue>?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": "  Hello! "},
        {"role": "user", "content": "ünï"},
    ],
    [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}]},
        {"role": "tool", "content": "4"},
    ],
]
# In the manner of what models bring along.
TEMPLATES = {
    "chatml": """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""",
    "instruct": """{{ bos_token }}
{% set ns = namespace(system='') %}
{% for message in messages %}
    {% if message['role'] == 'system' %}
        {% set ns.system = message['content'] + '\\n\\n' %}
        {% continue %}
    {% elif message['role'] == 'user' %}
        {{- '[INST] ' + ns.system + message['content'] | trim + ' [/INST]' }}
    {% elif message['role'] == 'assistant' and message['content'] %}
        {%- generation %}{{ ' ' + message['content'].strip() + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}""",
    "tools": """{%- if tools %}
    {{- 'tools:' + tools | tojson(indent=2) }}
{%- endif %}
{%- for message in messages %}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name + call.function.arguments | tojson }}
    {%- else %}
        {{- message.role ~ ': ' ~ message.content ~ '\\n' }}
    {%- endfor %}
{%- endfor %}
{{- messages[-1] | items | list }}{{ strftime_now('%d %b') | length }}""",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS, ids=["one", "system", "tools"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "with tools"])
def test_rendered_chats(name: str, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
    oracle = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token=SPECIALS[1], eos_token=SPECIALS[2])
    named = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2]}
    for add in (True, False):
        for kwargs in ({}, {"enable_thinking": False}):
            expected = oracle.apply_chat_template(
                chat, chat_template=TEMPLATES[name], tools=tools, add_generation_prompt=add, tokenize=False, **kwargs
            )
            # Content that is missing beside tool_calls is None here: the one thing that is not as it came.
            ours = ChatTemplate(TEMPLATES[name], named).render(chat, tools=tools, add_generation_prompt=add, **kwargs)
            if name != "tools" and chat[-1]["role"] == "tool":
                assert "é" in ours and "é" not in expected  # the template leaves calls out
            else:
                assert ours == expected


def test_arguments_as_clients_send_them() -> None:
    template = ChatTemplate(TEMPLATES["tools"])
    [user, call, answer] = CHATS[2]
    [function] = [one["function"] for one in call["tool_calls"]]
    text = {**call, "tool_calls": [{"function": {**function, "arguments": json.dumps(function["arguments"])}}]}
    assert template.render([user, text, answer]) == template.render(CHATS[2])
