"""Tokenizers that somebody made to harm: each is refused in one line, before it takes time or memory."""

from __future__ import annotations

import base64
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.pure.vocabularies import byte_level, byte_level_json, sentencepiece_fields, sentencepiece_model, write_gguf
from tests.refusals import refuses
from weft.checkpoint.files import limits
from weft.engine.text import folder, spm
from weft.engine.text.charsmap import check_charsmap
from weft.engine.text.growth import MAX_GROWTH, check_growth
from weft.engine.text.merges import derive_merges
from weft.engine.text.tokenizer import load_tokenizer
from weft.errors import ModelError

_MAP = spm._decode_model(sentencepiece_model(normalization_rule_name="nmt_nfkc"))[2][spm.CHARSMAP]
assert isinstance(_MAP, bytes)
CHARSMAP: bytes = _MAP
A: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _sequence(part: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {part: {"type": "Sequence", {"normalizer": "normalizers", "decoder": "decoders"}.get(part, part): [*steps]}}


BOMBS: dict[str, dict[str, Any]] = {
    "a long prefix": {"normalizer": {"type": "Prepend", "prepend": "x" * 1000}},
    "doubled 34 times": _sequence("normalizer", *[_replace("aa", String="a")] * 34),
    "doubled by an expression": _sequence("normalizer", *[_replace("\\0aa", Regex=r"\b")] * 5),
    "a character that decomposes": _sequence("normalizer", *[_replace("ﷺ", String="a")] * 2),
    "nested sequences": _sequence(
        "normalizer", *[_sequence("normalizer", _replace("aaaa", String="a"))["normalizer"]] * 4
    ),
    "bytes of bytes": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 4}},
    "a growing decoder": _sequence("decoder", *[_replace("aa", String="a")] * 7),
    "the text many times": {"post_processor": {"type": "TemplateProcessing", "single": [A] * 65, "special_tokens": {}}},
    "many ids": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, A],
            "special_tokens": {"x": {"id": "x", "ids": [0] * 5000, "tokens": ["x"] * 5000}},
        }
    },
    "no character replaced": {"normalizer": _replace("a", String="")},
    "pieces of no character": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "too many steps": _sequence("normalizer", *[{"type": "NFC"}] * 1001),
    "an empty map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    "a random map": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"x" * 99).decode()}
    },
    "no base64": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "%"}},
    "long words": {"model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}},
    "a long piece": {"model": {"type": "Unigram", "vocab": [["a" * 1025, 0.0]], "unk_id": 0}},
    "no field of the library": {"model": {"type": "Nothing"}},
}


@pytest.mark.parametrize("change", BOMBS.values(), ids=BOMBS)
def test_a_hostile_file_is_refused_in_one_line(
    change: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(byte_level_json()) | change))
    with refuses(ModelError, "damaged-tokenizer", "tokenizer.json") as refused:
        load_tokenizer(str(path))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500 + len(str(path))
    assert capfd.readouterr().err == ""


def test_steps_of_published_tokenizers_are_allowed() -> None:
    charsmap = base64.b64encode(CHARSMAP).decode()
    nfkc = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    for steps in (
        [nfkc, {"type": "Strip"}, _replace("▁", Regex=" {2,}")],  # XLM-R
        [{"type": "Prepend", "prepend": "▁"}, _replace("▁", String=" ")],  # Llama 2
        [_replace('"', String="``"), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, nfkc],  # ALBERT
        [{"type": "BertNormalizer"}],
    ):
        check_growth({"normalizer": {"type": "Sequence", "normalizers": steps}})
    check_growth(json.loads(byte_level_json()))


def test_a_panic_of_the_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("weft.engine.text.tokenizer_json.check_growth", lambda _: None)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(byte_level_json()) | BOMBS["an empty map"]))
    with refuses(ModelError, "damaged-tokenizer", "tokenizer.json"):
        load_tokenizer(str(path))
    assert capfd.readouterr().err == ""


def test_other_lines_on_standard_error_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("weft.engine.text.tokenizer_json.check_growth", lambda _: os.write(2, b"a warning\n"))
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_level_json())
    load_tokenizer(str(path))
    assert capfd.readouterr().err == "a warning\n"


# --- Character maps


def test_character_maps() -> None:
    assert check_charsmap(CHARSMAP) == 18
    size = int.from_bytes(CHARSMAP[:4], "little")
    texts = CHARSMAP[4 + size :]
    first = struct.unpack_from("<I", CHARSMAP, 4)[0]
    for damaged in (
        CHARSMAP[:-1],  # the last text has no end
        CHARSMAP[:4] + struct.pack("<I", first ^ 0x7FFFFC00) + CHARSMAP[8:],  # the root's children are far away
        CHARSMAP[: 4 + size] + b"\0",  # no texts for the values
        (size + 1).to_bytes(4, "little") + CHARSMAP[4:],
        CHARSMAP[: 4 + size] + b"\xff" + texts[1:],
        b"",
    ):
        with pytest.raises(ValueError):
            check_charsmap(damaged)
    long = CHARSMAP[: 4 + size] + texts + b"x" * 1000 + b"\0"
    assert check_charsmap(long) == 1000
    steps = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(long).decode()}
    with pytest.raises(ValueError, match=str(MAX_GROWTH)):
        check_growth({"normalizer": steps})


# --- Vocabularies


def test_a_long_token_is_merged_in_little_time() -> None:
    ranks = {"a" * length: float(length) for length in range(1, limits.TOKEN_CHARACTERS + 1)}
    assert len(derive_merges(ranks)) == limits.TOKEN_CHARACTERS - 1
    with pytest.raises(ValueError, match="1,025"):
        derive_merges(ranks | {"a" * 1025: 1025.0})


def test_a_vocabulary_beyond_any_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = sentencepiece_model()
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "a.tiktoken").write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(b"%d" % n), n) for n in range(300)))
    write_gguf(tmp_path / "a.gguf", **sentencepiece_fields(model))
    monkeypatch.setattr(limits, "CONVERTED_TOKENS", 200)
    codes = {
        "tokenizer.model": "damaged-sentencepiece",
        "a.tiktoken": "damaged-tiktoken",
        "a.gguf": "damaged-tokenizer",
    }
    for name, code in codes.items():
        with refuses(ModelError, code, name, "200"):
            load_tokenizer(str(tmp_path / name))


@pytest.mark.parametrize("length", [1025, 20_000])
def test_a_long_token_of_each_format_is_refused(length: int, tmp_path: Path) -> None:
    text = "a" * length
    fields = sentencepiece_fields(sentencepiece_model())
    fields["tokens"] = [*fields["tokens"][:-1], text]
    write_gguf(tmp_path / "a.gguf", **fields)
    piece = b"\x0a" + _varint(length) + text.encode()
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model() + b"\x0a" + _varint(len(piece)) + piece)
    (tmp_path / "a.tiktoken").write_bytes(b"%s 0\n" % base64.b64encode(text.encode()))
    codes = {
        "tokenizer.model": "damaged-sentencepiece",
        "a.tiktoken": "damaged-tokenizer",
        "a.gguf": "damaged-tokenizer",
    }
    for name, code in codes.items():
        with refuses(ModelError, code, name, f"{length:,}"):
            load_tokenizer(str(tmp_path / name))


def _varint(value: int) -> bytes:
    return bytes([value & 127 | 128, value >> 7 & 127 | 128, value >> 14])


def test_a_number_of_many_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\xff" * 100_000)
    with refuses(ModelError, "damaged-sentencepiece", "10 bytes"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("rank", ["-1", "4294967296", "1_0", "0x1", "9" * 5000, "+1"])
def test_a_rank_that_is_no_id_is_refused(rank: str, tmp_path: Path) -> None:
    (tmp_path / "a.tiktoken").write_text(f"YQ== 0\nYg== {rank}\n")
    with refuses(ModelError, "damaged-tiktoken", "a.tiktoken"):
        load_tokenizer(str(tmp_path))


def test_many_added_tokens_are_added_at_once(tmp_path: Path) -> None:
    hf_tokenizer = byte_level()
    (tmp_path / "tokenizer.json").write_text(hf_tokenizer.to_str())
    first = folder.vocab_size(hf_tokenizer)
    listed = {str(first + n): {"content": f"<|{n}|>", "special": n % 2 == 0} for n in range(20_000)}
    listed[str(first + 30_000)] = {"content": "beyond a gap"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    this = load_tokenizer(str(tmp_path))
    assert this.vocab_size == first + 20_000
    assert this.id("<|19999|>") == first + 19_999
    assert this.id("beyond a gap") is None


def test_a_template_beyond_any_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level_json())
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(limits.TEMPLATE_BYTES + 1)
    with refuses(ModelError, "file-too-large", "chat_template.jinja", "1,000,000"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "chat_template.jinja").unlink()
    long = "x" * (limits.TEMPLATE_BYTES + 1)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": long}))
    write_gguf(tmp_path / "a.gguf", **sentencepiece_fields(sentencepiece_model()), chat_template=long)
    for path in (tmp_path, tmp_path / "a.gguf"):
        with refuses(ModelError, "chat-template-too-long", path, "1,000,001"):
            load_tokenizer(str(path))
