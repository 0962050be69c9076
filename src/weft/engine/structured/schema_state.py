"""SchemaState: the position of an answer in a JSON schema, as a cache key: equal keys have equal token masks.

In most schemas the tokens that may follow depend on little of the text before: on the open objects with their names, on
the open lists, and on the length of the string that has begun. They do not depend on earlier strings and numbers. A
schema in which more matters has no keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
FILES = {"$defs", "definitions", "x-guidance"}
OF_ROOT = {"$schema", "$id"}  # below the root they change the meaning of what is inside
NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
STRINGS = {"minLength", "maxLength", "pattern", "format"}
LISTS = {"items", "prefixItems", "minItems", "maxItems"}
OBJECTS = {"properties", "required", "additionalProperties"}
KNOWN = {"type", "enum", "const"} | ANNOTATIONS | FILES | NUMBERS | STRINGS | LISTS | OBJECTS
BESIDE_OTHERS = ANNOTATIONS | FILES  # keywords that are allowed next to `$ref` and `anyOf`
BEGINNINGS = {"string": '"', "object": "{", "array": "[", "number": "0", "integer": "0", "boolean": "t", "null": "n"}
ENDED = b"."  # the text of a state after a name or a value
MAX_SCHEMAS = 2000  # schemas within one, references not followed
MAX_REFERENCES = 32  # references that lead from one to the other

Schema = Mapping[str, Any]
ANYTHING: Schema = {}


def has_keys(root: Any) -> bool:
    """Return True if each value of a schema has the same continuations whatever the values before it are."""
    try:
        return _all_simple(root)
    except (AttributeError, TypeError):
        return False  # a definition that nothing refers to may be anything


def _all_simple(root: Any) -> bool:
    waiting: list[Any] = [root]
    seen = 0
    while waiting:
        schema = waiting.pop()
        seen += 1
        if schema is True or schema is False:
            continue
        if not isinstance(schema, Mapping) or seen > MAX_SCHEMAS or not _is_simple(schema, root):
            return False
        for named in ("properties", "$defs", "definitions"):
            waiting += schema.get(named, {}).values()
        waiting += [*schema.get("prefixItems", ()), *_alternatives(schema)]
        waiting += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return True


def _is_simple(schema: Schema, root: Schema) -> bool:
    keys = schema.keys() - OF_ROOT if schema is root else schema.keys()
    if "$ref" in schema:
        return keys <= {"$ref"} | BESIDE_OTHERS and _resolve(schema, root) is not None
    if alternatives := _alternatives(schema):
        return len(keys - BESIDE_OTHERS) == 1 and _begin_differently(alternatives, root)
    if "prefixItems" in schema and "2020-12" not in root.get("$schema", "2020-12"):
        return False  # drafts before do not know it
    constants = [*schema.get("enum", ()), schema.get("const")]
    return keys <= KNOWN and not any(isinstance(constant, Mapping | list) for constant in constants)


def _alternatives(schema: Schema) -> Sequence[Any]:
    return [*schema.get("anyOf", ()), *schema.get("oneOf", ())]


def _begin_differently(alternatives: Sequence[Any], root: Schema) -> bool:
    """Return True if the first character of a value says which of the alternatives it is of."""
    if len(alternatives) > len(BEGINNINGS):
        return False
    beginnings = [_beginnings(_resolve(alternative, root)) for alternative in alternatives]
    return all(beginnings) and sum(map(len, beginnings)) == len(set().union(*beginnings))


def _beginnings(schema: Any) -> set[str]:
    """The first characters of a schema's values, a digit and a letter for all; empty if the schema does not say."""
    kinds = schema.get("type", ()) if isinstance(schema, Mapping) else ()
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return {BEGINNINGS[kind] for kind in kinds if kind in BEGINNINGS}


def _resolve(schema: Any, root: Schema) -> Any:
    """The schema that a reference names in the end; None if there is none within MAX_REFERENCES."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        schema = _resolve_once(schema, root)
    return None


def _resolve_once(schema: Schema, root: Schema) -> Any:
    """The schema that a reference names; None if it is not one of this text, or written in a way not known here."""
    place = schema["$ref"]
    if place == "#":
        return root
    parts = place.split("/") if isinstance(place, str) else []
    if len(parts) != 3 or parts[0] != "#" or parts[1] not in ("$defs", "definitions") or set("~%") & set(place):
        return None
    return root.get(parts[1], {}).get(parts[2])


class _Object(NamedTuple):
    """An open object: its schema, and the names so far, whose last one has no value yet if `named`."""

    schema: Schema
    names: tuple[bytes, ...] = ()
    named: bool = False

    @property
    def progress(self) -> Hashable:
        return self.names, self.named

    def with_name(self, name: bytes) -> _Object:
        return self._replace(names=(*self.names, name))

    def after(self, char: bytes) -> _Object:
        """The level after a colon or a comma."""
        return self._replace(named=char == b":")

    @property
    def value(self) -> Any:
        """The schema of the last name's value."""
        name = self.names[-1].decode(errors="replace")
        others = self.schema.get("additionalProperties", ANYTHING)
        return self.schema.get("properties", {}).get(name, others)


class _List(NamedTuple):
    """An open list: its schema, and how many commas it has."""

    schema: Schema
    commas: int = 0

    @property
    def progress(self) -> Hashable:
        if "maxItems" in self.schema:
            return self.commas
        # Beyond these, one more makes no difference.
        matter = max(self.schema.get("minItems", 0), len(self.schema.get("prefixItems", ())), 1)
        return min(self.commas, int(matter))

    def after(self, char: bytes) -> _List:
        """The level after a comma."""
        return self._replace(commas=self.commas + 1)

    @property
    def value(self) -> Any:
        """The schema of the item after the last comma."""
        first = self.schema.get("prefixItems", ())
        return first[self.commas] if self.commas < len(first) else self.schema.get("items", ANYTHING)


class SchemaState:
    """The state of one answer to the schema `root`, for which `has_keys` is true."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._open: list[_Object | _List] = []
        self._text = b""  # since the last bracket, comma, colon, or quotation mark; ENDED stands for what has ended
        self._in_string = False
        self._string: Schema | None = None  # the length of the string that has begun, unless it is a name
        self._lost = False

    def key(self) -> Hashable | None:
        """The key; None where no other answer is likely to have it."""
        if self._lost:
            return None
        place = tuple(level.progress for level in self._open)
        if self._string is None or "enum" in self._string or "const" in self._string:
            return place, self._in_string, self._text
        if not self._text.isascii() or b"\\" in self._text or "pattern" in self._string or "format" in self._string:
            return None  # more than the length matters, and the length is no number of bytes
        length = len(self._text)
        if "maxLength" not in self._string:
            length = min(length, self._string.get("minLength", 0))
        return place, True, length

    def advance(self, text: bytes) -> None:
        """Go on by the text of a token."""
        if self._lost:
            return
        if self._in_string and b'"' not in text:
            self._text += text
            return
        try:
            for at in range(len(text)):
                self._take(text[at : at + 1])
        except (IndexError, AttributeError, TypeError):
            self._lost = True  # the text is no JSON, such as an end token's

    def _take(self, char: bytes) -> None:
        if self._in_string:
            self._take_in_string(char)
        elif char == b'"':
            self._begin_string()
        elif char in b"{[":
            schema = self._value_schema(char.decode())
            self._open.append(_Object(schema) if char == b"{" else _List(schema))
            self._text = b""
        elif char in b"}]":
            self._open.pop()
            self._text = ENDED
        elif char in b",:":
            self._open[-1] = self._open[-1].after(char)
            self._text = b""
        else:
            self._text += char

    def _begin_string(self) -> None:
        level = self._open[-1] if self._open else None
        is_name = isinstance(level, _Object) and not level.named
        self._string = None if is_name else self._value_schema('"')
        self._in_string, self._text = True, b""

    def _take_in_string(self, char: bytes) -> None:
        if char != b'"' or _ends_in_escape(self._text):
            self._text += char
            return
        if self._string is None:
            self._open[-1] = cast(_Object, self._open[-1]).with_name(self._text)
            self._lost = b"\\" in self._text  # the name of a property may be written in more than one way
        self._in_string, self._string, self._text = False, None, ENDED

    def _value_schema(self, beginning: str) -> Schema:
        """The schema of the value that begins now, with this character."""
        schema = _resolve(self._open[-1].value if self._open else self._root, self._root)
        if not isinstance(schema, Mapping):
            return ANYTHING
        for alternative in _alternatives(schema):
            chosen = _resolve(alternative, self._root)
            if beginning in _beginnings(chosen):
                return cast(Schema, chosen)
        return schema


def _ends_in_escape(text: bytes) -> bool:
    """Return True if the next character belongs to a backslash."""
    return (len(text) - len(text.rstrip(b"\\"))) % 2 == 1
