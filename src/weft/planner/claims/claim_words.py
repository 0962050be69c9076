"""The words of a claim put in order: a row of a table, or a sentence, as `MODEL PRECISION on …` or `… needs …`."""

from __future__ import annotations

import re

from weft.checkpoint.quantised.precision import is_precision

COUNTS = {"one": 1, "single": 1, "two": 2, "dual": 2, "three": 3, "four": 4, "six": 6, "eight": 8}

_ABOUT = re.compile(r"~|\b(?:about|around|approximately|roughly|up to)\b", re.IGNORECASE)
_SIZE = r"\d+(?:\.\d+)?\s*[GT]i?B\b(?!/)"
_CARDS = r"\d{1,5}\s*x\s*(?!\d+(?:\.\d+)?b\b)"  # 2x A100, but not 8x7B
_COUNTED = r"\d{1,5}\s+(?:gpus?|cards?)\b"
_BITS = re.compile(r"(?:\b(?:in|with|at)\s+)?\b(?P<bits>4|8|16)[ -]?bits?\b", re.IGNORECASE)
_OF_BITS = {"4": "4-bit", "8": "8-bit", "16": "bf16"}
# Verbs that say where a model runs, and verbs that say what it needs; the second are a table's heads, too.
_ON = re.compile(r"\b(?:can\s+)?(?:fits?|runs?|works?)\s+(?:on|in|into|with)\b", re.IGNORECASE)
_NEEDS = re.compile(
    r"\b(?:needs|takes|requires|uses|wants|(?:needs\s+)?(?:at least|min(?:imum)?\b\.?))"
    r"(?:\s+(?:of\s+)?(?:v?ram|memory|gpus?))?\s*:?\s+(?=\d)|\b(?:v?ram|memory)\s*:?\s+(?=\d)",
    re.IGNORECASE,
)
_NUMBER_WORD = re.compile(
    rf"\b(?:(?P<verb>on|needs)\s+)?(?:a\s+)?(?P<word>{'|'.join(COUNTS)})\s+(?P<gpus>gpus?\b|cards?\b)?(?=(?P<more>\w)?)",
    re.IGNORECASE,
)
_COUNT_OF_CARDS = re.compile(
    r"\b(?P<verb>on|needs) (?P<count>\d{1,3}) (?:gpus? (?!of\b|with\b|in\b|at\b))?"
    r"(?!gpus?\b|cards?\b|x\b|[gt]i?b\b)(?=[a-z])",
    re.IGNORECASE,
)
# The beginning of the hardware or the memory in a row without a verb.
_START = re.compile(rf"\s*[:,]?\s+(?={_CARDS}|{_COUNTED}|{_SIZE})", re.IGNORECASE)
_VERB = re.compile(r"\s(?:on|needs)\s", re.IGNORECASE)
# Figures that may follow others without a comma.
_SPEED = r"\d[\d,_.]*(?:\s*(?:-|to)\s*\d[\d,_.]*)?\s*(?:tok(?:en)?s?\s*(?:/|per\b)|t/s|tps)"
_FIGURE = re.compile(
    rf"(?<=[^\s,])\s*:?\s+(?={_SPEED}|{_SIZE}\s*(?:each|per gpu|total|in all)"
    r"|(?:tp|tensor[ -]parallel)\s*=?\s*\d|\d+(?:\.\d+|-\d+)(?=\s|,|$))"
    rf"|(?<=[GT]B)\s+(?={_SIZE})|(?<=gpus)\s+(?=\d)|(?<=gpu)\s+(?=\d)",
    re.IGNORECASE,
)


def plain_claim(text: str) -> str:
    """The text with one kind of blank and dash and one verb, "on" or "needs", without remarks in brackets and words for
    "about", and with numbers for "one" to "eight" cards."""
    text = re.sub(r"[‐-―−]", "-", text.replace("×", "x")).replace("≈", "~").replace("|", " ")
    text = re.sub(r"\(([^()]*)\)", lambda match: f" {match[1]} " if is_precision(match[1]) else " ", text)
    text = " ".join(_ABOUT.sub(" ", text).split())
    text = re.sub(rf"({_SIZE}) (?:gpus?|cards?)\b", r"\1", text, flags=re.IGNORECASE)
    text = _BITS.sub(lambda match: _OF_BITS[match["bits"]], text)
    text = _NEEDS.sub("needs ", _ON.sub("on", text))
    text = _NUMBER_WORD.sub(_number, text)
    if not _VERB.search(text) and (start := _START.search(text)):
        rest = text[start.end() :]
        verb = "on" if re.match(_CARDS, rest, re.IGNORECASE) else "needs"
        text = f"{text[: start.start()]} {verb} {rest}"
    return re.sub(r"\s+(?=,)", "", _COUNT_OF_CARDS.sub(r"\g<verb> \g<count>x ", text))


def _number(match: re.Match[str]) -> str:
    if not (match["verb"] or match["gpus"]) or not (match["gpus"] or match["more"]):
        return match[0]
    verb = f"{match['verb']} " if match["verb"] else ""
    count = COUNTS[match["word"].lower()]
    return f"{verb}{count} {match['gpus']}" if match["gpus"] else f"{verb}{count}x "


def in_pieces(rest: str) -> str:
    """Put a comma before each figure and around precisions in the words behind the verb."""
    rest = _FIGURE.sub(", ", rest)
    words = (f", {word.strip(',')}, " if is_precision(word.strip(",")) else word for word in rest.split())
    return re.sub(r"(?:(?:\s+(?:in|with))?\s*,\s+)+", ", ", " ".join(words)).strip(" ,")
