"""Growth of texts in a tokenizer.json: how many times longer its steps can make a text, by what the file says.

A step that doubles each character is small in a file, and forty of them one after the other fill every memory with the
first prompt. The file is refused before the library gets it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any

from weft.engine.text.charsmap import check_charsmap, decomposed_length

MAX_GROWTH = 64  # times; the largest published is 36: XLM-R's character map, of 18, and a Replace
MAX_STEPS = 1_000  # normalizers, or other steps of a kind; published files have up to 60
MAX_ADDED_IDS = 1_000  # that a post-processor puts around a text; published ones have up to 5
MAX_WORD = 10_000  # characters of a WordPiece word, whose search is quadratic; published files have 100

# Fields with the steps of a sequence, by the part of the file.
SEQUENCES = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
# A byte of a character becomes a character; words of BERT get spaces on both sides; others get one before them.
FACTORS = {"ByteLevel": 4.0, "BertNormalizer": 3.0, "Metaspace": 2.0, "Prepend": 1.0}
# A regular expression that never matches an empty text: one character, at least once.
_SOME = re.compile(r"(\\?.)(\+|\{[1-9]\d*,\d*\})", re.DOTALL)


def check_growth(content: Mapping[str, Any]) -> None:
    """Raise ValueError if the steps of a tokenizer.json can make a text much longer, or panic on any text."""
    for part in SEQUENCES:
        growth, count, added = 1.0, 0, 0
        for step in steps_of(content, part):
            growth, count, added = growth * _factor(step), count + 1, added + _added_ids(step)
            if growth > MAX_GROWTH or count > MAX_STEPS or added > MAX_ADDED_IDS:
                raise ValueError(
                    f"its {part} makes texts {growth:,.0f} times longer in {count:,} steps, with {added:,} ids around "
                    f"them; at most {MAX_GROWTH}, {MAX_STEPS:,} and {MAX_ADDED_IDS:,} are allowed"
                )


def steps_of(content: Mapping[str, Any], part: str) -> Iterator[Mapping[str, Any]]:
    """Steps of a part of a tokenizer.json in order, without the sequences that they are in."""
    waiting = [content.get(part)]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, Mapping):
            continue
        inner = step.get(SEQUENCES[part])
        if step.get("type") == "Sequence" and isinstance(inner, list):
            waiting += reversed(inner)
        else:
            yield step


def _factor(step: Mapping[str, Any]) -> float:
    """The most characters that a step makes of one character. Unicode's own forms count as 1: they do not add up."""
    kind = str(step.get("type"))
    if kind == "FixedLength" and step.get("length") == 0:
        raise ValueError("its pre_tokenizer cuts texts into pieces of 0 characters")
    if kind == "Prepend":
        return 1.0 + _length(step.get("prepend"))
    if kind == "Replace":
        return _replacement(step)
    if kind == "TemplateProcessing":
        return _repetitions(step)
    if kind == "Precompiled":
        return max(1.0, check_charsmap(base64.b64decode(str(step.get("precompiled_charsmap")), validate=True)))
    return FACTORS.get(kind, 1.0)


def _replacement(step: Mapping[str, Any]) -> float:
    pattern, content = step.get("pattern"), _length(step.get("content"))
    literal = pattern.get("String") if isinstance(pattern, Mapping) else None
    if literal == "":
        raise ValueError("it replaces empty texts")
    if isinstance(literal, str):
        return max(1.0, content / len(literal))
    regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    return max(1.0, content) if isinstance(regex, str) and _SOME.fullmatch(regex) else 1.0 + content


def _repetitions(step: Mapping[str, Any]) -> float:
    """Number of times that a template has the text: {"Sequence": {"id": "A"}} among the pieces of `single`."""
    pieces = step.get("single")
    return max(1, sum("Sequence" in piece for piece in _objects(pieces)))


def _added_ids(step: Mapping[str, Any]) -> int:
    """The most ids that a template puts around a text."""
    tokens = step.get("special_tokens")
    if step.get("type") != "TemplateProcessing" or not isinstance(tokens, Mapping):
        return 0
    ids = {name: len(token.get("ids") or ()) for name, token in tokens.items() if isinstance(token, Mapping)}
    most = 0
    for pieces in (step.get("single"), step.get("pair")):
        named = [piece.get("SpecialToken") for piece in _objects(pieces)]
        most = max(most, sum(ids.get(token.get("id"), 0) for token in named if isinstance(token, Mapping)))
    return most


def _objects(value: object) -> list[Mapping[str, Any]]:
    """The objects in a list."""
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _length(text: object) -> int:
    return decomposed_length(text) if isinstance(text, str) else 0
