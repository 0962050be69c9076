"""Tokenisers of every kind against the libraries that invented them."""

from __future__ import annotations

import base64
import json
import os
import struct
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import processors

from tests.log_events import logged
from tests.pure.vocabularies import (
    SPECIALS,
    TEXTS,
    byte_level,
    byte_level_fields,
    sentencepiece_fields,
    sentencepiece_model,
    word_level,
    write_folder,
    write_gguf,
    write_tiktoken,
)
from tests.refusals import refuses
from weft.engine.text import cache, spm
from weft.engine.text.merges import derive_merges
from weft.engine.text.pretokenizers import PRE_TOKENIZERS, QWEN
from weft.engine.text.tokenizer import Tokenizer, load_tokenizer
from weft.errors import ModelError, RequestError

ODD = (
    "",
    " ",
    "  two  spaces ",
    "\n\n\ttab",
    "a" * 50,
    "日本語 🙂👍🏽",
    "12345678",
    "it's WE'LL",
    "\u2581 x",
    "e\u0301",
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# --- Hugging Face directories


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", byte_level(), bos_token=SPECIALS[1], eos_token={"content": SPECIALS[2]})


def test_a_folder(folder: Path) -> None:
    this = load_tokenizer(str(folder))
    assert (this.bos_id, this.eos_id, this.end_ids, this.vocab_size) == (1, 2, (2,), 600)
    assert this.special_tokens == {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2]}
    assert this.special_ids == {0, 1, 2}
    assert this.chat_template is None
    for text in (*TEXTS, *ODD):
        ids = this.encode(text)
        assert ids == byte_level().encode(text).ids
        assert this.decode(ids) == text
    assert load_tokenizer(str(folder / "tokenizer.json")).encode(TEXTS[0]) == this.encode(TEXTS[0])


def test_a_long_text_is_encoded_as_a_short_one(folder: Path) -> None:
    this = load_tokenizer(str(folder))
    text = "The weft. " * 16_384
    assert this.encode(text) == byte_level().encode(text).ids


@pytest.mark.parametrize(
    ("config", "template", "expected"),
    [
        ({}, False, []),
        ({}, True, [1]),
        ({"add_bos_token": True}, False, [1]),
        ({"add_bos_token": False}, True, []),
        ({"add_bos_token": True, "add_eos_token": True}, True, [1, 2]),
        ({"add_bos_token": True, "bos_token": None}, False, []),
    ],
)
def test_bos_comes_as_the_model_says_and_once(
    tmp_path: Path, config: dict[str, Any], template: bool, expected: list[int]
) -> None:
    hf_tokenizer = byte_level()
    if template:
        hf_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    named = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2]}
    this = load_tokenizer(str(write_folder(tmp_path / "model", hf_tokenizer, **{**named, **config})))
    plain = this.encode("weft", add_special_tokens=False)
    assert plain == byte_level().encode("weft").ids
    bos, eos = expected[:1], expected[1:]
    assert this.encode("weft") == bos + plain + eos
    assert this.encode("") == expected
    # A rendered chat begins with BOS already.
    assert this.encode(SPECIALS[1] + "weft") == [1, *plain, *eos]
    assert this.encode(SPECIALS[1] + "weft", add_special_tokens=False) == [1, *plain]


def test_tokens_that_only_the_config_knows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    added = {
        "600": {"content": "<tool>", "special": False},
        "601": {"content": "<eot>", "special": True},
        "900": {"content": "<nowhere>", "special": True},
        "0": {"content": SPECIALS[0], "special": True},
        "x": {"content": "<x>"},
        "602": {"content": 5},
    }
    this = load_tokenizer(
        str(write_folder(tmp_path / "model", byte_level(), added_tokens_decoder=added, eos_token="<eot>"))
    )
    assert this.encode("<tool><eot>") == [600, 601]
    assert this.decode([600, 601]) == "<tool>"
    assert (this.eos_id, this.vocab_size) == (601, 602)
    assert this.id("<nowhere>") is None
    assert logged(caplog, "token-left-out") == [{"token": "<nowhere>", "id": 900}]


def test_named_tokens_are_special_wherever_they_are_named(tmp_path: Path) -> None:
    hf_tokenizer = word_level(("[UNK]", "a", "</s>", "<pad>", "<x>"))
    model = write_folder(
        tmp_path / "model", hf_tokenizer, pad_token="<pad>", additional_special_tokens=["<x>", "<none>"]
    )
    (model / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    this = load_tokenizer(str(model))
    assert this.special_ids == {2, 3, 4}
    assert this.eos_id == 2
    assert this.decode(this.encode("a </s> a <x> <pad>")) == "a a"


def test_ids_from_config_json_where_nothing_else_names_them(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "model", byte_level(), bos_token=None)
    (model / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    this = load_tokenizer(str(model))
    assert (this.bos_id, this.eos_id) == (None, 2)  # a bos_token of null is a word too


def test_truncation_of_the_training_is_not_ours(tmp_path: Path) -> None:
    hf_tokenizer = byte_level()
    hf_tokenizer.enable_truncation(3)
    hf_tokenizer.enable_padding(length=8)
    this = load_tokenizer(str(write_folder(tmp_path / "model", hf_tokenizer)))
    for text in (TEXTS[0], "a"):
        assert this.encode(text) == byte_level().encode(text).ids


TOOL_USE = {"name": "tool_use", "template": "t"}
DEFAULT = {"name": "default", "template": "d"}


@pytest.mark.parametrize(
    ("files", "expected", "with_tools"),
    [
        ({"tokenizer_config.json": {"chat_template": "one"}}, "one", None),
        ({"tokenizer_config.json": {"chat_template": "one"}, "chat_template.jinja": "file"}, "file", None),
        ({"chat_template.json": {"chat_template": "processor"}}, "processor", None),
        ({"tokenizer_config.json": {"chat_template": [TOOL_USE, DEFAULT]}}, "d", "t"),
        ({"tokenizer_config.json": {"chat_template": [TOOL_USE]}}, "t", "t"),
        ({"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "more"}, "file", "more"),
        ({"additional_chat_templates/tool_use.jinja": "more"}, "more", "more"),
        ({"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "more"}, "file", None),
        ({}, None, None),
    ],
)
def test_chat_templates_of_a_folder(
    folder: Path, files: dict[str, Any], expected: str | None, with_tools: str | None
) -> None:
    for name, value in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    loaded = load_tokenizer(str(folder))
    assert (loaded.chat_template, loaded.tool_template) == (expected, with_tools)


def test_missing_and_damaged_files_are_told_in_one_line(tmp_path: Path, folder: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    names = ("tokenizer.json", "tokenizer.model", "*.tiktoken")
    with refuses(ModelError, "no-tokenizer-in-folder", empty, *names, "--tokenizer"):
        load_tokenizer(str(empty))
    with refuses(ModelError, "no-such-tokenizer"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (folder / "tokenizer_config.json").write_text("{")
    with refuses(ModelError, "cannot-read-tokenizer", "tokenizer_config.json"):
        load_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text('{"model": 1}')
    with refuses(ModelError, "damaged-tokenizer"):
        load_tokenizer(str(folder))
    for name, code in (("tokenizer.model", "damaged-sentencepiece"), ("x.tiktoken", "damaged-tiktoken")):
        (empty / name).write_bytes(b"\x0a\xff not a model")
        with refuses(ModelError, code, name):
            load_tokenizer(str(empty))
        (empty / name).unlink()


def test_bad_texts_and_ids(folder: Path) -> None:
    this = load_tokenizer(str(folder))
    with refuses(RequestError, "invalid-unicode", "2", "U+D83D"):
        this.encode("ab\ud83d")
    with refuses(RequestError, "invalid-unicode", "U+D83D"):
        this.encode("ab\ud83d" + " " * 16_384)
    with refuses(RequestError, "token-id-out-of-range", "0", "599"):
        this.decode([-1])
    assert this.decode([10_000]) == ""
    assert (this.token_bytes(10_000), this.token_text(10_000)) == (b"", "")


def test_bad_words_come_at_the_start_and_after_a_space(folder: Path) -> None:
    this = load_tokenizer(str(folder))
    assert this.word_ids(" weft") == [tuple(this.encode("weft")), tuple(this.encode(" weft"))]
    assert this.word_ids("🙂\n") == [tuple(this.encode(text)) for text in ("🙂\n", " 🙂\n")]
    with refuses(RequestError, "empty-bad-word"):
        this.word_ids("  ")


def test_token_text_is_best_effort(folder: Path) -> None:
    this = load_tokenizer(str(folder))
    assert [this.token_text(id) for id in this.encode(" weft")] == [" weft"]
    bold = this.encode("𝒳")
    assert [this.token_text(id) for id in bold] == ["\ufffd"] * 4
    assert b"".join(map(this.token_bytes, bold)).decode() == "𝒳"
    assert this.token_text(2) == SPECIALS[2]


# --- SentencePiece


def sentencepiece_folder(path: Path, **options: Any) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    path.mkdir()
    model = sentencepiece_model(**options)
    (path / "tokenizer.model").write_bytes(model)
    return load_tokenizer(str(path)), sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"model_type": "unigram", "vocab_size": 420},
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
        {"model_type": "unigram", "vocab_size": 200, "byte_fallback": False, "remove_extra_whitespaces": True},
        {"bos_id": -1, "pad_id": 3},
        {"byte_fallback": False},
    ],
    ids=str,
)
def test_sentencepiece_models(tmp_path: Path, options: dict[str, Any]) -> None:
    this, oracle = sentencepiece_folder(tmp_path / "model", **options)
    assert this.vocab_size == oracle.get_piece_size()
    assert (this.bos_id, this.eos_id) == (None if oracle.bos_id() < 0 else oracle.bos_id(), oracle.eos_id())
    for text in (*TEXTS, *ODD):
        expected = oracle.encode(text)
        assert this.encode(text, add_special_tokens=False) == expected, text
        assert this.encode(text) == ([] if this.bos_id is None else [this.bos_id]) + expected
        if options.get("byte_fallback", True):
            assert this.decode(expected) == oracle.decode(expected)


@given(data=st.data())
def test_sentencepiece_decodes_broken_bytes(data: st.DataObject) -> None:
    """A byte that belongs to no character costs itself, not the characters beside it."""
    model = sentencepiece_model()
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    this = Tokenizer(*spm.parse_sentencepiece(model))
    byte = oracle.piece_to_id("<0x00>")
    ids = data.draw(st.lists(st.one_of(st.integers(byte, byte + 255), st.integers(byte + 256, 499)), max_size=12))
    # SentencePiece keeps a space at the beginning that is a byte; Llama's own tokenizer.json does not.
    if ids[:1] != [byte + 0x20]:
        assert this.decode(ids) == oracle.decode(ids)


def test_sentencepiece_shows_each_broken_byte() -> None:
    model = sentencepiece_model()
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = [oracle.piece_to_id(piece) for piece in ("<0xE4>", "<0xBD>", "<0x0A>", "<0xF0>", "a", "<0xFF>")]
    assert Tokenizer(*spm.parse_sentencepiece(model)).decode(ids) == oracle.decode(ids) == "\ufffd\ufffd\n\ufffda\ufffd"


def test_runs_of_spaces_that_all_rank_the_same() -> None:
    """Llama's whitespace: the leftmost pair is joined, whatever it gives."""
    model = sentencepiece_model(allow_whitespace_only_pieces=False)
    for length in (2, 3, 4, 5, 6, 7, 8, 16):
        text = "\u2581" * length
        # A message that is put behind another of the same kind is part of it.
        piece = b"\x0a" + bytes([len(text.encode())]) + text.encode() + b"\x15" + struct.pack("<f", -1e9)
        model += b"\x0a" + bytes([len(piece)]) + piece
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    this = Tokenizer(*spm.parse_sentencepiece(model))
    for length in range(40):
        text = "x" + " " * length + "y"
        assert this.encode(text, add_special_tokens=False) == oracle.encode(text)


def test_merges() -> None:
    assert derive_merges({b"a": 0, b"b": 1, b"ab": 2, b"aba": 3}) == [(b"a", b"b"), (b"ab", b"a")]
    # "bc" comes first, so that "abc" is never "ab" and "c"; "xy" has a part that is no token.
    assert derive_merges({"a": 0, "b": 0, "c": 0, "bc": 1, "ab": 2, "abc": 3, "xy": 4, "x": 0}) == [
        ("b", "c"),
        ("a", "b"),
        ("a", "bc"),
    ]


# --- tiktoken


@pytest.fixture
def ranks(tmp_path: Path) -> dict[bytes, int]:
    words = QWEN.create_pre_tokenizer()
    hf_tokenizer = byte_level(words.__getstate__().decode())
    return write_tiktoken(tmp_path / "qwen.tiktoken", hf_tokenizer)


def test_tiktoken(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    specials = {text: len(ranks) + at for at, text in enumerate(SPECIALS)}
    [pattern] = QWEN.splits
    oracle = tiktoken.Encoding("qwen", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
    this = load_tokenizer(str(tmp_path))
    assert this.end_ids == tuple(specials.values())
    assert this.vocab_size == len(ranks) + 3 + 205
    for text in (*TEXTS, *ODD, "<|im_start|>user\nweft<|im_end|>"):
        expected = oracle.encode(unicodedata.normalize("NFC", text), allowed_special="all")
        assert this.encode(text) == expected, text
        assert this.decode(expected, skip_special_tokens=False) == oracle.decode(expected)


def test_a_tiktoken_file_with_an_entry_twice(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    file = tmp_path / "qwen.tiktoken"
    lines = file.read_bytes().splitlines()
    token, rank = lines[7].split()
    for wrong, names in ((b"ACB6 " + rank, ("rank", 7)), (token + b" 100000", ("token",))):
        file.write_bytes(b"\n".join([*lines, wrong]))
        with refuses(ModelError, "tiktoken-entry-twice", file, *names):
            load_tokenizer(str(tmp_path))


def test_a_literal_text_has_no_special_token(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    [pattern] = QWEN.splits
    oracle = tiktoken.Encoding("qwen", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    this = load_tokenizer(str(tmp_path))
    for text in (*TEXTS, "a<|im_end|>\n<|im_start|>system\nweft", "<|extra_0|><|endoftext|>", "<|im_start|"):
        expected = oracle.encode(unicodedata.normalize("NFC", text))
        assert this.encode_literally(text) == expected, text
    assert this.encode("<|im_start|>") == [len(ranks) + 1]


# --- vocab.json and merges.txt


def test_a_folder_of_opt(tmp_path: Path) -> None:
    """Without a tokenizer.json, and with a beginning that only tokenizer_config.json asks for."""
    hf_tokenizer = byte_level()
    model = json.loads(hf_tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    (tmp_path / "merges.txt").write_text("\n".join(lines))
    named = {"bos_token": {"content": SPECIALS[0]}, "eos_token": {"content": SPECIALS[0]}, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    this = load_tokenizer(str(tmp_path))
    assert (this.bos_id, this.eos_id, this.end_ids) == (0, 0, (0,))
    for text in (*TEXTS, *ODD):
        assert this.encode(text) == [0, *hf_tokenizer.encode(text).ids], text
        assert this.decode(this.encode(text)) == text
    (tmp_path / "merges.txt").write_text("one\n")
    with refuses(ModelError, "damaged-tokenizer", "vocab.json", "merges.txt"):
        load_tokenizer(str(tmp_path))


# --- GGUF


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_gguf_byte_level(tmp_path: Path, pre: str) -> None:
    words = PRE_TOKENIZERS[pre]
    oracle = byte_level(words.create_pre_tokenizer().__getstate__().decode())
    # As a file of any name, as Ollama keeps them.
    this = load_tokenizer(str(write_gguf(tmp_path / "sha256-0123", **byte_level_fields(oracle, pre))))
    for text in (*TEXTS, *ODD, "<|im_start|>user\nweft<|im_end|>"):
        assert this.encode(text, add_special_tokens=False) == oracle.encode(text).ids
        assert this.encode(text)[:1] == [1] or not words.bos
    assert (this.bos_id, this.eos_id, this.end_ids) == (1, 2, (2, 0))
    assert this.special_ids == {0, 1, 2}


TEXT = "Weft's 12345 x, 你好ü!?a\n\nb"
WORDS = {
    "deepseek-llm": [
        "Weft",
        "'",
        "s",
        " ",
        "1",
        "2",
        "3",
        "4",
        "5",
        " x",
        ",",
        " ",
        "你好",
        "ü",
        "!?",
        "a",
        "\n",
        "\n",
        "b",
    ],
    "deepseek-v3": ["Weft", "'s", " ", "123", "45", " x", ",", " ", "你好", "ü", "!?", "a", "\n\n", "b"],
    "kimi-k2": ["Weft's", " ", "123", "45", " x", ",", " ", "你好", "ü", "!?", "a", "\n\n", "b"],
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_of_deepseek_and_kimi(pre: str) -> None:
    """By the published patterns; of DeepSeek V2 the digits are apart, of V3 and Kimi-K2 up to three are one word."""
    cut = PRE_TOKENIZERS[pre].create_pre_tokenizer().pre_tokenize_str(TEXT)
    assert [TEXT[first:last] for _, (first, last) in cut] == WORDS[pre]


def test_kimi_names_special_tokens_in_another_file(tmp_path: Path) -> None:
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    lines.append(f"{base64.b64encode(b'ab').decode()} 256")
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    named = {257: "[BOS]", 258: "[EOS]", 261: "<|im_user|>", 512: "[PAD]"}
    listed = {str(id): {"content": text, "special": True} for id, text in named.items()}
    config = {"added_tokens_decoder": listed, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    this = load_tokenizer(str(tmp_path))
    assert this.encode("ab<|im_user|>b[PAD]") == [256, 261, ord("b"), 512]
    assert (this.bos_id, this.eos_id, this.vocab_size) == (257, 258, 257 + 256)
    assert this.id("<|reserved_token_260|>") == 260
    assert this.decode([256, 261, 98]) == "abb"


def test_smollm_takes_digits_singly(tmp_path: Path) -> None:
    fields = byte_level_fields(byte_level(), "smollm")
    assert "23" in fields["tokens"]
    smollm = load_tokenizer(str(write_gguf(tmp_path / "smollm.gguf", **fields)))
    gpt2 = load_tokenizer(str(write_gguf(tmp_path / "gpt2.gguf", **{**fields, "pre": "gpt-2"})))
    assert [smollm.token_text(id) for id in smollm.encode("1234")] == ["1", "2", "3", "4"]
    assert len(gpt2.encode("1234")) < 4


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_a_word_that_is_a_token_whatever_the_merges_say(tmp_path: Path, pre: str) -> None:
    fields = byte_level_fields(byte_level(), pre)
    fields["merges"] = [merge for merge in fields["merges"] if merge.replace(" ", "") != "\u0120the"]
    this = load_tokenizer(str(write_gguf(tmp_path / "m.gguf", **fields, add_bos_token=False)))
    assert (this.encode(" the") == [this.id("\u0120the")]) == (pre == "llama-bpe")


def test_harmony_ends_with_a_reply_or_a_call(tmp_path: Path) -> None:
    """The end of a message is not the end of a reply, whatever the file says."""
    fields = byte_level_fields(byte_level(), "gpt-4o")
    fields["tokens"] += ["<|return|>", "<|end|>", "<|call|>"]
    fields["token_type"] += [3, 3, 3]
    fields |= {"bos_token_id": 1, "eos_token_id": 600, "eot_token_id": 601}
    this = load_tokenizer(str(write_gguf(tmp_path / "m.gguf", **fields)))
    assert {this.token_text(id) for id in this.end_ids} == {"<|return|>", "<|call|>", "<|im_end|>", "<|endoftext|>"}


@pytest.mark.parametrize("prefix", [True, False])
def test_gguf_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    model = sentencepiece_model(add_dummy_prefix=prefix)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    this = load_tokenizer(str(write_gguf(tmp_path / "m.gguf", **sentencepiece_fields(model), add_space_prefix=prefix)))
    for text in (*TEXTS, *ODD):
        expected = oracle.encode(text)
        assert this.encode(text) == [oracle.bos_id(), *expected]
        assert this.decode(expected) == oracle.decode(expected)
    assert this.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert this.end_ids == (oracle.eos_id(),)
    assert this.encode("<s>weft</s>")[:1] + this.encode("<s>weft</s>")[-1:] == [1, 2]


def test_gguf_flags_template_and_added_tokens(tmp_path: Path) -> None:
    hf_tokenizer = byte_level()
    fields = byte_level_fields(hf_tokenizer, "llama-bpe")
    fields["tokens"] += ["<think>", "<|eot_id|>", "a b"]
    fields["token_type"] += [4, 3, 4]
    fields |= {"add_bos_token": False, "add_eos_token": True, "chat_template": "{{ 1 }}", "eot_token_id": 601}
    fields["eos_token_id"] = 0
    this = load_tokenizer(str(write_gguf(tmp_path / "m.gguf", **fields, padding_token_id=2**32 - 1)))
    assert this.encode("<think>a b<|eot_id|>") == [600, 602, 601, 0]
    assert this.decode([600, 602, 601]) == "<think>a b"
    assert this.end_ids == (0, 601, 2)
    assert this.chat_template == "{{ 1 }}"
    assert "pad_token" not in this.special_tokens


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        ({"pre": "nobody"}, "unknown-pre-tokenizer", ("'nobody'", "llama-bpe", "smollm", "--tokenizer")),
        ({"model": "bert"}, "unknown-gguf-tokenizer", ("'bert'", "gpt2 and llama")),
        ({"token_type": [1]}, "token-types-of-other-length", ("1", "600")),
        ({"merges": ["x y z"]}, "merge-of-no-tokens", ("'x y z'",)),
        ({"model": "llama"}, "token-scores-of-other-length", ("0", "600")),
    ],
)
def test_gguf_that_cannot_be(tmp_path: Path, change: dict[str, Any], code: str, values: tuple[str, ...]) -> None:
    fields = {**byte_level_fields(byte_level(), "gpt-2"), **change}
    with refuses(ModelError, code, *values):
        load_tokenizer(str(write_gguf(tmp_path / "m.gguf", **fields)))


# --- the cache


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", **byte_level_fields(byte_level(), "gpt-2"), chat_template="{{ 1 }}")


def test_the_second_time_nothing_is_made(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_tokenizer(str(gguf_file))

    def never(*_: object) -> tuple[HFTokenizer, Any]:
        raise AssertionError("made again")

    monkeypatch.setattr("weft.engine.text.gguf_tokenizer.read_gguf_tokenizer", never)
    second = load_tokenizer(str(gguf_file))
    for name in ("special_tokens", "special_ids", "end_ids", "chat_template", "bos_id", "vocab_size"):
        assert getattr(first, name) == getattr(second, name)
    assert [second.encode(text) for text in TEXTS] == [first.encode(text) for text in TEXTS]
    with monkeypatch.context() as newer:
        newer.setattr(cache, "FORMAT", cache.FORMAT + 1)
        with pytest.raises(AssertionError, match="made again"):
            load_tokenizer(str(gguf_file))
    load_tokenizer(str(gguf_file))
    os.utime(gguf_file, ns=(1, 1))  # another file by the same name
    with pytest.raises(AssertionError, match="made again"):
        load_tokenizer(str(gguf_file))


@pytest.mark.parametrize("name", ["tokenizer.json", "settings.json"])
def test_a_damaged_cache_is_made_again(gguf_file: Path, tmp_path: Path, name: str) -> None:
    load_tokenizer(str(gguf_file))
    [kept] = (tmp_path / "cache/weft/tokenizers").glob(f"*/{name}")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:50])
    assert load_tokenizer(str(gguf_file)).chat_template == "{{ 1 }}"
    assert kept.read_bytes() == whole
    assert sorted(path.name for path in kept.parent.iterdir()) == ["settings.json", "tokenizer.json"]


def test_chat_templates_of_a_gguf_file(tmp_path: Path) -> None:
    fields = byte_level_fields(byte_level(), "gpt-2") | {"chat_template": "d", "chat_template.tool_use": "t"}
    loaded = load_tokenizer(str(write_gguf(tmp_path / "m.gguf", **fields)))
    assert (loaded.chat_template, loaded.tool_template) == ("d", "t")


def test_without_a_place_for_the_cache(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_tokenizer(str(gguf_file)).encode("weft")


def test_only_what_is_needed_is_imported(gguf_file: Path) -> None:
    script = """
import sys
from weft.engine.text.tokenizer import load_tokenizer
from weft.engine.templates.template import ChatTemplate
from weft.engine.text.stream import TextStream
load_tokenizer(sys.argv[1]).encode("weft")
loaded = {"jinja2", "sentencepiece", "tiktoken", "transformers", "torch", "numpy", "gguf"} & sys.modules.keys()
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", script, str(gguf_file)], check=True, timeout=60)
