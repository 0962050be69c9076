"""JSON as models write it, read while it arrives, and passed on as JSON that any decoder reads.

Valid JSON is passed on as it stands. Repaired are: raw line breaks and quotes within texts, Python's spelling (quotes,
literals, tuples), unknown escapes, keys without quotes, missing or superfluous commas, and missing ends.
"""

from __future__ import annotations

import json
import re
from enum import Enum

from weft.api.parsers.json_text import from_json, to_json
from weft.api.parsers.reader import Reader, Steps, Take

LITERAL = re.compile(r"[^\s\"'`{}\[\](),:;<>\\]+")
OPENING = {"{": "{", "[": "[", "(": "["}
CLOSING = {"}": "{", "]": "[", ")": "["}  # each with the bracket that opens what it closes
ENDS = {"{": "}", "[": "]"}
COMMAS = re.compile(r"[ \t\r\n,]+")
PLAIN = re.compile(r"[^\"'\\\x00-\x1f]+")  # inside a text
HEX = re.compile(r"[0-9a-fA-F]+")
PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
AFTER_MARKS = ("</", "<|", "<｜")  # beginnings of the marks that end a call


class Expected(Enum):
    """Kinds of tokens that may come next within a list or an object."""

    KEY = "key"
    COLON = "colon"
    VALUE = "value"
    COMMA = "comma"


def repaired(text: str) -> str | None:
    """The JSON object that is all of a text; None for another text, or for none."""
    reader = Reader()
    reader.add(text.strip())
    reader.ended = True
    parts: list[str] = []
    if text.lstrip().startswith("{"):
        for _ in read_value(reader, parts.append):
            pass  # all of the text is there
    return "".join(parts) if parts and not reader.rest() else None


def read_value(reader: Reader, emit: Take) -> Steps[bool]:
    """Read one value and pass its JSON to `emit` as it comes, up to where no value can go on.

    Returns False if the answer is cut within the value, or if no value follows.
    """
    ahead = yield from reader.peek(1)
    if ahead and ahead in "\"'":
        return (yield from read_text(reader, emit))
    if ahead in OPENING:
        return (yield from _Container(reader, emit).read_container())
    literal = yield from reader.skip(LITERAL)
    if literal:
        emit(json_literal(literal))
    return bool(literal)


def json_literal(text: str) -> str:
    """JSON of a literal in JSON's spelling or Python's; another word is a text."""
    form = PYTHON_LITERALS.get(text, text.removeprefix("+"))
    try:
        from_json(form)
    except ValueError:
        return to_json(text)
    return form


class _Container:
    """Reads a list or an object with all that is in it."""

    def __init__(self, reader: Reader, emit: Take) -> None:
        self._reader, self._emit = reader, emit
        self._open: list[str] = []  # brackets, the innermost last
        self._expected = Expected.VALUE
        self._bare_keys = False  # keys have no quotes
        self._spaces = ""  # before the next token
        self._comma = ""  # a received comma with the spaces before it: it is written once an item follows

    def read_container(self) -> Steps[bool]:
        """Read up to the last bracket, or to what can be no part of a value."""
        self._begin((yield from self._reader.take(1)))
        while self._open:
            self._spaces += yield from self._reader.skip()
            ahead = yield from self._reader.peek(1)
            if not (yield from self._read_token(ahead)):
                if self._reader.cut and (yield from self._reader.ends()):
                    return False
                while self._open:
                    self._end()
        return True

    def _read_token(self, ahead: str) -> Steps[bool]:
        """Read the token that begins with this text; returns False if it cannot be part of the value."""
        if ahead in CLOSING:
            return (yield from self._read_closing(CLOSING[ahead]))
        if ahead == ",":
            yield from self._reader.take(1)
            self._read_comma()
            return True
        if ahead == ":" and self._expected is Expected.COLON:
            self._say((yield from self._reader.take(1)))
            self._expected = Expected.VALUE
            return True
        is_item = ahead in OPENING or (ahead != "" and (ahead in "\"'" or LITERAL.match(ahead) is not None))
        if not is_item or self._expected is Expected.COLON:
            return False
        return (yield from self._read_item(ahead))

    def _read_closing(self, bracket: str) -> Steps[bool]:
        """Read a bracket that closes; brackets that are missing before it are added."""
        if bracket not in self._open:
            return False
        yield from self._reader.take(1)
        while self._open[-1] != bracket:
            self._end()
        self._end()
        return True

    def _read_comma(self) -> None:
        is_item = self._expected is Expected.COMMA or self._add_null(self._open[-1])
        if is_item:
            self._comma, self._spaces = self._spaces + ",", ""
            self._expect_item()

    def _add_null(self, bracket: str) -> bool:
        """Add the missing value of a key; returns False if no value is missing."""
        if self._expected is Expected.COLON:
            self._emit(": null")
        elif self._expected is Expected.VALUE and bracket == "{":
            self._emit("null")
        else:
            return False
        return True

    def _read_item(self, ahead: str) -> Steps[bool]:
        """Read a key or a value; a comma that is missing before it is added."""
        if self._expected is Expected.COMMA:
            if LITERAL.match(ahead):
                return False  # words after a value, which cannot begin another value
            self._comma = ","
            self._expect_item()
        self._say("")
        if self._expected is Expected.KEY:
            return (yield from self._read_key(ahead))
        if ahead in OPENING:
            self._begin((yield from self._reader.take(1)))
            return True
        self._expected = Expected.COMMA
        if ahead in "\"'":
            return (yield from read_text(self._reader, self._emit, self._open[-1], bare_keys=self._bare_keys))
        return (yield from read_value(self._reader, self._emit))

    def _read_key(self, ahead: str) -> Steps[bool]:
        self._expected = Expected.COLON
        if ahead in OPENING:
            self._emit('""')
            return False
        if ahead in "\"'":
            return (yield from read_text(self._reader, self._emit, ":"))
        self._emit(to_json((yield from self._reader.skip(LITERAL))))
        self._bare_keys = True
        return True

    def _begin(self, bracket: str) -> None:
        self._open.append(OPENING[bracket])
        self._emit(OPENING[bracket])
        self._expect_item()

    def _end(self) -> None:
        """Close what is open innermost; a value that is missing in it is null."""
        bracket = self._open.pop()
        self._add_null(bracket)
        self._comma = ""
        self._say(ENDS[bracket])
        self._expected = Expected.COMMA

    def _expect_item(self) -> None:
        self._expected = Expected.KEY if self._open[-1] == "{" else Expected.VALUE

    def _say(self, text: str) -> None:
        token = self._comma + self._spaces + text
        self._comma = self._spaces = ""
        if token:
            self._emit(token)


def has_key(reader: Reader, quote: str = "") -> Steps[bool]:
    """Return True if a key of one word and its colon follow; without a `quote` the key has none."""
    yield from reader.accept(quote)
    word = yield from reader.skip(LITERAL)
    if not word or (yield from reader.accept(quote)) is None:
        return False
    yield from reader.skip()
    return (yield from reader.accept(":")) is not None


def read_text(reader: Reader, emit: Take, inside: str = "", *, bare_keys: bool = False) -> Steps[bool]:
    """Read a text in quotes, and pass it to `emit` as JSON; returns False if the answer is cut within it.

    `inside`: the bracket before a value, ":" for a key, "" if anything may follow. By it a quote within the text is
    told from its end. `bare_keys`: the keys around it have no quotes.
    """
    quote = yield from reader.take(1)
    emit('"')
    while True:
        yield from reader.read_run(PLAIN, emit)
        character = yield from reader.take(1)
        if character == "":
            if not reader.cut:
                emit('"')
            return not reader.cut
        if character == quote and (yield from reader.ahead(_ends_text(reader, inside, bare_keys))):
            emit('"')
            return True
        if character == "\\":
            emit((yield from _escape(reader)))
        else:
            emit(_in_text(character))


def _in_text(text: str) -> str:
    """JSON of a part of a text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _ends_text(reader: Reader, inside: str, bare_keys: bool) -> Steps[bool]:
    """Return True if a quote ends the text before it, by what follows."""
    spaces = yield from reader.skip()
    ahead = yield from reader.peek(2)
    if not ahead or not inside or ahead in AFTER_MARKS:
        return True
    if inside == ":":
        return ahead[0] in ":,}"
    if ahead[0] == "," and inside == "{":  # a key comes next
        yield from reader.skip(COMMAS)
        ahead = yield from reader.peek(1)
        return ahead == "" or ahead in "\"'}" or (bare_keys and (yield from has_key(reader)))
    if ahead[0] in ",}])":
        return True
    if ahead[0] not in "\"'":
        return False
    return "\n" in spaces or (inside == "{" and (yield from has_key(reader, ahead[0])))


def _escape(reader: Reader) -> Steps[str]:
    """Read what stands behind a backslash; JSON for both."""
    character = yield from reader.take(1)
    if character == "":
        return "" if reader.cut else "\\\\"
    if character in '"\\/bfnrt':
        return "\\" + character
    if character == "'":
        return character
    if character not in "ux":
        return "\\\\" + _in_text(character)
    size = 4 if character == "u" else 2
    digits = yield from reader.peek(size)
    if len(digits) < size and reader.cut:
        yield from reader.take(size)
        return ""
    if len(digits) < size or not HEX.fullmatch(digits):
        return "\\\\" + character
    yield from reader.take(size)
    return (yield from _unicode(reader, digits.rjust(4, "0")))


def _unicode(reader: Reader, digits: str) -> Steps[str]:
    """JSON of a character's escape. Half of a UTF-16 pair that stands alone is U+FFFD."""
    code = int(digits, 16)
    if not 0xD800 <= code < 0xE000:
        return f"\\u{digits}"
    ahead = yield from reader.peek(6)
    low = ahead.removeprefix("\\u")
    is_pair = len(low) == 4 and HEX.fullmatch(low) is not None and 0xDC00 <= int(low, 16) < 0xE000
    if code < 0xDC00 and is_pair:
        yield from reader.take(6)
        return f"\\u{digits}\\u{low}"
    return "" if len(ahead) < 6 and reader.cut else "\\ufffd"
