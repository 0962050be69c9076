"""JSON that any decoder reads, from values and from texts."""

from __future__ import annotations

import ast
import json
import math
from typing import Any

MAX_DEPTH = 64  # levels of lists and objects in arguments that are not JSON yet
NAMES = {"true": True, "false": False, "null": None}  # literals of JSON that Python spells otherwise


def to_json(value: Any) -> str:
    """JSON of a value, which any decoder reads: halves of UTF-16 pairs are U+FFFD, numbers without a value are texts.

    Raises ValueError for an integer of more digits than Python writes.
    """
    return without_halves(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False))


def from_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for none, for NaN, and for a number outside a double's range."""
    return json.loads(text, parse_float=_to_float, parse_constant=_to_float)


def without_halves(text: str) -> str:
    """A text in which each half of a UTF-16 pair that stands alone is U+FFFD, as UTF-8 cannot write it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _to_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text!r:.40} is no number of JSON")
    return value


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case list():
            return [_finite(item) for item in value]
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case _:
            return value


def from_python(text: str) -> Any:
    """The value of a literal in Python's spelling, as from JSON. Raises ValueError for anything else."""
    try:
        return python_value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{text!r:.40} is no literal") from error


def python_value(node: ast.expr) -> Any:
    """The value of a literal, in Python's or JSON's spelling. Raises ValueError for anything else."""
    match node:
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [python_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(python_value(key)): python_value(value) for key, value in pairs if key is not None}
        case _:
            value = ast.literal_eval(node)
            if not isinstance(value, str | int | float | bool | None):
                raise ValueError("not JSON")
            return value
