"""Fields: typed access to a JSON object or a GGUF header, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import TypeGuard

from weft.checkpoint.files import limits
from weft.errors import ModelError


class Fields:
    """The fields in `values`, read from the file `where`.

    A getter raises ModelError for a value of the wrong type or range. `integer` and `number` also raise it for a field
    that is missing or null. The others return their default for a missing field; for null, `flag` returns its default,
    `token_ids` returns (), and the others return None.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values, self.where = values, where

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def wrong_value(self, key: str, expected: str) -> ModelError:
        """The error for a field of a wrong value."""
        return ModelError(
            f"{self.where}: {key} is {self.values.get(key)!r:.80}; it must be {expected}", code="wrong-field-value"
        )

    def integer(self, key: str, *, maximum: int = limits.INTEGER) -> int:
        """Return an integer from 1 to `maximum`."""
        value = self.integer_or(key, None, maximum=maximum)
        if value is None:
            raise ModelError(
                f"{self.where} has no {key}; the file is damaged, or of a model that Weft does not know",
                code="missing-field",
            )
        return value

    def integer_or(
        self, key: str, default: int | None, *, minimum: int = 1, maximum: int = limits.INTEGER
    ) -> int | None:
        """Return an integer from `minimum` to `maximum`."""
        value = self.values.get(key, default)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
            if value <= maximum:
                return value
            raise self.wrong_value(key, f"{maximum:,} at most, since no model is larger; download the file again")
        raise self.wrong_value(key, f"a whole number, {minimum} or more")

    def number(self, key: str) -> float:
        """Return a finite number above 0."""
        value = self.number_or(key, None)
        if value is None:
            raise ModelError(
                f"{self.where} has no {key}; the file is damaged, or of a model that Weft does not know",
                code="missing-field",
            )
        return value

    def number_or(self, key: str, default: float | None) -> float | None:
        """Return a finite number above 0."""
        value = self.values.get(key, default)
        if value is None:
            return None
        if _is_positive(value):
            return float(value)
        raise self.wrong_value(key, "a number above 0")

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers above 0."""
        value = self.values.get(key)
        if isinstance(value, list | tuple) and all(map(_is_positive, value)):
            return tuple(map(float, value))
        raise self.wrong_value(key, "a list of numbers above 0")

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self.wrong_value(key, "true or false")

    def text_or(self, key: str, default: str | None) -> str | None:
        """Return a text of one line: errors quote it."""
        value = self.values.get(key, default)
        if value is None or (isinstance(value, str) and value.isprintable() and len(value) <= limits.TEXT):
            return value
        raise self.wrong_value(key, f"a text of one line and at most {limits.TEXT} characters")

    def names(self, key: str, most: int = limits.NAMES) -> list[str]:
        """Return a list of at most `most` texts; the file may leave it out."""
        value = self.values.get(key) or []
        if isinstance(value, list) and len(value) <= most and all(isinstance(name, str) for name in value):
            return value
        raise self.wrong_value(key, f"a list of names, {most:,} at most")

    def token_ids(self, key: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return token ids without duplicates; the file may give a single id, a list or null."""
        value = self.values.get(key, default)
        items = () if value is None else value if isinstance(value, list | tuple) else (value,)
        if all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
            return tuple(dict.fromkeys(items))
        raise self.wrong_value(key, "a token id or a list of them")

    def nested(self, key: str) -> Fields | None:
        """Return the fields of an object inside this one; None if it is missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, dict):
            return Fields(value, f"{self.where}: {key if key.isidentifier() else repr(key):.80}")
        raise self.wrong_value(key, "an object")


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value > 0
