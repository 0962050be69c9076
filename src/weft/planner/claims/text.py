"""The text of a claim: what a guide says about a model, its memory, its speed, or a card's links."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import msgspec

from weft.checkpoint.quantised.precision import is_precision
from weft.errors import ConfigError
from weft.machine.hardware.quantities import parse_bytes
from weft.planner.profiles import engine_names

FORMS = (
    "MODEL PRECISION on NxGPU[ at N tokens][, X-Y tok/s]",
    "MODEL PRECISION needs 38 GB[ each on 2 GPUs]",
    "MODEL PRECISION needs NxGPU",
    "GPU: PCIe 5.0, 64 GB/s",
    "NVLink: +20-40 % for MODEL PRECISION on NxGPU",
)
GAIN_GPUS = "4xA100"  # cards of a gain by NVLink, if the claim names none
SEVERAL = 2  # GPUs of "8GB each", if their number is not told

_NUMBER = r"\d[\d,_.]*"
_TO = r"\s*(?:-|to)\s*"
_LOW_HIGH = rf"(?P<low>{_NUMBER})(?:{_TO}(?P<high>{_NUMBER}))?"
_SPEED = re.compile(rf"{_LOW_HIGH}\s*(?:(?:tok(?:en)?s?)(?:\s*/\s*s(?:ec)?|\s+per\s+second)|t/s|tps)", re.IGNORECASE)
_TOKENS = re.compile(
    r"(?:at\s+|with\s+)?(?P<tokens>\d[\d,_]*)\s*(?P<thousands>k)?(?:\s+(?:tokens?|context|ctx)\b.*|(?<=k))",
    re.IGNORECASE,
)
_MEMORY = re.compile(
    r"(?P<size>\d+(?:\.\d+)?\s*(?:[GT]i?B))(?:\s+(?:of\s+)?v?ram)?\s*(?P<end>each|per gpu|(?:in )?total|in all)?",
    re.IGNORECASE,
)
_COUNT = re.compile(
    r"(?P<count>\d{1,5})\s*(?:x\s*)?(?:gpus?|cards?)(?:\s+(?:of|with)\s+(?P<memory>.+))?", re.IGNORECASE
)
_EACH_OF = re.compile(r"(?P<count>\d{1,5})\s*x\s*(?P<memory>\d.*)", re.IGNORECASE)
_TENSOR = re.compile(r"(?:tp|tensor[ -]parallel)\s*=?\s*(?P<size>\d{1,4})", re.IGNORECASE)
_SUBJECT = re.compile(r"(?P<subject>.+?)\s+(?P<verb>on|needs)\s+(?P<rest>.+)", re.IGNORECASE)
# A comma within a number, 32,768, has no blank behind it.
_PIECE = re.compile(r"\s+(?:on|in|with)\s+|\s+at\s+(?=\d)|,\s+|,(?!\d{3}\b)", re.IGNORECASE)
# A figure of a column of speeds, without its unit: a range or a fraction, since a number may be a card's name.
_UNITLESS = re.compile(rf"(?=\d+\s*(?:-|to|\.)\s*\d){_LOW_HIGH}", re.IGNORECASE)
_GAIN = re.compile(
    rf"(?:(?P<before>.+?)\s*[:,]\s*)?nvlink\s*[:,]?\s*(?:is\s+)?\+?{_LOW_HIGH}\s*%"
    r"(?:\s+(?:higher|more|faster|better)\b[a-z ]*?)?"
    r"(?:\s+(?:for|with)\s+(?P<after>.+))?",
    re.IGNORECASE,
)
_LINK = re.compile(
    r"(?:\d{1,4}\s*x\s*)?(?P<gpu>[^:]+?)\s*:\s*(?P<links>[^:]*\b(?:pcie|nvlink|nvswitch)\b[^:]*?)"
    r"(?:\s*,?\s*(?P<speed>\d+(?:\.\d+)?)\s*GB/s(?: per gpu)?)?",
    re.IGNORECASE,
)
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
_RATE = r"\d[\d,_.]*(?:\s*(?:-|to)\s*\d[\d,_.]*)?\s*(?:tok(?:en)?s?\s*(?:/|per\b)|t/s|tps)"
_FIGURE = re.compile(
    rf"(?<=[^\s,])\s*:?\s+(?={_RATE}|{_SIZE}\s*(?:each|per gpu|total|in all)"
    r"|(?:tp|tensor[ -]parallel)\s*=?\s*\d|\d+(?:\.\d+|-\d+)(?=\s|,|$))"
    rf"|(?<=[GT]B)\s+(?={_SIZE})|(?<=gpus)\s+(?=\d)|(?<=gpu)\s+(?=\d)",
    re.IGNORECASE,
)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A claim that a model runs, as written.

    `gpus` is a description of hardware, in which a card may be a size of memory. `precision` is empty for the model's
    own, `tokens` None for the usual length. `tok_s` is the speed of one request, or the low end of a range that ends at
    `most_tok_s`. `memory` is what the model is said to need, in all or on `each` of `count` GPUs. `fewest`: the claim
    is that it needs this hardware, and fits no fewer GPUs. `tensor` is the tensor-parallel size, `engine` one that
    the claim is about.
    """

    model: str
    precision: str = ""
    gpus: str = ""
    tokens: int | None = None
    tok_s: float | None = None
    most_tok_s: float | None = None
    memory_bytes: int | None = None
    each: bool = False
    count: int | None = None
    fewest: bool = False
    tensor: int | None = None
    engine: str = ""


class LinkClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A claim about the links of a card: `links` in words, and their bytes per second if it gives them."""

    gpu: str
    links: str
    link_Bps: float | None = None


class GainClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A claim that NVLink makes answers faster by `low` to `high`, as factors above 0; `run` is what is served, if the
    claim says so."""

    low: float
    high: float
    run: Claim | None = None


def parse_claim(text: str) -> Claim | LinkClaim | GainClaim:
    """Parse a claim that has one of FORMS. Raises ConfigError for a text that is none."""
    plain = plain_claim(text)
    if match := _GAIN.fullmatch(plain):
        run = match["after"] or match["before"]
        low, high = _ends(match)
        if run and _SUBJECT.fullmatch(run) is None:  # a model alone
            run = f"{run} on {GAIN_GPUS}"
        return GainClaim(low=low / 100, high=high / 100, run=_parse_run(run, text) if run else None)
    if match := _LINK.fullmatch(plain):
        speed = match["speed"]
        return LinkClaim(gpu=match["gpu"], links=match["links"], link_Bps=float(speed) * 1e9 if speed else None)
    return _parse_run(plain, text)


def _ends(match: re.Match[str]) -> tuple[float, float]:
    """The ends of a range, which are equal if there is one number."""
    try:
        low, high = (float(re.sub("[,_]", "", match[name] or match["low"])) for name in ("low", "high"))
    except ValueError:
        raise ConfigError(f"{match[0]!r} in the claim has no number", code="claim-speed-not-number") from None
    return low, max(low, high)


def _parse_run(plain: str, text: str) -> Claim:
    engine = _engine().search(plain)
    match = _SUBJECT.fullmatch(_engine().sub("", plain))
    if match is None:
        raise _no_claim(text)
    subject = match["subject"].rstrip(" ,:")
    model, _, last = subject.rpartition(" ")
    fields = {"model": model.rstrip(" ,:"), "precision": last} if model and is_precision(last) else {"model": subject}
    needs = match["verb"].lower() != "on"
    hardware: list[str] = []
    fields |= {"engine": engine["engine"].lower()} if engine else {}
    fields |= _details([piece for piece in _PIECE.split(in_pieces(match["rest"])) if piece], hardware)
    fields["model"], tensor = _without_tensor(fields["model"])
    if tensor:
        fields["tensor"] = tensor
    if any(re.search(r"\btok(ens?|s)?\b|/s\b", piece, re.IGNORECASE) for piece in hardware):
        raise _no_claim(text)
    claim = msgspec.convert(
        fields | {"gpus": ",".join(hardware), "fewest": needs and "memory_bytes" not in fields}, Claim
    )
    if claim.tokens == 0 or claim.tok_s == 0 or claim.memory_bytes == 0:
        raise ConfigError(f"the claim {text!r} has 0 of something; give 1 or more", code="claim-of-zero")
    return _memory_as_card(claim, plain) if not needs and claim.memory_bytes and not hardware else _checked(claim, text)


def _details(pieces: Sequence[str], hardware: list[str]) -> dict[str, object]:
    """Fields of the pieces behind "on" or "needs"; pieces that are no figure are appended to `hardware`."""
    fields: dict[str, object] = {}
    for piece in pieces:
        piece, tensor = _without_tensor(piece)
        if tensor:
            fields["tensor"] = tensor
        if match := _SPEED.fullmatch(piece) or (_UNITLESS.fullmatch(piece) if hardware else None):
            low, high = _ends(match)
            fields |= {"tok_s": low, "most_tok_s": high if high > low else None}
        elif match := _TOKENS.fullmatch(piece):
            fields["tokens"] = int(re.sub("[,_]", "", match["tokens"])) * (1000 if match["thousands"] else 1)
        elif match := _COUNT.fullmatch(piece) or _EACH_OF.fullmatch(piece):
            memory = _MEMORY.fullmatch(match["memory"] or "")
            if match["memory"] and memory is None:  # cards with their count
                hardware.append(piece)
                continue
            fields["count"] = int(match["count"])
            fields |= {"memory_bytes": parse_bytes(memory["size"]), "each": True} if memory else {}
        elif match := _MEMORY.fullmatch(piece):
            fields["memory_bytes"] = parse_bytes(match["size"])
            fields["each"] = (match["end"] or "").lower() in ("each", "per gpu")
        elif is_precision(piece):
            fields["precision"] = piece
        elif piece:
            hardware.append(piece)
    return fields


@cache
def _engine() -> re.Pattern[str]:
    """A word that names an engine, as in "with vLLM"."""
    names = "|".join(map(re.escape, engine_names()))
    return re.compile(rf"(?:\b(?:with|using|by)\s+)?(?<![\w/.-])(?P<engine>{names})(?![\w/.-])\s*", re.IGNORECASE)


def _without_tensor(words: str) -> tuple[str, int | None]:
    match = _TENSOR.search(words)
    return (_TENSOR.sub("", words).strip(" ,"), int(match["size"])) if match else (words, None)


def _memory_as_card(claim: Claim, plain: str) -> Claim:
    """The claim "on 16GB" or "on 2 GPUs, 8GB each", with cards of that memory as its hardware."""
    count = claim.count or (SEVERAL if claim.each else 1)
    size = _MEMORY.search(plain)
    assert size is not None
    return msgspec.structs.replace(
        claim, gpus=f"{count}x{size['size'].replace(' ', '')}", memory_bytes=None, each=False, count=None
    )


def _checked(claim: Claim, text: str) -> Claim:
    if not claim.gpus and claim.memory_bytes is None:
        raise _no_claim(text)
    return claim


def _no_claim(text: str) -> ConfigError:
    return ConfigError(
        f"cannot read the claim {text!r}; write it as {'; '.join(FORMS)}; for example: Qwen2.5-72B-Instruct fp16 on "
        "1xH100, 50 tok/s",
        code="bad-claim",
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
