"""States of answers: whatever the texts before, answers in the same state may go on by the same tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from tests.pure.api.test_forced_calls import BOUNDED
from weft.engine.core.params import StructuredOutputsParams
from weft.engine.structured import masks
from weft.engine.structured.compiler import GrammarCompiler
from weft.engine.structured.grammar import body_of, grammar_text
from weft.engine.structured.masks import MaskMaker, Row
from weft.engine.structured.matcher import GuidedMatcher
from weft.engine.structured.schema_state import has_keys
from weft.engine.text.byte_level import ALPHABET, build_byte_level, spell_bytes
from weft.engine.text.pretokenizers import GPT2
from weft.engine.text.settings import TokenizerSettings
from weft.engine.text.tokenizer import Tokenizer

END = "<end>"
QUOTE = ord('"')  # the tokens of single bytes come first
PARTS = [
    *(
        '{"',
        '":',
        '": ',
        '",',
        '", "',
        '"}',
        '"]',
        '"],',
        '[{"',
        "},{",
        "}}",
        '":"',
        '"a"',
        ",\n",
        " ",
        " true",
        "null",
    ),
    *("ab", "abc", "name", "x y", "12", "-1", "0.5", "é", "größe", "日本", '\\"', "\\u00", "\\n", "\\\\"),
]

PLACE = {"type": "object", "properties": {"at": {"type": "integer", "maximum": 99}}, "additionalProperties": False}
NODE = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "next": {"$ref": "#/$defs/node"}},
    "required": ["name"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "texts": {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 5}, "maxItems": 3},
    "long lists": {"type": "array", "items": {"type": ["string", "integer"], "minLength": 2}, "minItems": 2},
    "pairs": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": {"type": "null"}},
    "constants": {
        "type": "array",
        "items": {"enum": ["ab", "abc", "name", "x y", 12, None, True]},
        "minItems": 1,
        "maxItems": 4,
    },
    "optional": {"type": "object", "properties": {"ab": {"type": "string", "maxLength": 3}, "name": PLACE}},
    "maps": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 3}},
    "nullable": {
        "type": "object",
        "properties": {"name": {"anyOf": [PLACE, {"type": "string", "maxLength": 3}, {"type": "null"}]}},
        "required": ["name"],
    },
    "recursive": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "patterns": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]+ab$"}, "maxItems": 2},
    "anything": {"type": "array", "items": {}, "maxItems": 2},
    "a text": {"type": "string", "maxLength": 4},
    "bounded": {
        **BOUNDED,
        "properties": {key: part for key, part in BOUNDED["properties"].items() if key != "form"},
        "required": [key for key in BOUNDED["required"] if key != "form"],
    },
}
# Random names, and strings with patterns, are hardly met again.
OPEN = {"optional", "maps", "nullable", "patterns", "anything"}
WALKS, TOKENS = 60, 80


@cache
def compiler() -> tuple[GrammarCompiler, int, int]:
    """A compiler for a vocabulary of all bytes, of PARTS and of an end token; its size, and the end token's id."""
    spelled = [*ALPHABET, *(spell_bytes(part.encode()) for part in PARTS)]
    vocab = {text: id for id, text in enumerate(dict.fromkeys(spelled))}
    hf_tokenizer = build_byte_level(vocab, [], GPT2.create_pre_tokenizer(), whole_words=False)
    hf_tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer = Tokenizer(hf_tokenizer, TokenizerSettings(tokens={"eos_token": END}))
    end = tokenizer.id(END)
    assert end is not None
    return GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, (end,)), tokenizer.vocab_size, end


def begin(schema: Any) -> GuidedMatcher:
    grammar = grammar_text(body_of(StructuredOutputsParams(json=schema)))
    matcher = compiler()[0].compile(grammar, []).result()
    assert isinstance(matcher, GuidedMatcher)
    return matcher


def walk(matcher: GuidedMatcher, draw: random.Random) -> Iterator[tuple[Hashable | None, bytes]]:
    """The states of a random answer, each with its mask as the library computes it there."""
    grammars, size, end = compiler()
    for _ in range(TOKENS):
        if matcher.ended:
            return
        mask = bytes(matcher.inner.compute_bitmask())
        assert grammars.masks([(matcher, [])]) == [mask]
        yield matcher.state_key(), mask
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:size]
        allowed = [int(id) for id in np.flatnonzero(bits)]
        plain = [id for id in allowed if id >= len(ALPHABET) and id != end]
        matcher.accept(draw.choice(plain if plain and draw.random() < 0.7 else allowed))
        assert matcher.error is None


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_in_one_state_have_one_mask(name: str) -> None:
    draw, masks_of = random.Random(name), dict[Hashable, bytes]()
    seen = met_again = 0
    for _ in range(WALKS):
        for key, mask in walk(begin(SCHEMAS[name]), draw):
            seen += 1
            if key is not None:
                met_again += key in masks_of
                assert masks_of.setdefault(key, mask) == mask, key
    assert met_again > (0.02 if name in OPEN else 0.3) * seen, "states that no two answers share are of no use"


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "integer"}, {"type": "number", "maximum": 5}]},
        {"anyOf": [{"const": "a"}, {"type": "string", "maxLength": 3}]},
        {"type": "object", "allOf": [{"properties": {"a": {"type": "string"}}}]},
        {"enum": [{"a": 1}, {"a": 2}]},
        {"type": "array", "uniqueItems": True},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "string"}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {"type": "null"}}}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "prefixItems": [{"type": "integer"}]},
        {"type": "array", "items": {"$id": "b", "$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a"}},
        {"type": "string", "$defs": []},
        {"type": "string", "$defs": {"x": {"enum": 5}, "y": {"anyOf": [{"type": [{}]}]}}},
        {"anyOf": [{"$ref": "#/$defs/a"}] * 9, "$defs": {"a": {"type": "string"}}},
        {"$ref": "#/$defs/a0", "$defs": {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(40)}},
    ],
    ids=json.dumps,
)
def test_a_schema_in_which_more_matters_has_no_keys(schema: Any) -> None:
    assert not has_keys(schema)
    assert has_keys({"type": "string"}) and has_keys(True)
    assert has_keys({"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "x", "type": "string"})


def test_masks_that_are_kept_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    maker, computed = MaskMaker(compiler()[1]), list[int]()

    def compute(rows: Sequence[Row]) -> list[bytes]:
        computed.append(len(rows))
        return computing(rows)

    computing = maker._compute
    monkeypatch.setattr(maker, "_compute", compute)
    texts = [begin(SCHEMAS["a text"]) for _ in range(3)]
    assert len({*maker.masks([(text, []) for text in texts])}) == 1 and computed == [1]
    for text, letter in zip(texts, b"xyz", strict=True):
        text.accept(QUOTE)
        text.accept(letter)
    maker.masks([(text, []) for text in texts])
    maker.masks([(text, []) for text in texts[1:]])
    assert computed == [1, 1], "strings of one length, whatever they say"
    maker.masks([(texts[0], [ord("a")]), (texts[1], [])])
    assert computed == [1, 1, 1], "masks after draft tokens are always computed"

    patterns = [begin({"type": "string", "pattern": "^[a-c]{2,5}$"}) for _ in range(2)]
    for pattern in patterns:
        pattern.accept(QUOTE)
    maker.masks([(pattern, []) for pattern in patterns])
    assert computed == [1, 1, 1, 2], "a state without a key shares no mask"


def test_masks_without_those_before() -> None:
    """The matcher goes on by tokens and computes no mask between them, if all masks are kept."""
    for text in ('"ab"', '"x y', '"'):
        followed, asked = begin(SCHEMAS["a text"]), begin(SCHEMAS["a text"])
        for byte in text.encode():
            asked.inner.compute_bitmask()
            followed.accept(byte)
            asked.accept(byte)
        assert followed.inner.compute_bitmask() == asked.inner.compute_bitmask()
        assert followed.ended == asked.ended and followed.error is asked.error is None


def test_a_row_whose_matcher_fails_leaves_the_others_theirs() -> None:
    grammars = compiler()[0]
    (expected,) = grammars.masks([(begin(SCHEMAS["maps"]), [])])
    for failing in (0, 1):
        maker, rows = MaskMaker(compiler()[1]), [begin(SCHEMAS["maps"]), begin(SCHEMAS["maps"])]
        rows[failing].inner.consume_token(ord("]"))  # an error, with the state as it was
        made = maker.masks([(row, []) for row in rows])
        assert made[1 - failing] == expected and rows[1 - failing].error is None


def test_masks_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    size = compiler()[1]
    monkeypatch.setattr(masks, "KEPT_BYTES", 2 * -(-size // 32) * 4)
    maker = MaskMaker(size)
    for length in range(5):
        text = begin(SCHEMAS["a text"])
        for byte in [QUOTE, *b"abcd"][:length]:
            text.accept(byte)
        maker.masks([(text, [])])
    assert len(maker._kept) == 2
